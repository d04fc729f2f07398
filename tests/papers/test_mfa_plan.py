"""MFA's plan against the paper's numbers, and its readings of run folders."""

from __future__ import annotations

import json
from math import log10
from pathlib import Path

import numpy as np
import pytest

from plans import runs_of
from polytier.papers import mfa
from polytier.papers import mfa_values as read
from polytier.runs.methods import make_method
from polytier.runs.model_specs import model_tables, own_fields
from polytier.runs.spec import check_spec

FULL = {item.name: item for item in mfa.items("full")}
QUICK = {item.name: item for item in mfa.items("quick")}


def write(folder: Path, rounds: dict, seed: int = 0) -> Path:
    """A run with a history: {round: accuracy}, or {round: [accuracy of each model]}; test is 0.1 below train."""
    folder.mkdir(parents=True)

    def figures(accuracy: float) -> dict:
        return {"global": {split: {"accuracy": accuracy - less} for split, less in (("train", 0), ("test", 0.1))}}

    lines = [{"round": 1, "bytes": {}}]  # one that was not judged
    for number, found in rounds.items():
        several = found if isinstance(found, list) else [found]
        record = {"round": number, "bytes": {}, **figures(sum(several) / len(several))}
        if isinstance(found, list):
            record["models"] = {f"model{k}": figures(value) for k, value in enumerate(found, 1)}
        lines.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    (folder / "summary.json").write_text(json.dumps({"seed": seed}))
    return folder


def write_gaps(folder: Path, rounds: dict[int, list[float]]) -> Path:
    """A run on the tridiagonal problem: {round: [log10(F - F*) of each model]}."""
    folder.mkdir(parents=True)
    best = read.optimum()
    lines = []
    for number, gaps in rounds.items():
        models = {f"model{k}": {"global": {"train": {"loss": best + 10**gap}}} for k, gap in enumerate(gaps)}
        lines.append({"round": number, "bytes": {}, "global": {"train": {"loss": 0.0}}, "models": models})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return folder


# -- the plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [FULL, QUICK], ids=["full", "quick"])
def test_plan_holds_together(items):
    tables = [f"table{n}{gain}" for n in (4, 5) for gain in ("", "-gain")]
    assert list(items) == [*(f"figure{n}" for n in range(1, 8)), *tables]
    assert all(bool(item.reduced) == (items is QUICK) for item in items.values())
    for run in runs_of(list(items.values())).values():
        config = check_spec(run.settings)
        assert not {"seed", "data_dir", "out", "workers"} & set(run.settings)
        assert config.rounds % config.eval_every == 0
        if config.models is None:
            make_method(config.algorithm, config.set)
            continue
        inner = {name: make_method("fedavg", own["set"]) for name, own in model_tables(config).items()}
        make_method(config.algorithm, own_fields(config), inner)


def test_figures_1_to_4_are_the_papers():
    for number, (models, lr) in enumerate(((2, 0.1), (2, "30/(100+t)"), (12, 0.1), (12, "30/(100+t)")), 1):
        rand, rr = FULL[f"figure{number}"].runs()
        assert (rand.settings["algorithm"], rr.settings["algorithm"]) == ("mfa-rand", "mfa-rr")
        for run in (rand, rr):
            settings = run.settings
            assert (settings["models"], settings["rounds"], settings["devices"]) == (models, 1000, 24)
            assert (settings["data"], settings["model"], settings["dtype"]) == ("tridiagonal", "quadratic", "float64")
            assert (settings["set"]["device_lr"], settings["set"]["device_steps"]) == (lr, 5)


def test_figure_5_has_all_lengths_and_up_to_half_as_many_models_as_devices():
    runs = [run for run in FULL["figure5"].runs() if "models" in run.settings]
    found = {(r.settings["algorithm"], r.settings["set"]["device_steps"], r.settings["models"]) for r in runs}
    assert found == {(a, e, m) for a in mfa.METHODS.values() for e in (1, 5, 10) for m in (2, 3, 4, 6, 8, 12)}
    assert {run.settings["set"]["device_lr"] for run in runs} == {0.1}
    # the runs of Figures 1 and 3 are not made twice
    assert {r.name for n in (1, 3) for r in FULL[f"figure{n}"].runs()} <= {run.name for run in runs}


