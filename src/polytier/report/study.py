"""From run folders to what a page shows of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from polytier._text import duration
from polytier.report import comparison, curves, population
from polytier.report.blocks import Cell, Heading, Section, Table, Text
from polytier.report.comparison import DONE, LOCAL, interval, shown
from polytier.report.runs import NO_SETTING, Run, Study, Variant, settings_of, studies
from polytier.runs.read import KINDS, score

UNTIL = 0.9
FACTORS = {"accuracy": 100.0}


def page_of(folders: Sequence[Path]) -> tuple[str, str, list[Any]]:
    """Title, subtitle and blocks of the page about all runs in these folders."""
    found = studies(folders)
    runs = [run for study in found for variant in study.variants for run in variant.runs]
    methods = {variant.like or variant.name for study in found for variant in study.variants}
    open_ones = sum(not run.finished for run in runs)
    parts = (count(len(methods), "method"), count(len(runs), "run"), f"{open_ones} unfinished" if open_ones else "")
    blocks: list[Any] = []
    if len(found) > 1:
        blocks.append(Text(
            f"These runs are of {len(found)} different data sets or models. Each has a part of its own below: nothing "
            "is averaged or compared across them."
        ))  # fmt: skip
    for study in found:
        blocks += [Heading(study.title), *blocks_of(study)]
    title = found[0].title if len(found) == 1 else ", ".join(folder.resolve().name for folder in folders)
    return title, " · ".join(part for part in parts if part), blocks[1:] if len(found) == 1 else blocks


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def blocks_of(study: Study) -> Iterator[Any]:
    yield from map(Text, study.notes)
    yield summary_table(study)
    if study.finished and (models := models_table(study)).rows:
        yield models
    yield from curves.by_round(study)
    local = alone(study)
    parts = {
        "Devices": population.accuracies(study, local),
        "Traffic": population.traffic(study),
        "Sparsity": population.sparsity(study),
        "Who listens to whom": population.collaboration(study),
        "Data": population.labels(study),
    }
    for title, blocks in parts.items():
        there = [block for block in blocks if block is not None]
        if there:
            yield Section(title, there)
    yield Section("Configuration and seeds", list(configuration(study)), folded=True)


def summary_tables(folders: Sequence[Path], until: float = UNTIL) -> Iterator[tuple[str, Table, list[str]]]:
    """For each data set: its title, the summary and what there is to say about its runs."""
    for study in studies(folders):
        yield study.title, summary_table(study, until), study.notes


# -- the summary --------------------------------------------------------------------------------------


def entry(variant: Variant, run: Run) -> dict[str, Any]:
    names = {"method": variant.name, "seed": run.seed, "folder": str(run.folder.resolve())}
    return {**names, "rounds": run.wanted, "state": DONE, "reason": ""}


def alone(study: Study) -> Variant | None:
    """The runs of Local that others are compared with: of several settings, the best."""
    own = [variant for variant in study.finished if variant.runs[0].config["algorithm"] == LOCAL]

    def mean(variant: Variant) -> float:
        found = interval(((run.summary or {}).get("personal") or {}).get("accuracy") for run in variant.runs)
        return found["mean"] if found else 0.0

    return max(own, key=mean, default=None)


def summary_table(study: Study, until: float = UNTIL) -> Table:
    """A row a method, the best first; then unfinished runs. Columns that none has are left out."""
    local, root = alone(study), Path("/")
    entries = [entry(variant, run) for variant in study.finished for run in variant.runs]
    records = comparison.make_records(root, entries, until, local.name if local else None)
    found = comparison.by_method(root, records) if records else []
    traffic = {v.name: interval(sum(map(sum_of, run.traffic().values())) for run in v.runs) for v in study.variants}
    rows: list[dict[str, Cell]] = []
    for m in found:
        row = {"method": Cell(m["method"] + (" *" if m["best"] and len(found) > 1 else ""), m["method"])}
        row |= {
            kind: cell(m[kind], m["metric"], m["best"] and len(found) > 1 and kind == m["judged_by"]) for kind in KINDS
        }
        row["worst decile"] = cell(m["worst_decile"], "accuracy")
        row["better than Local"] = cell(m["better_than_local"], "accuracy")
        row["traffic"] = cell(traffic[m["method"]], "bytes")
        reached = m["bytes_until"]
        row[f"bytes until {100 * until:g} %"] = Cell(
            comparison.until_text(m).replace(" ± 0 B", ""), reached and reached["mean"]
        )
        row["groups found"] = cell(m["rand_index"], "index")
        row["training"] = cell(m["seconds"], "seconds")
        seeds = [record["seed"] for record in records if record["method"] == m["method"]]
        row["seeds"] = Cell(", ".join(map(str, seeds)), len(seeds))
        row["rounds"] = Cell(f"{records_rounds(records, m['method']):,}", records_rounds(records, m["method"]))
        rows.append(row)
    rows += [unfinished_row(variant, traffic[variant.name]) for variant in study.variants if not variant.finished]
    names = dict.fromkeys(name for row in rows for name in row)
    kept = [name for name in names if any(row.get(name, Cell("-")).text not in ("-", "never") for row in rows)]
    metric = found[0]["metric"] if found else "accuracy"
    notes = [f"Test {metric} of the last round, mean over devices, ± half the 95 % interval over seeds."]
    if sum(m["best"] for m in found) and len(found) > 1:
        test = f"Wilcoxon signed-rank over devices and seeds, p > {comparison.LEVEL}"
        notes.append(f"* the best, or a tie with it: {test}.")
    if local:
        notes.append(f"Better than Local: share of the devices that {local.name} of the same seed serves worse.")
    return Table("Summary", kept, [[row.get(name, Cell("-")) for name in kept] for row in rows], " ".join(notes))


def sum_of(ways: dict[str, int]) -> int:
    return sum(ways.values())


def records_rounds(records: Iterable[dict[str, Any]], method: str) -> int:
    return max(record["rounds"] for record in records if record["method"] == method)


def cell(found: dict[str, Any] | None, what: str, best: bool = False) -> Cell:
    value = found["mean"] * FACTORS.get(what, 1.0) if found else None
    exact = found and {**found, "half": found["half"] or None}  # without "± 0"
    return Cell(shown(exact, what), value, "good" if best else "" if found else "muted")


def unfinished_row(variant: Variant, traffic: dict[str, Any] | None) -> dict[str, Cell]:
    """What it has so far."""
    run = variant.runs[0]
    judged = next((r for r in reversed(run.history) if any(kind in r for kind in KINDS)), {})
    row = {"method": Cell(variant.name, variant.name, "muted")}
    for kind in KINDS:
        tests = judged.get(kind, {}).get("test", {})
        accuracy = tests.get("accuracy")
        row[kind] = Cell(score(tests), tests.get("loss") if accuracy is None else 100 * accuracy, "muted")
    row["traffic"] = cell(traffic, "bytes")
    row["training"] = cell(interval([sum(r.get("seconds", 0) for r in run.history)]), "seconds")
    row["seeds"] = Cell(str(run.seed), 1)
    return row | {"rounds": Cell(f"{run.rounds:,} of {run.wanted:,}", run.rounds, "bad")}


def models_table(study: Study) -> Table:
    """Several models on one pool, one by one."""
    rows = []
    for variant in study.finished:
        each = [run.summary["models"] for run in variant.runs if run.summary and run.summary.get("models")]
        for name in each[0] if each else ():
            own = [models[name] for models in each if name in models]
            cells = [cell(interval((model[k] or {}).get("accuracy") for model in own), "accuracy") for k in KINDS]
            rows.append([variant.name, name, own[0]["algorithm"], *cells])
    kept = [0, 1, 2, *(k for k in range(3, 6) if any(row[k].text != "-" for row in rows))]
    columns, rows = ["run", "model", "method", *KINDS], [[row[k] for k in kept] for row in rows]
    return Table("Models on one pool", [columns[k] for k in kept], rows, "Test accuracy of the last round.")


# -- the configuration --------------------------------------------------------------------------------


def configuration(study: Study) -> Iterator[Table]:
    flat = [settings_of(variant.runs[0].config) for variant in study.variants]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    alike = [name for name in names if len({json.dumps(settings.get(name)) for settings in flat}) == 1]
    yield Table("What all runs share", ["setting", "value"], [[name, str(flat[0].get(name))] for name in alike])
    own = [
        (variant, settings)
        for variant, settings in zip(study.variants, flat, strict=True)
        if variant.finished or variant.like not in {other.name for other in study.variants}
    ]
    rows = []
    for variant, settings in own:
        differ = [name for name in settings if name not in alike and name != "algorithm"]
        rows.append([variant.name, ", ".join(f"{name.removeprefix('set.')} = {settings[name]}" for name in differ)])
    if len(flat) > 1:
        yield Table("What differs", ["method", "settings"], rows)
    columns = ["method", "seed", "rounds", "state", "training", "computed with", "folder"]
    yield Table("Runs", columns, [run_row(variant, run) for variant in study.variants for run in variant.runs])


def run_row(variant: Variant, run: Run) -> list[Cell | str]:
    seconds = sum(record.get("seconds", 0) for record in run.history)
    hidden = {k: v for k, v in run.config.items() if k in NO_SETTING and k not in ("seed", "out", "data_dir")}
    made = hidden.pop("versions", {}) | {k: v for k, v in hidden.items() if v is not None}
    state = Cell("done", "done") if run.finished else Cell("unfinished", "unfinished", "bad")
    return [
        variant.like or variant.name, Cell(str(run.seed), run.seed), Cell(f"{run.rounds:,}", run.rounds), state,
        Cell(duration(seconds), seconds), ", ".join(f"{k} {v}" for k, v in made.items()), str(run.folder),
    ]  # fmt: skip
