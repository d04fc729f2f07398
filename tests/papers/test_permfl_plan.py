"""PerMFL's plan against the paper's numbers, and what is read from its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans import check_runs, runs_of, write_run
from polytier.papers import permfl
from polytier.papers.claims import ahead, alike, compare, rising, settled
from polytier.papers.permfl_figures import TABLE1, UNCERTAIN
from polytier.papers.plan import Item, PlannedRun
from polytier.papers.run_values import by_round, pooled

FULL = {item.name: item for item in permfl.items("full")}
QUICK = {item.name: item for item in permfl.items("quick")}
TABLE2_FIELDS = {
    "device_lr": 0.01,
    "device_steps": 20,
    "team_lr": 0.03,
    "server_lr": 0.6,
    "device_pull": 0.5,
    "team_pull": 1.5,
    "team_rounds": 10,
}
CODE_FIELDS = {**TABLE2_FIELDS, "server_lr": 0.99, "device_pull": 5.0, "team_pull": 5.0}


def row(item: Item, *labels: str):
    return next(row for row in item.rows if row.labels == labels)


def curves(item: Item, title: str) -> list[PlannedRun]:
    """The runs of a chart's solid lines."""
    chart = next(chart for chart in item.charts if chart.title == title)
    return [curve.runs[0] for curve in chart.curves if not curve.dashed]


@pytest.mark.parametrize("items", [FULL, QUICK], ids=["full", "quick"])
def test_plan_holds_together(items):
    check_runs(list(items.values()))
    assert [name for name in FULL if name not in items] == ([] if items is FULL else ["table1-equal-steps"])
    assert all(bool(item.reduced) == (items is QUICK) for item in items.values())
    assert all(item.rows or item.charts for item in items.values())
    assert all(item.notes for item in items.values())


def test_full_is_the_papers():
    for run in runs_of(list(FULL.values())).values():
        settings = run.settings
        assert run.seeds == 10
        assert settings["batch_size"] == 124
        assert settings["split"] == ("3:0:1" if run.name.endswith("-code") else "27:3:10")
        assert settings["rounds"] == (100 if settings["algorithm"] in ("fedavg", "per-fedavg", "pfedme") else 400)
        usual = 50 if run.name.endswith("-50-devices") else 40
        assert settings["devices"] == {"emnist-byclass:low=-1": 3500, "cifar-100:low=-1": 350}.get(
            settings["data"], usual
        )
        assert "dnn:32" not in settings["model"]
    usual = row(FULL["table1"], "MNIST", "MCLR", "PerMFL (PM)").runs[0].settings
    assert (usual["teams"], usual["partition"], usual["set"]) == (4, "labels:2", CODE_FIELDS)
    assert row(FULL["table1"], "MNIST", "CNN", "PerMFL (PM)").runs[0].settings["model"] == "cnn-mnist"
    assert row(FULL["table1"], "FMNIST", "CNN", "PerMFL (PM)").runs[0].settings["model"] == "cnn-fmnist"
    assert row(FULL["table1"], "MNIST", "CNN", "pFedMe (PM)").runs[0].settings["set"]["server_lr"] == 0.4
    assert row(FULL["table1"], "Synthetic", "DNN", "pFedMe (PM)").runs[0].settings["set"]["server_lr"] == 0.5


def test_tables_have_the_papers_figures():
    table1 = FULL["table1"]
    assert len(table1.rows) == 12 * 4 + 11 * 4 + 1
    assert row(table1, "Synthetic", "-", "most frequent label of each device").paper is None
    assert row(table1, "MNIST", "MCLR", "PerMFL (PM)").paper == 96.77
    assert row(table1, "FMNIST", "MCLR", "PerMFL (PM)").paper == 96.49
    assert row(table1, "Synthetic", "DNN", "PerMFL (GM)").paper == 87.53
    assert row(table1, "EMNIST-10", "CNN", "AL2GD as read here (PM)").paper == 92.94
    assert row(table1, "Synthetic", "MCLR", "pFedBayes (PM)").deviation == 0.5
    # PerMFL's personal model is printed best for all networks, and for MCLR on MNIST and synthetic data
    for model, column in [("network", k) for k in range(4)] + [("MCLR", 0), ("MCLR", 1)]:
        personal = {key: figures[column][0] for key, figures in TABLE1[model].items() if key[1] == "PM"}
        assert max(personal, key=lambda key: personal[key]) == ("permfl", "PM")
    assert sum(bool(r.differs) for r in table1.rows) == sum(map(len, UNCERTAIN.values())) == 14
    assert len(FULL["table2"].rows) == 24
    assert row(FULL["table2"], "average case", "FMNIST", "CNN", "PerMFL (GM)").paper == 74.66
    worst = row(FULL["table2"], "worst case", "MNIST", "MCLR", "PerMFL (PM)").runs[0].settings
    assert (worst["teams"], worst["team_formation"], worst["set"]) == (2, "worst", TABLE2_FIELDS)
    assert len(FULL["table3"].rows) == 8
    last = row(FULL["table3"], "CIFAR-100", "PerMFL (PM)")
    assert (last.paper, last.runs[0].settings["teams"], last.runs[0].settings["partition"]) == (66.95, 5, "labels:3")


