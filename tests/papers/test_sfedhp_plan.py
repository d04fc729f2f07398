"""sFedHP's plan: the paper's numbers, valid settings, what is read of run folders, and the claims both ways."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from polytier import SFedHP, build_federation, train
from polytier.models.zoo import make_model
from polytier.papers import sfedhp
from polytier.papers.plan import Item, PlannedRun
from polytier.papers.sfedhp_figures import AHEAD, LAMBDAS, TABLE_I, TABLES
from polytier.papers.sfedhp_values import (
    ahead,
    best,
    cumulated,
    final,
    nonzeros,
    nonzeros_left,
    rising,
    saved,
    sparsity,
    speed,
)
from polytier.runs.methods import make_method
from polytier.runs.spec import check_spec

SCALES = ("quick", "full")
NESTED = ("hier-fedavg", "pfedme", "sfedhp")


@pytest.fixture(scope="module", params=SCALES)
def items(request) -> list[Item]:
    return sfedhp.items(request.param)


@pytest.fixture(scope="module")
def full() -> dict[str, Item]:
    return {item.name: item for item in sfedhp.items("full")}


def all_runs(items: list[Item]) -> dict[str, PlannedRun]:
    return {run.name: run for item in items for run in item.runs()}


# -- the plan -----------------------------------------------------------------------------------------


def test_every_table_and_figure_is_there(items):
    tables = [f"table-{number}" for number in ("i", "ii", "iii", "iv", "v", "vi", "vii")]
    names = [item.name for item in items]
    assert names == [
        tables[0],
        "table-i-equal-steps",
        *tables[1:],
        "tables-two-labels",
        *(f"figure{k}" for k in range(2, 6)),
    ]


def test_full_has_all_figures_of_the_tables(full):
    assert len(full["table-i"].rows) == 3 * 2 * 5
    for name in ("ii", "iii", "iv", "v", "vi", "vii"):  # pFedMe and sFedHP have two figures for each lambda
        assert len(full[f"table-{name}"].rows) == 7 + 2 * 2 * len(LAMBDAS)
    assert all(row.deviation is not None and row.differs == "" for row in full["table-i"].rows)
    equal = full["table-i-equal-steps"]
    assert all(row.paper is not None for item in full.values() if item is not equal for row in item.rows)


def test_equal_steps_are_read_where_all_have_computed_as_many_gradients(full, tmp_path):
    folder = write_run(tmp_path / "run", [0.1] * 40 + [0.5] * 760, [message(10)] * 800)
    rows = full["table-i-equal-steps"].rows
    found = {row.labels[2]: row.read([folder])[0] for row in rows if row.labels[:2] == ("MNIST", "1")}
    assert found["FedAvg"] == found["FedProx, lambda = 0.001"] == 50
    assert found["HierFAVG"] == found["sFedHP, lambda = 20"] == 10
    assert len(full["table-i-equal-steps"].claims) == 6
    for row in {item.name: item for item in sfedhp.items("quick")}[
        "table-i-equal-steps"
    ].rows:  # at the scale quick all are evaluated there
        settings = row.runs[0].settings
        nested = settings["algorithm"] in NESTED
        at = (100 if row.labels[0] == "CIFAR-10" else 400) // (100 if nested else 5)
        assert at % settings["eval_every"] == 0
        assert at <= settings["rounds"]


def test_figures_as_printed(full):
    printed = {row.labels: (row.paper, row.deviation) for row in full["table-i"].rows}
    assert printed["MNIST", "1", "FedAvg", "global"] == (91.63, 0.12)
    assert printed["MNIST", "2", "FedProx, lambda = 0.001", "global"] == (90.04, 0.08)
    assert printed["Fashion-MNIST", "1", "pFedMe, lambda = 30", "global"] == (80.57, 0.07)
    assert printed["CIFAR-10", "1", "HierFAVG", "global"] == (52.76, 0.21)
    assert printed["CIFAR-10", "2", "sFedHP, lambda = 30", "global"] == (94.09, 0.10)
    detailed = {row.labels: row.paper for row in full["table-ii"].rows}
    assert detailed["pFedMe, lambda = 30", "personal"] == 52.07
    assert detailed["sFedHP, lambda = 5", "global"] == 93.06
    assert detailed["HeurFedAMP, alpha = 0.1", "personal"] == 97.11
    assert {row.labels: row.paper for row in full["table-vii"].rows}["Per-FedAvg", "personal"] == 84.92


def test_sums_over_the_tables_as_printed():
    """Catches a slip in any single figure."""
    found = {
        place: tuple(round(sum(pair[k] or 0 for pair in table.values()), 2) for k in (0, 1))
        for place, table in TABLES.items()
    }
    assert found == {
        ("mnist", 1): (1282.06, 1106.90),
        ("mnist", 2): (1315.60, 1137.40),
        ("fashion-mnist", 1): (1365.78, 1067.50),
        ("fashion-mnist", 2): (1374.29, 1110.22),
        ("cifar-10", 1): (1141.71, 698.58),
        ("cifar-10", 2): (1257.32, 1055.36),
    }


def test_what_the_text_says_of_table_i_follows_from_it():
    for place, methods in TABLE_I.items():
        *others, own = (TABLES[place][method][1] or 0 for method in methods)
        assert own - max(others) > AHEAD[place]


def test_full_has_the_papers_sizes(full):
    for run in all_runs(list(full.values())).values():
        settings, fields = run.settings, run.settings["set"]
        assert (run.seeds, settings["rounds"], settings["batch_size"]) == (3, 800, 20)
        assert (settings["devices"], settings["teams"]) == (20, 4)
        assert (fields["device_lr"], fields["device_steps"]) == (0.05, 5)
        assert fields.get("team_rounds", 20) == fields.get("local_rounds", 20) == 20
        assert settings["partition"] == ("labels:2" if run.name.endswith("2-labels") else "labels:5")
        assert settings["eval_every"] == 20
        if settings["algorithm"] == "sfedhp":
            assert fields["device_pull"] == fields["team_pull"]
            assert (fields["team_lr"], fields["server_lr"], fields["smoothing"]) == (0.05, 1.0, 6e-5)
            assert fields["device_sparsity"] == fields["team_sparsity"]
            assert (fields["least_nonzeros"], fields["sparse_rounds"]) == (0.2, 100)


def test_full_shares_out_as_the_paper(full):
    runs = all_runs(list(full.values()))
    counts = {name: (runs[name].settings["per_class"], runs[name].settings["model"]) for name in runs if "set" in name}
    dnn, vgg = "dnn:500x200", "vgg:16-M-32-M-64-M-128-M-128-M"
    assert counts["fedavg-mnist-setting-1"] == ("200:800", dnn)
    assert counts["sfedhp-20-fashion-mnist-setting-2"] == ("900:300", dnn)
    assert counts["fedprox-cifar-10-setting-1"] == ("100:400", vgg)
    assert counts["pfedgp-cifar-10-setting-2"] == ("450:150", vgg)
    assert counts["sfedhp-20-mnist-setting-1-2-labels"] == ("800:3200", dnn)  # 4 devices hold a class
    lambdas = {runs[f"sfedhp-{k}-mnist-setting-1"].settings["set"]["device_pull"] for k in LAMBDAS}
    assert lambdas == {5.0, 15.0, 20.0, 25.0, 30.0}
    assert runs["fedprox-mnist-setting-1"].settings["set"]["device_pull"] == 0.001
    assert runs["heurfedamp-0.1-mnist-setting-1"].settings["set"]["self_weight"] == 0.1
    assert all(runs[name].settings["set"].get("team_sparsity", 0) == 0 for name in counts)  # the tables are dense


def test_full_figures(full):
    convex, network = full["figure2"].runs(), full["figure3"].runs()
    assert [run.settings["model"] for run in convex] == ["mclr"] * 3
    assert all(run.settings["l2"] > 0 for run in convex)
    assert [run.settings["model"] for run in network] == ["dnn:100"] * 4
    assert {run.settings["codec"] for run in network} == {"paper"}
    model = make_model("dnn:100", (1, 28, 28), 10, 0)
    assert sum(p.numel() for p in model.parameters()) == 79_510  # Remark 1
    for run in (*convex, *network):
        assert run.settings["split"] == "27:3:10"
        assert "per_class" not in run.settings
        assert run.settings["set"].get("device_pull", 25.0) == 25.0
    swept = [(r.settings["set"]["device_sparsity"], r.settings["set"]["device_pull"]) for r in full["figure4"].runs()]
    assert swept == [(gamma, pull) for gamma in (0.008, 0.001) for pull in (5, 15, 20, 25, 30)]
    names = {run.name for run in full["figure5"].runs()}
    assert {"sfedhp-25-gamma-0-mnist-dnn", "sfedhp-25-gamma-0.001-mnist-dnn"} <= names & {r.name for r in network}


def test_settings_are_valid(items):
    for run in all_runs(items).values():
        config = check_spec(run.settings)
        assert make_method(config.algorithm, config.set)
        shape = (3, 32, 32) if config.data == "cifar-10" else (1, 28, 28)
        if config.model.startswith("dnn:"):
            assert make_model(config.model, shape, 10, 0)


def test_equal_names_are_equal_runs(items):
    seen: dict[str, PlannedRun] = {}
    for run in (run for item in items for run in item.runs()):
        assert seen.setdefault(run.name, run) == run
    settings = [json.dumps([run.settings, run.seeds], sort_keys=True) for run in seen.values()]
    assert len(set(settings)) == len(seen)


def test_only_quick_is_reduced():
    for item in sfedhp.items("full"):
        assert item.reduced == ""
        assert not any(row.differs for row in item.rows)
    for item in sfedhp.items("quick"):
        words = set(re.findall(r"[\w-]+", item.reduced))
        assert {str(run.settings["rounds"]) for run in item.runs()} <= words
        assert {"1", "3", "800"} <= words
        widths = {run.settings["model"].removeprefix("dnn:") for run in item.runs()} - {"mclr"}
        assert all(any(f"-{width}-10" in word for word in words) for width in widths)
        assert {run.seeds for run in item.runs()} == {1}


def test_quick_is_small(items):
    runs = all_runs(items)
    if runs["fedavg-mnist-setting-1"].seeds == 1:
        steps = sum(
            run.settings["rounds"] * (100 if run.settings["algorithm"] in NESTED else 5) * 20 for run in runs.values()
        )
        assert len(runs) <= 60
        assert steps < 2_000_000


def test_rows_without_the_papers_network_are_not_compared():
    quick = {item.name: item for item in sfedhp.items("quick")}
    assert all(row.differs for row in quick["table-vi"].rows)
    assert not any(row.differs for row in quick["table-ii"].rows)


# -- what is read of run folders ----------------------------------------------------------------------


def write_run(folder: Path, accuracies: list[float], sent: list[int], child: str = "team", size: int = 1000) -> Path:
    """A run of 4 edges or 20 devices; `sent` are the bytes of one of them a round, each way."""
    folder.mkdir(parents=True)
    number = {"team": 4, "device": 20}[child]
    lines = []
    for k, (accuracy, nbytes) in enumerate(zip(accuracies, sent, strict=True), 1):
        ways = {"down": number * nbytes, "up": number * nbytes}
        links = {f"server-{child}": ways} | ({"team-device": {"down": 7, "up": 7}} if child == "team" else {})
        record = {"round": k, "bytes": links, "participants": {"device": 20} | {child: number}}
        lines.append(record | {name: {"test": {"accuracy": accuracy}} for name in ("global", "personal")})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    top = {name: {"accuracy": max(accuracies)} for name in ("global", "personal")}
    (folder / "summary.json").write_text(json.dumps({"parameters": size, "best": top, "chosen": None}))
    return folder


def message(count: int, size: int = 1000) -> int:
    return min(8 * size, 8 * count + size // 8)


def test_nonzeros_and_bytes_of_one_edge(tmp_path):
    folder = write_run(tmp_path / "a", [0.1, 0.2, 0.3], [message(1000), message(500), message(200)])
    assert nonzeros([folder]) == (range(1, 3), [50.0, 20.0])
    assert nonzeros_left([folder]) == (20.0, None)
    rounds, sums = cumulated([folder])
    assert list(rounds) == [1, 2, 3]
    assert sums == pytest.approx([0.016, 0.02425, 0.0277])
    flat = write_run(tmp_path / "b", [0.1, 0.2, 0.3], [message(1000)] * 3, "device")
    assert nonzeros([flat])[1] == [100.0, 100.0]
    assert cumulated([flat])[1][-1] == pytest.approx(0.048)
    assert saved([folder, flat])[0] == pytest.approx(100 * (1 - 27.7 / 48))


def test_nothing_is_read_of_an_unfinished_run(tmp_path):
    folder = write_run(tmp_path / "a", [0.1], [message(10)])
    (folder / "summary.json").unlink()
    assert nonzeros([folder]) == ([], [])
    assert nonzeros_left([folder]) == (None, None)


def test_nonzeros_are_those_of_the_model(tmp_path):
    """A real run: what the bytes of the second round tell is what the model held after the first."""
    algorithm = SFedHP(team_rounds=4, device_steps=1, device_sparsity=0.2, team_sparsity=0.2, smoothing=6e-3)
    federation = build_federation("digits", devices=4, teams=2)
    runs = [train(algorithm, federation, "mclr", rounds=k, codec="paper", eval_every=2, workers=1) for k in (1, 2)]
    runs[1].save(tmp_path / "run")
    held = runs[0].global_
    assert held is not None
    share = 100 * float((held != 0).double().mean())
    assert 0 < share < 95
    assert nonzeros([tmp_path / "run"])[1] == pytest.approx([share])


def test_figures_of_a_run(tmp_path):
    folder = write_run(tmp_path / "a", [0.2, 0.6, 0.4], [message(400)] * 3)
    assert best("personal")(folder) == pytest.approx(60)
    assert final(folder) == pytest.approx(40)
    assert speed(folder) == pytest.approx(40)
    assert sparsity(folder) == pytest.approx(40)


# -- claims -------------------------------------------------------------------------------------------


def test_ahead_and_rising_hold_or_not(tmp_path):
    runs = [[write_run(tmp_path / str(k), [value], [message(10)])] for k, value in enumerate((0.9, 0.8, 0.85))]
    names, figure = ["a", "b", "c"], best("global")
    assert ahead(figure, names, margin=4.0)(runs) == (True, "a: 90.00, b: 80.00, c: 85.00")
    assert ahead(figure, names, margin=6.0)(runs)[0] is False
    assert ahead(figure, names, margin=4.9)(runs)[0] is None  # level: 0.1 points with one seed
    assert ahead(figure, names, 2)(runs)[0]  # the better one of the first two
    assert not ahead(figure, names, 2, of=min)(runs)[0]  # both
    assert not rising(figure, names)(runs)[0]
    assert not rising(figure, names, -1)(runs)[0]
    assert rising(figure, names[:2], -1)(runs[:2])[0]
    assert rising(figure, names[1:])(runs[1:])[0]


# -- the claims of the items, on folders where they hold and where they do not --------------------------


def told(item: Item, tmp_path: Path, better: bool) -> list[bool]:
    """Whether each claim holds where runs end higher and sparser the more (`better`) they are what the paper wants."""
    found = []
    for number, claim in enumerate(item.claims):
        folders = []
        for run in claim.runs:
            fields, algorithm = run.settings["set"], run.settings["algorithm"]
            gamma = fields.get("device_sparsity", 0.0)
            value = {"sfedhp": 0.8 + fields.get("device_pull", 0) / 1000, "hier-fedavg": 0.5}.get(algorithm, 0.4)
            if item.name in ("figure2", "figure3"):
                value = {"sfedhp": 0.8, "pfedme": 0.7}.get(algorithm, 0.4)
            value -= 10 * gamma
            value = value if better else 1 - value - (60 * gamma if item.name == "figure3" else 0)
            count = round((500 - 50_000 * gamma) if better else (100 + 50_000 * gamma))
            folders.append(
                [write_run(tmp_path / str(better) / str(number) / run.name, [value] * 2, [message(count)] * 2)]
            )
        found.append(claim.holds(folders)[0])
    return found


@pytest.mark.parametrize("name", ["table-i", "table-ii", "table-vii", "figure2", "figure3", "figure4", "figure5"])
def test_claims_both_ways(full, tmp_path, name):
    assert all(told(full[name], tmp_path, better=True))
    assert not any(told(full[name], tmp_path, better=False))
