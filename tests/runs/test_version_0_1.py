"""Run folders of version 0.1.0 (tests/fixtures) are shown, reported, predicted from and resumed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import call
from polytier import Run
from polytier.runs.read_files import read_state

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
FINISHED = [
    name for name in sorted(p.name for p in FIXTURES.iterdir() if p.name.startswith("run-")) if "unfinished" not in name
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_folder_is_shown_and_reported(name):
    assert call("show", FIXTURES / name).stdout
    call("report", FIXTURES / name, "-o", "page.html")
    assert Path("page.html").stat().st_size > 10_000
    assert read_state(FIXTURES / name) == {
        "format": 1,
        "state": "done",
        "reason": "",
        "round": EXPECTED[name]["rounds"],
    }


def test_a_model_of_it_predicts(tmp_path):
    shape = Run.load(FIXTURES / "run-0.1.0-permfl").context.population.shape
    np.savez("new.npz", x=np.zeros((3, *shape), dtype=np.float32))
    call("predict", FIXTURES / "run-0.1.0-permfl", "--device", "0", "--data", "new.npz", "--out", "found.npz")
    assert np.load("found.npz")["scores"].shape == (3, 10)


def test_several_models_are_loaded():
    run = Run.load(FIXTURES / "run-0.1.0-several")
    assert list(run.models) == ["model1", "model2"]


def test_learned_groups_become_teams():
    learned = f"learned:{FIXTURES / 'run-0.1.0-cobo'}"
    call(
        "run",
        "hier-fedavg",
        *("--devices", 6, "--rounds", 1, "--batching", "eager"),
        "--team-formation",
        learned,
        "--quiet",
    )


def test_an_unfinished_run_goes_on(tmp_path):
    shutil.copytree(FIXTURES / "run-0.1.0-unfinished", "run")
    assert read_state(Path("run"))["state"] == "stopped"
    result = call("resume", "run")
    assert "started with polytier 0.1.0" in result.stderr
    summary = json.loads(Path("run/summary.json").read_text())
    expected = EXPECTED["run-0.1.0-unfinished"]["after_resume"]
    assert summary["rounds"] == expected["rounds"]
    for kind, accuracy in expected["accuracy"].items():  # bits may differ on another processor, by few samples at most
        assert summary[kind]["accuracy"] == pytest.approx(accuracy, abs=0.02)
    assert read_state(Path("run"))["format"] == 3
