"""The works of `polytier bench`: loop, kernels and engine compute the same; what the command writes and refuses."""

from __future__ import annotations

import json
import os
import runpy
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import call
from polytier.runs.assemble import server_of
from polytier.studies import bench
from polytier.studies.bench import WORKS as ALL_WORKS
from polytier.studies.bench_methods import CoBoWork, MFAWork
from polytier.studies.bench_works import ALPHA, CLASSES, WORKS, HandWritten, Kernels, Work, floats, run_engine

GPT = "gpt:layers=3,width=128"
TINY = {
    name: replace(
        work,
        inputs=(1, 4, 4) if len(work.inputs) > 1 else (12,),
        devices=4,
        batch=8,
        batches=2,
        steps=3,
        teams=min(work.teams, 2),
        team_rounds=min(work.team_rounds, 2),
        model={"dnn:100": "dnn:7", "dnn:500x200": "dnn:7x5", GPT: "gpt:layers=1,width=8"}.get(work.model, work.model),
    )
    for name, work in WORKS.items()
}
TINY_METHODS = {
    "cobo": CoBoWork(5, "dnn:7", (12,), batch=8, batches=1),
    "cobo80": CoBoWork(8, "dnn:7", (12,), batch=8, batches=1),
    "mfa": MFAWork(devices=8, num_models=3, steps=2),
}


def global_models(work: Work, rounds: int) -> dict[str, torch.Tensor]:
    """After some rounds, by contender; the kernels with each of their tiles."""
    x, y = work.data()
    found = {"loop": work.loop(x, y).run(rounds)}
    with work.engine(work.federation(x, y), workers=1) as training:
        run_engine(training, rounds)
        found["engine"] = work.models(training)
    for tile in (1, 2, 4):
        for name, kernels in work.bounds(x, y).items():
            assert tile in kernels.tiles()
            kernels.tile = tile
            found[f"{name} of {tile}"] = kernels.run(rounds)
    return found


@pytest.mark.parametrize("name", WORKS)
def test_contenders_compute_the_same(name, monkeypatch):
    for step in ("ALPHA", "ETA"):  # far enough from the start to tell a step from no step
        monkeypatch.setattr(f"polytier.studies.bench_works.{step}", 0.5)
    work = replace(TINY[name], batches=1)  # one batch holds all samples: no order matters
    start = torch.cat([p.detach().reshape(1, -1) for p in work.module().parameters() if p.requires_grad], 1)
    found = global_models(work, rounds=2)
    engine = found.pop("engine")
    assert (engine - start).abs().max() > 1e-2
    bounds = {f"{kind} of {tile}" for kind in ("kernels", "gathered") for tile in (1, 2, 4)}
    assert set(found) == ({"loop"} if name in ("cnn", "lora") else {"loop", *bounds})
    for model in found.values():
        torch.testing.assert_close(model, engine, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TINY_METHODS)
def test_loops_of_short_rounds_compute_what_the_engine_computes(name, monkeypatch):
    work, rounds = TINY_METHODS[name], 5
    x, y = work.data()
    by_hand = work.loop(x, y)
    with work.engine(work.federation(x, y), workers=1) as training:
        # the same pairs or groups in both: they are drawn at random
        def pairs():
            server = server_of(training.context, by_hand.round)
            drawn = training.algorithm.draw_pairs(server.draw()[0], server)
            return list(zip(*(side.tolist() for side in drawn), strict=True))

        def groups():
            group, match = training.algorithm.groups(server_of(training.context, by_hand.round))
            return [torch.nonzero(group == m).flatten().tolist() for m in match]

        monkeypatch.setattr(
            by_hand, "pairs" if isinstance(work, CoBoWork) else "groups", pairs if name != "mfa" else groups
        )
        loop = by_hand.run(rounds)
        start = training.context.parts[0].objective.initial
        run_engine(training, rounds)
        engine = work.models(training)
        if isinstance(work, CoBoWork):
            assert len(training.state["pairs"])  # some pairs were drawn, and their weights have changed
    assert loop.shape == engine.shape
    assert (engine - start).abs().max() > 1e-2
    torch.testing.assert_close(loop, engine, atol=1e-5, rtol=0)


def test_hand_written_groups_take_turns_and_pairs_are_drawn_at_random():
    by_hand, trained = TINY_METHODS["mfa"].loop(*TINY_METHODS["mfa"].data()), [[], [], []]
    for by_hand.round in range(3):
        groups = by_hand.groups()
        assert sorted(chain(*groups)) == list(range(8))  # every device trains one model in a round
        for devices, group in zip(trained, groups, strict=True):
            devices += group
    assert [sorted(devices) for devices in trained] == [list(range(8))] * 3  # and every model once in a frame
    cobo = TINY_METHODS["cobo80"].loop(*TINY_METHODS["cobo80"].data())
    drawn = [len(cobo.pairs()) for _ in range(200)]
    assert 2.5 < sum(drawn) / 200 < 4.5  # 28 pairs, one in eight of them


@pytest.mark.parametrize("name", ["common", "permfl"])
def test_loop_and_kernels_walk_through_the_same_batches(name, monkeypatch):
    monkeypatch.setattr("polytier.studies.bench_works.ALPHA", 0.5)
    monkeypatch.setattr(torch, "randperm", torch.arange)  # the order in which the kernels' data lie
    work = TINY[name]  # 3 steps on 2 batches: into the second epoch
    x, y = work.data()
    loop, kernels = (kind(work, floats(x), torch.from_numpy(y)) for kind in (HandWritten, Kernels))
    torch.testing.assert_close(loop.run(2), kernels.run(2), atol=1e-5, rtol=0)


