"""The run folder in Python: what is saved, what comes back, what is written on the way."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from polytier import FedAvg, FedAvgFT, PerMFL, Run, build_federation, train
from polytier.algorithms import LocalTraining
from polytier.files.write import json_line, next_folder
from polytier.models.metrics import LOSS
from polytier.runs.callbacks import RunFolder
from polytier.runs.folder import check_free
from polytier.runs.loop import make_loop
from polytier.runs.read_files import read_history, read_state
from polytier.runs.summary import best_of

QUICK: Any = {"device_steps": 2, "team_rounds": 2}


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, teams=2, split=(3, 1, 1))


@pytest.fixture(scope="module")
def run(federation):
    return train(PerMFL(**QUICK), federation, "mclr", rounds=3, seed=4)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "saved"
    run.save(place)
    return place


def same_module(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_loaded_run_has_the_same_models(run, folder):
    again = Run.load(folder)
    for kind in ("personal", "team", "global_"):
        assert torch.equal(getattr(again, kind), getattr(run, kind))
    assert again.device_ids.tolist() == run.device_ids.tolist()
    assert again.team_ids.tolist() == run.team_ids.tolist()
    assert again.history == run.history
    assert again.ledger.total() == run.ledger.total()
    assert again.algorithm == run.algorithm
    assert same_module(again.model(device=3), run.model(device="3"))
    assert same_module(again.model(team=1), run.model(team=1))
    assert same_module(again.model(), run.model())


def test_a_new_device_adapts_alike_before_and_after_loading(run, folder, federation):
    x, y = federation.device(0)
    before = run.adapt(x, y, team=1)
    assert same_module(before, Run.load(folder).adapt(x, y, team=1))
    assert not same_module(before, run.model(team=1))
    with pytest.raises(ValueError, match="0, 1"):
        run.adapt(x, y)


def test_the_folder_holds_what_is_promised(run, folder):
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "devices.csv",
        "topology.json",
        "traffic.csv",
        "models",
        "checkpoints",
        "state.json",
        ".lock",
    }
    with safe_open(folder / "models" / "team.safetensors", "pt") as file:
        assert json.loads(file.metadata()["ids"]) == [0, 1]
        assert file.get_tensor("head.weight").shape == (2, 10, 64)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["device_steps"] == 3 * 2 * 2 * 6
    assert summary["personal"] == run.history[-1]["personal"]["test"]
    assert summary["best"]["personal"]["accuracy"] == max(r["personal"]["test"]["accuracy"] for r in run.history)
    judged = max(run.history, key=lambda r: r["global"]["validation"]["accuracy"])
    assert summary["chosen"]["global"] == {**judged["global"]["test"], "round": judged["round"]}
    assert summary["never_took_part"] == 0
    tiers = json.loads((folder / "topology.json").read_text())["tiers"]
    assert [t["tier"] for t in tiers] == ["server", "team", "device"]
    assert sorted(tiers[2]["ids"]) == list(range(6))


def test_devices_and_traffic_add_up(run, folder, federation):
    rows = list(csv.DictReader((folder / "devices.csv").read_text().splitlines()))
    assert [r["id"] for r in rows] == [str(i) for i in federation.ids]
    for row in rows:
        labels = sum(int(v) for k, v in row.items() if k.startswith("label_"))
        assert labels == int(row["samples"]) == sum(int(row[s]) for s in ("train", "validation", "test"))
    accuracy = np.mean([float(r["personal_accuracy"]) for r in rows])
    assert accuracy == pytest.approx(run.history[-1]["personal"]["test"]["accuracy"])
    traffic = list(csv.DictReader((folder / "traffic.csv").read_text().splitlines()))
    up = sum(int(r["bytes"]) for r in traffic if r["link"] == "team-device" and r["direction"] == "up")
    assert up == run.ledger.total()["team-device"]["up"] == 3 * 2 * 6 * 650 * 4


def test_files_are_the_same_to_the_byte(run, folder, tmp_path):
    run.save(tmp_path / "again")
    for path in folder.rglob("*"):
        if path.is_file():
            assert (tmp_path / "again" / path.relative_to(folder)).read_bytes() == path.read_bytes(), path


def test_the_callback_writes_what_save_writes(run, folder, federation, tmp_path):
    train(PerMFL(**QUICK), federation, "mclr", rounds=3, seed=4, callbacks=[RunFolder(tmp_path / "run")])
    for name in ("config.toml", "devices.csv", "topology.json", "traffic.csv", "models/personal.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()


def test_a_folder_in_use_is_refused(run, folder, tmp_path):
    with pytest.raises(ValueError, match="not empty"):
        run.save(folder)
    (tmp_path / "a-file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        check_free(tmp_path / "a-file")
    with pytest.raises(ValueError, match="cannot be created"):
        run.save(tmp_path / "a-file" / "below")
    (tmp_path / "permfl-1").mkdir()
    assert next_folder(tmp_path, "permfl").name == "permfl-2"


def test_a_model_given_in_python_is_asked_for(federation, tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    run = train(FedAvg(device_steps=1), federation, net, rounds=1)
    run.save(tmp_path / "run")
    with pytest.raises(ValueError, match="model="):
        Run.load(tmp_path / "run")
    assert same_module(Run.load(tmp_path / "run", model=net).model(), run.model())
    with pytest.raises(ValueError, match="parameters of the model differ"):
        Run.load(tmp_path / "run", model=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="no personal models"):
        run.model(device=0)


@pytest.mark.parametrize("method", [FedAvgFT(device_steps=1, tune_steps=1), LocalTraining(device_steps=1)])
def test_flat_methods_adapt_after_loading(method, federation, tmp_path):
    run = train(method, federation, "mclr", rounds=1)
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    x, y = federation.device(2)
    assert same_module(again.adapt(x, y), run.adapt(x, y))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["team"] is None
    assert summary["teams"] == 0
    assert list(summary["traffic"]) == ["server-device"]


def test_scaling_is_kept_with_the_models(tmp_path):
    federation = build_federation(devices=4, teams=2, standardize=True)
    run = train(PerMFL(**QUICK), federation, "mclr", rounds=1, dtype="float64")
    run.save(tmp_path / "run")
    x, _ = federation.device(1, "test")
    assert torch.equal(Run.load(tmp_path / "run").model(device=1)(x), run.model(device=1)(x))


def test_checkpoints_may_be_removed(run, folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert same_module(Run.load(tmp_path / "run").model(device=1), run.model(device=1))
    (tmp_path / "run" / "models" / "personal.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="damaged: its content does not match its digest"):
        Run.load(tmp_path / "run")


def test_checkpoints_cost_a_tenth_of_the_time_at_most(federation, tmp_path, monkeypatch):
    now, saved = [0.0], []
    monkeypatch.setattr("polytier.runs.callbacks.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def save(folder, number, tensors, facts):
        saved.append(number)
        now[0] += 1  # a checkpoint takes a second

    class Clock(RunFolder):
        def on_round(self, training, record):
            now[0] += 4  # a round takes four
            super().on_round(training, record)

    monkeypatch.setattr("polytier.runs.checkpoint.save", save)
    train(FedAvg(device_steps=1), federation, "mclr", rounds=9, callbacks=[Clock(tmp_path / "run")])
    assert saved == [0, 1, 4, 7, 9]


def test_a_half_written_line_and_later_rounds_are_dropped(federation, tmp_path):
    with make_loop(PerMFL(**QUICK), federation, "mclr") as training:
        training.run(2, [RunFolder(tmp_path / "run")])
        lines = (tmp_path / "run" / "metrics.jsonl").read_text()
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            owner = read_state(tmp_path / "run")["run"]
            file.write(json_line({"round": 3, "bytes": {}}, owner) + '{"round": 4, "pers')
        assert [r["round"] for r in read_history(tmp_path / "run")] == [1, 2, 3]
        training.run(2, [RunFolder(tmp_path / "run", resumed=True)])
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_best_follows_the_loss_where_the_loss_leads():
    rounds = [{"round": k, "global": {"test": {"loss": loss}}} for k, loss in enumerate((3.0, 1.0, 2.0), 1)]
    best = best_of(rounds, ["personal", "global"], "test", LOSS)
    assert best == {"round": 2, "personal": None, "global": {"loss": 1.0, "round": 2}}
    assert best_of(rounds, ["global"], "validation", LOSS) is None


def test_reports_need_no_torch():
    code = "import sys, polytier.report.tables, polytier.runs.read, polytier.cli"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