@pytest.mark.parametrize(
    ("figure", "data", "devices", "sampled", "single", "train", "test"),
    [
        ("figure6", "Synthetic(1,1)-A", 100, 1.0, 70, 51, 51),
        ("figure6", "Synthetic(1,1)-B", 100, 1.0, 70, 42.7, 42.8),
        ("figure6", "CelebA", 96, 1.0, 75, 79, 68),
        ("figure7", "Synthetic(1,1)-A", 200, "count:32", 200, 61.1, 61.3),
        ("figure7", "Synthetic(1,1)-B", 200, "count:32", 200, 58.4, 57.7),
        ("figure7", "CelebA", 96, "count:24", 75, 78, 71.5),
    ],
)
def test_figures_6_and_7_are_the_papers(figure, data, devices, sampled, single, train, test):
    rows = {row.labels: row for row in FULL[figure].rows}
    assert (rows[data, "train"].paper, rows[data, "test"].paper) == (train, test)
    assert rows[data, "train"].differs == ""
    chart = next(chart for chart in FULL[figure].charts if chart.title == data)
    assert len(chart.curves) == 4
    for curve in chart.curves:
        alone, *together = (check_spec(run.settings) for run in curve.runs)
        assert (alone.algorithm, alone.rounds, alone.eval_every) == ("fedavg", single, single)
        for config in (alone, *together):
            assert (config.devices, config.device_participation) == (devices, sampled)
            assert config.model == ("cnn-celeba" if data == "CelebA" else "mclr")
        assert all(config.eval_every == (5 if single >= 200 else 1) and config.rounds > single for config in together)
    if data != "CelebA":
        size = "num_features=60,num_classes=5" if data.endswith("A") else "num_features=30,num_classes=10"
        assert alone.data == f"synthetic:alpha=1,beta=1,{size}"


def test_tables_4_and_5_have_the_papers_figures():
    rows = {row.labels: row for row in FULL["table4"].rows}
    assert len(rows) == 36
    assert rows["Bald", "train", "T_M = 117"].paper == 74.5
    assert rows["Male", "test", "T_1 = 50"].paper == 58.7
    assert rows["Double_Chin", "test", "T_M = 126"].paper == 69.3
    *singles, together = rows["Bald", "test", "T_M = 126"].runs
    assert [len(singles), len(together.settings["models"])] == [9, 9]
    assert {run.settings["rounds"] for run in singles} == {50}
    assert [run.settings["data"] for run in singles] == [t["data"] for t in together.settings["models"].values()]
    assert [row.paper for row in FULL["table4-gain"].rows] == pytest.approx([3.846, 3.571], abs=1e-3)
    rows = {row.labels: row for row in FULL["table5"].rows}
    assert len(rows) == 8
    assert rows["Logistic regression", "test", "T_M = 142"].paper == 55.6
    assert rows["Convolutional NN", "train", "T_1 = 100"].paper == 86.7
    assert [row.paper for row in FULL["table5-gain"].rows] == pytest.approx([2.0, 1.41], abs=0.01)


# -- readings -----------------------------------------------------------------------------------------


def test_optimum_is_below_every_other_point():
    from polytier.data.synthetic import tridiagonal

    data = tridiagonal()
    a, b = data.x.numpy(), data.y.numpy()

    def loss(w: np.ndarray) -> float:
        return float(np.mean([0.5 * w @ a[k] @ w - b[k] @ w for k in range(len(a))]))

    best = np.linalg.lstsq(a.sum(0), b.sum(0), rcond=None)[0]
    assert read.optimum() == pytest.approx(loss(best), abs=1e-12)
    assert loss(best + 1e-3 * np.random.default_rng(0).normal(size=len(best))) > read.optimum()


def test_gaps_by_round(tmp_path):
    folder = write_gaps(tmp_path / "a", {5: [-1.0, -2.0], 10: [-2.0, -2.0]})
    rounds, mean = read.mean_gap([folder])
    assert list(rounds) == [5, 10]
    assert mean == pytest.approx([-1.5, -2], abs=1e-9)
    assert read.spread_of_gaps([folder])[1] == pytest.approx([0.5**0.5, 0], abs=1e-9)


