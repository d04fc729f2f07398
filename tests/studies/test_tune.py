"""A search over fields: what is tried, what it is judged by, and how it goes on after a break."""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import call
from polytier.algorithms import ALGORITHMS
from polytier.models.metrics import ACCURACY
from polytier.runs.read_files import read_history
from polytier.studies import tune
from polytier.studies.search_space import propose, read_space
from polytier.studies.tune_table import ranked

SMALL = ("--devices", 6, "--teams", 2, "--rounds", 4, "--split", "3:1:1", "--batching", "eager")  # nothing is traced
STEPS = ("--set", "device_steps=2")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def trials_of(folder: str | Path) -> list[dict[str, Any]]:
    """Without the seconds, which no run repeats."""
    lines = (Path(folder) / "trials.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "crc32")} for line in lines]


# -- a search -----------------------------------------------------------------------------------------


def test_a_better_step_is_found_and_can_be_trained(tmp_path):
    args = ("fedavg", *SMALL, *STEPS, "--set", "device_lr=0.0005", "--over", "device_lr=0.0005:1")
    result = call("tune", *args, "--trials", 6, "--out", "out")
    trials = trials_of("out")
    assert [t["number"] for t in trials] == list(range(6))
    assert trials[0]["fields"] == {"device_lr": 0.0005}
    best = ranked(trials, ACCURACY)[0]
    assert best["score"] > trials[0]["score"] + 0.3
    assert best["fields"]["device_lr"] > 0.01
    assert f"trial {best['number']} is the best on validation; train it: polytier run out/best.toml" in result.stdout
    assert f"{100 * best['score']:.2f} %" in result.stdout
    said = result.stderr.splitlines()
    assert said[0] == "FedAvg is a flat method: the teams are ignored"  # once; Optuna says nothing at all
    assert [text.partition(":")[0] for text in said[1:]] == [f"trial {k}" for k in range(6)]
    # trained by itself the winner has that score, to the bit
    winner = tomllib.loads(Path("out/best.toml").read_text())
    assert winner["set"] == {"device_lr": best["fields"]["device_lr"], "device_steps": 2, "weights": "samples"}
    call("run", "out/best.toml", "--quiet", "--out", "run")
    history = read_history(tmp_path / "run")
    assert len([r for r in history if "global" in r]) == 4
    assert history[-1]["global"]["validation"]["accuracy"] == best["score"]
    # and another search may begin with it
    found = json.loads(call("tune", "out/best.toml", "--over", "device_lr", "--trials", 1, "--json").stdout)
    assert found["best"] == {"fields": best["fields"], "score": best["score"], "trial": 0}
    assert [t["score"] for t in found["trials"]] == [best["score"]]
    assert (tmp_path / "runs" / "tune-fedavg-digits-1" / "best.toml").exists()


def test_after_a_break_it_goes_on_as_if_there_had_been_none(tmp_path, monkeypatch):
    args = ("permfl", *SMALL, *STEPS, "--set", "team_rounds=1", "--quiet", "--trials", 12)
    assert call("tune", *args, "--out", "whole").stdout == "whole\n"

    attempt, begun = tune.attempt, []

    def attempt_and_press(*given: Any) -> dict[str, Any]:
        """Ctrl-C in the third attempt, twice in the sixth."""
        begun.append(given)
        for _ in range({3: 1, 6: 2}.get(len(begun), 0)):
            os.kill(os.getpid(), signal.SIGINT)
        return attempt(*given)

    monkeypatch.setattr(tune, "attempt", attempt_and_press)
    for done in (2, 4):
        result = call("tune", *args, "--out", "broken", code=130)
        assert (
            f"interrupted after {done} of 12 trials; continue with the same command and --out broken" in result.stderr
        )
        assert len(trials_of("broken")) == done
    path = tmp_path / "broken/trials.jsonl"
    path.write_text(path.read_text()[:-20])  # in the middle of the last line
    call("tune", *args, "--out", "broken")
    assert trials_of("broken") == trials_of("whole")
    assert {t["state"] for t in trials_of("whole")} == {"done", "pruned"}
    assert all(t["rounds"] < 4 for t in trials_of("whole") if t["state"] == "pruned")
    assert (tmp_path / "broken/best.toml").read_text() == (tmp_path / "whole/best.toml").read_text()
    # all step sizes and pulls, by default; those of teams and of the server follow from the pulls
    assert list(trials_of("whole")[0]["fields"]) == ["device_lr", "device_pull", "team_pull", "team_lr", "server_lr"]
    for trial in trials_of("whole")[1:]:
        own = trial["fields"]
        assert own["team_lr"] == pytest.approx(1 / (own["device_pull"] + own["team_pull"]), rel=0.06)  # two digits
        assert own["server_lr"] == pytest.approx(1 / own["team_pull"], rel=0.06)
    assert "rounds 4 (now 5)" in call("tune", *args, "--rounds", 5, "--out", "broken", code=2).stderr
    assert "seeds 1 (now 2)" in call("tune", *args, "--seeds", 2, "--out", "broken", code=2).stderr
    assert trials_of("broken") == trials_of("whole")


def test_steps_that_are_named_are_searched_for_and_follow_nothing():
    method = ALGORITHMS["permfl"]()
    assert list(read_space("permfl", method, ["team_lr"], following=["team_lr", "server_lr"])) == ["team_lr"]
    assert list(read_space("permfl", method, [], following=["team_lr"])) == [
        "device_lr",
        "server_lr",
        "device_pull",
        "team_pull",
    ]


def test_the_first_trial_is_the_current_setting_even_if_its_steps_do_not_follow():
    args = ("permfl", *SMALL, *STEPS, "--rounds", 1, "--set", "team_rounds=1", "--set", "team_lr=0.5", "--trials", 2)
    call("tune", *args, "--quiet", "--out", "out")
    first, second = trials_of("out")
    assert first["fields"]["team_lr"] == 0.5
    assert second["fields"]["team_lr"] == pytest.approx(
        1 / (second["fields"]["device_pull"] + second["fields"]["team_pull"]), rel=0.06
    )


def test_test_samples_have_no_say(tmp_path):
    rng = np.random.default_rng(0)
    device, split = np.arange(240) % 4, np.arange(240) // 4 % 3
    x, y = rng.normal(size=(240, 5)), rng.integers(0, 3, 240)
    x[:, 0] += 2 * y
    np.savez(tmp_path / "a.npz", x=x, y=y, device=device, split=split)
    y[split == 2] = rng.permutation(y[split == 2])
    x[split == 2] *= 100
    np.savez(tmp_path / "b.npz", x=x, y=y, device=device, split=split)
    shared = ("--rounds", 3, "--trials", 4, "--over", "device_lr", "--batching", "eager", "--quiet", "--seeds", 2)
    for name in "ab":
        call("tune", "local", "--data", f"{name}.npz", *shared, *STEPS, "--out", name)
    assert trials_of("a") == trials_of("b")
    first = trials_of("a")[0]
    assert first["score"] == pytest.approx(sum(first["scores"]) / 2)
    assert first["rounds"] == 6
    # validation samples do
    y[split == 1] = rng.permutation(y[split == 1])
    np.savez(tmp_path / "c.npz", x=x, y=y, device=device, split=split)
    call("tune", "local", "--data", "c.npz", *shared, *STEPS, "--out", "c")
    assert trials_of("a") != trials_of("c")


def test_less_loss_is_better_where_there_is_no_accuracy(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    np.savez(tmp_path / "mine.npz", x=x, y=x.sum(1), device=np.arange(80) % 4)
    (tmp_path / "own_line.py").write_text("from torch import nn\ndef line(*_):\n    return nn.Linear(3, 1)\n")
    own = ("--data", "mine.npz", "--model", "own_line:line", "--batching", "eager", "--split", "2:1:1", "--rounds", 3)
    lrs = ("--set", "device_lr=0.001", "--over", "device_lr=0.001,0.1")
    result = call("tune", "fedavg", *own, *lrs, *STEPS, "--out", "out")
    slow, fast = trials_of("out")  # no more are there to try
    assert fast["score"] < slow["score"]
    assert "trial 1 is the best on validation" in result.stdout
    assert "validation loss" in result.stdout


def test_choices_are_tried_once_each():
    args = ("fedavg", *SMALL, "--set", "device_steps=3", "--over", "weights", "--over", "device_steps=1:2")
    call("tune", *args, "--rounds", 1, "--quiet", "--out", "out")
    tried = [tuple(t["fields"].values()) for t in trials_of("out")]
    assert tried[0] == ("samples", 3)  # outside: yet the winner is never worse than it
    assert sorted(tried[1:]) == [("samples", 1), ("samples", 2), ("uniform", 1), ("uniform", 2)]


def test_trials_that_fail_stop_nobody():
    args = ("al2gd", *SMALL, "--over", "p_team=0.1,0.7", "--over", "p_server=0.1,0.7", "--set", "steps=2")
    call("tune", *args, "--quiet", "--out", "out")
    failed = [t for t in trials_of("out") if t["state"] == "failed"]
    assert [(t["fields"], t["score"], t["rounds"]) for t in failed] == [({"p_team": 0.7, "p_server": 0.7}, None, 0)]
    assert "p_team" in failed[0]["reason"]
    assert len(trials_of("out")) == 4
    blown = ("sfedhp", *SMALL, "--set", "device_lr=1e30", "--over", "device_lr=1e29:1e31", "--trials", 2)
    result = call("tune", *blown, "--out", "blown", code=3)
    assert "no trial finished" in result.stderr
    assert "no longer finite" in result.stderr
    assert "failed" in result.stdout
    assert not Path("blown/best.toml").exists()


# -- what is tried ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "text", "expected"),
    [
        ("permfl", "device_lr=0.001:0.1", {"low": 0.001, "high": 0.1, "log": True}),
        ("permfl", "device_lr=0.01:0.05", {"low": 0.01, "high": 0.05, "log": False}),
        ("permfl", "device_lr=0.07:0.7", {"low": 0.07, "high": 0.7, "log": True}),
        ("permfl", "device_pull=0:5", {"low": 0.0, "high": 5.0, "log": False}),
        ("permfl", "device_lr", {"low": 0.001, "high": 0.1, "log": True}),
        ("permfl", "device_lr=0.01, 0.03,30/(100+t)", {"choices": [0.01, 0.03, "30/(100+t)"]}),
        ("permfl", "device_steps=1:200", {"low": 1, "high": 200, "log": False}),
        ("permfl", "team_rounds", {"low": 2, "high": 40, "log": False}),
        ("per-fedavg", "adapt_steps", {"low": 1, "high": 4, "log": False}),
        ("apfl", "alpha", {"low": 0.05, "high": 1.0, "log": True}),
        ("apfl", "adaptive", {"choices": [False, True]}),
        ("cobo", "domain", {"choices": ["box", "simplex"]}),
        ("cobo", "sampling=all,mixed", {"choices": ["all", "mixed"]}),
    ],
)
def test_specs(method, text, expected):
    space = read_space(method, ALGORITHMS[method](), [text])
    assert space == {text.partition("=")[0]: expected}
    values = [v for v in next(iter(space.values())).values() if v is not True and v is not False]
    assert all(type(v) is type(e) for v, e in zip(values, expected.values(), strict=False))


@pytest.mark.parametrize("method", [name for name in ALGORITHMS if not name.startswith("mfa")])
def test_every_method_has_something_to_search_over(method):
    assert "device_lr" in read_space(method, ALGORITHMS[method](), [])


def test_who_falls_behind_is_cut_short():
    space = {"device_lr": {"low": 0.1, "high": 1.0, "log": False}}
    records = [
        {"fields": {"device_lr": 0.1 * k}, "state": "done", "score": 0.9, "reported": {"2": 0.1 * k, "4": 0.1 * k}}
        for k in range(1, 6)
    ]
    for value, behind in ((0.2, True), (0.4, False)):
        proposed = propose(space, records, ACCURACY, 0, 3)
        assert proposed is not None
        fields, lags = proposed
        assert 0.1 <= fields["device_lr"] <= 1
        assert not lags(2, value)  # too early to tell
        assert lags(4, value) == behind


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("permfll",), "did you mean 'permfl'"),
        (("none.toml",), "none.toml"),
        (("--device", 6), "--devices"),
        (("permfl", "--rounds", 0), "rounds = 0"),
        (("permfl", "--trials", 0), "--trials"),
        (("permfl", "--set", "devce_lr=1"), "did you mean 'device_lr'"),
        (("permfl", "--over", "devce_lr"), "did you mean 'device_lr'"),
        (("permfl", "--over", "device_lr.team"), "did you mean 'device_lr'"),
        (("permfl", "--over", "device_lr", "--over", "device_lr=1:2"), "each field once"),
        (("permfl", "--over", "device_lr="), "FIELD=LOW:HIGH"),
        (("permfl", "--over", "device_lr=0:1"), "> 0"),
        (("permfl", "--over", "device_lr=0.1"), "device_lr=LOW:HIGH or device_lr=A,B,C"),
        (("permfl", "--over", "device_lr=1:2:3"), "device_lr=LOW:HIGH"),
        (("permfl", "--over", "device_lr=1:"), "is not a number"),
        (("permfl", "--over", "device_lr=2:1"), "the range from 2.0 to 1.0 is empty"),
        (("permfl", "--over", "device_lr=1/(2+t):1"), "is empty"),
        (("permfl", "--over", "device_lr=1,1"), "twice"),
        (("permfl", "--over", "device_steps=1.5:3"), "whole number"),
        (("permfl", "--over", "weights=uniform:samples"), "--over weights=uniform,samples"),
        (("permfl", "--over", "weights=uniform,sample"), "uniform | samples"),
        (("permfl", "--set", "device_pull=0", "--over", "device_pull"), "so it has no default range"),
        (("permfl", "--set", "device_lr=1/(9+t)", "--over", "device_lr"), "so it has no default range"),
        (("apfl", "--over", "alpha=0.5:2"), "<= 1"),
        (("mfa-rr",), "tune the method of each model separately"),
        (("permfl", "--models", 2), "mfa-rr or mfa-rand"),
        (("permfl", "--split", "3:0:1"), "--split 3:1:1"),
        (("permfl", "--model", "mcrl"), "did you mean 'mclr'"),
        (("cobo", "--teams", 0, "--set", "clients=teams"), "needs a tree with teams"),
    ],
    ids=str,
)
def test_bad_input_gets_advice_and_writes_nothing(args, advice, tmp_path):
    split = () if "--split" in args else ("--split", "3:1:1")
    assert advice in call("tune", *args, *split, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_there_is_advice(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'polytier[tune]'" in call("tune", "local", *SMALL, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    assert "not a search" in call("tune", "local", *SMALL, "--out", "mine", code=2).stderr
    assert "not a search" in call("tune", "local", *SMALL, "--out", "mine/letter", code=2).stderr
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["letter"]
