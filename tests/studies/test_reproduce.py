"""A paper's figures beside ours: verdicts, claims, curves, and the command on a small paper of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from commands import call
from polytier import Source, papers
from polytier.papers import verdicts as reproduction
from polytier.papers.plan import Chart, Claim, Curve, Item, Matrix, PlannedRun, Row
from polytier.papers.run_values import accuracy, by_round, last
from polytier.papers.stored_runs import stored_runs
from polytier.report.blocks import Matrices, Panels, Table
from polytier.studies import run_queue as tasks

SMALL = {"data": "digits", "devices": 4, "rounds": 2, "split": "2:1:1"}


def fake_run(folder: Path, personal: float, chosen: float | None = None) -> Path:
    folder.mkdir(parents=True)
    kinds = {"best": personal, "chosen": chosen}
    summary = {how: None if v is None else {"personal": {"accuracy": v}} for how, v in kinds.items()}
    (folder / "summary.json").write_text(json.dumps(summary))
    records = [{"round": r, "bytes": {}, "personal": {"test": {"accuracy": personal * r / 2}}} for r in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def row(paper: float | None, deviation: float | None = None, differs: str = "") -> Row:
    return Row(("a",), (PlannedRun("a", SMALL),), accuracy("personal"), paper, deviation, differs)


def about(mean: float, half: float = 0.0) -> dict[str, float]:
    """A figure as `intervals.interval` gives it."""
    return {"mean": mean, "low": mean - half, "high": mean + half}


@pytest.mark.parametrize(
    ("ours", "paper", "deviation", "differs", "expected"),
    [
        (about(90.0, 0.5), 91.9, 0.1, "", "agrees"),
        (about(90.0, 0.5), 92.1, 0.1, "", "lower"),
        (about(94.2), 92.1, None, "", "higher"),
        (about(90.0, 3.0), 94.9, 2.0, "", "agrees"),  # 5 is the root of 3^2 + (2 * 2)^2
        (about(90.0, 3.0), 95.1, 2.0, "", "lower"),
        (about(90.0), None, None, "", "not comparable"),
        (about(90.0), 90.0, None, "another net", "not comparable"),
        (None, 90.0, None, "", "not run"),
    ],
)
def test_verdicts_follow_the_stated_rule(ours, paper, deviation, differs, expected):
    assert reproduction.verdict(ours, row(paper, deviation, differs), margin=2.0)["verdict"] == expected


def test_both_protocols_are_means_over_the_seeds_that_are_there(tmp_path):
    folders = {"a": {0: fake_run(tmp_path / "0", 0.9, 0.8), 2: fake_run(tmp_path / "2", 0.94, 0.84)}}
    found = reproduction.judge_row(row(92.5), 2.0, folders)
    assert found["best"]["ours"]["mean"] == pytest.approx(92)
    assert found["best"]["difference"] == pytest.approx(-0.5)
    assert (found["best"]["ours"]["low"], found["best"]["ours"]["high"]) == pytest.approx((90, 94))  # the two seeds
    assert found["chosen"]["ours"]["mean"] == pytest.approx(82)
    assert found["chosen"]["verdict"] == "lower"  # 10.5 below: more than the margin and half the range of the seeds
    assert reproduction.judge_row(row(92.5), 2.0, {})["best"]["verdict"] == "not run"


def test_rows_of_several_runs_use_the_seeds_that_all_have(tmp_path):
    one, other = PlannedRun("one", SMALL, 2), PlannedRun("other", SMALL, 2)
    folders = {"one": {0: tmp_path / "a", 1: tmp_path / "b"}, "other": {1: tmp_path / "c"}}
    assert reproduction.by_seed((one, other), folders) == {1: [tmp_path / "b", tmp_path / "c"]}


def test_curves_have_bands_over_seeds_and_few_points(tmp_path):
    run = PlannedRun("a", SMALL, 2)
    folders = {"a": {0: fake_run(tmp_path / "0", 0.9), 1: fake_run(tmp_path / "1", 0.94)}}
    found = reproduction.mean_curve(Curve("PerMFL", (run,), by_round("personal")), folders)
    assert found is not None
    assert list(found.x) == [1, 2]
    assert found.y[1] == pytest.approx(92)
    low, high = found.low[1], found.high[1]
    assert low is not None
    assert high is not None
    assert low < 92 < high
    many = Curve("long", (run,), lambda _: (list(range(5000)), [0.0] * 5000))
    long = reproduction.mean_curve(many, folders)
    assert long is not None
    assert len(long.x) <= reproduction.POINTS
    assert (long.x[0], long.x[-1]) == (0, 4999)
    assert reproduction.mean_curve(many, {}) is None
    assert last(by_round("personal"), list(folders["a"].values())) == pytest.approx([90, 94])


def test_claims_are_judged_only_where_their_runs_are(tmp_path):
    claim = Claim("it learns", (PlannedRun("a", SMALL),), lambda found: (len(found[0]) == 1, f"{len(found[0])} seed"))
    there = {"a": {0: fake_run(tmp_path / "0", 0.9)}}
    judged = {"text": "it learns", "state": "holds", "rests_on": "1 seed", "seeds": 1}
    assert reproduction.judge_claim(claim, there) == judged
    assert reproduction.judge_claim(claim, {})["state"] == "not tested"
    undecided = Claim("level", claim.runs, lambda _: (None, ""))
    assert reproduction.judge_claim(undecided, there)["state"] == "level"


@pytest.mark.parametrize("paper", papers.PAPERS)
@pytest.mark.parametrize("scale", papers.SCALES)
def test_plans_are_complete_and_their_runs_can_be_asked_for(paper, scale):
    items, known = papers.items_of(paper, scale), {}
    assert items
    assert len({item.name for item in items}) == len(items)
    for item in items:
        assert bool(item.reduced) == (scale == "quick"), item.name
        assert item.rows or item.charts or item.matrices
        assert all(len(each.labels) == len(item.columns) for each in item.rows)
        for run in item.runs():
            assert known.setdefault(run.name, run) == run, f"{run.name} means two runs"
            assert not {"seed", "out", "workers", "data_dir"} & set(run.settings)
    assert len({json.dumps(run.settings, sort_keys=True, default=str) for run in known.values()}) == len(known)
    made = tasks_of(list(known.values()))
    assert sum(run.seeds for run in known.values()) == len(made)


def tasks_of(runs: list[PlannedRun]) -> list[tasks.Task]:
    from unittest.mock import patch

    from polytier.studies import plan_cost, reproduce

    with patch.object(plan_cost.Samples, "missing", return_value=""):
        return reproduce.make_tasks(runs, None, Path("nowhere"), plan_cost.Samples())


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def small_paper(monkeypatch, tmp_path):
    """A paper of three runs on digits, one of which needs data that are not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYTIER_DATA", str(tmp_path / "none"))
    monkeypatch.setattr(tasks, "TICK", 0.01)
    good = PlannedRun("fedavg-digits", {**SMALL, "algorithm": "fedavg", "set": {"device_lr": 0.1}}, seeds=2)
    learned = PlannedRun("cobo-digits", {**SMALL, "algorithm": "cobo", "partition": "clusters-permuted:2"})
    absent = PlannedRun("fedavg-mnist", {**SMALL, "algorithm": "fedavg", "data": "mnist"})
    module = ModuleType("polytier.papers.tiny")
    curve = Curve("FedAvg", (good,), by_round("global"))
    module.items = lambda scale: [  # type: ignore[attr-defined]
        Item(
            "table1",
            "Two data sets",
            ("method", "data"),
            [
                Row(("FedAvg", name), (run,), accuracy("global"), 12.5, 0.5)
                for name, run in (("digits", good), ("MNIST", absent))
            ],
            [Chart("digits", "round", "test accuracy (%)", [curve])],
            claims=[Claim("it is not perfect", (good,), lambda f: (last(curve.read, f[0])[0] < 100, "below 100"))],
            reduced="few rounds" if scale == "quick" else "",
            notes=["As it stands."],
        ),
        Item("figure2", "Who listens to whom", matrices=[Matrix("CoBo", learned)], reduced="few rounds"),
    ]
    monkeypatch.setitem(sys.modules, "polytier.papers.tiny", module)
    monkeypatch.setitem(papers.PAPERS, "tiny", "A small paper")
    return tmp_path


