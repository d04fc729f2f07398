"""The command line as a person uses it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import polytier
from commands import QUICK, SMALL, call, own_file, rows_of
from polytier import Run, build_federation
from polytier.runs.defaults import settings
from polytier.runs.read_files import read_history, read_summary

LONG = ("--rounds", "5", "--devices", "24", "--set", "device_steps=60")  # the test kills it before it ends
RESULTS = ("models", "devices.csv", "traffic.csv", "topology.json")


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "polytier", *map(str, args)]


def start(folder: Path, *args: object) -> subprocess.Popen:
    """A run in a process of its own that has come to its third round."""
    process = subprocess.Popen(command("run", *args, "--out", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def without_seconds(folder: Path) -> list[object]:
    figures = [read_summary(folder) or {}, *read_history(folder)]
    timed = ("seconds", "device_steps_per_second")
    return [{k: v for k, v in record.items() if k not in timed} for record in figures]


def assert_same_bits(a: Path, b: Path) -> None:
    assert without_seconds(a) == without_seconds(b)
    files = [f for name in RESULTS for f in ([a / name] if (a / name).is_file() else (a / name).iterdir())]
    for path in files:
        assert path.read_bytes() == (b / path.relative_to(a)).read_bytes(), path.name


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A short run of PerMFL on digits, with validation."""
    folder = tmp_path_factory.mktemp("runs") / "permfl"
    call("run", *SMALL, "--rounds", 3, "--split", "3:1:1", "--seed", 5, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "long"
    call("run", *LONG, "--quiet", "--out", folder)
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Whatever a command writes without being told where lands in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # models of one's own add the current folder


# -- a run --------------------------------------------------------------------------------------------


def test_run_alone_is_permfl_on_digits(tmp_path):
    result = call("run", "--rounds", 1, "--set", "team_rounds=1")
    assert "40 devices in 4 teams, 650 parameters" in result.stdout
    assert "personal" in result.stdout
    assert "runs/permfl-digits-0-1" in result.stdout
    assert "PerMFL: 40 devices in 4 teams" in result.stderr
    assert "per round" in result.stderr
    config = tomllib.loads((tmp_path / "runs" / "permfl-digits-0-1" / "config.toml").read_text())
    assert (config["data"], config["model"], config["partition"]) == ("digits", "mclr", "labels:2")
    assert config["set"]["device_pull"] == settings("permfl", "digits", "mclr")["device_pull"][0]
    assert config["versions"].keys() == {"polytier", "torch", "numpy", "python"}


def test_config_toml_repeats_the_run_to_the_bit(finished, tmp_path):
    call("run", finished / "config.toml", "--quiet", "--out", tmp_path / "again")
    assert_same_bits(finished, tmp_path / "again")
    assert (finished / "config.toml").read_bytes() == (tmp_path / "again" / "config.toml").read_bytes()


def test_flags_win_over_the_file(finished, tmp_path):
    args = ("--rounds", 1, "--seed", 6, "--set", "device_lr=0.02", "--set", "team_lr.team=0.04")
    result = call("run", finished / "config.toml", *args, "--quiet")
    assert result.stdout.strip() == "runs/permfl-digits-6-1"
    config = tomllib.loads((tmp_path / "runs/permfl-digits-6-1/config.toml").read_text())
    assert (config["rounds"], config["seed"], config["devices"]) == (1, 6, 6)
    assert config["set"]["device_lr"] == 0.02
    assert config["set"]["team_lr"] == {"team": 0.04}
    assert config["set"]["device_steps"] == 2


def test_json_is_all_there_is_on_stdout(tmp_path):
    result = call("run", "fedavg", "--rounds", 1, "--set", "device_steps=1", "--teams", 4, "--json")
    summary = json.loads(result.stdout)
    assert summary["team"] is None
    assert summary["best"]["round"] == 1
    assert "flat method: the teams are ignored" in result.stderr
    assert summary == read_summary(tmp_path / "runs/fedavg-digits-0-1")


def test_quiet_says_nothing_but_where(tmp_path):
    result = call("run", "local", *SMALL[:4], "--rounds", 1, "--set", "device_steps=1", "--quiet", "--out", "here")
    assert result.stdout == "here\n"
    assert result.stderr == ""


def test_two_tiers_of_teams(tmp_path):
    args = ("--devices", 16, "--teams", "2x4", "--set", "team_lr.team1=0.02", "--set", "team_lr.team2=0.03")
    call("run", *args, *QUICK, "--rounds", 1, "--out", "deep")
    tiers = json.loads((tmp_path / "deep" / "topology.json").read_text())["tiers"]
    assert [(t["tier"], len(t["ids"])) for t in tiers] == [
        ("server", 1),
        ("team1", 2),
        ("team2", 8),
        ("device", 16),
    ]
    summary = json.loads((tmp_path / "deep" / "summary.json").read_text())
    assert list(summary["traffic"]) == ["server-team1", "team1-team2", "team2-device"]
    assert summary["team1"]["accuracy"] is not None
    assert "team1" in call("show", "deep").stdout
    call("run", "deep/config.toml", "--quiet", "--out", "again")
    assert_same_bits(tmp_path / "deep", tmp_path / "again")


def test_participation_and_who_never_took_part(tmp_path):
    args = ("--device-participation", "count:1", "--team-participation", "0.5", "--set", "team_rounds=1")
    summary = json.loads(call("run", *SMALL[:4], *args, "--rounds", 1, "--json").stdout)
    assert summary["never_took_part"] == 5


# -- afterwards ---------------------------------------------------------------------------------------


def test_show_and_resume_of_a_finished_run(finished):
    shown = call("show", finished).stdout
    assert "chosen on validation" in shown
    assert "3 rounds" in shown
    result = call("resume", finished)
    assert "finished: 3 rounds" in result.stderr


def test_a_finished_run_goes_further_to_the_same_bits(finished, tmp_path):
    import shutil

    shutil.copytree(finished, tmp_path / "short")
    call("resume", "short", "--rounds", 5, "--quiet")
    call("run", finished / "config.toml", "--rounds", 5, "--out", "long", "--quiet")
    assert_same_bits(tmp_path / "short", tmp_path / "long")
    assert tomllib.loads((tmp_path / "short" / "config.toml").read_text())["rounds"] == 5
    assert "finished: 5 rounds" in call("resume", "short", "--rounds", 4).stderr


def save_test_samples(folder: Path, device: int, path: Path) -> np.ndarray:
    """x of the device's test samples in a file; returns y."""
    config = tomllib.loads((folder / "config.toml").read_text())
    federation = build_federation(devices=6, teams=2, split=(3, 1, 1), seed=config["seed"])
    x, y = federation.device(device, "test")
    np.savez(path, x=x.numpy())
    return y.numpy()


@pytest.mark.parametrize("device", [0, 4])
def test_predictions_equal_the_evaluation(finished, tmp_path, device):
    y = save_test_samples(finished, device, tmp_path / "x.npz")
    row = rows_of(finished / "devices.csv")[device]
    owners = {"personal": ("--device", device), "team": ("--team", row["team"]), "global": ("--global",)}
    for kind, owner in owners.items():
        call("predict", finished, *owner, "--data", "x.npz", "--out", f"{kind}.npz")
        with np.load(tmp_path / f"{kind}.npz") as file:
            answer = dict(file)
        assert answer["scores"].shape == (len(y), 10)
        assert (answer["y"] == answer["scores"].argmax(1)).all()
        assert (answer["y"] == y).mean() == pytest.approx(float(row[f"{kind}_accuracy"]), abs=1e-12)


def test_predict_refuses_what_it_cannot_do(finished, tmp_path):
    save_test_samples(finished, 0, tmp_path / "x.npz")
    np.savez(tmp_path / "bytes.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 9), np.float32))
    np.savez(tmp_path / "hole.npz", x=np.full((3, 1, 8, 8), np.nan, np.float32))
    (tmp_path / "there.npz").write_text("mine")
    to = ("--out", "y.npz")
    for args, text in {
        ("--data", "x.npz", *to): "select a model with one of",
        ("--device", 1, "--global", "--data", "x.npz", *to): "select a model with one of",
        ("--device", 99, "--data", "x.npz", *to): "available: 0, 1",
        ("--global", "--data", "bytes.npz", *to): "trained on floats",
        ("--global", "--data", "wide.npz", *to): "(1, 8, 8)",
        ("--global", "--data", "hole.npz", *to): "row 0",
        ("--global", "--data", "none.npz", *to): "none.npz",
        ("--global", "--data", "x.npz", "--out", "there.npz"): "exists",
        ("--global", "--data", "x.npz", "--out", "no/y.npz"): "does not exist",
    }.items():
        assert text in call("predict", finished, *args, code=2).stderr
    assert not (tmp_path / "y.npz").exists()


def test_export_both_ways(finished, tmp_path):
    from safetensors.torch import load_file

    call("export", finished, "--device", 2, "-o", "model.safetensors")
    call("export", finished, "--team", 1, "-o", "model.pt2")
    run, x = Run.load(finished), torch.rand(7, 1, 8, 8)
    assert torch.equal(
        load_file("model.safetensors")["head.weight"],
        dict(run.model(device=2).named_parameters())["head.weight"],
    )
    program = torch.export.load("model.pt2").module()
    torch.testing.assert_close(program(x), run.model(team=1)(x))
    assert "exists" in call("export", finished, "--global", "-o", "model.pt2", code=2).stderr
    assert ".safetensors or .pt2 or .onnx" in call("export", finished, "--global", "-o", "model.pt", code=2).stderr
    said = call("export", finished, "--global", "-o", "global.safetensors").stderr
    assert "the model of the whole population is in global.safetensors" in said


@pytest.mark.parametrize(
    ("kind", "name", "texts"),
    [
        ("algorithms", "permfl", ("device_lr", "alpha", "0.01", "step size of a device", "> 0")),
        ("data", "synthetic", ("alpha", "0.5", "max_samples")),
        ("models", "dnn", ("hidden", "100", "tuple[int, ...]")),
        ("partitions", "labels", ("per_device", "2")),
        ("teams", "overlapping", ("overlap", "0.5")),
    ],
)
def test_list(kind, name, texts):
    assert name in call("list", kind).stdout
    shown = call("list", kind, name).stdout
    assert all(text in shown for text in texts)
    assert f"did you mean '{name}'" in call("list", kind, name + "x", code=2).stderr


def test_list_of_a_method_of_ones_own(tmp_path):
    (tmp_path / "own_method_for_cli.py").write_text(
        "from dataclasses import dataclass\nfrom polytier import FedAvg, parameter\n"
        "@dataclass(frozen=True)\nclass Mine(FedAvg):\n"
        "    zeal: float = parameter(0.25, 'z', 'how eager it is', least=0)\n"
    )
    shown = call("list", "algorithms", "own_method_for_cli:Mine").stdout
    assert all(text in shown for text in ("zeal", "0.25", "how eager it is", "device_steps"))
    assert "cannot be imported" in call("list", "algorithms", "own_method_for_cli:Yours", code=2).stderr


def test_help_version_and_slips():
    assert call("--version").stdout == f"polytier {polytier.__version__}\n"
    assert "--team-formation" in call("run", "--help").stdout
    assert "did you mean 'data'" in call("list", "datas", code=2).stderr
    assert "nothing to get" in call("data", "get", "digits", code=2).stderr
    assert "did you mean 'mnist'" in call("data", "get", "mnits", code=2).stderr
    assert "does not exist" in call("show", "nowhere", code=2).stderr
    assert "does not exist" in call("resume", "nowhere", code=2).stderr


# -- one's own data and model -------------------------------------------------------------------------


def test_ones_own_file_and_model(tmp_path):
    own_file(tmp_path / "mine.npz")
    (tmp_path / "own_models_for_cli.py").write_text(
        "from torch import nn\n"
        "def small(inputs, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, num_classes))\n"
    )
    own = ("--data", "mine.npz", "--model", "own_models_for_cli:small")
    call("run", *own, *QUICK, "--rounds", 2, "--standardize", "--out", "run")
    rows = rows_of(tmp_path / "run" / "devices.csv")
    assert [(r["id"], r["team"]) for r in rows] == [
        ("anna", "north"),
        ("bert", "north"),
        ("chen", "south"),
        ("dora", "south"),
    ]
    run = Run.load(tmp_path / "run")
    federation = build_federation(tmp_path / "mine.npz", standardize=True)
    x, y = federation.device(2, "test")
    accuracy = float((run.model(device="chen")(x).argmax(1) == y).double().mean())
    assert accuracy == pytest.approx(float(rows[2]["personal_accuracy"]))
    assert isinstance(run.adapt(x, y, team="south"), torch.nn.Module)
    call("predict", "run", "--team", "north", "--data", "mine.npz", "--out", "y.npz")  # its other columns are no matter
    assert "names its own devices" in call("run", *own, "--devices", 3, code=2).stderr
    config = (tmp_path / "run" / "config.toml").read_text()
    assert str(tmp_path / "mine.npz") in config
    assert "devices =" not in config


def test_the_configuration_works_from_elsewhere(tmp_path, monkeypatch):
    own_file(tmp_path / "mine.npz")
    np.save(tmp_path / "there.npy", np.ones((2, 4), dtype=int))
    args = ("--device-participation", "table:there.npy", "--rounds", 1, *QUICK)
    call("run", "--data", "mine.npz", *args, "--out", "run", "--quiet")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    call("run", "../run/config.toml", "--out", "again", "--quiet")
    assert_same_bits(tmp_path / "run", tmp_path / "below" / "again")


# -- cut short ----------------------------------------------------------------------------------------


def test_kill_in_the_middle_of_a_round_and_resume(unbroken, tmp_path):
    process = start(tmp_path / "killed", *LONG)
    process.kill()
    process.communicate()
    assert not (tmp_path / "killed" / "summary.json").exists()
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "pers')
    assert "resume" in call("show", "killed").stdout
    assert "not finished" in call("export", "killed", "--global", "-o", "m.pt2", code=2).stderr
    call("resume", "killed", "--quiet")
    assert_same_bits(unbroken, tmp_path / "killed")


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no signal to one process")
def test_interrupt_ends_the_round_and_can_go_on(unbroken, tmp_path):
    process = start(tmp_path / "stopped", *LONG)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"finishing this round" in said
    assert b"polytier resume" in said
    done = (tmp_path / "stopped" / "metrics.jsonl").read_text().count("\n")
    assert f"round {done} of 5" in call("show", "stopped").stdout
    checkpoint = max((tmp_path / "stopped" / "checkpoints").iterdir())
    assert checkpoint.name == f"round-{done:07d}"  # nothing is lost
    call("resume", "stopped", "--quiet")
    assert_same_bits(unbroken, tmp_path / "stopped")


def test_workers_change_no_bit(finished, tmp_path):
    args = command("run", finished / "config.toml", "--workers", 2, "--out", tmp_path / "workers", "--json")
    result = subprocess.run(args, capture_output=True, check=True)
    assert json.loads(result.stdout)["rounds"] == 3
    assert_same_bits(finished, tmp_path / "workers")


@pytest.mark.parametrize(
    ("model", "advice"), [("mclr", "polytier data pack"), ("dnn:1000", "lower --tile, --workers or --micro-batch")]
)
def test_more_memory_than_there_is_is_refused(monkeypatch, tmp_path, model, advice):
    monkeypatch.setattr("polytier.runs.estimate.physical_memory", lambda: 100_000)
    said = call("run", *SMALL, "--model", model, "--out", tmp_path / "run", code=2).stderr
    assert "available: 100 kB" in said
    assert advice in said
    assert not (tmp_path / "run").exists()


def test_memory_that_runs_out_on_the_way(monkeypatch, tmp_path):
    def refuse(self):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("polytier.runs.loop.Loop.step", refuse)
    said = call("run", *SMALL, *QUICK, "--out", tmp_path / "run", code=3).stderr
    assert f"polytier resume {tmp_path / 'run'} --tile 4 --workers 1" in said
    monkeypatch.undo()
    call("resume", tmp_path / "run", "--tile", 4, "--workers", 1, "--quiet")


GROWING = ("--l2", 1, "--set", "device_lr=11", "--set", "device_steps=2")  # by (1 - 11)^2 a round


def test_a_diverging_run_stops_with_advice(tmp_path):
    said = call("run", "fedavg", "--devices", 6, *GROWING, "--rounds", 50, "--out", "wild", code=3).stderr
    for text in ("diverged in round", "device", "lower device_lr", "polytier resume wild --rounds"):
        assert text in said
    assert not (tmp_path / "wild" / "summary.json").exists()
    last = int(max((tmp_path / "wild" / "checkpoints").iterdir()).name.removeprefix("round-"))
    assert last >= 1
    call("resume", "wild", "--rounds", last, "--quiet")
    model = Run.load(tmp_path / "wild").global_
    assert model is not None
    assert torch.isfinite(model).all()


def test_a_run_that_diverges_at_once_stops_with_advice(tmp_path):
    """Also where the announcement, which tries a round, is the first to see it."""
    said = call("run", *SMALL, "--set", "device_lr=1e30", "--rounds", 2, "--out", "wild", code=3).stderr
    assert "diverged in round 1" in said
    assert "polytier run wild/config.toml --set FIELD=VALUE" in said
    assert "Traceback" not in said


def test_a_full_disk_is_a_fault_not_a_bug(tmp_path, monkeypatch):
    from polytier.runs import checkpoint

    real, calls = checkpoint.save, []

    def save(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(checkpoint, "save", save)
    said = call("run", *SMALL, "--rounds", 2, "--out", "full", code=3).stderr
    assert "No space left" in said
    assert "polytier resume full" in said
    call("resume", "full", "--quiet")


def test_broken_folders_are_told_from_good_ones(finished, tmp_path):
    import shutil

    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    for rows in (tmp_path / "run" / "checkpoints").glob("*/rows.safetensors"):
        rows.write_bytes(rows.read_bytes()[:100])
    said = call("resume", "run", code=2).stderr
    assert "rows.safetensors is damaged" in said
    assert "no checkpoint can be used; repeat the run" in said
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "no checkpoint" in call("resume", "run", code=2).stderr