def test_the_reading_of_the_code_is_the_papers_rule_with_other_numbers():
    """One round by hand on f(theta) = a/2 theta^2: the devices' lambda is L, the teams' is the one that was given."""
    run = row(FULL["table1-code"], "MNIST", "PerMFL (PM)").runs[0]
    given, used = CODE_FIELDS, run.settings["set"]
    steps, a = given["device_steps"], 0.7

    def round_of(lam_device: float, lam_team: float, gamma: float, eta: float, beta: float) -> float:
        x = w = 1.0
        for _ in range(given["team_rounds"]):
            theta = w
            for _ in range(steps):
                theta -= given["device_lr"] * (a * theta + lam_device * (theta - w))
            w -= eta * (lam_team * (w - theta) + gamma * (w - x))
        return x - beta * gamma * (x - w)

    code = round_of(steps, given["device_pull"], given["team_pull"], given["team_lr"], given["server_lr"])
    lam = used["device_pull"]
    assert lam == steps
    assert round_of(lam, lam, used["team_pull"], used["team_lr"], used["server_lr"]) == pytest.approx(code, rel=1e-12)
    settings = run.settings
    assert (settings["model"], settings["l2"], settings["shuffle"]) == ("mclr:62", 0.0, False)
    assert settings["partition"] == "labels-first-come:2"
    synthetic = row(FULL["table1-code"], "Synthetic", "PerMFL (GM)").runs[0].settings
    assert (synthetic["model"], "partition" in synthetic) == ("mclr", False)


def test_equal_steps_are_read_where_all_have_computed_as_many_gradients(tmp_path: Path):
    rounds = {10: (0.1, 0.1, 0.1), 20: (0.2, 0.2, 0.2), 50: (0.5, 0.5, 0.5), 110: (0.6, 0.6, 0.6)}
    folder = write_run(tmp_path / "run", {n: {"personal": v, "global": v} for n, v in rounds.items()})
    table = FULL["table1-equal-steps"]
    found = {r.labels[2]: r.read([folder])[0] for r in table.rows if r.labels[:2] == ("MNIST", "MCLR")}
    assert found["PerMFL (PM)"] == found["h-SGD (GM)"] == 10
    assert found["pFedMe (GM)"] == 20
    assert found["Ditto (GM)"] == found["Per-FedAvg (PM)"] == found["FedAvg (GM)"] == 50
    assert found["AL2GD as read here (PM)"] == 60
    assert len(table.claims) == 16


def test_sweeps_are_at_the_papers_settings():
    for name, key, letter, fixed in (
        ("figures5-10", "server_lr", "beta", {"team_pull": 3.0, "device_pull": 0.5}),
        ("figures11-16", "team_pull", "gamma", {"device_pull": 1.5, "server_lr": 0.1}),
        ("figures17-22", "device_pull", "lambda", {"server_lr": 0.3, "team_pull": 3.0}),
    ):
        assert len(FULL[name].charts) == 6
        runs = curves(FULL[name], f"FMNIST, CNN, by {letter}")
        values = [run.settings["set"][key] for run in runs]
        assert values == sorted(set(values))
        for run in runs:
            assert run.settings["set"] == {**TABLE2_FIELDS, **fixed, key: run.settings["set"][key]}