def test_a_paper_is_reproduced_and_the_same_again_runs_nothing(small_paper, monkeypatch):
    shown = call("reproduce", "tiny", "--out", "mine")
    assert "FedAvg" in shown.stdout
    assert "not run" in shown.stdout
    found = json.loads(Path("mine/reproduction.json").read_text())
    rows = found["items"][0]["rows"]
    assert rows[0]["best"]["ours"]["seeds"] == 2
    assert rows[0]["best"]["verdict"] in ("agrees", "higher", "lower")
    assert rows[0]["chosen"]["ours"] is not None
    assert rows[1]["best"]["verdict"] == "not run"
    assert found["items"][0]["claims"][0]["state"] == "holds"
    page, text = Path("mine/report.html").read_text(), Path("mine/results.md").read_text()
    for part in ("few rounds", "data get mnist", "As it stands."):
        assert part in page, part
        assert part in text, part
    assert {path.name for path in Path("mine/figures").iterdir()} == {"table1.png", "figure2.png"}
    monkeypatch.setattr(tasks, "begin", lambda task: pytest.fail("a finished run is run again"))
    before = Path("mine/reproduction.json").read_text()
    assert call("reproduce", "tiny", "--out", "mine", "--quiet").stdout == "mine\n"
    assert Path("mine/reproduction.json").read_text() == before


