"""Functions that read values from run folders, shared by several papers. Accuracies are in percent.

Each returns a function of the folders of a row's runs for one seed; see plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polytier.models.metrics import describe
from polytier.papers.plan import Points, Reading
from polytier.papers.stored_runs import StoredRun, most_frequent_label, open_run


def accuracy(model: str, of: str | None = None) -> Callable[[Sequence[Path]], Reading]:
    """The test accuracy in the best round on test samples, and in the round chosen on validation samples.

    Args:
        model: "personal", "team" or "global".
        of: The name of one of several models; None if the run has one model.
    """

    def read(folders: Sequence[Path]) -> Reading:
        summary: Any = open_run(folders[0]).summary or {}
        summary = summary if of is None else summary["models"][of]
        best, chosen = (((summary.get(how) or {}).get(model) or {}).get("accuracy") for how in ("best", "chosen"))
        return percent(best), percent(chosen)

    return read


def percent(fraction: float | None) -> float | None:
    """The accuracy in percent, or None."""
    return None if fraction is None else 100 * fraction


def by_round(model: str, split: str = "test", metric: str = "accuracy") -> Callable[[Sequence[Path]], Points]:
    """The value of a metric after each evaluated round; fractions are in percent."""

    def read(folders: Sequence[Path]) -> Points:
        records = [r for r in open_run(folders[0]).history if metric in r.get(model, {}).get(split, {})]
        factor = describe(metric).factor
        return [r["round"] for r in records], [factor * r[model][split][metric] for r in records]

    return read


def last(read: Callable[[Sequence[Path]], Points], folders: Sequence[Path]) -> list[float]:
    """The last point of a curve for each seed; `folders` are the folders of one run."""
    values = (read([folder])[1] for folder in folders)
    return [float(v[-1]) for v in values if len(v) and v[-1] is not None]


def pooled(model: str, rounds: int | None = None) -> Callable[[Sequence[Path]], Reading]:
    """The test accuracy over the samples of all devices together in the best round, as some papers' code computes it.

    The second value is the same in the round whose mean accuracy over devices is best on validation samples.

    Args:
        model: "personal", "team" or "global".
        rounds: Use only the first `rounds` rounds; None for all.
    """

    def read(folders: Sequence[Path]) -> Reading:
        history = open_run(folders[0]).history
        records = [r[model] for r in history if model in r and r["round"] <= (rounds or r["round"])]
        best = max((r["test"]["accuracy_pooled"] for r in records), default=None)
        judged = [r for r in records if "validation" in r]
        chosen = max(judged, key=lambda r: r["validation"]["accuracy"]) if judged else None
        return percent(best), percent(chosen and chosen["test"]["accuracy_pooled"])

    return read


def accuracy_after(model: str, rounds: int, metric: str = "accuracy_pooled") -> Callable[[Sequence[Path]], Reading]:
    """The test accuracy in the last evaluated round up to `rounds`.

    Args:
        model: "personal", "team" or "global".
        rounds: A number of rounds.
        metric: "accuracy_pooled" for the samples of all devices together, "accuracy" for the mean over devices.
    """

    def read(folders: Sequence[Path]) -> Reading:
        records = [r for r in open_run(folders[0]).history if model in r and r["round"] <= rounds]
        return percent(records[-1][model]["test"][metric] if records else None), None

    return read


def most_frequent(how: str) -> Callable[[Sequence[Path]], Reading]:
    """The accuracy of answering each device's most frequent label: "pooled", or the "mean" over devices."""

    def read(folders: Sequence[Path]) -> Reading:
        run = open_run(folders[0])
        shares = run.most_frequent_label if isinstance(run, StoredRun) else most_frequent_label(run.devices)
        return percent(shares.get(how)), None

    return read
