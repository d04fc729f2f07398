"""Several methods on one split: what is run, how it ends, and what is made of it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import call, obey, own_file, rows_of
from polytier.algorithms import ALGORITHMS
from polytier.models.metrics import ACCURACY, LOSS
from polytier.report import comparison, intervals
from polytier.runs.read_files import read_summary
from polytier.runs.spec import check_spec
from polytier.studies import compare
from polytier.studies import run_queue as tasks

SMALL = ("--devices", 6, "--teams", 2, "--rounds", 2, "--batching", "eager")  # nothing is traced: that takes longest


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(tasks, "TICK", 0.01)


class Here:
    """In place of a process: the run is made in this one."""

    def __init__(self, *given: Any) -> None:
        self.exitcode = tasks.attempt(*given)
        self.pid, self.sentinel = None, None


@pytest.fixture
def here(monkeypatch) -> list[bool]:
    """Runs are made in this process; for each one, whether it was resumed."""
    resumed: list[bool] = []
    monkeypatch.setattr(tasks, "start_process", lambda work, *given: resumed.append(given[2]) or Here(*given))
    return resumed


def found(folder: str | Path = "out") -> dict[str, Any]:
    return json.loads((Path(folder) / "compare.json").read_text())


# -- a comparison -------------------------------------------------------------------------------------


def test_a_comparison_and_the_same_again(here, tmp_path):
    args = ("permfl,fedavg,local", *SMALL, "--seed", 4, "--seeds", 2, "--steps", 4, "--until", 0.2, "--out", "out")
    result = call("compare", *args)
    assert len(here) == 6
    first = found()
    records = {(r["method"], r["seed"]): r for r in first["records"]}
    assert list(records) == [(m, s) for s in (4, 5) for m in ("permfl", "fedavg", "local")]
    for (method, seed), record in records.items():
        summary = read_summary(tmp_path / f"out/{method}-{seed}")
        assert record["state"] == "done"
        assert summary is not None
        assert {k: record[k] for k in summary} == summary
        assert record["gradients"] == 8
    assert first["settings"]["set"]["permfl"] == {"device_steps": 4, "team_rounds": 1}
    assert (first["settings"]["seeds"], first["settings"]["devices"]) == ([4, 5], 6)
    # one split: the same samples at the same devices, another one with another seed
    held = {k: [(r["id"], r["label_3"]) for r in rows_of(tmp_path / f"out/{k[0]}-{k[1]}/devices.csv")] for k in records}
    assert held["permfl", 4] == held["fedavg", 4] == held["local", 4] != held["local", 5]
    # the lines of compare.csv are the records
    lines = rows_of(tmp_path / "out/compare.csv")
    assert [(r["method"], int(r["seed"])) for r in lines] == list(records)
    assert float(lines[0]["personal_accuracy"]) == records["permfl", 4]["personal"]["accuracy"]
    assert int(lines[0]["traffic_team-device_up"]) == records["permfl", 4]["traffic"]["team-device"]["up"]
    assert lines[1]["personal_accuracy"] == ""  # FedAvg has no personal models
    # methods: judged by their personal models, else by the global one
    methods = {m["method"]: m for m in first["methods"]}
    values = [records["fedavg", s]["global"]["accuracy"] for s in (4, 5)]
    assert methods["fedavg"]["global"]["mean"] == pytest.approx(sum(values) / 2)
    assert methods["fedavg"]["personal"] is None
    means = [m[m["judged_by"]]["mean"] for m in first["methods"]]
    assert means == sorted(means, reverse=True)
    share = [better(tmp_path / "out", "fedavg", "global", s) for s in (4, 5)]
    assert [records["fedavg", s]["better_than_local"] for s in (4, 5)] == share
    assert methods["fedavg"]["better_than_local"]["mean"] == pytest.approx(sum(share) / 2)
    assert methods["local"]["better_than_local"] is None
    for text in (
        " to ",
        "the lowest and the highest seed",
        "better than Local",
        "bytes until 20 %",
        "fedavg",
        "Wilcoxon",
    ):
        assert text in result.stdout
    assert "test accuracy over 2 seeds" in result.stdout  # what was found, in words
    assert result.stdout.endswith("page: out/report.html\n")
    assert "test accuracy over 2 seeds" in Path("out/report.html").read_text()  # and the same on the page
    assert "fedavg, seed 5" in result.stderr
    # again, with one run folder gone: only that one is made, to the same bits
    shutil.rmtree(tmp_path / "out/fedavg-5")
    here.clear()
    assert json.loads(call("compare", *args, "--json").stdout) == found()
    assert here == [False]
    assert without_seconds(found()) == without_seconds(first)
    # with another protocol it is another comparison; with one more method it goes on
    assert "rounds 2 (now 3)" in call("compare", *args, "--rounds", 3, code=2).stderr
    here.clear()
    assert call("compare", "local,fedavg", *args[1:], "--quiet").stdout == "out\n"
    assert here == []
    assert [r["method"] for r in found()["records"]] == ["local", "fedavg"] * 2


def better(out: Path, method: str, kind: str, seed: int) -> float:
    own, local = (rows_of(out / f"{name}-{seed}/devices.csv") for name in (method, "local"))
    above = [float(a[f"{kind}_accuracy"]) > float(b["personal_accuracy"]) for a, b in zip(own, local, strict=True)]
    return sum(above) / len(above)


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if "second" not in k}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


def test_who_cannot_and_who_diverges_stop_nobody(here, tmp_path):
    fields = ("--set", "cobo.clients=teams", "--set", "sfedhp.device_lr=1e30")
    args = ("cobo,sfedhp,local", *SMALL, "--teams", 0, "--seeds", 1, *fields, "--out", "out")
    result = call("compare", *args)
    assert {r["method"]: r["state"] for r in found()["records"]} == {
        "cobo": "not applicable",
        "sfedhp": "diverged",
        "local": "done",
    }
    assert "needs a tree with teams" in found()["records"][0]["reason"]
    assert "cobo, seed 0: not applicable: clients" in result.stdout
    assert "no longer finite" in result.stdout
    assert found()["methods"][0]["method"] == "local"
    assert rows_of(tmp_path / "out/compare.csv")[0]["state"] == "not applicable"
    here.clear()
    call("compare", *args)
    assert here == [False, True]


def test_a_file_gives_its_fields_to_its_own_method(here, tmp_path):
    (tmp_path / "base.toml").write_text(
        "algorithm = 'local'\ndevices = 6\nrounds = 1\nbatching = 'eager'\n[set]\ndevice_steps = 3\ndevice_lr = 0.5\n"
    )
    call("compare", "local,fedavg", "base.toml", "--seeds", 1, "--set", "fedavg.device_steps=2", "--steps", 1)
    folder = tmp_path / "runs" / "compare-digits-1"
    fields = {m: tomllib.loads((folder / f"{m}-0.toml").read_text())["set"] for m in ("local", "fedavg")}
    assert fields == {"local": {"device_steps": 1, "device_lr": 0.5}, "fedavg": {"device_steps": 2}}
    assert "fedavg uses the fields of --set" in found(folder)["settings"]["notes"][0]


def test_a_file_says_how_its_method_shares_out_the_steps():
    shared = check_spec({"set": {"device_steps": 4, "team_rounds": 1}})
    fields = compare.settle(shared, ["permfl"], (), 20)[0]["permfl"].set
    assert fields == {"device_steps": 4, "team_rounds": 5}
    given = compare.settle(shared, ["permfl"], ["permfl.device_steps=10"], 20)[0]["permfl"].set
    assert given == {"device_steps": 10, "team_rounds": 2}


def test_a_process_of_its_own(tmp_path):
    call("compare", "local", *SMALL, "--steps", 1, "--seeds", 1, "--quiet", "--out", "out")
    assert found()["records"][0]["personal"]["accuracy"] > 0


# -- processes ----------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_runs_and_they_can_go_on(tmp_path, monkeypatch):
    """Two of three runs are at work when it comes; each is told."""
    monkeypatch.setattr(tasks, "work", obey)

    def press() -> None:
        while len(list(tmp_path.glob("*.started"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    result = call("compare", "local,fedavg,permfl", *SMALL, "--seeds", 1, "--jobs", 2, "--out", "out", code=130)
    presser.join()
    assert [r["state"] for r in found()["records"]] == ["interrupted", "interrupted", "waiting"]
    assert "continue with the same command and --out out" in result.stderr


BREAKS = """
from dataclasses import dataclass
from polytier import FedAvg

