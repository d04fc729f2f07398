"""Lines over rounds and bytes, with bands over seeds, from the histories of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polytier.report.blocks import Lines, Panels, Series
from polytier.report.comparison import JUDGES, quantile
from polytier.report.heatmap import evenly
from polytier.report.runs import Record, Run, Study, Variant

POINTS = 240  # of a line; more are not told apart
SPLITS = ("test", "validation", "train")
PER_CENT = {"accuracy": 100.0}
SPARSE = ("sparse", "paper")  # how the names of codecs begin that leave out zeros
BAND = "Bands: 95 % interval of the mean over seeds (Student's t)."

Pick = Callable[[Record], float | None]


# -- which figures there are --------------------------------------------------------------------------


def figures(record: Record, model: str = "") -> Mapping[str, Any]:
    """What a round holds of each kind of model: of all together, or of one of several."""
    return record.get("models", {}).get(model, {}) if model else record


def kinds_of(study: Study, model: str = "") -> list[str]:
    """personal, teams of all tiers from the devices up, global: those that any method has."""
    found = {
        kind
        for variant in study.variants
        for run in variant.runs
        for record in run.history
        for kind, value in figures(record, model).items()
        if isinstance(value, Mapping) and any(split in value for split in SPLITS)
    }
    order = {"personal": 0, "team": 1, "global": 3}
    return sorted(found, key=lambda kind: (order.get(kind, 2), kind))


def judge_of(variant: Variant, kinds: Sequence[str]) -> str | None:
    """The model that speaks for a method."""
    there = {kind for run in variant.runs for record in run.history for kind in kinds if kind in record}
    return next((kind for kind in (*JUDGES, *kinds) if kind in there), None)


def metric_of(study: Study, kinds: Sequence[str]) -> tuple[str, str]:
    """The metric and the split that are shown: accuracy and test if there are any."""
    seen = {
        (metric, split)
        for variant in study.variants
        for run in variant.runs
        for record in run.history
        for kind in kinds
        for split, values in record.get(kind, {}).items()
        for metric, value in values.items()
        if value is not None
    }
    order = [(metric, split) for split in SPLITS for metric in ("accuracy", "loss")]
    return next((pair for pair in order if pair in seen), ("loss", "test"))


def picker(kind: str, split: str, metric: str, model: str = "") -> Pick:
    def pick(record: Record) -> float | None:
        value = figures(record, model).get(kind, {}).get(split, {}).get(metric)
        return None if value is None else value * PER_CENT.get(metric, 1.0)

    return pick


# -- lines --------------------------------------------------------------------------------------------


def line(variant: Variant, pick: Pick, at: Callable[[Run], Mapping[int, float]] | None = None) -> Series | None:
    """The mean over the seeds at every round that has a figure; `at` gives places other than the rounds."""
    by_seed = [{r["round"]: value for r in run.history if (value := pick(r)) is not None} for run in variant.runs]
    rounds = sorted(set().union(*by_seed))
    if not rounds:
        return None
    rounds = [rounds[k] for k in evenly(len(rounds), POINTS)]
    values = np.array([[own.get(r, np.nan) for r in rounds] for own in by_seed])  # [seeds, rounds]
    mean, low, high = band(values)
    places = [at(run) for run in variant.runs] if at else []
    x = [float(np.mean([p[r] for p in places if r in p])) for r in rounds] if at else rounds
    return Series(variant.name, x, mean, low, high, not variant.finished, variant.like)


def band(values: np.ndarray) -> tuple[list[float], list[float], list[float]]:
    """Mean and 95 % interval over the first axis where there is a value, as `comparison.interval`; no band of one."""
    there = np.isfinite(values)
    number, mean = there.sum(0), np.nanmean(values, 0)
    if number.max() < 2:
        return mean.tolist(), [], []
    spread = np.sqrt(np.nansum((values - mean) ** 2, 0) / np.maximum(number - 1, 1) / number)
    half = np.array([quantile(int(n) - 1) if n > 1 else 0.0 for n in number]) * spread
    return mean.tolist(), (mean - half).tolist(), (mean + half).tolist()


def chart(study: Study, title: str, metric: str, split: str, pick_of: Callable[[Variant], Pick | None]) -> Lines:
    lines = (line(variant, pick) for variant in study.variants if (pick := pick_of(variant)))
    return Lines(title, "round", y_label(metric, split), [series for series in lines if series], note(study))


def y_label(metric: str, split: str) -> str:
    return f"{split} {metric}{', %' if metric in PER_CENT else ''}"


def note(study: Study) -> str:
    bands = BAND if any(len(v.runs) > 1 for v in study.variants) else "One seed each: no bands."
    cut = " Dashed: unfinished runs, as far as they have come." if any(not v.finished for v in study.variants) else ""
    return bands + cut


def by_round(study: Study) -> Iterator[Lines | Panels]:
    """The model that speaks for each method, then all kinds side by side, then losses, then each of several models."""
    kinds = kinds_of(study)
    metric, split = metric_of(study, kinds)
    judges = {variant: judge_of(variant, kinds) for variant in study.variants}

    def speaking(variant: Variant) -> Pick | None:
        judge = judges[variant]
        return judge and picker(judge, split, metric)  # type: ignore[return-value]

    if not kinds:
        return
    spoken = dict.fromkeys(judge for judge in judges.values() if judge)
    of = "" if len(spoken) == 1 else " (the personal model, or the global one of a method that has no other)"
    title = f"{split.capitalize()} {metric} by round"
    main = chart(study, title, metric, split, speaking)
    yield Lines(title, main.x, main.y, main.series, f"Mean over all devices{of}. {main.note}")
    if len(kinds) > 1:
        yield side_by_side(study, "Models side by side", kinds, metric, split)
    if metric != "loss":
        yield side_by_side(study, f"{split.capitalize()} loss", kinds, "loss", split)
    if split != "train":
        yield side_by_side(study, "Training loss", kinds, "loss", "train")
    models = {name for v in study.variants for run in v.runs for name in (run.config.get("models") or {})}
    for name in sorted(models):
        yield side_by_side(study, f"Model {name}", kinds_of(study, name), metric, split, name)


def side_by_side(study: Study, title: str, kinds: Sequence[str], metric: str, split: str, model: str = "") -> Panels:
    charts = [chart(study, kind, metric, split, lambda _, k=kind: picker(k, split, metric, model)) for kind in kinds]
    return Panels(title, [each for each in charts if each.series], note(study))


# -- traffic ------------------------------------------------------------------------------------------


def sent(run: Run) -> dict[int, float]:
    """Bytes until each round, on all links, both ways."""
    total, found = 0, {}
    for record in run.history:
        total += sum(sum(ways.values()) for ways in record["bytes"].values())
        found[record["round"]] = float(total)
    return found


def against_bytes(study: Study) -> Lines:
    """Accuracy by what it has cost to get there; a method that sends nothing is a level line."""
    kinds = kinds_of(study)
    metric, split = metric_of(study, kinds)
    lines: list[Series] = []
    for variant in study.variants:
        judge = judge_of(variant, kinds)
        found = line(variant, picker(judge, split, metric), sent) if judge else None
        lines += [found] if found else []
    moving = [series for series in lines if max(series.x) > 0]
    low = min((x for series in moving for x in series.x if x > 0), default=1.0)
    high = max((max(series.x) for series in moving), default=1.0)
    level = [
        Series(series.name, [low, high], [series.y[-1]] * 2, dashed=True, like=series.like)
        for series in lines
        if max(series.x) == 0
    ]
    text = "Bytes on all links, both ways. " + ("Level: sends nothing; its last figure. " if level else "")
    title = f"{split.capitalize()} {metric} against bytes"
    order = {variant.name: k for k, variant in enumerate(study.variants)}
    both = sorted([*moving, *level], key=lambda series: order[series.name]) if moving else []
    return Lines(title, "bytes sent so far", y_label(metric, split), both, text + note(study), "bytes")


def message_sizes(study: Study) -> Panels | None:
    """Bytes a round and participant by link, if zeros are left out of the messages of any method."""
    if not any(str(v.runs[0].config.get("codec", "")).startswith(SPARSE) for v in study.variants):
        return None
    links = dict.fromkeys(link for v in study.variants for run in v.runs for r in run.history for link in r["bytes"])

    def picked(link: str) -> Pick:
        def pick(record: Record) -> float | None:
            number = record.get("participants", {}).get(link.split("-")[-1])
            return sum(record["bytes"][link].values()) / number / 1000 if number and link in record["bytes"] else None

        return pick

    charts = []
    for link in links:
        lines = [found for v in study.variants if (found := line(v, picked(link))) and max(map(abs, found.y)) > 0]  # type: ignore[arg-type]
        charts.append(Lines(link, "round", "kB a node and round", lines))
    text = "What a node below the link sends and gets in a round. Zeros are left out by the codecs sparse and paper. "
    return Panels("Size of messages by round", [each for each in charts if each.series], text + note(study))
