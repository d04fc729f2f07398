"""pFedMT's plan against the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans import check_runs, runs_of, write_run
from polytier.papers import pfedmt

FULL = {item.name: item for item in pfedmt.items("full")}
QUICK = {item.name: item for item in pfedmt.items("quick")}


@pytest.mark.parametrize("items", [FULL, QUICK], ids=["full", "quick"])
def test_plan_holds_together(items):
    check_runs(list(items.values()))
    equal = ["table1-equal-steps"] if items is FULL else []
    assert list(items) == ["table1-100", "table1-600", *equal, "figure2"]
    assert all(bool(item.reduced) == (items is QUICK) for item in items.values())
    # all items are read from the same runs: four methods, two data sets, two models
    assert len(runs_of(list(items.values()))) == 16


def test_full_is_the_papers():
    for run in runs_of(list(FULL.values())).values():
        settings = run.settings
        assert (settings["rounds"], settings["teams"], settings["batch_size"], run.seeds) == (600, 2, 124, 10)
        assert settings["devices"] == (20 if settings["data"] == "mnist:low=-1" else 50)
        assert settings["set"]["device_lr"] == 0.01
        assert 100 % settings["eval_every"] == 0
    runs = runs_of([FULL["figure2"]])
    same = {"device_lr": 0.01, "device_steps": 20, "team_lr": 0.03, "server_lr": 1.0, "team_rounds": 30}
    for name, lam, gamma, model in (
        ("mnist-mclr", 15.0, 0.1, "mclr"),
        ("mnist-network", 3.0, 1.0, "cnn-mnist"),
        ("synthetic-mclr", 15.0, 0.1, "mclr"),
        ("synthetic-network", 15.0, 1.0, "dnn:20"),
    ):
        settings = runs[f"pfedmt-{name}"].settings
        assert settings["set"] == {**same, "device_pull": lam, "team_pull": gamma}
        assert settings["model"] == model
        pfedme = runs[f"pfedme-{name}"].settings["set"]
        assert (pfedme["device_pull"], pfedme["server_lr"]) == (15.0, 0.4 if name == "mnist-network" else 0.5)


def test_tables_have_the_papers_figures():
    found = {name: {row.labels: (row.paper, row.deviation) for row in FULL[name].rows} for name in list(FULL)[:2]}
    assert [len(rows) for rows in found.values()] == [25, 25]  # 24 and the most frequent label
    for labels, early, late in (
        (("MNIST", "MCLR", "FedAvg (GM)"), (84.87, 0.054), (89.70, 0.0)),
        (("MNIST", "MCLR", "pFedMT (PM)"), (98.30, 0.01), (98.30, 0.01)),
        (("Synthetic", "MCLR", "pFedMT (GM)"), (88.67, 0.79), (90.54, 0.02)),
        (("MNIST", "CNN", "pFedMT (GM)"), (93.49, 0.008), (96.72, 0.01)),
        (("Synthetic", "DNN", "pFedMe (PM)"), (87.86, 0.06), (89.53, 0.01)),
        (("Synthetic", "DNN", "pFedMT (PM)"), (92.196, 1.59), (95.42, 0.01)),
    ):
        assert (found["table1-100"][labels], found["table1-600"][labels]) == (early, late)


def test_after_100_rounds_no_later_one_is_read(tmp_path: Path):
    folder = write_run(tmp_path / "run", {100: {"personal": (0.6, 0.7, 0.5)}, 105: {"personal": (0.8, 0.9, 0.95)}})
    labels = ("MNIST", "MCLR", "pFedMT (PM)")
    early, late = (next(row for row in FULL[name].rows if row.labels == labels) for name in list(FULL)[:2])
    assert early.read([folder]) == (70.0, 70.0)
    assert late.read([folder]) == (90.0, 90.0)


def test_figure_2_has_loss_and_accuracy_of_each():
    titles = [chart.title for chart in FULL["figure2"].charts]
    assert len(titles) == 8
    assert titles[:2] == ["MNIST, MCLR: loss", "MNIST, MCLR: accuracy"]
    assert [chart.y for chart in FULL["figure2"].charts[:2]] == ["train loss", "test accuracy %"]
    assert all(len(chart.curves) == 5 for chart in FULL["figure2"].charts)


def test_equal_steps_are_read_where_all_have_computed_as_many_gradients(tmp_path: Path):
    rounds = {20: 0.1, 120: 0.2, 300: 0.3, 600: 0.4}
    history = {n: {"personal": (v, v, v), "global": (v, v, v)} for n, v in rounds.items()}
    folder = write_run(tmp_path / "run", history)
    table = FULL["table1-equal-steps"]
    found = {r.labels[2]: r.read([folder])[0] for r in table.rows if r.labels[:2] == ("MNIST", "MCLR")}
    assert found["pFedMT (PM)"] == found["pFedMT (GM)"] == 10
    assert found["pFedMe (PM)"] == 20
    assert found["Per-FedAvg (PM)"] == 30
    assert found["FedAvg (GM)"] == 40


def test_the_global_model_is_compared_with_the_personal_ones_of_the_same_run(tmp_path: Path):
    folder = write_run(tmp_path / "run", {600: {"personal": (0.6, 0.7, 0.5), "global": (0.8, 0.9, 0.95)}})
    (claim,) = (c for c in FULL["table1-600"].claims if "its personal models" in c.text)
    assert claim.holds([[folder], [folder]]) == (True, "global: 90.00, personal: 70.00")
    assert not any("its personal models" in c.text for c in FULL["table1-100"].claims)
