"""The works of `polytier bench`: loop, kernels and engine compute the same; what the command writes and refuses."""

from __future__ import annotations

import json
import os
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import call
from polytier.studies import bench
from polytier.studies.bench_works import ALPHA, CLASSES, WORKS, HandWritten, Kernels, Work, floats, run_engine

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
        model={"dnn:100": "dnn:7", "dnn:500x200": "dnn:7x5"}.get(work.model, work.model),
    )
    for name, work in WORKS.items()
}


def global_models(work: Work, rounds: int) -> dict[str, torch.Tensor]:
    """After some rounds, by contender; the kernels with each of their tiles."""
    x, y = work.data()
    inputs, targets = floats(x), torch.from_numpy(y)
    found = {"loop": HandWritten(work, inputs, targets).run(rounds)}
    with work.engine(work.federation(x, y), workers=1) as training:
        found["engine"] = run_engine(training, rounds)
    if work.has_kernels:
        for tile in (1, 2, 4):
            kernels = Kernels(work, inputs, targets)
            assert tile in kernels.tiles()
            kernels.tile = tile
            found[f"kernels of {tile}"] = kernels.run(rounds)
    return found


@pytest.mark.parametrize("name", WORKS)
def test_contenders_compute_the_same(name, monkeypatch):
    for step in ("ALPHA", "ETA"):  # far enough from the start to tell a step from no step
        monkeypatch.setattr(f"polytier.studies.bench_works.{step}", 0.5)
    work = replace(TINY[name], batches=1)  # one batch holds all samples: no order matters
    start = torch.cat([p.detach().reshape(1, -1) for p in work.module().parameters()], 1)
    found = global_models(work, rounds=2)
    engine = found.pop("engine")
    assert (engine - start).abs().max() > 1e-2
    assert set(found) == ({"loop", "kernels of 1", "kernels of 2", "kernels of 4"} if name != "cnn" else {"loop"})
    for model in found.values():
        torch.testing.assert_close(model, engine, atol=1e-4, rtol=0)


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
    assert steps == {"common": 800, "synthetic": 2000, "dnn": 800, "wide": 400, "permfl": 8000, "cnn": 80}
    sizes = {name: sum(p.numel() for p in work.module().parameters()) for name, work in WORKS.items()}
    assert sizes == {"common": 7850, "synthetic": 610, "dnn": 79510, "wide": 494710, "permfl": 7850, "cnn": 421642}


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
    ratios = {"engine_over_loop", "engine_over_kernels"}
    assert set(common) == {"work", "setting", "engine", "loop", "kernels", *ratios}
    assert set(cnn) == {"work", "setting", "engine", "loop", *ratios}
    for work in (common, cnn):
        for contender in {"engine", "loop", "kernels"} & set(work):
            speed = work[contender]
            assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert work["engine_over_loop"] == work["engine"]["median"] / work["loop"]["median"]
    assert common["engine_over_kernels"] == common["engine"]["median"] / common["kernels"]["median"]
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
            "engine_over_kernels": None,
        }

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    result = call("bench")
    assert asked == [(5, 3, 1.0)] * len(WORKS)
    assert all(name in result.stdout for name in (*WORKS, "one worker"))


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
    assert all(name in call("bench", "--help").stdout for name in WORKS)
