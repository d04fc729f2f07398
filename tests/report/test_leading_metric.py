"""Tables, pages, comparisons and searches of runs that are not led by accuracy."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import nn

from commands import call
from polytier import FedAvg, Federation, PerMFL, train
from polytier.algorithms import LocalTraining
from polytier.models.metrics import ACCURACY, METRICS, MetricInfo
from polytier.report import blocks, comparison, device_charts, page_contents
from polytier.report.grouping import studies
from polytier.report.page import render
from polytier.runs.read import RunRecord
from polytier.runs.spec import to_toml
from polytier.studies.search_space import propose
from polytier.studies.tune_table import print_search, ranked

F1, MAE = METRICS["macro_f1"], METRICS["mae"]


def write_run(folder: Path, values: dict[str, list[float]], metrics: list[MetricInfo], **settings: Any) -> Path:
    """A finished run of Local or another flat method; `values` are those of the devices by metric."""
    method, _, seed = folder.name.rpartition("-")
    folder.mkdir(parents=True)
    config = {"algorithm": method, "data": "digits", "model": "mclr", "rounds": 2, "seed": int(seed), **settings}
    (folder / "config.toml").write_text(to_toml(config))
    number = len(next(iter(values.values())))
    with (folder / "devices.csv").open("w", newline="") as file:
        rows = zip(range(number), [5] * number, *values.values(), strict=True)
        csv.writer(file).writerows([("id", "samples", *(f"personal_{name}" for name in values)), *rows])
    test: dict[str, float] = {"loss": 1.0}
    for metric in metrics:
        own = sorted(values[metric.name], reverse=metric.better == "lower")
        test |= {metric.name: sum(own) / number, f"{metric.name}_worst_decile": own[0]}
    sent = {"server-device": {"down": 10, "up": 5}}
    first = {name: value * (2 if name == "mae" else 0.5) for name, value in test.items()}
    lines = [{"round": k, "bytes": sent, "personal": {"test": each}} for k, each in enumerate((first, test), 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiers = [{"tier": "server", "ids": ["server"]}, {"tier": "device", "ids": list(range(number))}]
    (folder / "topology.json").write_text(json.dumps({"tiers": tiers}))
    summary = {
        "algorithm": method,
        "seed": int(seed),
        "rounds": 2,
        "device_steps": 10,
        "seconds": 1.0,
        "devices": number,
        "device_steps_per_second": 10,
        "teams": 0,
        "parameters": 9,
        "never_took_part": 0,
        "traffic": sent,
        "metrics": [metric.as_dict() for metric in metrics],
        "personal": test,
        "team": None,
        "global": None,
        "best": {"round": 2, "personal": {**test, "round": 2}, "team": None, "global": None},
        "chosen": None,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def entry(folder: Path) -> dict[str, Any]:
    method, _, seed = folder.name.rpartition("-")
    return {"method": method, "seed": int(seed), "folder": folder.name, "rounds": 2, "state": "done", "reason": ""}


def every(parts: Any) -> list[Any]:
    return [each for part in parts for each in [part, *every(getattr(part, "blocks", ()))]]


def by_title(parts: Any, kind: Any) -> dict[str, Any]:
    return {block.title: block for block in every(parts) if isinstance(block, kind)}


def disagreeing(root: Path, metrics: list[MetricInfo]) -> list[Path]:
    """fedavg is better by accuracy, local by macro F1."""
    high, low = [0.9, 0.91, 0.92, 0.93, 0.94, 0.95], [0.5, 0.51, 0.52, 0.53, 0.54, 0.55]
    return [
        write_run(root / "fedavg-0", {"accuracy": high, "macro_f1": low}, metrics),
        write_run(root / "local-0", {"accuracy": low, "macro_f1": high}, metrics),
    ]


# -- comparisons --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metrics", "best"), [([F1, ACCURACY], "local"), ([ACCURACY, F1], "fedavg")])
def test_the_leading_metric_decides_the_order(tmp_path, metrics, best):
    folders = disagreeing(tmp_path, metrics)
    records = comparison.make_records(tmp_path, map(entry, folders), 0.8)
    methods = comparison.by_method(tmp_path, records)
    assert methods[0]["method"] == best
    assert methods[0]["metric"] == metrics[0].name
    assert [method["best"] for method in methods] == [True, False]
    assert methods[0]["worst_decile"]["mean"] == 0.9
    assert {r["method"]: r["bytes_until"] for r in records} == {best: 30, {"local": "fedavg"}.get(best, "local"): None}
    fedavg = next(record for record in records if record["method"] == "fedavg")
    assert fedavg["better_than_local"] == (1.0 if best == "fedavg" else 0.0)
    ((_, table, _),) = page_contents.summary_tables([tmp_path])
    assert table.rows[0][0].value == best  # type: ignore[union-attr]
    assert table.note.startswith(f"Test {metrics[0].name} of the last round")
    console = Console(record=True, width=200)
    comparison.print_comparison(console, methods, records, 0.8, tmp_path)
    said = console.export_text()
    assert f"test {metrics[0].name} of the last round" in said
    assert "bytes until 80 %" in said
    narrow = Console(record=True, width=62)
    comparison.print_comparison(narrow, methods, records, 0.8, tmp_path)
    head, *rows = narrow.export_text().splitlines()
    assert "worst decile" in head
    assert "training" not in head
    assert [len(row.split()) > 3 for row in rows[:2]] == [True, True]  # a line per method: no cell is broken
    assert rows[2].startswith("no room here for ")
    assert "training: in compare.json" in rows[2]


def test_lower_is_better_for_errors(tmp_path):
    good, bad = [1.0, 2.0, 3.0, 4.0, 5.0, 6.5], [2.0, 3.1, 4.3, 5.2, 6.4, 5.5]
    folders = [
        write_run(tmp_path / "fedavg-0", {"mae": good}, [MAE]),
        write_run(tmp_path / "local-0", {"mae": bad}, [MAE]),
    ]
    records = comparison.make_records(tmp_path, map(entry, folders), 4.0)
    methods = comparison.by_method(tmp_path, records)
    assert [method["method"] for method in methods] == ["fedavg", "local"]
    assert records[0]["better_than_local"] == pytest.approx(5 / 6)
    assert [r["bytes_until"] for r in records] == [30, None]
    assert methods[0]["worst_decile"]["mean"] == 6.5
    _, _, parts = page_contents.page_of([tmp_path])
    summary = by_title(parts, blocks.Table)["Summary"]
    first = dict(zip(summary.columns, summary.rows[0], strict=True))
    assert (first["method"].value, first["personal"].text, first["personal"].value) == ("fedavg", "3.583", 21.5 / 6)
    assert not any("bytes until" in column for column in summary.columns)  # 0.9 has no meaning for an error
    strip = by_title(parts, blocks.Heat)["Who gains and who loses against Local"]
    assert strip.ends == ["83 % gain, 17 % lose"]
    assert strip.columns[0] == "device 4"  # the largest error with Local comes first
    assert strip.values[0] == pytest.approx([1.4, -1.0, 1.2, 1.3, 1.1, 1.0])  # less error is a gain
    assert strip.unit == "gain in mae"
    bars = by_title(parts, blocks.Histogram)["Mae of the devices"]
    assert (bars.x, bars.edges[0], bars.edges[-1]) == ("test mae", 1.0, 6.5)
    assert by_title(parts, blocks.Lines)["Test mae by round"].y == "test mae"


def test_runs_with_different_leading_metrics_share_one(tmp_path):
    write_run(tmp_path / "fedavg-0", {"accuracy": [0.5], "macro_f1": [0.4]}, [F1, ACCURACY])
    write_run(tmp_path / "fedavg-1", {"accuracy": [0.7]}, [ACCURACY], metric="accuracy")
    (study,) = studies([tmp_path])
    assert [len(variant.runs) for variant in study.variants] == [2]  # how a run is judged is no setting of it
    assert study.metric == MetricInfo("accuracy", unit="%")
    table = page_contents.summary_table(study, page_contents.results(study))
    assert table.rows[0][table.columns.index("personal")].text == "60.00 (50.00 to 70.00) %"  # type: ignore[union-attr]


def test_equal_values_still_make_bars():
    assert np.diff(device_charts.edges_of(np.array([2.0, 2.0]), MAE)).min() > 0


# -- on the terminal ----------------------------------------------------------------------------------


def test_show_names_the_leading_metric(tmp_path):
    run = write_run(tmp_path / "fedavg-0", {"accuracy": [0.5, 0.7], "macro_f1": [0.25, 0.35]}, [F1, ACCURACY])
    said = call("show", run, "--until", 0.3).stdout
    assert re.search(r"test macro_f1 +last +best", said)
    assert "30.00 % (round 2)" in said
    assert re.search(r"accuracy +60.00 %", said)
    assert "until 30 % test macro_f1" in said
    assert comparison.progress(run, "done", 2) == "30.00 %"
    (run / "summary.json").unlink()
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace("[versions]", 'metric = "macro_f1"\n[versions]')
    )
    assert "test macro_f1" in call("show", run).stdout
    assert comparison.progress(run, "running", 2) == "round 2/2, 30.00 %"
    error = write_run(tmp_path / "local-0", {"mae": [1.23456, 1.23456]}, [MAE])
    assert re.search(r"personal +1\.235 +1\.235 \(round 2\)", call("show", error).stdout)


def test_what_is_undefined_is_shown(tmp_path):
    run = write_run(tmp_path / "fedavg-0", {"auc": [0.5, 0.7]}, [METRICS["auc"]])
    path = run / "summary.json"
    path.write_text(path.read_text().replace('"auc": 0.6', '"auc": 0.6, "auc_undefined": 3'))
    assert re.search(r"auc +0.6 +undefined on 3 devices", call("show", run).stdout)


# -- searches -----------------------------------------------------------------------------------------


def test_a_search_goes_by_the_direction_of_the_metric():
    records = [
        {"number": k, "fields": {"lr": 0.1 * k}, "state": "done", "score": 1.0 * k, "reported": {"4": 1.0 * k}}
        for k in range(1, 6)
    ]
    assert [r["number"] for r in ranked(records, F1)] == [5, 4, 3, 2, 1]
    assert [r["number"] for r in ranked(records, MAE)] == [1, 2, 3, 4, 5]
    space = {"lr": {"low": 0.1, "high": 1.0, "log": False}}
    for metric, behind in ((F1, False), (MAE, True)):
        proposed = propose(space, records, metric, 0, 3)
        assert proposed is not None
        assert proposed[1](4, 4.5) == behind
    console = Console(record=True, width=120)
    print_search(console, records, MAE, Path("best.toml"))
    assert "validation mae" in console.export_text()


# -- the page -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of real runs led by macro F1."""
    root = tmp_path_factory.mktemp("led")
    rng = np.random.default_rng(0)
    y = (rng.random(300) < 0.3).astype(int)
    x = (rng.normal(size=(300, 3)) + y[:, None]).astype(np.float32)
    data = Federation.from_arrays(x, y, np.arange(300) % 6, team=np.arange(300) % 6 % 2)
    for name, method in (("permfl", PerMFL(device_steps=2, team_rounds=2)), ("local", LocalTraining(device_steps=2))):
        train(method, data, "mclr", rounds=3, metrics=["macro_f1", "auc"]).save(root / "runs" / name)
    call("report", root / "runs", "-o", root / "report.html")
    return root / "report.html"


