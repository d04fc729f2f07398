"""Several methods side by side, from their run folders; needs no torch.

A record is a run: method, seed, folder, state, reason and, once it is done, the fields of summary.json and

judged_by         | the model that speaks for the method: personal, else global (else team)
bytes_until       | what was sent until its test accuracy was reached; None if it never was
gradients         | what a device computed in all rounds, the mean over all devices
rand_index        | the adjusted Rand index of the groups that were found, where the true ones are known
better_than_local | share of the devices whose accuracy is above that of Local with the same seed
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from polytier._text import duration, size
from polytier.report.tables import line, table
from polytier.runs.read import KINDS, bytes_until, read_devices, read_history, read_summary, score

FILE = "compare.json"
WAITING, RUNNING, DONE, INTERRUPTED = "waiting", "running", "done", "interrupted"
NOT_APPLICABLE, DIVERGED, FAILED = "not applicable", "diverged", "failed"
LOCAL = "local"
JUDGES = ("personal", "global", "team")  # the first one that a method has speaks for it
OTHERS = ("bytes_until", "better_than_local", "gradients", "rand_index", "seconds")
MANY = 20  # methods, of which those that wait or are done are not shown while others run
LEVEL = 0.05  # a paired test with a p-value above it is a tie

Record = dict[str, Any]


# -- one run ------------------------------------------------------------------------------------------


def make_records(out: Path, runs: Iterable[Mapping[str, Any]], until: float, alone: str | None = LOCAL) -> list[Record]:
    """The records of runs, each given by method, seed, folder (its name in `out`), state and reason.

    `alone` is the method that all are compared with, device by device.
    """
    records = [make_record(out, run, until) for run in runs]
    local = {r["seed"]: by_device(out, r) for r in records if r["method"] == alone and r["state"] == DONE}
    for record in records:
        if record["state"] == DONE and record["method"] != alone and record["seed"] in local:
            pairs = paired(by_device(out, record), local[record["seed"]])
            record["better_than_local"] = fmean(own > other for own, other in pairs) if pairs else None
    return records


def make_record(out: Path, run: Mapping[str, Any], until: float) -> Record:
    record, folder = dict(run), out / run["folder"]
    if record["state"] != DONE:
        return record
    record |= read_summary(folder) or {}
    record["judged_by"] = judge = judge_of(record)
    found = bytes_until(read_history(folder), until, judge) if accuracy(record, judge) is not None else None
    record["gradients"] = record["device_steps"] / record["devices"]
    record["rand_index"] = record.get("collaboration", {}).get("adjusted_rand_index")
    return {**record, "bytes_until": found and found[1], "better_than_local": None}


def judge_of(figures: Mapping[str, Any]) -> str:
    """The model that speaks for a method, given the figures of those it has."""
    return next((kind for kind in JUDGES if figures.get(kind)), JUDGES[0])


def accuracy(record: Record, kind: str) -> float | None:
    return (record[kind] or {}).get("accuracy")


def by_device(out: Path, record: Record) -> dict[str, float]:
    """The test accuracy of every device that has test samples, by its id; the mean of several models."""
    return accuracies(read_devices(out / record["folder"]), record["judged_by"])


def accuracies(devices: Mapping[str, Sequence[str]], kind: str) -> dict[str, float]:
    """The same from the columns of devices.csv."""
    own = [values for name, values in devices.items() if f"_{name}".endswith(f"_{kind}_accuracy")]
    rows = ([float(value) for value in row if value] for row in zip(*own, strict=True))
    return {name: fmean(values) for name, values in zip(devices["id"], rows, strict=bool(own)) if values}


def paired(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(value, b[name]) for name, value in a.items() if name in b]


# -- methods ------------------------------------------------------------------------------------------


def by_method(out: Path, records: Sequence[Record]) -> list[dict[str, Any]]:
    """What the seeds of each method come to, the best method first.

    Figures are {mean, half, seeds}: the mean over the seeds that have one, and half the width of its 95 % interval.
    p_value is that of the paired test against the best method; `best` says that there is no difference to it.
    """
    finished = [record for record in records if record["state"] == DONE]
    done = {record["method"]: [r for r in finished if r["method"] == record["method"]] for record in records}
    metric = "accuracy" if any(accuracy(r, r["judged_by"]) is not None for r in finished) else "loss"
    rows = []
    for method, own in done.items():
        judge = own[0]["judged_by"] if own else JUDGES[0]
        figures = {kind: interval((r[kind] or {}).get(metric) for r in own) for kind in KINDS}
        rows.append({
            "method": method, "seeds": len(own), "judged_by": judge, "metric": metric, **figures,
            "worst_decile": interval((r[judge] or {}).get("accuracy_worst_decile") for r in own),
            **{name: interval(r[name] for r in own) for name in OTHERS},
        })  # fmt: skip
    sign = -1 if metric == "accuracy" else 1

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        found = row[row["judged_by"]]
        return found is None, 0.0 if found is None else sign * found["mean"]

    rows.sort(key=rank)
    best = {r["seed"]: by_device(out, r) for r in done[rows[0]["method"]]}
    for k, row in enumerate(rows):
        own = [r for r in done[row["method"]] if k and r["seed"] in best]
        row["p_value"] = paired_test([pair for r in own for pair in paired(by_device(out, r), best[r["seed"]])])
        row["best"] = bool(row["seeds"]) and (k == 0 or (row["p_value"] or 0) > LEVEL)
    return rows


def interval(values: Iterable[float | None]) -> dict[str, Any] | None:
    """The mean and half its 95 % interval (Student's t; None for fewer than two values); None without values."""
    there = [value for value in values if value is not None]
    if len(there) < 2:
        return {"mean": there[0], "half": None, "seeds": 1} if there else None
    half = quantile(len(there) - 1) * stdev(there) / len(there) ** 0.5
    return {"mean": fmean(there), "half": half, "seeds": len(there)}


@cache
def quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def paired_test(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The p-value of the Wilcoxon signed-rank test; None without pairs."""
    if not pairs or all(a == b for a, b in pairs):  # the test itself is not made for no difference at all
        return 1.0 if pairs else None
    from scipy.stats import wilcoxon

    result: Any = wilcoxon([a for a, _ in pairs], [b for _, b in pairs])
    return float(result.pvalue)


# -- for people and programs --------------------------------------------------------------------------


def write(out: Path, settings: dict[str, Any], records: Sequence[Record], methods: Sequence[dict[str, Any]]) -> None:
    """compare.json: settings, records, methods; compare.csv: a line a record."""
    found = {"settings": settings, "records": records, "methods": methods}
    (out / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    lines = [dict(flat(record)) for record in records]
    columns = dict.fromkeys(name for line in lines for name in line)
    with (out / "compare.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Names such as personal_accuracy."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value


def comparison_table(methods: Sequence[dict[str, Any]], records: Sequence[Record], until: float) -> Table:
    """A row a method, the best first; columns that no method has are left out."""
    columns: dict[str, list[str]] = {"method": [f"{m['method']}{' *' if m['best'] else ''}" for m in methods]}
    for kind in KINDS:
        columns[kind] = [shown(m[kind], m["metric"]) for m in methods]
    columns["worst decile"] = [shown(m["worst_decile"], "accuracy") for m in methods]
    columns[f"bytes until {100 * until:g} %"] = [until_text(m) for m in methods]
    columns["better than Local"] = [shown(m["better_than_local"], "accuracy") for m in methods]
    columns["groups found"] = [shown(m["rand_index"], "index") for m in methods]
    columns["gradients"] = [f"{m['gradients']['mean']:,.0f}" if m["seeds"] else "-" for m in methods]
    columns["training"] = [shown(m["seconds"], "seconds") for m in methods]
    columns["runs"] = [states(m["method"], records) for m in methods]
    kept = {name: cells for name, cells in columns.items() if any(cell not in ("-", DONE) for cell in cells)}
    return table(list(kept), zip(*kept.values(), strict=True), right=True)


def shown(found: dict[str, Any] | None, what: str) -> str:
    """mean ± half."""
    if found is None:
        return "-"
    mean, half = found["mean"], found["half"]
    if what == "accuracy":
        return f"{100 * mean:.2f}{'' if half is None else f' ± {100 * half:.2f}'} %"
    text = {"seconds": duration, "bytes": size, "loss": "{:.4g}".format, "index": "{:.2f}".format}[what]
    return f"{'loss ' * (what == 'loss')}{text(mean)}{'' if half is None else f' ± {text(half)}'}"


def until_text(row: dict[str, Any]) -> str:
    if not row["seeds"] or row["metric"] != "accuracy":
        return "-"
    if row["bytes_until"] is None:
        return "never"
    reached = row["bytes_until"]["seeds"]
    return shown(row["bytes_until"], "bytes") + (f" ({reached} of {row['seeds']})" if reached < row["seeds"] else "")


def states(method: str, records: Sequence[Record]) -> str:
    """done, or how the seeds ended."""
    found = [record["state"] for record in records if record["method"] == method]
    kinds = dict.fromkeys(found)
    return ", ".join(kind if len(kinds) == 1 else f"{found.count(kind)} {kind}" for kind in kinds)


def print_comparison(
    console: Console, methods: Sequence[dict[str, Any]], records: Sequence[Record], until: float, out: Path
) -> None:
    """The table, what its mark means, and why runs are not done."""
    console.print(comparison_table(methods, records, until))
    if any(m["best"] for m in methods):
        line(console, f"* the best, or a tie with it: Wilcoxon signed-rank over devices and seeds, p > {LEVEL}")
    why: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if r["reason"]:
            why.setdefault((r["method"], f"{r['state']}: {r['reason']}"), []).append(str(r["seed"]))
    for (method, reason), seeds in why.items():
        line(console, f"{method}, seed {', '.join(seeds)}: {reason}")
    line(console, f"folder: {out}")


def progress_table(out: Path, runs: Sequence[Mapping[str, Any]]) -> Table:
    """How far each run has come: a row a method, a column a seed; of many methods those that run now."""
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
    """The accuracy so far of a run that goes on, or its result."""
    if state == DONE:
        summary = read_summary(folder) or {}
        return score(summary.get(judge_of(summary)))
    if state != RUNNING:
        return state
    history = read_history(folder)
    tests = (r[kind]["test"] for r in reversed(history) for kind in JUDGES if "test" in r.get(kind, {}))
    return f"round {history[-1]['round'] if history else 0}/{rounds}, {score(next(tests, None))}"