def test_who_takes_part():
    assert [r.settings["teams"] for r in curves(FULL["figures23-30"], "Synthetic, DNN, by teams")] == [2, 4, 5]
    assert len(FULL["figures31-42"].charts) == 12
    few = curves(FULL["figures43-48"], "EMNIST-10, MCLR, 10 teams, by share of teams")
    assert [r.settings["team_participation"] for r in few] == [0.02, 0.04, 0.1]
    some = curves(FULL["figures43-48"], "MNIST, CNN, 10 teams, by share of teams")
    assert [r.settings["team_participation"] for r in some] == [0.2, 0.3, 0.4, 0.5]
    both = curves(FULL["figures49-51"], "FMNIST, MCLR, 20 % of teams, by share of devices")
    assert [r.settings["device_participation"] for r in both] == [0.02, 0.04, 0.15, 0.3]
    assert {r.settings["team_participation"] for r in both} == {0.2}
    rounds = [
        [c.runs[0].settings["set"]["team_rounds"] for c in chart.curves[:4]] for chart in FULL["figures57-60"].charts
    ]
    assert rounds == [[30, 50, 100, 150], *[[30, 100, 150, 200]] * 3]


def test_figures_share_runs():
    four, *_ = (r for r in curves(QUICK["figures23-30"], "MNIST, MCLR, by teams") if r.settings["teams"] == 4)
    assert four in curves(QUICK["figures52-56"], "MNIST, MCLR, by K")
    assert four.settings["set"] == TABLE2_FIELDS
    assert set(runs_of([QUICK["figure2"], QUICK["figures61-63"]])) <= set(runs_of([QUICK["table1"]]))
    # once in the sweep of beta and once in that of lambda
    assert "permfl-mnist-mclr-beta-0.3-gamma-3.0-lambda-0.5" in runs_of([QUICK["figures5-10"]])
    assert "permfl-mnist-mclr-beta-0.3-gamma-3.0-lambda-0.5" in runs_of([QUICK["figures17-22"]])


def test_quick_says_where_it_cannot_be_compared():
    assert row(QUICK["table1"], "MNIST", "CNN", "PerMFL (PM)").differs
    assert not row(QUICK["table1"], "MNIST", "MCLR", "PerMFL (PM)").differs
    assert not row(QUICK["table1"], "Synthetic", "DNN", "PerMFL (PM)").differs
    assert all(r.differs for r in QUICK["table3"].rows)


# -- readings and claims ------------------------------------------------------------------------------


def test_pooled_reads_both_protocols(tmp_path: Path):
    history = {10: {"personal": (0.7, 0.8, 0.9)}, 20: {"personal": (0.75, 0.6, 0.94)}}
    folder = write_run(tmp_path / "run", history)
    assert pooled("personal")([folder]) == (80.0, 60.0)
    assert pooled("global")([folder]) == (None, None)
    assert pooled("personal", 5)([folder]) == (None, None)
    later = write_run(tmp_path / "later", {**history, 30: {"personal": (0.99, 0.97, 0.95)}})
    assert pooled("personal", 20)([later]) == (80.0, 60.0)
    assert pooled("personal")([later]) == (97.0, 97.0)


def climbing(folder: Path, *accuracies: float, every: int = 1) -> Path:
    return write_run(folder, {every * (k + 1): {"personal": (a, a, a)} for k, a in enumerate(accuracies)})


def test_claims_hold_and_fail(tmp_path: Path):
    slow, fast = climbing(tmp_path / "slow", 0.1, 0.2, 0.9), climbing(tmp_path / "fast", 0.5, 0.8, 0.85)
    longer = climbing(tmp_path / "longer", 0.2, 0.9, 0.9, 0.9, every=2)
    runs, names = [PlannedRun("a", {}), PlannedRun("b", {})], ["a", "b"]
    faster = rising("b is faster", runs, names, "personal")
    assert faster.holds([[slow], [fast]]) == (True, "a: 40.00, b: 71.67")
    assert not faster.holds([[fast], [slow]])[0]
    assert not faster.holds([[fast], [fast]])[0]
    # of the second, over rounds 2 alone, the first has 80 in it
    assert faster.holds([[longer], [fast]]) == (True, "a: 20.00, b: 80.00")
    same = alike("both are equally fast", runs, names, "personal")
    assert same.holds([[fast], [fast, fast]])[0]
    assert not same.holds([[fast], [fast, slow]])[0]
    better = ahead("a is better", runs, names, pooled("personal"))
    assert better.holds([[slow], [fast]]) == (True, "a: 90.00, b: 85.00")
    assert not better.holds([[fast], [slow]])[0]
    assert not better.holds([[fast], [fast]])[0]


def test_rising_forgives_no_more_than_seeds_differ(tmp_path: Path):
    low, dip, high = (climbing(tmp_path / str(a), a) for a in (0.9, 0.8995, 0.95))
    drop = climbing(tmp_path / "drop", 0.89)
    claim = rising("each is faster", [PlannedRun(n, {}) for n in "abc"], list("abc"), "personal")
    assert claim.holds([[low], [dip], [high]])[0]
    assert not claim.holds([[low], [drop], [high]])[0]
    assert claim.holds([[dip], [low], [low]])[0] is None  # 0.05 points are no rise


