"""sFedHP, several models and CoBo as a person uses them: commands, files, and what one system hands to another."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from commands import call, rows_of
from polytier import Run
from polytier.tree import collaboration

CLUSTERS = ("--devices", "8", "--teams", "0", "--partition", "clusters-permuted:4", "--batch-size", "64")

SEVERAL = """
algorithm = "mfa-rr"
devices = 8
teams = 2
rounds = 4

[models.digits]
algorithm = "permfl"
set = { team_rounds = 2, device_steps = 4, device_lr = 0.2 }

[models.made]
data = "synthetic:num_features=5"
model = "dnn:4"
partition = "column"
batch_size = 16
set = { device_lr = "3/(30+t)", device_steps = 2 }
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def cobo(tmp_path_factory) -> Path:
    """CoBo on digits whose labels are permuted in four clusters of two devices."""
    folder = tmp_path_factory.mktemp("runs") / "cobo"
    quick = ("--set", "weight_lr=1", "--set", "sampling=all", "--set", "device_lr=0.5")
    call("run", "cobo", *CLUSTERS, *quick, "--rounds", 41, "--eval-every", 50, "--quiet", "--out", folder)
    return folder


# -- sFedHP -------------------------------------------------------------------------------------------


def test_sparse_models_save_traffic():
    """The same bits by a codec that leaves zeros out, in fewer bytes."""
    short = ("--devices", "6", "--teams", "2", "--set", "team_rounds=4", "--rounds", 2, "--quiet")
    strong = ("--set", "device_sparsity=0.5", "--set", "team_sparsity=0.5", "--set", "smoothing=0.02")
    strong += ("--set", "device_lr=0.05", "--set", "team_lr=0.05", "--set", "server_lr=1.0")
    strong += ("--set", "device_pull=25", "--set", "team_pull=25")
    for codec in ("float32", "sparse"):
        call("run", "sfedhp", *short, *strong, "--codec", codec, "--out", codec)
    dense, sparse = (json.loads(Path(codec, "summary.json").read_text()) for codec in ("float32", "sparse"))
    assert dense["global"] == sparse["global"]
    for link in ("server-team", "team-device"):
        assert sparse["traffic"][link]["up"] < 0.7 * dense["traffic"][link]["up"]
    shown = call("show", "sparse", "--until", "0.01").output
    assert "round 1" in shown
    assert "until 1 % test accuracy" in shown


# -- several models -----------------------------------------------------------------------------------


def test_a_file_describes_several_models(tmp_path):
    (tmp_path / "several.toml").write_text(SEVERAL)
    shown = call("run", "several.toml", "--out", "one").output
    assert "digits" in shown
    assert "server-device" in shown  # FedAvg is flat, PerMFL beside it is not
    summary = json.loads(Path("one/summary.json").read_text())
    assert summary["models"]["digits"]["personal"]["accuracy"] > 0.3
    assert summary["models"]["made"]["personal"] is None
    assert 0 <= summary["models"]["made"]["train"]["global"]["accuracy"] <= 1
    assert summary["device_steps"] == sum(m["device_steps"] for m in summary["models"].values())
    last = json.loads(Path("one/metrics.jsonl").read_text().splitlines()[-1])
    figures = [last["models"][name]["global"]["test"]["accuracy"] for name in ("digits", "made")]
    assert last["global"]["test"]["accuracy"] == pytest.approx(np.mean(figures))
    assert last["participants"]["device"] == 8
    assert {"digits_personal_accuracy", "made_samples"} <= rows_of(Path("one/devices.csv"))[0].keys()


def test_several_models_repeat_resume_and_are_used(tmp_path):
    (tmp_path / "several.toml").write_text(SEVERAL)
    call("run", "several.toml", "--out", "one", "--quiet")
    call("run", "one/config.toml", "--rounds", 2, "--out", "two", "--quiet")
    call("resume", "two", "--rounds", 4, "--quiet")
    for file in ("models/digits/personal.safetensors", "models/made/global.safetensors", "devices.csv", "traffic.csv"):
        assert Path("one", file).read_bytes() == Path("two", file).read_bytes()
    run = Run.load("one")
    assert run.models["digits"].model(device=3) is not None
    assert run.models["made"].ledger.total()["server-device"]["up"] > 0
    with pytest.raises(ValueError, match="several models, digits, made"):
        run.model(device=3)
    call("export", "one", "--device", 3, "--of", "digits", "-o", "model.safetensors")
    assert "--of" in call("export", "one", "--device", 3, "-o", "other.safetensors", code=2).stderr


