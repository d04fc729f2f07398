"""Several methods side by side, from their run folders: the data of compare.json and its table.

A record is a run: method, seed, folder, state, reason and, once it is done, the fields of summary.json and

judged_by         | the kind of model that the method is judged by: personal, else team, else global
bytes_until       | bytes sent until that model's test value reached a level; None if it never did
gradients         | gradients that a device computed in all rounds, averaged over all devices
rand_index        | the adjusted Rand index of the groups that were found, where the true ones are known
better_than_local | share of the devices whose value is better than with Local and the same seed

All methods are judged by one metric: the leading one of the first run, if all runs have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rich.console import Console
from rich.table import Table

from polytier._text import duration, size
from polytier.files.write import write_text
from polytier.models.metrics import LOSS, MetricInfo, describe
from polytier.report.finding import Values, finding
from polytier.report.intervals import LEVEL, interval, interval_text, paired_test, spread_note, with_spread
from polytier.report.tables import line, print_fitting, table
from polytier.runs.csv_cells import as_cell, csv_lines
from polytier.runs.read import JUDGES, RunRecord, bytes_until, judge_of, score
from polytier.runs.read_files import KINDS, Record

FILE, PAGE = "compare.json", "report.html"
WAITING, RUNNING, DONE, INTERRUPTED = "waiting", "running", "done", "interrupted"
NOT_APPLICABLE, DIVERGED, FAILED = "not applicable", "diverged", "failed"
LOCAL = "local"
MANY = 20  # with more methods than this, the progress table shows only those that are running
SHARE = MetricInfo("share", unit="%")
FIFTH = 2  # evaluations that a fifth of a curve needs, to tell a trend from noise
POINT, PART = 0.01, 0.02  # a trend is more than this: of a share, and relative to other values
OTHERS = {  # other figures of a method, with their limits
    "bytes_until": (0, inf),
    "better_than_local": SHARE.limits,
    "gradients": (0, inf),
    "rand_index": (-1, 1),
    "seconds": (0, inf),
}


# -- one run ------------------------------------------------------------------------------------------


def make_records(
    out: Path,
    runs: Iterable[Mapping[str, Any]],
    until: float | None,
    alone: str | None = LOCAL,
    metric: MetricInfo | None = None,
) -> list[Record]:
    """The records of runs.

    Args:
        out: The folder of the comparison.
        runs: Each given by method, seed, folder (its name in `out`), state and reason.
        until: The level of the leading metric up to which bytes are counted; None counts none.
        alone: The method that all others are compared with, device by device.
        metric: What methods are judged by; None: the leading metric of the first run, if all runs have it.
    """
    records = [make_record(out, run) for run in runs]
    done = [record for record in records if record["state"] == DONE]
    metric = metric or metric_of(done)
    local = {r["seed"]: by_device(out, r, metric) for r in done if r["method"] == alone}
    for record in done:
        record["bytes_until"] = sent_until(out, record, until, metric)
        record["better_than_local"] = None
        if record["method"] != alone and record["seed"] in local:
            pairs = paired(by_device(out, record, metric), local[record["seed"]])
            better = [metric.sign * own > metric.sign * other for own, other in pairs]
            record["better_than_local"] = fmean(better) if better else None
    return records


def make_record(out: Path, run: Mapping[str, Any]) -> Record:
    """The fields of a record that depend on this run only."""
    record = dict(run)
    if record["state"] != DONE:
        return record
    found = RunRecord(out / run["folder"])
    record |= found.summary or {}
    record["metrics"] = [metric.as_dict() for metric in found.metrics]
    record["judged_by"] = judge_of(record)
    record["gradients"] = record["device_steps"] / record["devices"]
    record["rand_index"] = record.get("collaboration", {}).get("adjusted_rand_index")
    return record


def metric_of(records: Sequence[Record]) -> MetricInfo:
    """The first metric of the first finished run that all finished runs have; the loss if there is none."""
    listed = [[describe(entry) for entry in record["metrics"]] for record in records if record["state"] == DONE]
    others = [{metric.name for metric in metrics} for metrics in listed[1:]]
    own = listed[0] if listed else []
    return next((metric for metric in own if all(metric.name in names for names in others)), LOSS)


def sent_until(out: Path, record: Record, until: float | None, metric: MetricInfo) -> int | None:
    """The bytes sent until the metric reached a level; None if it never did or none is given."""
    judge = record["judged_by"]
    if until is None or metric.name == LOSS.name or (record[judge] or {}).get(metric.name) is None:
        return None
    found = bytes_until(RunRecord(out / record["folder"]).history, until, judge, metric=metric)
    return found and found[1]


def by_device(out: Path, record: Record, metric: MetricInfo) -> dict[str, float]:
    """The test value of every device that has one, by its id, of the model that the method is judged by."""
    return RunRecord(out / record["folder"]).by_device(record["judged_by"], metric)


def device_values(out: Path, records: Iterable[Record], metric: MetricInfo) -> Values:
    """The test value of every device of finished runs: by method and kind of model, then by seed and device."""
    found: dict[tuple[str, str], dict[tuple[int, str], float]] = {}
    for record in (record for record in records if record["state"] == DONE):
        run = RunRecord(out / record["folder"])
        for kind in KINDS:
            own = {(record["seed"], name): value for name, value in run.by_device(kind, metric).items()}
            found.setdefault((record["method"], kind), {}).update(own)
    return found


def paired(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[float, float]]:
    """The values of devices that are in both mappings, as pairs."""
    return [(value, b[name]) for name, value in a.items() if name in b]


# -- methods ------------------------------------------------------------------------------------------


def by_method(out: Path, records: Sequence[Record], metric: MetricInfo | None = None) -> list[dict[str, Any]]:
    """The figures of each method over its seeds, the best method first.

    Figures are those of `intervals.interval`, over the seeds that have one.
    p_value is that of the paired test against the best method; `best` is true if they do not differ significantly.
    """
    finished = [record for record in records if record["state"] == DONE]
    done = {record["method"]: [r for r in finished if r["method"] == record["method"]] for record in records}
    metric = metric or metric_of(finished)
    rows = [method_row(method, own, metric) for method, own in done.items()]

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        found = row[row["judged_by"]]
        return found is None, 0.0 if found is None else -metric.sign * found["mean"]

    rows.sort(key=rank)
    best = {r["seed"]: by_device(out, r, metric) for r in done[rows[0]["method"]]}
    for k, row in enumerate(rows):
        own = [r for r in done[row["method"]] if k and r["seed"] in best]
        pairs = [pair for r in own for pair in paired(by_device(out, r, metric), best[r["seed"]])]
        row["p_value"] = paired_test(pairs)
        row["best"] = bool(row["seeds"]) and (k == 0 or (row["p_value"] or 0) > LEVEL)
        curves = [test_curve(out, record, metric) for record in done[row["method"]]]
        row["improving"] = is_improving([fmean(values) for values in zip(*curves, strict=False)], metric)
    return rows


def test_curve(out: Path, record: Record, metric: MetricInfo) -> list[float]:
    """The test value of every evaluated round, of the model that the method is judged by."""
    history = RunRecord(out / record["folder"]).history
    found = (r.get(record["judged_by"], {}).get("test", {}).get(metric.name) for r in history)
    return [value for value in found if value is not None]


def is_improving(values: Sequence[float], metric: MetricInfo) -> bool:
    """Whether training ended too early: the last fifth of the values is better than the fifth before it.

    The means must differ by more than a point (1 % of a share, otherwise 2 % of the value) and by more than twice the
    standard error of their difference, so that noise is no trend. False with fewer than ten values.

    Examples:
        >>> is_improving([k / 20 for k in range(20)], SHARE), is_improving([0.5] * 20, SHARE)
        (True, False)
    """
    fifth = len(values) // 5
    if fifth < FIFTH:
        return False
    before, last = values[-2 * fifth : -fifth], values[-fifth:]
    gain = metric.sign * (fmean(last) - fmean(before))
    error = sqrt((variance(before) + variance(last)) / fifth)
    return gain > max(POINT if metric.unit == "%" else PART * abs(fmean(before)), 2 * error)


def method_row(method: str, own: Sequence[Record], metric: MetricInfo) -> dict[str, Any]:
    """The figures of one method; `own` are the records of its finished runs."""
    judge = own[0]["judged_by"] if own else JUDGES[0]
    said = metric.as_dict()
    return {
        "method": method,
        "seeds": len(own),
        "judged_by": judge,
        "metric": said.pop("name"),
        **said,
        **{kind: interval([(r[kind] or {}).get(metric.name) for r in own], metric.limits) for kind in KINDS},
        "worst_decile": interval([(r[judge] or {}).get(f"{metric.name}_worst_decile") for r in own], metric.limits),
        **{name: interval([r[name] for r in own], limits) for name, limits in OTHERS.items()},
    }


def metric_in(row: Mapping[str, Any]) -> MetricInfo:
    """The metric by which a row of `by_method` is judged."""
    return describe({"name": row["metric"], "better": row["better"], "unit": row["unit"]})


# -- for people and programs --------------------------------------------------------------------------


def write(out: Path, settings: dict[str, Any], records: Sequence[Record], methods: Sequence[dict[str, Any]]) -> None:
    """Write compare.json (settings, records, methods) and compare.csv (one line per record)."""
    content = {"settings": settings, "records": records, "methods": methods}
    write_text(out / FILE, json.dumps(content, indent=2) + "\n")
    found = [dict(flat(record)) for record in records]
    columns = dict.fromkeys(name for line in found for name in line)
    rows = [columns, *([line.get(name, "") for name in columns] for line in found)]
    write_text(out / "compare.csv", "".join(csv_lines(map(as_cell, row) for row in rows)))


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The fields of a record as pairs, with names such as personal_loss; lists are left out."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}_")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value


def comparison_columns(
    methods: Sequence[dict[str, Any]], records: Sequence[Record], until: float
) -> dict[str, list[str]]:
    """The cells of each column, one per method, the best first; columns without any value are left out."""
    metric = metric_in(methods[0])
    columns: dict[str, list[str]] = {"method": [f"{m['method']}{' *' if m['best'] else ''}" for m in methods]}
    for kind in KINDS:
        columns[kind] = [interval_text(m[kind], metric) for m in methods]
    columns["worst decile"] = [interval_text(m["worst_decile"], metric) for m in methods]
    columns[f"bytes until {metric.short(until)}"] = [until_text(m) for m in methods]
    columns["better than Local"] = [interval_text(m["better_than_local"], SHARE) for m in methods]
    columns["Rand index of groups"] = [with_spread(m["rand_index"], "{:.2f}".format) for m in methods]
    columns["gradients"] = [f"{m['gradients']['mean']:,.0f}" if m["seeds"] else "-" for m in methods]
    columns["training"] = [with_spread(m["seconds"], duration) for m in methods]
    columns["runs"] = [states(m["method"], records) for m in methods]
    empty = ("-", "never", DONE)
    return {name: cells for name, cells in columns.items() if any(cell not in empty for cell in cells)}


def until_text(row: dict[str, Any]) -> str:
    """The bytes until a level was reached, as text; "never" if no seed reached it."""
    if not row["seeds"] or row["metric"] == LOSS.name:
        return "-"
    if row["bytes_until"] is None:
        return "never"
    reached = row["bytes_until"]["seeds"]
    return with_spread(row["bytes_until"], size) + (f" ({reached} of {row['seeds']})" if reached < row["seeds"] else "")


def states(method: str, records: Sequence[Record]) -> str:
    """ "done", or the states in which the seeds ended."""
    found = [record["state"] for record in records if record["method"] == method]
    kinds = dict.fromkeys(found)
    return ", ".join(kind if len(kinds) == 1 else f"{found.count(kind)} {kind}" for kind in kinds)


def means_note(methods: Sequence[dict[str, Any]], metric: str) -> str:
    """What the figures of a table are, and their spreads, in words."""
    spreads = spread_note(m[name] for m in methods for name in (*KINDS, "worst_decile", "better_than_local"))
    return "; ".join(filter(None, (f"test {metric} of the last round, mean over devices", spreads)))


def train_longer(methods: Sequence[dict[str, Any]], metric: MetricInfo) -> list[str]:
    """A note that names the methods that were still improving at the end; none if there are none."""
    names = ", ".join(m["method"] for m in methods if m["improving"])
    way = "rising" if metric.better == "higher" else "falling"
    return [f"{names}: test {metric.name} still {way}: train longer (--rounds)"] if names else []


def print_comparison(
    console: Console, methods: Sequence[dict[str, Any]], records: Sequence[Record], until: float, out: Path
) -> None:
    """Print the table, its explanation, the reasons for runs that are not done, what was found and where it is."""
    print_fitting(console, comparison_columns(methods, records, until), FILE)
    if any(m["seeds"] for m in methods):
        line(console, means_note(methods, methods[0]["metric"]))
    if any(m["best"] for m in methods):
        line(console, f"* the best, or a tie with it: Wilcoxon signed-rank over devices and seeds, p > {LEVEL}")
    for note in train_longer(methods, metric_in(methods[0])):
        line(console, note)
    why: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if r["reason"]:
            why.setdefault((r["method"], f"{r['state']}: {r['reason']}"), []).append(str(r["seed"]))
    for (method, reason), seeds in why.items():
        line(console, f"{method}, seed {', '.join(seeds)}: {reason}")
    metric = metric_in(methods[0])
    if found := finding(methods, device_values(out, records, metric), metric, LOCAL):
        line(console, f"\n{found}\n")
    line(console, f"folder: {out}")
    if (out / PAGE).is_file():
        line(console, f"page: {out / PAGE}")


def progress_table(out: Path, runs: Sequence[Mapping[str, Any]]) -> Table:
    """The progress of each run: one row per method, one column per seed.

    With more than `MANY` methods, only those that are running are shown.
    """
    seeds = list(dict.fromkeys(run["seed"] for run in runs))
    rows: dict[str, list[str]] = {run["method"]: [run["method"]] for run in runs}
    for seed in seeds:
        for run in runs:
            if run["seed"] == seed:
                rows[run["method"]].append(progress(out / run["folder"], run["state"], run["rounds"]))
    if len(rows) > MANY:
        busy = {run["method"] for run in runs if run["state"] == RUNNING}
        rows = {method: cells for method, cells in rows.items() if method in busy}
    return table(["method", *(f"seed {seed}" for seed in seeds)], rows.values())


def progress(folder: Path, state: str, rounds: int) -> str:
    """The current round and leading metric of a run, or its result."""
    run = RunRecord(folder)
    if state == DONE:
        summary = run.summary or {}
        return score(summary.get(judge_of(summary)), run.metric)
    if state != RUNNING:
        return state
    tests = (r[kind]["test"] for r in reversed(run.history) for kind in JUDGES if "test" in r.get(kind, {}))
    return f"round {run.rounds}/{rounds}, {score(next(tests, None), run.metric)}"
