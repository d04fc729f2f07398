"""Lines over rounds with bands over seeds, from the histories of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polytier.models.metrics import LOSS, MetricInfo
from polytier.report.blocks import Lines, Panels, Series
from polytier.report.grouping import Study, Variant
from polytier.report.heatmap import evenly
from polytier.report.intervals import FEWEST, interval
from polytier.runs.read import JUDGES, RunRecord
from polytier.runs.read_files import Record

POINTS = 240  # of a line; more would not be visible on a page
SPLITS = ("test", "validation", "train")
ABOUT = 1.05  # numbers of gradients up to this factor are the same: some methods draw theirs
BAND = f"Bands: 95 % interval of the mean over seeds (Student's t); with fewer than {FEWEST} seeds, their range."

Pick = Callable[[Record], float | None]  # reads the value that a chart shows from the record of a round


# -- which figures there are --------------------------------------------------------------------------


def figures(record: Record, model: str = "") -> Mapping[str, Any]:
    """The figures of a round by kind of model: of all models together, or of one of several."""
    return record.get("models", {}).get(model, {}) if model else record


def kinds_of(study: Study, model: str = "") -> list[str]:
    """The kinds of models that any method has: personal, teams of all tiers from the devices up, global."""
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
    """The kind of model that a method is judged by."""
    there = {kind for run in variant.runs for record in run.history for kind in kinds if kind in record}
    return next((kind for kind in (*JUDGES, *kinds) if kind in there), None)


def metric_of(study: Study, kinds: Sequence[str]) -> tuple[MetricInfo, str]:
    """The metric and the split that are shown: the leading metric, on test samples if it was measured there."""
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
    order = [(metric, split) for split in SPLITS for metric in (study.metric, LOSS)]
    return next(((metric, split) for metric, split in order if (metric.name, split) in seen), (LOSS, "test"))


def picker(kind: str, split: str, metric: MetricInfo, model: str = "") -> Pick:
    """A function that reads the value of a metric, in the unit shown, from the record of a round."""

    def pick(record: Record) -> float | None:
        value = figures(record, model).get(kind, {}).get(split, {}).get(metric.name)
        return None if value is None else value * metric.factor

    return pick


# -- lines --------------------------------------------------------------------------------------------


def line(
    variant: Variant,
    pick: Pick,
    at: Callable[[RunRecord], Mapping[int, float]] | None = None,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> Series | None:
    """The mean over the seeds at every round that has a value, and a band within `limits`.

    `at` maps rounds to other positions on the axis.
    """
    by_seed = [{r["round"]: value for r in run.history if (value := pick(r)) is not None} for run in variant.runs]
    rounds = sorted(set().union(*by_seed))
    if not rounds:
        return None
    rounds = [rounds[k] for k in evenly(len(rounds), POINTS)]
    values = np.array([[own.get(r, np.nan) for r in rounds] for own in by_seed])  # [seeds, rounds]
    mean, low, high = band(values, limits)
    places = [at(run) for run in variant.runs] if at else []
    x = [float(np.mean([p[r] for p in places if r in p])) for r in rounds] if at else rounds
    return Series(variant.name, x, mean, low, high, not variant.finished, variant.like)


def band(values: np.ndarray, limits: tuple[float, float]) -> tuple[list[float], list[float], list[float]]:
    """Mean, low and high of `intervals.interval` for each column; NaN is no value; one seed has no band."""
    figures = [interval(column[np.isfinite(column)].tolist(), limits) for column in values.T]
    mean, low, high = ([found[key] if found else np.nan for found in figures] for key in ("mean", "low", "high"))
    return (mean, low, high) if len(values) > 1 else (mean, [], [])


def chart(study: Study, title: str, metric: MetricInfo, split: str, pick_of: Callable[[Variant], Pick | None]) -> Lines:
    """A chart with one line per variant; `pick_of` gives what is shown of it."""
    at = gradients if same_work(study) else None
    picks = [(variant, pick) for variant in study.variants if (pick := pick_of(variant))]
    lines = (line(variant, pick, at, limits=metric.axis_limits) for variant, pick in picks)
    x = "gradients per device" if at else "round"
    return Lines(title, x, f"{split} {metric.axis}", [series for series in lines if series], note(study))


def same_work(study: Study) -> bool:
    """Whether methods took different numbers of rounds for the same number of gradients, as by `compare --steps`."""
    runs = [run for variant in study.variants for run in variant.runs]
    if not all(run.finished and run.summary for run in runs) or len({run.rounds for run in runs}) < 2:
        return False
    work = [gradients(run)[run.rounds] for run in runs]
    return 0 < max(work) <= ABOUT * min(work)


def gradients(run: RunRecord) -> dict[int, float]:
    """The gradients that a device of a finished run has computed until each round, averaged over devices."""
    summary = run.summary or {}
    each = summary["device_steps"] / summary["devices"] / run.rounds
    return {number: each * number for number in range(1, run.rounds + 1)}


def note(study: Study) -> str:
    """The note about bands and unfinished runs."""
    bands = BAND if any(len(v.runs) > 1 for v in study.variants) else "One seed each: no bands."
    cut = " Dashed: unfinished runs, up to their last round." if any(not v.finished for v in study.variants) else ""
    return bands + cut


def by_round(study: Study) -> Iterator[Lines | Panels]:
    """Charts by round, or by gradients if methods took different numbers of rounds for the same number of gradients.

    First the model that each method is judged by; then all kinds of models, the losses, and each of several models.
    """
    kinds = kinds_of(study)
    metric, split = metric_of(study, kinds)
    judges = {variant: judge_of(variant, kinds) for variant in study.variants}

    def judged(variant: Variant, metric: MetricInfo) -> Pick | None:
        judge = judges[variant]
        return picker(judge, split, metric) if judge else None

    if not kinds:
        return
    title = f"{split.capitalize()} {metric.name} by {'gradients' if same_work(study) else 'round'}"
    if study.single:
        yield by_kind(study, title, kinds, metric, split)
    else:
        several = len({judge for judge in judges.values() if judge}) > 1
        of = (
            " (of the personal models; of a method without them, of its team models or its global model)"
            if several
            else ""
        )
        main = chart(study, title, metric, split, lambda variant: judged(variant, metric))
        yield replace(main, note=f"Mean over all devices{of}. {main.note}")
        if len(kinds) > 1:
            yield by_kind(study, "Models side by side", kinds, metric, split)
    others = [other for other in study.metrics if other.name not in (metric.name, LOSS.name)]
    if others:
        charts = [chart(study, o.name, o, split, lambda variant, o=o: judged(variant, o)) for o in others]
        yield Panels("Other metrics", [each for each in charts if each.series], note(study))
    if metric.name != LOSS.name:
        yield by_kind(study, f"{split.capitalize()} loss", kinds, LOSS, split)
    if split != "train":
        yield by_kind(study, "Training loss", kinds, LOSS, "train")
    models = {name for v in study.variants for run in v.runs for name in (run.config.get("models") or {})}
    for name in sorted(models):
        yield by_kind(
            study, f"{split.capitalize()} {metric.name} of model {name}", kinds_of(study, name), metric, split, name
        )


def by_kind(
    study: Study, title: str, kinds: Sequence[str], metric: MetricInfo, split: str, model: str = ""
) -> Lines | Panels:
    """All kinds of models: of one method on one axis, of several methods in one chart per kind."""
    charts = [chart(study, kind, metric, split, lambda _, k=kind: picker(k, split, metric, model)) for kind in kinds]
    charts = [each for each in charts if each.series]
    if not study.single or not charts:
        return Panels(title, charts, note(study))
    lines = [
        replace(
            series, name=series.name.replace(series.like or series.name, each.title, 1), like=series.like and each.title
        )
        for each in charts
        for series in each.series
    ]
    which = f"The {charts[0].title} model" if len(charts) == 1 else "Each kind of model"
    return replace(charts[0], title=title, series=lines, note=f"{which}, mean over all devices. {note(study)}")