def test_the_page_of_a_run_led_by_macro_f1_names_it(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    parts = json.loads(found[1])["blocks"]

    def flat(some: list[Any]) -> list[Any]:
        return [each for part in some for each in [part, *flat(part.get("blocks", []))]]

    titles = {part.get("title"): part for part in flat(parts)}
    assert [chart["title"] for chart in titles["Other metrics"]["charts"]] == ["auc", "accuracy"]
    assert titles["Test macro_f1 by round"]["y"] == "test macro_f1, %"
    assert titles["Test macro_f1 against bytes"]["y"] == "test macro_f1, %"
    assert titles["Macro_f1 of the devices"]["x"] == "test macro_f1, %"
    assert titles["Summary"]["note"].startswith("Test macro_f1 of the last round")
    assert "sorted by the macro_f1 with local" in titles["Who gains and who loses against Local"]["note"]
    permfl = next(s for s in titles["Test macro_f1 by round"]["series"] if s["name"] == "permfl")
    run = RunRecord(page.parent / "runs" / "permfl")
    assert permfl["y"] == pytest.approx([100 * r["personal"]["test"]["macro_f1"] for r in run.history], rel=1e-4)


def test_the_tooltips_of_such_a_page_name_it_too(page):
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on this machine to open pages with")
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport={"width": 1200, "height": 900})
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.goto(page.as_uri())
        opened.wait_for_selector("html[data-ready]")
        for chart, words in (
            ("#test-macro-f1-by-round", "round 3: test macro_f1, %"),
            ("#devices-macro-f1-of-the-devices", "test macro_f1, %: 95 to 100"),
        ):
            picture = opened.locator(f"{chart} svg[role=img]").first
            assert "test macro_f1, %" in (picture.get_attribute("aria-label") or "")
            picture.focus()
            opened.keyboard.press("End")
            assert words in opened.locator(f"{chart} .tip").first.inner_text()
        browser.close()
    assert faults == []


def test_a_page_of_a_regression(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    data = Federation.from_arrays(x, x.sum(1), np.arange(120) % 4)
    train(FedAvg(device_steps=2), data, nn.Linear(3, 1), rounds=2, metrics=["r2", "mae"]).save(tmp_path / "led")
    train(FedAvg(device_steps=2), data, nn.Linear(3, 1), rounds=2).save(tmp_path / "plain")
    title, _, parts = page_contents.page_of([tmp_path / "led"])
    assert "Test r2 by round" in by_title(parts, blocks.Lines)
    assert "R2 of the devices" in by_title(parts, blocks.Histogram)
    assert "%" not in by_title(parts, blocks.Lines)["Test r2 by round"].y
    render(title, parts)
    title, _, parts = page_contents.page_of([tmp_path / "plain"])
    assert "Test loss by round" in by_title(parts, blocks.Lines)
    assert by_title(parts, blocks.Table)["Summary"].note.startswith("Test loss of the last round")
    render(title, parts)