def test_models_alike_and_their_gain():
    few = ("--models", 3, "--set", "device_lr=0.1", "--set", "device_steps=3")
    call("run", "mfa-rand", "--devices", 6, *few, "--rounds", 2, "--out", "alike", "--quiet")
    assert list(json.loads(Path("alike/summary.json").read_text())["models"]) == ["model1", "model2", "model3"]
    found = json.loads(call("gain", "mfa-rr", *few, "--single-rounds", 3, "--seeds", 2, "--json").stdout)
    assert (found["models"], found["single"], len(found["rounds"])) == (3, 3, 2)
    for seed, rounds in found["rounds"].items():
        assert found["gains"][seed] == pytest.approx(9 / rounds)
    low, high = found["interval"]
    assert low <= found["mean"] <= high


# -- CoBo, and what it hands on -----------------------------------------------------------------------


def test_cobo_finds_the_groups(cobo):
    summary = json.loads((cobo / "summary.json").read_text())
    assert summary["collaboration"]["adjusted_rand_index"] == 1
    assert summary["collaboration"]["groups"] == 4
    assert "adjusted Rand index 1.00" in call("show", cobo).output
    snapshots, true = collaboration.load(cobo / collaboration.FILE)
    assert list(snapshots)[:3] == [1, 2, 3]
    assert max(snapshots) == 41  # the last round, though no multiple of a power of two
    assert true is not None
    assert (cobo / "collaboration.png").stat().st_size > 10_000
    assert max(Run.load(cobo).collaboration) == 41
    assert "one model" in call("export", cobo, "--device", 0, "--of", "x", "-o", "x.pt2", code=2).stderr


@pytest.mark.parametrize("method", ["permfl", "sfedhp", "hier-fedavg"])
def test_learned_groups_become_teams(cobo, method):
    short = ("--set", "team_rounds=1", "--set", "device_steps=1", "--rounds", 1, "--quiet")
    call("run", method, "--team-formation", f"learned:{cobo}", *CLUSTERS[:2], *CLUSTERS[4:], *short, "--out", "mine")
    _, true = collaboration.load(cobo / collaboration.FILE)
    team = [row["team"] for row in rows_of(Path("mine/devices.csv"))]
    assert true is not None
    assert len(set(team)) == 4
    assert len(set(zip(team, true.tolist(), strict=True))) == 4  # the same groups under other names


def test_cobo_between_teams():
    """Teams are the clients: their matrix, their models, no personal ones."""
    short = ("--devices", 8, "--teams", 4, "--set", "clients=teams", "--rounds", 3, "--quiet")
    call("run", "cobo", *short, "--out", "mine")
    summary = json.loads(Path("mine/summary.json").read_text())
    assert summary["personal"] is None
    assert summary["team"]["accuracy"] >= 0
    assert len(collaboration.load(Path("mine") / collaboration.FILE)[0][3]) == 4


def test_a_client_leaves_and_comes_back():
    Path("who.csv").write_text("id,join,leave\n2,1,3\n2,5,\n7,4,\n")
    short = (*CLUSTERS, "--set", "sampling=all", "--rounds", 6, "--quiet")
    call("run", "cobo", *short, "--device-participation", "schedule:who.csv", "--out", "mine")
    there = [json.loads(line)["participants"]["device"] for line in Path("mine/metrics.jsonl").read_text().splitlines()]
    assert there == [7, 7, 6, 7, 8, 8]
    call("run", "mine/config.toml", "--rounds", 3, "--out", "half", "--quiet")
    call("resume", "half", "--rounds", 6, "--quiet")
    files = ("collaboration.npz", "models/personal.safetensors")
    assert all(Path("mine", f).read_bytes() == Path("half", f).read_bytes() for f in files)


# -- nothing is lost ----------------------------------------------------------------------------------


def test_a_team_without_a_device_in_the_round_keeps_its_model():
    """An edge whose devices are all away: nothing is lost, the others go on."""
    np.save("table.npy", np.array([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]))
    short = ("--devices", 6, "--teams", 2, "--team-formation", "sequential", "--set", "team_rounds=2", "--quiet")
    for rounds in (1, 2):
        call("run", "sfedhp", *short, "--rounds", rounds, "--device-participation", "table:table.npy", "--out", rounds)
    first = json.loads(Path("1/metrics.jsonl").read_text())
    assert first["participants"] == {"team": 2, "device": 3}
    accuracy = [json.loads(Path(f"{r}/summary.json").read_text())["global"]["accuracy"] for r in (1, 2)]
    assert all(0 <= a <= 1 for a in accuracy)
    assert json.loads(Path("2/summary.json").read_text())["never_took_part"] == 0


def test_a_pull_that_diverges_is_warned_of():
    short = ("--devices", 8, "--teams", 0, "--set", "device_lr=0.1", "--set", "device_pull=3", "--rounds", 1)
    assert "device_lr * device_pull * n = 2.4" in call("run", "cobo", *short, "--out", "mine").stderr