def test_each_finished_run_is_stored_with_its_origin_and_read_in_the_place_of_its_folder(small_paper):
    call("reproduce", "tiny/table1", "--out", "mine", "--only", "*-digits", "--seeds", "3", "--results", "kept")
    assert sorted(path.name for path in Path("kept").iterdir()) == [f"fedavg-digits-{k}.json" for k in range(3)]
    content = json.loads(Path("kept/fedavg-digits-2.json").read_text())
    assert content["command"].startswith("polytier reproduce tiny/table1 --scale quick --only fedavg-digits --seeds 3")
    assert content["machine"]["cores"] >= 1
    assert {"torch", "numpy", "python"} <= set(content["versions"])
    assert (content["run"], content["seed"], content["settings"]["rounds"]) == ("fedavg-digits", 2, 2)
    items = papers.items_of("tiny", "quick")
    stored = stored_runs(Path("kept"), items, "quick")
    folders = {name: {seed: Path(f"mine/runs/{name}-{seed}") for seed in seeds} for name, seeds in stored.items()}
    assert list(folders) == ["fedavg-digits"]
    one, other = (reproduction.judge(items[0], each) for each in (stored, folders))
    assert one["rows"][0]["best"]["ours"]["mean"] == pytest.approx(other["rows"][0]["best"]["ours"]["mean"], abs=1e-3)
    assert one["claims"] == other["claims"]
    changed = {**content, "settings": {**content["settings"], "rounds": 3}}
    Path("kept/fedavg-digits-2.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="other settings than the plan"):
        stored_runs(Path("kept"), items, "quick")


def test_only_takes_the_rows_of_runs_that_match(small_paper):
    call("reproduce", "tiny", "--out", "mine", "--only", "fedavg-digits", "--seeds", "1")
    (item,) = json.loads(Path("mine/reproduction.json").read_text())["items"]
    assert [row["labels"][1] for row in item["rows"]] == ["digits"]
    assert "no run matches --only cnn*" in call("reproduce", "tiny", "--only", "cnn*", code=2).stderr


def test_one_item_alone_and_what_it_shows(small_paper):
    call("reproduce", "tiny/figure2", "--out", "mine")
    assert sorted(path.name for path in Path("mine/runs").iterdir()) == ["cobo-digits-0", "cobo-digits-0.toml"]
    item = papers.items_of("tiny", "quick")[1]
    shown = reproduction.section(
        item, reproduction.judge(item, {}), {"cobo-digits": {0: Path("mine/runs/cobo-digits-0")}}, {}
    )
    assert [type(block) for block in shown.blocks[1:]] == [Matrices]


def test_a_dry_run_makes_no_data(monkeypatch, tmp_path):
    """Methods that use true groups are counted too, and time is measured on samples of the same form."""
    from polytier.studies import plan_cost

    few = Source(np.zeros((20, 3, 32, 32), np.uint8), np.arange(20), 20)  # too few for the 80 devices of the plan
    monkeypatch.chdir(tmp_path)
    real = plan_cost.load_source

    def load(name: str, *rest: Any) -> Source:
        if name.startswith("text:"):
            return real("sentences:context=32", rest[0], 4, 0)
        return few if "cifar" in name else real(name, *rest)

    monkeypatch.setattr(plan_cost, "load_source", load)
    shown = call("reproduce", "cobo", "--dry-run")
    assert "115 runs" in shown.stdout
    assert "no data" not in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_every_run_and_writes_nothing(small_paper):
    shown = call("reproduce", "tiny", "--scale", "full", "--dry-run")
    for part in ("fedavg-digits", "device_lr=0.1", "no data", "4 runs; 3 to do", "hours", "evaluation"):
        assert part in shown.stdout, part
    assert "without an estimate" not in shown.stdout
    assert "data get mnist" in shown.stderr
    assert not Path("runs").exists()


def test_steps_are_counted_for_methods_that_cannot_run_with_one_device():
    from polytier.runs.spec import check_spec
    from polytier.studies import plan_cost

    fields = {"device_steps": 5, "levels": 3}
    spec = check_spec({"algorithm": "demlearn", "data": "digits", "devices": 12, "set": fields})
    assert plan_cost.counts_on_stand_in(spec) == (12 * 5, 2)  # personal and global models
    assert plan_cost.evaluations(spec.replace(rounds=10, eval_every=4)) == 3  # rounds 4, 8 and 10


def test_short_rounds_are_timed_as_a_whole_and_stand_ins_stay_small():
    from polytier.runs.spec import check_spec
    from polytier.studies import plan_cost

    spec = check_spec({"algorithm": "cobo", "data": "digits", "devices": 8, "teams": 0, "batch_size": 32})
    images = plan_cost.Sample((3, 32, 32), np.dtype(np.uint8), 10, number=60_000)
    assert plan_cost.samples_each(spec, images, 8) == 7_500  # as many as a device of the run has
    assert plan_cost.samples_each(spec, replace(images, number=10), 8) == 96  # three mini-batches
    many = replace(images, number=10**9)
    assert plan_cost.samples_each(spec, many, 8) * 8 * 3072 <= plan_cost.MOST_BYTES
    digits = plan_cost.Sample((64,), np.dtype(np.float32), 10, number=1_797)
    assert (plan_cost.seconds_of_round(spec, digits) or 0) > 0
    assert plan_cost.seconds_of_round(spec.replace(devices=10_000), images) is None  # 3 GB of samples
    assert plan_cost.sounds_alike(spec) == plan_cost.sounds_alike(spec.replace(set={"device_lr": 0.5}, rounds=7))
    assert plan_cost.sounds_alike(spec) != plan_cost.sounds_alike(spec.replace(set={"sampling": "all"}))


def test_sections_say_why_runs_are_missing_and_leave_out_empty_columns(small_paper):
    item = papers.items_of("tiny", "quick")[0]
    shown = reproduction.section(
        item, reproduction.judge(item, {}), {}, {"fedavg-mnist": "no files", "fedavg-digits": "no files"}
    )
    tables = [block for block in shown.blocks if isinstance(block, Table)]
    assert "ours, best" not in tables[0].columns
    assert not any(isinstance(block, Panels) for block in shown.blocks)
    assert "Not run: fedavg-digits, fedavg-mnist. no files" in [getattr(block, "text", "") for block in shown.blocks]


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("permfl2",), "did you mean 'permfl'"),
        (("permfl/tabel1",), "did you mean 'table1'"),
        (("permfl", "--scale", "fast"), "available: quick, full"),
        (("tiny", "--out", "taken"), "is not a reproduction"),
    ],
)
def test_bad_input_is_advice(small_paper, args, advice):
    Path("taken").mkdir()
    (Path("taken") / "letter").touch()
    assert advice in call("reproduce", *args, code=2).stderr
    assert not Path("runs").exists()


def test_another_scale_does_not_mix_with_the_first(small_paper, monkeypatch):
    call("reproduce", "tiny/figure2", "--out", "mine")
    items = papers.items_of("tiny", "quick")
    longer = PlannedRun("cobo-digits", {**items[1].matrices[0].run.settings, "rounds": 3})
    changed = ModuleType("polytier.papers.tiny")
    changed.items = lambda scale: [Item("figure2", "x", matrices=[Matrix("CoBo", longer)])]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polytier.papers.tiny", changed)
    assert "was made with rounds 2 (now 3)" in call("reproduce", "tiny/figure2", "--out", "mine", code=2).stderr
