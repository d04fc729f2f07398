"""Compares the values of a paper with ours: a verdict for each row and claim, and the blocks of the page.

`folders` are the folders of the finished runs, {name of the run: {seed: folder}}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot
from pathlib import Path
from typing import Any

from polytier.papers.plan import Chart, Claim, Curve, Item, Matrix, PlannedRun, Row
from polytier.report import heatmap
from polytier.report.blocks import Cell, Lines, Matrices, Panels, Section, Series, Table, Text
from polytier.report.intervals import interval, with_spread
from polytier.runs.read_files import check_result
from polytier.tree.collaboration import FILE

Folders = Mapping[str, Mapping[int, Path]]
AGREES, HIGHER, LOWER, INCOMPARABLE, MISSING = "agrees", "higher", "lower", "not comparable", "not run"
HOLDS, FAILS, LEVEL, UNTESTED = "holds", "does not hold", "level", "not tested"
STATES = {True: HOLDS, False: FAILS, None: LEVEL}
CLAIM_TONES = {HOLDS: "good", FAILS: "bad", LEVEL: "", UNTESTED: "muted"}
TONES = {AGREES: "good", HIGHER: "", LOWER: "bad", INCOMPARABLE: "muted", MISSING: "muted"}
POINTS, FRAMES, CLIENTS = 300, 12, 100  # points of a curve; rounds and clients of a matrix
RULE = (
    "Our value is the mean over seeds with its 95 % interval (Student's t). A row agrees if the two values differ "
    "by at most the item's margin, or by at most the square root of the sum of squares of our interval's half width "
    "and twice the paper's deviation; otherwise ours is higher or lower. Best: the best round on test data, as "
    "papers report; chosen: the round that is best on validation data. A claim that one value is above another is "
    "level if the 95 % interval of their difference, paired by seed, contains 0; with fewer than three seeds, if they "
    "differ by no more than 0.5 points."
)


# -- figures ------------------------------------------------------------------------------------------


def judge(item: Item, folders: Folders) -> dict[str, Any]:
    """The values and verdicts of an item, for reproduction.json."""
    return {
        "name": item.name,
        "title": item.title,
        "unit": item.unit,
        "margin": item.margin,
        "reduced": item.reduced,
        "rows": [judge_row(row, item.margin, folders) for row in item.rows],
        "claims": [judge_claim(claim, folders) for claim in item.claims],
    }


def judge_row(row: Row, margin: float, folders: Folders) -> dict[str, Any]:
    """Our values for a row, and the verdict."""
    readings = [row.read(each) for each in by_seed(row.runs, folders).values()]
    best, chosen = (interval(reading[k] for reading in readings) for k in (0, 1))
    return {
        "labels": list(row.labels),
        "paper": row.paper,
        "deviation": row.deviation,
        "differs": row.differs,
        "best": {"ours": best, **verdict(best, row, margin)},
        "chosen": {"ours": chosen, **verdict(chosen, row, margin)},
    }


def verdict(ours: dict[str, Any] | None, row: Row, margin: float) -> dict[str, Any]:
    """The difference between our value and the paper's, and the verdict."""
    if ours is None or row.paper is None:
        return {"difference": None, "verdict": MISSING if ours is None else INCOMPARABLE}
    difference = ours["mean"] - row.paper
    if row.differs:
        return {"difference": difference, "verdict": INCOMPARABLE}
    near = abs(difference) <= max(margin, hypot((ours["high"] - ours["low"]) / 2, 2 * (row.deviation or 0)))
    return {"difference": difference, "verdict": AGREES if near else HIGHER if difference > 0 else LOWER}


def judge_claim(claim: Claim, folders: Folders) -> dict[str, Any]:
    """The state of a claim with the seeds that all its runs have finished, and the values that decide it."""
    seeds = by_seed(claim.runs, folders)
    if not seeds:
        return {"text": claim.text, "state": UNTESTED, "rests_on": "", "seeds": 0}
    holds, rests_on = claim.holds(list(zip(*seeds.values(), strict=True)))
    return {"text": claim.text, "state": STATES[holds], "rests_on": rests_on, "seeds": len(seeds)}


def by_seed(runs: Sequence[PlannedRun], folders: Folders) -> dict[int, list[Path]]:
    """The folders of the runs for each seed that all of them have finished."""
    found = [folders.get(run.name, {}) for run in runs]
    seeds = sorted(set.intersection(*(set(each) for each in found)))
    return {seed: [each[seed] for each in found] for seed in seeds}


# -- blocks of the page -------------------------------------------------------------------------------


def section(item: Item, judged: Mapping[str, Any], folders: Folders, why: Mapping[str, str]) -> Section:
    """The part of the page about an item; `why` gives the reason for each missing run by its name."""
    blocks: list[Any] = [Text(f"Reduced here: {item.reduced}.")] if item.reduced else []
    if item.rows:
        blocks.append(verdict_table(item, judged))
    if item.claims:
        blocks.append(claim_table(item, judged))
    blocks += [panels for panels in (charts(item, folders),) if panels.charts]
    blocks += [found for matrix in item.matrices if (found := matrices(matrix, item, folders)) is not None]
    reasons: dict[str, list[str]] = {}
    for run in item.runs():
        if run.name in why:
            reasons.setdefault(why[run.name], []).append(run.name)
    blocks += [Text(f"Not run: {', '.join(names)}. {reason}") for reason, names in reasons.items()]
    blocks += [Text(note) for note in item.notes]
    return Section(f"{item.name}: {item.title}", blocks)