@dataclass(frozen=True)
class Breaks(FedAvg):
    def server(self, x, devices):
        raise ZeroDivisionError("it broke")
"""


def test_a_run_that_crashes_says_why(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    call("compare", "breaks:Breaks", *SMALL, "--seeds", 1, "--out", "out", code=3)
    record = found()["records"][0]
    assert (record["state"], record["reason"]) == ("failed", "ZeroDivisionError: it broke")
    state = json.loads((tmp_path / "out" / "breaks-Breaks-0" / "state.json").read_text())
    assert (state["state"], state["reason"]) == ("stopped", "it broke")


def test_a_run_that_diverges_is_known_by_its_state_file(tmp_path):
    growing = ("--rounds", 9, "--l2", 1, "--set", "fedavg.device_lr=11", "--set", "fedavg.device_steps=8")
    call("compare", "fedavg", *SMALL, *growing, "--seeds", 1, "--out", "out", code=3)
    record = found()["records"][0]
    assert record["state"] == "diverged"
    assert record["reason"].startswith("in round ")
    assert json.loads((tmp_path / "out" / "fedavg-0" / "state.json").read_text())["state"] == "diverged"


def test_an_interrupted_run_is_resumed_and_one_without_a_checkpoint_repeated(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(tasks, "start_process", lambda work, spec, folder, resumed, pipe: started.append(resumed))
    task = tasks.Task("local", compare.protocol(None, {}), tmp_path / "local-0")
    (task.folder / "checkpoints" / "round-0000003").mkdir(parents=True)
    tasks.begin(task)
    (task.folder / "checkpoints" / "round-0000003").rmdir()
    tasks.begin(task)
    assert started == [True, False]


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("permfl,fedavgg",), "did you mean 'fedavg'"),
        (("permfl,permfl",), "different methods"),
        (("permfl,",), "different methods"),
        (("permfl", "fedavg"), "separated by commas"),
        (("permfl", "none.toml"), "none.toml"),
        (("permfl", "--device", 6), "--devices"),
        (("permfl", "--rounds", "ten"), "--rounds"),
        (("permfl", "--rounds", 0), "rounds = 0"),
        (("permfl,local", "--set", "devce_lr=1"), "METHOD.FIELD=VALUE"),
        (("permfl", "--set", "permfl.devce_lr=1"), "did you mean 'device_lr'"),
        (("permfl", "--set", "permfl.device_lr=-1"), "> 0"),
        (("permfl,local", "--data", "digit"), "did you mean 'digits'"),
        (("permfl,local", "--data", "digit", "--steps", 3), "did you mean 'digits'"),
        (("permfl,local", "--model", "mcrl"), "did you mean 'mclr'"),
        (("permfl,local", "--models", 2), "mfa-rr or mfa-rand"),
        (("permfl", "--until", 90), "--until"),
        (("permfl", "--seeds", 0), "--seeds"),
    ],
    ids=str,
)
def test_bad_input_gets_advice_and_writes_nothing(args, advice, tmp_path):
    result = call("compare", *args, code=2)
    assert advice in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    assert "not a comparison" in call("compare", "local", "--out", "mine", code=2).stderr
    (tmp_path / "mine" / "compare.json").touch()
    (tmp_path / "mine" / "local-0").mkdir()
    assert "not made by this command" in call("compare", "local", "--out", "mine", code=2).stderr


# -- the same number of steps -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "tiers", "inner", "expected"),
    [
        ("fedavg", 1, None, {"device_steps": 40}),
        ("permfl", 0, None, {"device_steps": 40}),
        ("permfl", 1, None, {"device_steps": 20, "team_rounds": 2}),
        ("permfl", 1, 16, {"device_steps": 8, "team_rounds": 5}),
        ("permfl", 2, None, {"device_steps": 40, "team_rounds": 1}),
        ("pfedme", 1, None, {"device_steps": 5, "local_rounds": 8}),
        ("cobo", 1, None, {}),
    ],
)
def test_fields_for_forty_steps(method, tiers, inner, expected):
    assert compare.step_fields(ALGORITHMS[method], inner, 40, tiers) == expected


def test_a_long_round_counts_as_several_and_the_gradients_stay_equal():
    shared = check_spec({"rounds": 30, "eval_every": 10, "devices": 8, "teams": "2"})
    texts = ["permfl.device_steps=20", "permfl.team_rounds=5"]
    specs, notes = compare.settle(shared, ["permfl", "local"], texts, 20)
    assert (specs["permfl"].rounds, specs["permfl"].eval_every) == (6, 2)
    assert (specs["local"].rounds, specs["local"].set) == (30, {"device_steps": 20})
    assert notes == ["permfl: one of its rounds counts as 5 rounds here, with 100 gradients per device"]
    # 30 rounds of 20 gradients are no whole number of rounds of 140
    specs, notes = compare.settle(shared, ["permfl"], ["permfl.device_steps=20", "permfl.team_rounds=7"], 20)
    assert specs["permfl"].rounds == 30
    assert notes == ["permfl uses the fields of --set: its number of steps per round may differ from 20"]


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n != "al2gd"])
def test_every_method_takes_the_gradients_it_is_given(name, here, tmp_path):
    """Whatever a method calls its steps: two rounds of 20. (AL2GD's coin decides how many of its steps are local.)"""
    clusters = ("--partition", "clusters-permuted:2", "--devices", 12, "--teams", 3, "--split", "3:1:1")
    more = () if not name.startswith("mfa") else ("--models", 2)
    small = ("--rounds", 2, "--eval-every", 2, "--batching", "eager", "--batch-size", 4)
    call("compare", name, *clusters, *small, *more, "--steps", 20, "--seeds", 1, "--out", "out")
    assert found()["records"][0]["gradients"] == pytest.approx(40, rel=0 if name != "cobo" else 0.15)


def test_several_models_are_not_compared_with_one_by_accident(here):
    call("compare", "local,mfa-rr", *SMALL, "--steps", 1, "--seeds", 1, "--out", "out")
    states = {r["method"]: r["state"] for r in found()["records"]}
    assert states == {"local": "done", "mfa-rr": "not applicable"}


# -- figures ------------------------------------------------------------------------------------------


def test_the_interval_by_hand():
    """Mean 2, deviation 1, n = 3: t(0.975, 2) = 4.302653, half = 4.302653 / sqrt(3)."""
    half = pytest.approx(2.484138, abs=1e-6)
    found = intervals.interval([1.0, None, 2.0, 3.0])
    assert found is not None
    assert found == {"mean": 2.0, "half": half, "seeds": 3, "low": 2 - found["half"], "high": 2 + found["half"]}
    assert intervals.interval([0.5]) == {"mean": 0.5, "half": None, "seeds": 1, "low": 0.5, "high": 0.5}
    assert intervals.interval([None]) is None


def test_two_seeds_show_their_range_and_no_bound_leaves_the_limits_of_the_metric():
    two = intervals.interval([0.5, 0.75], ACCURACY.limits)
    assert intervals.interval_text(two, ACCURACY) == "62.50 (50.00 to 75.00) %"
    high = intervals.interval([0.9, 0.95, 1.0], ACCURACY.limits)
    assert high is not None
    assert high["high"] == 1
    assert intervals.interval_text(high, ACCURACY) == "95.00 (82.58 to 100.00) %"
    three = intervals.interval([0.5, 0.6, 0.7], ACCURACY.limits)
    assert intervals.interval_text(three, ACCURACY) == "60.00 ± 24.84 %"
    assert intervals.interval_text(intervals.interval([0.5, 0.5]), ACCURACY) == "50.00 %"
    note = intervals.spread_note([two, high, three, None])
    assert note == "; ".join(intervals.NOTES.values())


def test_the_paired_test():
    """Six differences of one sign: 2 of the 2^6 arrangements of signs are as extreme, p = 2/64."""
    values = [0.1, 0.22, 0.33, 0.45, 0.56, 0.71]
    assert intervals.paired_test([(v, 0.0) for v in values]) == pytest.approx(2 / 64)
    assert intervals.paired_test([(0.5, 0.5)] * 4) == 1.0
    assert intervals.paired_test([]) is None


def write_run(folder: Path, accuracies: Sequence[float | None], column: str = "personal_accuracy") -> dict[str, Any]:
    """A finished run, of these devices."""
    folder.mkdir(parents=True)
    with (folder / "devices.csv").open("w") as file:
        csv.writer(file).writerows([("id", column), *((k, "" if a is None else a) for k, a in enumerate(accuracies))])
    there = [a for a in accuracies if a is not None]
    figures = {"accuracy": sum(there) / len(there), "accuracy_worst_decile": min(there)}
    work = {"seconds": 1.5, "rounds": 2, "devices": len(accuracies), "device_steps": 6 * len(accuracies)}
    (folder / "summary.json").write_text(json.dumps({"personal": figures, "team": None, "global": None, **work}))
    tests = [{"accuracy": 0.1}, figures]
    lines = [
        json.dumps({"round": k, "bytes": {"a": {"down": 10, "up": 5}}, "personal": {"test": test}})
        for k, test in enumerate(tests, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    method, _, seed = folder.name.rpartition("-")
    return {"method": method, "seed": int(seed), "folder": folder.name, "rounds": 9, "state": "done", "reason": ""}


def test_ties_traffic_and_local_from_hand_made_runs(tmp_path):
    base = [0.50, 0.55, 0.61, 0.68, 0.76, 0.85]
    other = [0.40, 0.46, 0.50, 0.60, 0.70, 0.70]
    runs = []
    for seed in (0, 1):
        runs.append(write_run(tmp_path / f"local-{seed}", base))
        runs.append(write_run(tmp_path / f"top-{seed}", [0.52, 0.54, 0.63, 0.67, 0.80, None]))
        runs.append(write_run(tmp_path / f"low-{seed}", other, "a_personal_accuracy"))
    records = comparison.make_records(tmp_path, runs, 0.6)
    assert [r["bytes_until"] for r in records] == [30, 30, None] * 2
    assert [r["better_than_local"] for r in records] == [None, 3 / 5, 0.0] * 2
    methods = comparison.by_method(tmp_path, records)
    assert [(m["method"], m["best"]) for m in methods] == [("local", True), ("top", True), ("low", False)]
    assert methods[0]["p_value"] is None
    # low is lower at all 12 devices and seeds; each difference is there twice: the normal approximation of the test
    assert methods[2]["p_value"] < 0.01
    assert methods[0]["worst_decile"] == {"mean": 0.5, "half": None, "seeds": 2, "low": 0.5, "high": 0.5}
    assert methods[0]["gradients"]["mean"] == 6
    assert methods[2]["bytes_until"] is None
    assert comparison.until_text(methods[2]) == "never"
    records[0]["state"] = "diverged"
    assert {m["method"]: m["seeds"] for m in comparison.by_method(tmp_path, records)}["local"] == 1


def test_a_field_without_a_method_is_set_for_all_that_have_it():
    shared, names = check_spec({"devices": 6}), ["permfl", "ditto", "local"]
    texts = ["device_lr=0.2", "local.device_lr=0.3", "personal_lr=0.4"]
    specs = compare.settle(shared, names, texts, None)[0]
    assert {name: spec.set for name, spec in specs.items()} == {
        "permfl": {"device_lr": 0.2},
        "ditto": {"device_lr": 0.2, "personal_lr": 0.4},
        "local": {"device_lr": 0.3},
    }


def test_own_data_have_one_setting_per_method_which_a_continued_comparison_uses_again(here, tmp_path, monkeypatch):
    own_file(tmp_path / "own.npz")
    args = ("fedavg,local", "--data", "own.npz", "--rounds", 10, "--batching", "eager", "--seeds", 2, "--steps", 2)
    args = (*args, "--set", "local.device_lr=0.4", "--out", "out")
    result = call("compare", *args)
    assert result.stderr.count("chosen on training data") == 1  # local has no other field to choose
    fields = found()["settings"]["set"]
    assert fields["local"] == {"device_steps": 2, "device_lr": 0.4}
    assert set(fields["fedavg"]) == {"device_steps", "device_lr"}
    for seed in (0, 1):
        made = tomllib.loads((tmp_path / f"out/fedavg-{seed}/config.toml").read_text())["set"]
        assert made["device_lr"] == fields["fedavg"]["device_lr"]
    shutil.rmtree(tmp_path / "out/fedavg-1")
    first = found()
    monkeypatch.setattr("polytier.runs.first_fields.Search.begin", lambda *_: pytest.fail("searched again"))
    call("compare", *args)
    assert without_seconds(found()) == without_seconds(first)


def test_methods_are_tuned_first_with_as_many_trials_each(here, tmp_path):
    args = ("local,fedavg", *SMALL, "--seeds", 1, "--tune", 3, "--set", "fedavg.device_lr=0.2", "--out", "out")
    assert "--split 3:1:1" in call("compare", *args, code=2).stderr
    assert not (tmp_path / "out").exists()
    args = (*args, "--split", "3:1:1")
    call("compare", *args)
    trials = [json.loads(text) for text in (tmp_path / "out/tune-local/trials.jsonl").read_text().splitlines()]
    done = [trial for trial in trials if trial["state"] == "done"]
    best = max(done, key=lambda trial: trial["score"])
    assert len(trials) == 3
    assert found()["settings"]["set"] == {"local": best["fields"], "fedavg": {"device_lr": 0.2}}
    first = found()
    call("compare", *args)
    assert found() == first


@pytest.mark.parametrize(
    ("values", "better", "improving"),
    [
        ([0.02 * k for k in range(20)], "higher", True),
        ([0.8 + 0.0005 * k for k in range(20)], "higher", False),  # less than a point
        ([0.8 + 0.03 * (-1) ** k for k in range(20)], "higher", False),  # noise
        ([0.8, 0.7, 0.8, 0.75, 0.8, 0.7, 0.73, 0.76, 0.74, 0.78], "higher", False),
        ([0.9 - 0.02 * k for k in range(20)], "higher", False),
        ([0.97**k for k in range(20)], "lower", True),
        ([0.999**k for k in range(20)], "lower", False),  # less than 2 %
        ([0.1 * k for k in range(9)], "higher", False),  # too few to tell
    ],
)
def test_a_trend_at_the_end_is_told_from_a_flat_curve(values, better, improving):
    metric = ACCURACY if better == "higher" else LOSS
    assert comparison.is_improving(values, metric) == improving


def test_the_table_and_the_page_name_methods_that_were_still_improving(here, tmp_path):
    slow = ("--set", "local.device_lr=1e-2", "--set", "fedavg.device_lr=1e-9", "--set", "device_steps=1")
    few = ("--devices", 6, "--teams", 2, "--rounds", 20, "--batching", "eager", "--metric", "loss")
    result = call("compare", "local,fedavg", *few, *slow, "--seeds", 1, "--out", "out")
    assert {m["method"]: m["improving"] for m in found()["methods"]} == {"local": True, "fedavg": False}
    note = "local: test loss still falling: train longer"
    assert note in result.stdout
    assert note in Path("out/report.html").read_text()


def test_progress_of_each_run(tmp_path):
    runs = [write_run(tmp_path / "top-0", [0.5, 0.7]), write_run(tmp_path / "low-0", [0.25])]
    runs[1]["state"] = "running"
    table = comparison.progress_table(tmp_path, [*runs, {**runs[0], "seed": 1, "state": "waiting"}])
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells == [["top", "low"], ["60.00 %", "round 2/9, 25.00 %"], ["waiting", ""]]


def test_reading_needs_no_torch():
    code = "import sys, polytier.cli, polytier.report.comparison; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
