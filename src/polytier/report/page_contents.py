"""The blocks of a page about run folders: summary, charts, configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytier._text import counted, duration, size
from polytier.files.write import write_text
from polytier.models.metrics import MetricInfo
from polytier.report import comparison, curves, device_charts, network_nodes, traffic_charts
from polytier.report.blocks import Cell, Heading, Matrices, Section, Table, Text
from polytier.report.comparison import DONE, LOCAL, SHARE
from polytier.report.finding import finding, of_groups, of_models
from polytier.report.grouping import NO_SETTING, Study, Variant, settings_of, studies
from polytier.report.heatmap import matrices
from polytier.report.intervals import LEVEL, interval, interval_text, with_spread
from polytier.report.page import render
from polytier.runs.read import RunRecord, score
from polytier.runs.read_files import KINDS, RUNNING, Record, check_result
from polytier.tree.collaboration import FILE

UNTIL = 0.9  # default level of metrics for which higher is better
ROOT = Path("/")  # the folders of runs are absolute
WHAT = "What a method or a data set is: polytier list algorithms NAME, polytier list data NAME."
FRAMES, CLIENTS = 16, 96  # rounds and rows of a collaboration matrix


def page_of(folders: Sequence[Path], live: bool = False) -> tuple[str, str, list[Any]]:
    """Title, subtitle and blocks of the page about all runs in these folders.

    Args:
        folders: Run folders, or folders that contain some.
        live: Whether somebody watches: runs under way come first, or else the newest ones, and all others are folded.
    """
    found = studies(folders)
    title = found[0].title if len(found) == 1 else ", ".join(folder.resolve().name for folder in folders)
    return title, contents(found), list(parts_of(found, live))


def contents(found: Sequence[Study]) -> str:
    """How many methods and runs there are, as text."""
    runs = [run for study in found for variant in study.variants for run in variant.runs]
    methods = {variant.like or variant.name for study in found for variant in study.variants}
    late = sum(not run.finished for run in runs)
    return " · ".join(
        (counted(len(methods), "method"), counted(len(runs), "run"), *([f"{late} unfinished"] if late else []))
    )


def parts_of(found: Sequence[Study], live: bool) -> Iterator[Any]:
    """The blocks of each study, one after the other, with a heading if there are several."""
    if len(found) == 1:
        yield from blocks_of(found[0])
        return
    text = f"These runs are on {len(found)} different data sets or models. Each has a separate part below; nothing "
    yield Text(text + "is averaged or compared across them.")
    unfolded = len(found)
    if live:
        now = [study for study in found if running(study)]
        found = sorted(found, key=lambda study: (study not in now, -changed(study)))
        unfolded = len(now) or 1
    for study in found[:unfolded]:
        yield from (Heading(study.title), *blocks_of(study))
    if found[unfolded:]:
        yield Heading("Other runs")
    for study in found[unfolded:]:
        yield Section(f"{study.title} · {contents([study])}", list(blocks_of(study)), folded=True)


def running(study: Study) -> list[Variant]:
    """The runs of a study that are under way."""
    own = [variant for variant in study.variants if not variant.finished]
    return [v for v in own if v.runs[0].state["state"] == RUNNING and not v.runs[0].abandoned]


def changed(study: Study) -> float:
    """When a run of the study was last written to."""
    files = [run.folder / "metrics.jsonl" for variant in study.variants for run in variant.runs]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def write_page(folders: Sequence[Path], path: Path) -> None:
    """Write the page about all runs in these folders to a file."""
    title, subtitle, blocks = page_of(folders)
    write_text(path, render(title, blocks, subtitle))


def blocks_of(study: Study) -> Iterator[Any]:
    """All blocks of a page about one study."""
    found = results(study)
    yield from (Text(progress(variant.runs[0], study.metric), leading=True) for variant in running(study))
    if text := found.finding(study.metric):
        yield Text(text, leading=True)
    yield from map(Text, study.notes)
    for variant in study.variants:
        yield from network_nodes.nodes(variant.runs[0])
    yield summary_table(study, found)
    yield Text(WHAT)
    if study.finished and (models := models_table(study)).rows:
        yield models
    yield from curves.by_round(study)
    parts = {
        "Devices": device_charts.metric_charts(study, alone(study)),
        "Traffic": traffic_charts.traffic(study),
        "Sparsity": traffic_charts.sparsity(study),
        "Who listens to whom": collaboration(study),
        "Data": device_charts.labels(study),
    }
    for title, blocks in parts.items():
        there = [block for block in blocks if block is not None]
        if there:
            yield Section(title, there)
    yield Section("Configuration and seeds", list(configuration(study)), folded=True)


def summary_tables(folders: Sequence[Path], until: float | None = None) -> Iterator[tuple[str, Table, list[str]]]:
    """For each study: its title, the summary and notes on its runs."""
    for study in studies(folders):
        yield study.title, summary_table(study, results(study, until)), study.notes


def collaboration(study: Study) -> Iterator[Matrices]:
    """The weights between clients over time, from the first run of each method that learns them."""
    for variant in study.finished:
        learned = (
            run for run in variant.runs if (run.folder / FILE).exists() or FILE in (run.summary or {}).get("files", ())
        )
        run = next(learned, None)
        if run is not None:
            found = matrices(check_result(run.folder, FILE), FRAMES, CLIENTS)
            title, note = f"{variant.name}, seed {run.seed}", f"{found.title}. {found.note}"
            yield Matrices(title, found.frames, found.groups, note)


# -- the summary --------------------------------------------------------------------------------------


def alone(study: Study) -> Variant | None:
    """The runs of Local that others are compared with; the best ones if there are several settings."""
    own = [variant for variant in study.finished if variant.runs[0].config["algorithm"] == LOCAL]
    metric = study.metric

    def mean(variant: Variant) -> tuple[bool, float]:
        values = (((run.summary or {}).get("personal") or {}).get(metric.name) for run in variant.runs)
        found = interval(values)
        return found is not None, metric.sign * found["mean"] if found else 0.0

    return max(own, key=mean, default=None)


@dataclass(frozen=True)
class Results:
    """The finished runs of a study.

    Args:
        methods: Rows of `comparison.by_method`, the best first.
        records: Those of `comparison.make_records`.
        until: The level of the leading metric up to which bytes are counted.
        local: The name of the runs of Local that others are compared with.
    """

    methods: Sequence[Record]
    records: Sequence[Record]
    until: float | None
    local: str | None

    def finding(self, metric: MetricInfo) -> str:
        """What was found, in words."""
        text = finding(self.methods, comparison.device_values(ROOT, self.records, metric), metric, self.local)
        return text and text + of_models(self.records, metric) + of_groups(self.records)


def results(study: Study, until: float | None = None) -> Results:
    """The results of the finished runs of a study.

    Args:
        study: Runs on the same data.
        until: The level of the leading metric up to which bytes are counted; by default 0.9 if higher is better.
    """
    local, metric = alone(study), study.metric
    until = UNTIL if until is None and metric.better == "higher" else until
    entries = [entry(variant, run) for variant in study.finished for run in variant.runs]
    records = comparison.make_records(ROOT, entries, until, local.name if local else None, metric)
    methods = comparison.by_method(ROOT, records, metric) if records else []
    return Results(methods, records, until, local.name if local else None)


def summary_table(study: Study, results: Results) -> Table:
    """Runs under way; one row per method, the best first; other unfinished runs. Empty columns are left out."""
    metric, found = study.metric, results.methods
    traffic = {v.name: interval(sum(map(sum_of, run.traffic().values())) for run in v.runs) for v in study.variants}
    now = running(study)
    waiting = sorted((v for v in study.variants if not v.finished), key=lambda v: v not in now)
    rows = [method_row(m, results, traffic[m["method"]], metric, len(found) > 1) for m in found]
    late = [unfinished_row(variant, traffic[variant.name], metric) for variant in waiting]
    rows = [*late[: len(now)], *rows, *late[len(now) :]]
    names = dict.fromkeys(name for row in rows for name in row)
    kept = [name for name in names if any(row.get(name, Cell("-")).text not in ("-", "never") for row in rows)]
    notes = [f"T{comparison.means_note(found, metric.name)[1:]}."]
    if len([kind for kind in KINDS if kind in kept]) > 1:
        notes.append("Personal, team, global: one model per device, one per team, one for all devices.")
    if sum(m["best"] for m in found) and len(found) > 1:
        test = f"Wilcoxon signed-rank over devices and seeds, p > {LEVEL}"
        notes.append(f"* the best, or a tie with it: {test}.")
    notes += [f"{note}." for note in comparison.train_longer(found, metric)]
    if results.local:
        notes.append(
            f"Better than Local: share of the devices whose value is worse with {results.local} and the same seed."
        )
    return Table("Summary", kept, [[row.get(name, Cell("-")) for name in kept] for row in rows], " ".join(notes))


def progress(run: RunRecord, metric: MetricInfo) -> str:
    """How far a run is, as a sentence."""
    seen = [
        f"{kind} {score(run.last[kind].get('test'), metric)}" for kind in KINDS if run.last.get(kind, {}).get("test")
    ]
    values = f" Test {metric.name} in round {run.last['round']}: {', '.join(seen)}." if seen else ""
    name = f"{run.config['algorithm']}, seed {run.seed}"
    return f"Under way: {name}, round {run.rounds:,} of {run.wanted:,}.{values}"


def entry(variant: Variant, run: RunRecord) -> dict[str, Any]:
    """A finished run as `comparison.make_records` takes it."""
    names = {"method": variant.name, "seed": run.seed, "folder": str(run.folder.resolve())}
    return {**names, "rounds": run.wanted, "state": DONE, "reason": ""}


def method_row(
    m: Record, results: Results, traffic: dict[str, Any] | None, metric: MetricInfo, marked: bool
) -> dict[str, Cell]:
    """The cells of one method, by column; `m` is its row of `comparison.by_method`."""
    best, until = m["best"] and marked, results.until
    own = [record for record in results.records if record["method"] == m["method"]]
    rounds = max(record["rounds"] for record in own)
    row = {"method": Cell(m["method"] + (" *" if best else ""), m["method"])}
    row |= {kind: metric_cell(m[kind], metric, best and kind == m["judged_by"]) for kind in KINDS}
    row["worst decile"] = metric_cell(m["worst_decile"], metric)
    row["better than Local"] = metric_cell(m["better_than_local"], SHARE)
    row["traffic"] = cell(traffic, size)
    if until is not None:
        reached = m["bytes_until"]
        row[f"bytes until {metric.short(until)}"] = Cell(comparison.until_text(m), reached and reached["mean"])
    row["Rand index of groups"] = cell(m["rand_index"], "{:.2f}".format)
    row["training"] = cell(m["seconds"], duration)
    row["seeds"] = Cell(", ".join(str(record["seed"]) for record in own), len(own))
    return row | {"rounds": Cell(f"{rounds:,}", rounds)}


def sum_of(ways: dict[str, int]) -> int:
    """The bytes of both directions."""
    return sum(ways.values())


def metric_cell(found: dict[str, Any] | None, metric: MetricInfo, best: bool = False) -> Cell:
    """A mean with its interval; sorted by the mean as it is shown."""
    value = found["mean"] * metric.factor if found else None
    return Cell(interval_text(found, metric), value, "good" if best else "" if found else "muted")


def cell(found: dict[str, Any] | None, text: Any) -> Cell:
    """A mean with its interval for values that are not a metric, formatted by `text`."""
    return Cell(with_spread(found, text), found["mean"] if found else None, "" if found else "muted")


def unfinished_row(variant: Variant, traffic: dict[str, Any] | None, metric: MetricInfo) -> dict[str, Cell]:
    """The cells of an unfinished run, with its last values."""
    run = variant.runs[0]
    row = {"method": Cell(variant.name, variant.name, "muted")}
    for kind in KINDS:
        tests = run.last.get(kind, {}).get("test", {})
        value = tests.get(metric.name)
        row[kind] = Cell(score(tests, metric), None if value is None else metric.factor * value, "muted")
    row["traffic"] = cell(traffic, size)
    row["training"] = cell(interval([sum(r.get("seconds", 0) for r in run.history)]), duration)
    row["seeds"] = Cell(str(run.seed), 1)
    return row | {"rounds": Cell(f"{run.rounds:,} of {run.wanted:,}", run.rounds, "bad")}


def models_table(study: Study) -> Table:
    """One row for each of several models on the same devices."""
    rows, metric = [], study.metric
    for variant in study.finished:
        each = [run.summary["models"] for run in variant.runs if run.summary and run.summary.get("models")]
        for name in each[0] if each else ():
            own = [models[name] for models in each if name in models]
            cells = [
                metric_cell(interval([(model[k] or {}).get(metric.name) for model in own], metric.limits), metric)
                for k in KINDS
            ]
            rows.append([variant.name, name, own[0]["algorithm"], *cells])
    kept = [0, 1, 2, *(k for k in range(3, 6) if any(row[k].text != "-" for row in rows))]
    columns, rows = ["run", "model", "method", *KINDS], [[row[k] for k in kept] for row in rows]
    return Table("Several models", [columns[k] for k in kept], rows, f"Test {metric.name} of the last round.")


# -- the configuration --------------------------------------------------------------------------------


def configuration(study: Study) -> Iterator[Table]:
    """The settings that all runs share, the settings that differ, and one line per run."""
    flat = [settings_of(variant.runs[0].config) for variant in study.variants]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    alike = [name for name in names if len({json.dumps(settings.get(name)) for settings in flat}) == 1]
    yield Table("What all runs share", ["setting", "value"], [[name, str(flat[0].get(name))] for name in alike])
    if len(flat) > 1:
        yield Table("What differs", ["method", "settings"], list(differences(study, flat, alike)))
    columns = ["method", "seed", "rounds", "state", "training", "computed with", "folder"]
    yield Table("Runs", columns, [run_row(variant, run) for variant in study.variants for run in variant.runs])


def differences(study: Study, flat: Sequence[dict[str, Any]], alike: Iterable[str]) -> Iterator[list[Cell | str]]:
    """The method and its settings; for an unfinished run only if no finished one has the same."""
    names = {variant.name for variant in study.variants}
    for variant, settings in zip(study.variants, flat, strict=True):
        if variant.finished or variant.like not in names:
            own = [name for name in settings if name not in alike and name != "algorithm"]
            yield [variant.name, ", ".join(f"{name.removeprefix('set.')} = {settings[name]}" for name in own)]


def run_row(variant: Variant, run: RunRecord) -> list[Cell | str]:
    """The cells of a run in the table of all runs."""
    seconds = sum(record.get("seconds", 0) for record in run.history)
    hidden = {k: v for k, v in run.config.items() if k in NO_SETTING and k not in ("seed", "out", "data_dir", "metric")}
    made = hidden.pop("versions", {}) | {k: v for k, v in hidden.items() if v is not None}
    return [
        variant.like or variant.name,
        Cell(str(run.seed), run.seed),
        Cell(f"{run.rounds:,}", run.rounds),
        Cell("done", "done") if run.finished else Cell("unfinished", "unfinished", "bad"),
        Cell(duration(seconds), seconds),
        ", ".join(f"{k} {v}" for k, v in made.items()),
        str(run.folder),
    ]