def verdict_table(item: Item, judged: Mapping[str, Any]) -> Table:
    """The table of an item: the paper's values, ours and the verdicts."""
    rows = []
    for row in judged["rows"]:
        paper = number(row["paper"], row["deviation"])
        cells = [*row["labels"], Cell(paper, row["paper"])]
        for how in ("best", "chosen"):
            found = row[how]
            ours, word = found["ours"], found["verdict"]
            cells.append(Cell(with_spread(ours, "{:.2f}".format), ours and ours["mean"]))
            difference = found["difference"]
            cells.append(Cell("-" if difference is None else f"{difference:+.2f}", difference))
            none = ours is None and row["best"]["ours"] is not None  # the runs had no validation samples
            cells.append(Cell("-") if none else Cell(word, tone=TONES[word]))
        rows.append([*cells, Cell(row["differs"], tone="muted")])
    columns = (*item.columns, f"paper ({item.unit})", "ours, best", "difference", "verdict")
    columns = (*columns, "ours, chosen", "difference", "verdict", "why not comparable")
    seeds = {row[how]["ours"]["seeds"] for row in judged["rows"] for how in ("best", "chosen") if row[how]["ours"]}
    many = " to ".join(map(str, sorted({min(seeds), max(seeds)}))) if seeds else ""
    note = f"{many} {'seed' if many == '1' else 'seeds'}; margin {item.margin:g}" if many else ""
    return Table(item.title, *without_empty(columns, rows), note=note)


def without_empty(columns: Sequence[str], rows: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """The table without columns that are empty in all rows."""
    texts = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in rows]
    kept = [k for k in range(len(columns)) if any(row[k] not in ("", "-") for row in texts)]
    return [columns[k] for k in kept], [[row[k] for k in kept] for row in rows]


def number(mean: float | None, spread: float | None) -> str:
    """A mean and its spread, as text."""
    return "-" if mean is None else f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def claim_table(item: Item, judged: Mapping[str, Any]) -> Table:
    """The table of an item's claims."""
    rows = [
        [claim["text"], Cell(claim["state"], tone=CLAIM_TONES[claim["state"]]), claim["rests_on"]]
        for claim in judged["claims"]
    ]
    return Table(f"Claims of the paper about {item.name}", ["in the paper", "here", "decided by"], rows)


def charts(item: Item, folders: Folders) -> Panels:
    """The charts of an item that have at least one curve."""
    drawn = [found for chart in item.charts if (found := lines(chart, folders)).series]
    return Panels(item.title, drawn, f"Reduced: {item.reduced}." if item.reduced else "")


def lines(chart: Chart, folders: Folders) -> Lines:
    """A chart with those curves whose runs have finished."""
    series = [found for curve in chart.curves if (found := mean_curve(curve, folders)) is not None]
    return Lines(chart.title, chart.x, chart.y, series)


def mean_curve(curve: Curve, folders: Folders) -> Series | None:
    """The mean and the 95 % interval over seeds, at the points that all seeds have; None if there are none."""
    found = [dict(zip(*curve.read(each), strict=True)) for each in by_seed(curve.runs, folders).values()]
    x = sorted(set.intersection(*map(set, found))) if found else []
    x = [x[k] for k in heatmap.evenly(len(x), POINTS)] if x else x
    if not x:
        return None
    middle = [interval(points[at] for points in found) for at in x]
    y = [None if m is None else m["mean"] for m in middle]
    if len(found) == 1:
        return Series(curve.name, x, y, dashed=curve.dashed)
    low, high = ([None if m is None else m[bound] for m in middle] for bound in ("low", "high"))
    return Series(curve.name, x, y, low, high, curve.dashed)


def matrices(matrix: Matrix, item: Item, folders: Folders) -> Matrices | None:
    """The collaboration matrices of the first seed over time; None if the run has not finished or has none."""
    seeds = folders.get(matrix.run.name, {})
    folder = seeds[min(seeds)] if seeds else None
    if folder is None or not (folder / FILE).exists():
        return None
    found = heatmap.matrices(check_result(folder, FILE), FRAMES, CLIENTS)
    note = f"{found.title}. {found.note}" + (f" Reduced: {item.reduced}." if item.reduced else "")
    return Matrices(f"{item.name}: {matrix.title}", found.frames, found.groups, note)


def overview(judged: Sequence[Mapping[str, Any]]) -> Table:
    """A table with the number of rows that agree and of claims that hold, for each item."""
    rows = []
    for item in judged:
        words = [row["best"]["verdict"] for row in item["rows"]]
        states = [claim["state"] for claim in item["claims"]]
        tested = len(states) - states.count(UNTESTED)
        said = f"{states.count(HOLDS)} of {tested}" if tested else ""
        counts = [Cell(str(words.count(word) or ""), words.count(word)) for word in TONES]
        rows.append([item["name"], item["title"], *counts, said])
    columns = ["item", "what", *TONES, "claims that hold"]
    return Table("Overview", *without_empty(columns, rows), note="Rows by the best round.")