def test_claims_about_mean_and_spread_hold_or_not(tmp_path):
    wide = write_gaps(tmp_path / "wide", {5: [0.0, 0.0], 10: [-2.1, -1.9]})
    narrow = write_gaps(tmp_path / "narrow", {5: [0.0, 0.0], 10: [-2.01, -2.01]})
    low = write_gaps(tmp_path / "low", {5: [0.0, 0.0], 10: [-2.5, -2.5]})
    assert read.same_mean([[wide], [narrow]])[0]
    assert not read.same_mean([[wide], [low]])[0]
    assert read.rr_lower([[wide], [low]]) == (True, "MFA-Rand: -2.000, MFA-RR: -2.500, second half of the rounds")
    assert read.rr_lower([[low], [wide]])[0] is False
    assert read.rr_lower([[wide], [narrow]])[0] is None  # 0.01 with one seed
    assert read.rand_varies_more([[wide], [narrow]])[0]
    assert not read.rand_varies_more([[narrow], [wide]])[0]
    assert read.late([narrow, low])[1] == pytest.approx(np.std([-2.01, -2.01, -2.5, -2.5], ddof=1))  # seeds too


def test_gain_is_of_the_first_round_in_which_all_have_reached_their_target(tmp_path):
    alone = write(tmp_path / "alone", {50: 0.7, 100: 0.8})
    rounds = {50: [0.8, 0.7], 100: [0.7, 0.9], 150: [0.8, 0.85], 200: [0.9, 0.9]}
    together = write(tmp_path / "together", rounds)
    assert read.rounds_together([alone, together], "train") == (100, 150, 2)
    assert read.gain("test")([alone, together]) == (pytest.approx(200 / 150), None)
    assert read.gain_by_models("train")([alone, together]) == ([1, 2], [1.0, pytest.approx(200 / 150)])
    never = write(tmp_path / "never", {50: [0.8, 0.7], 100: [0.7, 0.9]})
    assert read.gain("train")([alone, never]) == (None, None)
    # a target each, and the accuracies of that round
    other = write(tmp_path / "other", {100: 0.9})
    assert read.rounds_together([alone, other, together], "train") == (100, 200, 2)
    assert read.accuracy_alone("test")([other]) == (pytest.approx(80), None)
    assert read.accuracy_together("train", "model2")([alone, together]) == (pytest.approx(85), None)
    assert read.accuracy_together("train", "model2")([alone, never]) == (None, None)


def test_losses_are_targets_where_there_is_no_accuracy(tmp_path):
    best = read.optimum()
    folder = tmp_path / "alone"
    folder.mkdir()
    record = {"round": 20, "bytes": {}, "global": {"train": {"loss": best + 0.01}}}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    together = write_gaps(tmp_path / "together", {20: [-1.9, -2.1], 25: [-2.1, -2.1]})
    assert read.gain("train")([folder, together])[0] == pytest.approx(2 * 20 / 25)
    assert log10(0.01) == -2


def test_claims_about_gains_hold_or_not(tmp_path):
    singles = [write(tmp_path / f"alone{s}", {100: 0.8}, s) for s in (0, 1)]

    def several(name: str, number: int, *reached: int | None) -> list[Path]:
        histories = [{r: [0.9 if at and r >= at else 0.1] * number for r in (50, 100, 150, 200, 400)} for at in reached]
        return [write(tmp_path / f"{name}{s}", found, s) for s, found in enumerate(histories)]

    two, four = several("two", 2, 100, 150), several("four", 4, 150, 150)
    found = "M = 1: 1.00, M = 2: 1.67, M = 4: 2.67"
    assert read.growing("test")([singles, two, four]) == (True, found)
    assert read.sublinear("test")([singles, two, four]) == (True, found)
    assert read.above_one("test")([singles, two, four])[0]
    late = several("late", 4, 400, 400)
    assert read.growing("test")([singles, two, late]) == (False, "M = 1: 1.00, M = 2: 1.67, M = 4: 1.00")
    assert not read.above_one("test")([singles, two, late])[0]
    lost = several("lost", 4, 150, None)
    assert read.growing("test")([singles, two, lost]) == (False, "M = 1: 1.00, M = 2: 1.67, M = 4: not reached")
    early = several("early", 4, 50, 100)
    assert read.growing("test")([singles, two, early])[0]
    assert not read.sublinear("test")([singles, two, early])[0]  # 6 is more than 4
    # seeds are matched, whichever came to their end
    assert read.growing("test")([singles, two[1:], four])[1] == "M = 1: 1.00, M = 2: 1.33, M = 4: 2.67"