def test_works_are_those_of_the_docs():
    steps = {name: work.device_steps for name, work in WORKS.items()}
    short = {"round": 40, "teams": 1200, "cnn": 80, "lora": 80}
    assert steps == {"common": 800, "synthetic": 2000, "dnn": 800, "wide": 400, "permfl": 8000, **short}
    sizes = {name: sum(p.numel() for p in work.module().parameters()) for name, work in WORKS.items()}
    assert sizes == {"common": 7850, "synthetic": 610, "dnn": 79510, "wide": 494710, "permfl": 7850, "cnn": 421642} | {
        "round": 7850,
        "teams": 7850,
        "lora": 631936,
    }
    assert {name: ALL_WORKS[name].device_steps for name in TINY_METHODS} == {"cobo": 15, "cobo80": 159, "mfa": 120}


def test_peers_get_the_common_work():
    peers = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/peers/work.py"))
    work = WORKS["common"]
    sizes = (work.devices, work.batches * work.batch, *work.inputs, CLASSES, work.batch, work.steps, ALPHA)
    names = ("DEVICES", "SAMPLES", "FEATURES", "CLASSES", "BATCH", "STEPS", "LR")
    assert sizes == tuple(peers[name] for name in names)
    assert all(np.array_equal(a, b) for a, b in zip(work.data(), peers["data"](), strict=True))
    assert peers["speed_of"]([9, 5, 1, 2, 3]) == work.device_steps  # a round a second, after the first


# -- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "WORKS", TINY)


def test_table_and_json(tiny, tmp_path):
    threads = torch.get_num_threads()
    file = tmp_path / "bench.json"
    result = call("bench", "common", "cnn", "common", "--repeat", 2, "--workers", 1, "--seconds", 0, "--json", file)
    assert torch.get_num_threads() == threads
    found = json.loads(file.read_text())
    assert set(found) == {"versions", "cores", "threads", "workers", "repeat", "works"}
    assert (found["repeat"], found["workers"]) == (2, 1)
    common, cnn = found["works"]
    ratios = {f"engine_over_{other}" for other in ("loop", "kernels", "gathered", "one_worker")}
    assert set(common) == {"work", "setting", "engine", "loop", "kernels", "gathered", "round_ms", *ratios}
    assert set(cnn) == {"work", "setting", "engine", "loop", "round_ms", *ratios}
    for work in (common, cnn):
        for contender in {"engine", "loop", "kernels", "gathered"} & set(work):
            speed = work[contender]
            assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert work["engine_over_loop"] == pytest.approx(work["engine"]["median"] / work["loop"]["median"])
        assert work["engine_over_one_worker"] == 1
    for bound in ("kernels", "gathered"):
        assert common[f"engine_over_{bound}"] == pytest.approx(common["engine"]["median"] / common[bound]["median"])
    assert cnn["engine_over_kernels"] is None
    assert common["setting"]["devices"] == 4
    lines = result.stdout.splitlines()
    assert lines[0].split()[0] == "work"
    assert [line.split()[0] for line in lines[1:3]] == ["common", "cnn"]


def test_all_works_without_a_name_and_with_two_workers(tiny, monkeypatch, tmp_path):
    asked = []
    figures = {"median": 1.0, "min": 1.0, "max": 1.0}

    def measure(work, repeat, workers, seconds):
        asked.append((repeat, workers, seconds))
        return {
            "engine": figures,
            "one_worker": figures,
            "loop": figures,
            "engine_over_loop": 1.0,
            **{f"engine_over_{other}": None for other in ("kernels", "gathered", "one_worker")},
        }

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    result = call("bench")
    assert asked == [(5, 3, 1.0)] * len(TINY)
    assert all(name in result.stdout for name in (*WORKS, "one worker"))


def test_fixed_cost_is_what_is_left_without_steps(tiny, monkeypatch, tmp_path):
    took = {"engine": 0.010, "more_steps": 0.018}  # seconds per round: 2 ms per step, so 8 ms besides the only step
    monkeypatch.setattr(bench, "WORKS", {"teams": replace(TINY["teams"], steps=1)})
    names = iter(["loop", "kernels", "gathered", "engine", "more_steps"] * 100)
    monkeypatch.setattr(bench, "calibrate", lambda run, threads, seconds: 1)
    monkeypatch.setattr(bench, "fastest", lambda kernels: kernels)
    monkeypatch.setattr(bench, "timed", lambda run, rounds, threads: took.get(next(names), 1.0))
    file = tmp_path / "bench.json"
    result = call("bench", "teams", "--repeat", 1, "--workers", 1, "--json", file)
    (work,) = json.loads(file.read_text())["works"]
    assert (work["fixed_round_ms"], work["fixed_call_ms"]) == (pytest.approx(8), pytest.approx(4))
    assert "8.00 ms per round, 4.00 ms per call" in result.stdout


def test_bad_input_comes_before_the_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    assert (
        "no work 'comon'; did you mean 'common'? available: common, synthetic" in call("bench", "comon", code=2).stderr
    )
    assert "does not exist" in call("bench", "--json", tmp_path / "none" / "bench.json", code=2).stderr
    assert "is a folder" in call("bench", "--json", tmp_path, code=2).stderr
    file = tmp_path / "bench.json"
    file.touch()
    monkeypatch.setattr("os.access", lambda _, mode: mode != os.W_OK)
    assert "cannot be written" in call("bench", "--json", file, code=2).stderr
    call("bench", "--repeat", 0, code=2)
    call("bench", "--seconds", -1, code=2)


def test_help_names_the_works():
    assert all(name in call("bench", "--help").stdout for name in ALL_WORKS)
