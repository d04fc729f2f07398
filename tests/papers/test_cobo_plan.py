"""CoBo's plan against the paper's numbers, and its readings of run folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from plans import check_runs, runs_of
from polytier import build_federation
from polytier.papers import cobo
from polytier.papers import cobo_values as read
from polytier.tree.collaboration import FILE, Collaboration, save

FULL = {item.name: item for item in cobo.items("full")}
QUICK = {item.name: item for item in cobo.items("quick")}
ELASTIC = [run for run in FULL["elastic"].runs() if run.name not in ("cobo-8", "local-8")]
TRUE = np.array([0, 0, 1, 1])
BLOCKS = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], dtype=float)
ALL = np.ones((4, 4))


def write(folder: Path, accuracy: float, loss: float = 1.0, model: str = "personal") -> Path:
    """A run that has the accuracy in round 200 and a tenth less in round 100."""
    folder.mkdir(parents=True)
    found = {model: {"accuracy": accuracy, "loss": loss}}
    chosen = {model: {"accuracy": accuracy - 0.01, "loss": loss + 1}}
    (folder / "summary.json").write_text(json.dumps({"best": found, "chosen": chosen}))
    records = [
        {"round": r, "bytes": {}, model: {"test": {"accuracy": a}}} for r, a in ((100, accuracy - 0.1), (200, accuracy))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return folder


def write_devices(folder: Path, values: Sequence[float], model: str = "personal", prefix: str = "") -> None:
    """The accuracy of each device after the last round."""
    folder.mkdir()
    lines = [f"id,{model}_accuracy", *(f"{prefix}{k},{value}" for k, value in enumerate(values))]
    (folder / "devices.csv").write_text("\n".join(lines) + "\n")


def write_matrices(folder: Path, **rounds: np.ndarray) -> Path:
    """Matrices of rounds r1, r2, .. of four clients in two groups."""
    folder.mkdir(parents=True)
    found = {int(name[1:]): Collaboration.from_dense(matrix) for name, matrix in rounds.items()}
    save(folder / FILE, {number: one for number, one in found.items() if one is not None}, TRUE)
    return folder


# -- the plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [FULL, QUICK], ids=["full", "quick"])
def test_plan_holds_together(items):
    check_runs(list(items.values()))
    assert list(items) == [
        "table1",
        "table1-loss",
        "figure2a",
        "figure2b",
        "iterations",
        "figure3",
        "table2",
        "table2-loss",
        "table2-improved",
        "figure5",
        "figure6",
        "elastic",
        "language",
    ]
    assert all(bool(item.reduced) == (items is QUICK) for item in items.values())
    assert all(bool(r.differs) == (items is QUICK) for i in items.values() for r in i.rows if i.name != "elastic")


def test_full_is_the_papers():
    runs = runs_of(list(FULL.values()))
    for name, run in runs.items():
        if name.startswith("language-") or run in ELASTIC:  # tests/papers/test_cobo_language_plan.py
            continue
        settings = run.settings
        many = name.endswith("-80")
        assert (settings["data"], settings["model"], settings["batch_size"]) == ("cifar-100", "resnet9", 128)
        assert settings["rounds"] == (20_000 if many else 40_000)
        method = settings["algorithm"]
        assert settings["set"]["device_lr"] == {"ditto": 0.1, "fc": 0.05}.get(method, 0.01)
        assert settings["set"].get("device_steps", 1) == 1
        assert settings.get("device_participation", 1) == (0.1 if name == "ifca-80" else 1)
    assert (runs["cobo-8"].settings["devices"], runs["cobo-8"].settings["partition"]) == (8, "clusters-permuted:4")
    partition = "clusters-disjoint:sizes=6+6+7+7+8+8+9+9+10+10,classes_per_cluster=10"
    assert (runs["cobo-80"].settings["devices"], runs["cobo-80"].settings["partition"]) == (80, partition)
    assert (runs["ditto-8"].settings["set"]["device_pull"], runs["ditto-8"].settings["set"]["personal_lr"]) == (1, 0.1)
    clusters = [runs[name].settings["set"]["num_clusters"] for name in ("ifca-8", "ifca-80")]
    assert clusters == [4, 10]
    assert runs["fc-8"].settings["set"]["nearest"] == 0
    assert "fc-80" not in runs


def test_clients_that_join_and_leave_are_partners_and_whole_clusters():
    runs = runs_of([FULL["elastic"]])
    absent = {name: run.settings.get("device_participation", 1) for name, run in runs.items()}
    assert absent["cobo-8-clusters-leave"] == "lines:4,1,20001;5,1,20001;6,1,20001;7,1,20001"
    assert absent["cobo-8-partners-leave"] == "lines:1,1,20001;3,1,20001;5,1,20001;7,1,20001"
    assert absent["cobo-8-join-2000"] == "lines:1,38001,;3,38001,;5,38001,;7,38001,"
    assert (absent["cobo-8"], absent["cobo-8-0.25-of-clients"], absent["local-8-2000"]) == (1, 0.25, 1)
    assert runs["local-8-2000"].settings["rounds"] == 2000
    data = build_federation("digits", devices=8, partition=runs["cobo-8"].settings["partition"])
    assert np.asarray(data.cluster).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_claims_about_joining_and_leaving_compare_the_same_clients(tmp_path):
    claims = {claim.text.split(" (")[0]: claim for claim in FULL["elastic"].claims}
    here, there = tmp_path / "here", tmp_path / "there"
    write_devices(here, [0.9, 0.5] * 4)
    write_devices(there, [0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1])
    found = claims["Those who stay are no worse off when their partners leave"].holds([[here], [there]])
    assert found == (True, "here: 90.00, compared with: 50.00")
    found = claims["Those who stay are no worse off when two clusters leave"].holds([[here], [there]])
    assert found == (False, "here: 70.00, compared with: 90.00")
    late = next(claim for text, claim in claims.items() if text.startswith("Newcomers after 2,000 rounds are better"))
    assert late.holds([[here], [there]]) == (None, "here: 50.00, compared with: 50.00")


def test_sampling_rules_of_table_1():
    found = {row.labels[0]: row for row in FULL["table1"].rows}
    rules = {label: row.runs[0].settings["set"]["sampling"] for label, row in found.items()}
    assert list(rules.values()) == ["constant", "inverse", "mixed", "all"]
    assert found["Mixed"].runs[0].settings["set"]["constant_rounds"] == 80  # 0.2 % of 40,000
    assert [row.paper for row in found.values()] == [73.05, 73.18, 74.77, 74.93]
    assert [row.paper for row in FULL["table1-loss"].rows] == [1.104, 1.226, 1.081, 1.278]
    assert found["Constant (1/n)"].runs[0].name == "cobo-8"  # that of Table 2


def test_table_2_has_the_papers_figures():
    rows = {row.labels: row for row in FULL["table2"].rows}
    assert len(rows) == 15
    for labels, paper, deviation in (
        (("8 clients", "FedAvg"), 18.8, 0.1),
        (("8 clients", "FC as read here"), 55.1, 0.4),
        (("8 clients", "CoBo"), 74.6, 0.2),
        (("80 clients", "IFCA"), 45.6, 0.8),
        (("80 clients", "CoBo"), 79.6, 0.4),
        (("80 clients", "Oracle"), 83.6, 0.3),
    ):
        assert (rows[labels].paper, rows[labels].deviation) == (paper, deviation)
    losses = {row.labels: row.paper for row in FULL["table2-loss"].rows}
    assert (len(losses), losses["8 clients", "Ditto"], losses["80 clients", "Local"]) == (15, 1.55, 1.40)
    better = {row.labels: row for row in FULL["table2-improved"].rows}
    assert len(better) == 13
    assert better["80 clients", "Fine-tuning FedAvg"].paper == 94
    assert [run.name for run in better["80 clients", "FedAvg"].runs] == ["fedavg-80", "local-80"]


def test_figure_2a_varies_one_thing_at_a_time():
    share, clusters, members = ([run.settings for run in chart.curves[0].runs] for chart in FULL["figure2a"].charts)
    assert [s["split"] for s in share] == ["2.25:0.25:9.5", "4.5:0.5:7", "6.75:0.75:4.5", "9:1:2"]
    assert {s["devices"] for s in share} == {8}
    assert [(s["devices"], s["partition"][-1], s["split"]) for s in clusters] == [
        (4, "2", "9:1:2"),
        (8, "4", "9:1:2"),
        (16, "8", "9:1:2"),
    ]
    assert [(s["devices"], s["partition"][-1]) for s in members] == [(8, "4"), (16, "4"), (32, "4")]


def test_figures_show_matrices_and_curves_of_the_tables_runs():
    assert [matrix.run.name for matrix in FULL["figure3"].matrices] == ["fc-8", "ifca-8", "cobo-8"]
    assert [matrix.run.name for matrix in FULL["figure5"].matrices] == ["cobo-80"]
    assert [len(FULL[name].charts[0].curves) for name in ("figure2b", "figure6")] == [8, 7]
    assert [row.paper for row in FULL["iterations"].rows] == [4500, None]


# -- readings -----------------------------------------------------------------------------------------


def test_loss_of_both_protocols(tmp_path):
    assert read.loss("personal")([write(tmp_path / "a", 0.5, 0.75)]) == (0.75, 1.75)
    assert read.loss("global")([tmp_path / "a"]) == (None, None)


def test_improved_is_the_share_of_devices_better_off(tmp_path):
    for name, column, values in (
        ("a", "personal", (0.5, 0.7, 0.9, 0.6)),
        ("b", "personal", (0.4, 0.7, 0.8, 0.9)),
        ("c", "global", (0.5, 0.8, 0.9, 1.0)),
    ):
        write_devices(tmp_path / name, values, column, "d")
    assert read.improved([tmp_path / "a", tmp_path / "b"]) == (50.0, None)  # no better is not better
    assert read.improved([tmp_path / "c", tmp_path / "b"]) == (100.0, None)


def test_iterations_until_an_accuracy(tmp_path):
    folder = write(tmp_path / "a", 0.65)
    assert read.until(60)([folder]) == (200, None)
    assert read.until(50)([folder]) == (100, None)
    assert read.until(70)([folder]) == (None, None)
    slow, quick = [folder], [write(tmp_path / "b", 0.75)]
    assert read.faster(60, 0.7)([quick, slow]) == (True, "60 % after 100 and 200 iterations")
    assert not read.faster(60, 0.7)([slow, slow])[0]
    assert read.faster(70, 0.7)([quick, slow]) == (False, "70 % is not reached by both runs")


def test_claims_about_accuracies_hold_or_not(tmp_path):
    low, middle, high = ([write(tmp_path / name, value)] for name, value in (("l", 0.5), ("m", 0.52), ("h", 0.6)))
    everybody = [write(tmp_path / "g", 0.55, model="global")]
    first = read.first_of(["CoBo", "FedAvg", "Local"], ["cobo", "fedavg", "local"])
    assert first([high, everybody, low]) == (True, "CoBo: 60.00, FedAvg: 55.00, Local: 50.00")
    assert not first([middle, everybody, low])[0]
    assert read.near({"a": "", "b": ""}, 3)([low, middle])[0]
    assert read.near({"a": "", "b": ""}, 3)([high, middle])[0]
    assert not read.near({"a": "", "b": ""}, 3)([middle, high])[0]
    assert read.highest({"a": "", "b": ""}, 1)([low, middle])[0]
    assert not read.highest({"a": "", "b": ""}, 0)([low, middle])[0]
    assert read.rising((0.5, 1))([low, middle]) == (True, "0.5: 50.00, 1: 52.00")
    assert not read.rising((0.5, 1))([middle, low])[0]
    assert read.level((2, 4), 3)([low, middle])[0]
    assert not read.level((2, 4), 3)([low, high])[0]
    assert read.against((2, 4))([*low, *high]) == ([2, 4], [50.0, 60.0])


def test_claims_about_who_listens_to_whom_hold_or_not(tmp_path):
    stays = write_matrices(tmp_path / "stays", r1=ALL, r4=BLOCKS, r8=BLOCKS)
    lost = write_matrices(tmp_path / "lost", r1=BLOCKS, r4=BLOCKS, r8=ALL)
    assert read.found(4)([[stays]]) == (True, "from iteration 4 on")
    assert not read.found(3)([[stays]])[0]
    assert read.found(8)([[stays, lost]]) == (False, "from iteration 4 on, never")
    assert read.parted(2)([[stays]]) == (True, "mean weight within groups minus that between them: 1.00 after 4")
    assert not read.parted(1)([[stays]])[0]
    assert read.one_cluster([[lost]]) == (True, "number of clusters after the last round: 1")
    assert not read.one_cluster([[stays]])[0]
    assert read.mistakes([[lost]])[0]
    assert not read.mistakes([[stays]])[0]