def test_settled(tmp_path: Path):
    run = climbing(tmp_path / "run", 0.5, 0.895, 0.9, 0.9)
    claim = settled("soon", PlannedRun("a", {"rounds": 4}), "personal", 3)
    assert claim.holds([[run]]) == (True, "within 1 of the best in round 2")
    assert not claim.holds([[run, climbing(tmp_path / "other", 0.5, 0.6, 0.9, 0.9)]])[0]
    with pytest.raises(ValueError, match="more than 3 are needed to refute"):
        settled("soon", PlannedRun("a", {"rounds": 3}), "personal", 3)


def test_what_one_seed_or_an_interval_cannot_decide_is_level(tmp_path: Path):
    assert [compare([90.0], [b]) for b in (89.4, 89.6, 90.4, 90.6)] == [1, 0, 0, -1]
    assert compare([90.0, 91.0, 92.0], [89.7, 90.6, 91.7]) == 1  # 0.3 or 0.4 with every seed
    assert compare([90.0, 91.0, 92.0], [80.0, 95.0, 89.0]) == 0  # 10, -4 and 3
    runs, names = [PlannedRun("a", {}), PlannedRun("b", {})], ["a", "b"]
    one, other = ([climbing(tmp_path / f"{a}-{k}", a)] for k, a in enumerate((0.9, 0.897)))
    assert ahead("a is better", runs, names, pooled("personal")).holds([one, other])[0] is None
    assert rising("a is faster", runs, names, "personal").holds([other, one])[0] is None


def test_claims_of_the_supplement_about_who_takes_part(tmp_path: Path):
    drop = [c.text for c in FULL["figures23-30"].claims if "slower" in c.text]
    assert drop == ["Synthetic, DNN, by teams: larger values are slower (GM)"]  # Fig. 29
    idle = [c.text for c in FULL["figures57-60"].claims if "2 % of teams" in c.text]
    assert len(idle) == 2
    assert all("equally fast (GM)" in text for text in idle)  # Figs. 58 and 60
    for items in (FULL, QUICK):
        known = {run.name for run in items["figure4"].only(["*"]).runs()}
        modes = [c for c in items["figure4"].claims if "four" in c.text or "other three" in c.text]
        assert [c.text[-4:] for c in modes] == ["(PM)", "(GM)"]
        charted = {run.name for chart in items["figure4"].charts for curve in chart.curves for run in curve.runs}
        assert {run.name for run in modes[0].runs} <= charted == known  # no run of its own
        high, low = climbing(tmp_path / f"high-{items is FULL}", 0.9), climbing(tmp_path / f"low-{items is FULL}", 0.5)
        assert modes[0].holds([[high], [low], [low], [low]])[0]
        assert modes[0].holds([[low], [low], [high], [low]])[0] is False


def test_six_of_eight_counts_the_columns_in_which_permfl_is_ahead(tmp_path: Path):
    claim = next(c for c in FULL["table1"].claims if "6 of 8" in c.text)
    high, low = climbing(tmp_path / "high", 0.9), climbing(tmp_path / "low", 0.5)

    def found(worse: set[str]) -> tuple[bool | None, str]:
        """PerMFL is ahead except in the columns whose runs end with one of `worse`."""
        names = [run.name for run in claim.runs]
        ahead_in = [name.startswith("permfl") and name.removeprefix("permfl-") not in worse for name in names]
        return claim.holds([[high if own else low] for own in ahead_in])

    assert found(set()) == (True, "better in 8, level in 0 of 8")
    assert found({"mnist-mclr", "fmnist-network"}) == (True, "better in 6, level in 2 of 8")
    assert found({"mnist-mclr", "fmnist-network", "synthetic-mclr"})[0] is False


def test_charts_read_the_models_they_name(tmp_path: Path):
    folder = write_run(tmp_path / "run", {1: {"personal": (0.5, 0.5, 0.5), "global": (0.25, 0.5, 0.5)}})
    chart = FULL["figure2"].charts[0]
    found = {curve.name: curve.read([folder])[1] for curve in chart.curves}
    assert found["PerMFL (PM)"] == [50.0]
    assert found["PerMFL (GM)"] == [25.0]
    assert by_round("personal", "train", "loss")([folder]) == ([1], [1.5])
