"""Readings of run folders that several papers share; needs no torch.

Accuracies are percent here, as the papers print them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polytier.papers.plan import Points, Reading
from polytier.runs.read import read_history, read_summary


def accuracy(model: str, of: str | None = None) -> Callable[[Sequence[Path]], Reading]:
    """Test accuracy of "personal", "team" or "global", `of` one of several models: best round on test, and chosen."""

    def read(folders: Sequence[Path]) -> Reading:
        summary: Any = read_summary(folders[0]) or {}
        summary = summary if of is None else summary["models"][of]
        best, chosen = (((summary.get(how) or {}).get(model) or {}).get("accuracy") for how in ("best", "chosen"))
        return percent(best), percent(chosen)

    return read


def percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def by_round(model: str, split: str = "test", metric: str = "accuracy") -> Callable[[Sequence[Path]], Points]:
    """The figure after each evaluated round; accuracies in percent."""

    def read(folders: Sequence[Path]) -> Points:
        records = [r for r in read_history(folders[0]) if metric in r.get(model, {}).get(split, {})]
        scale = 100 if metric == "accuracy" else 1
        return [r["round"] for r in records], [scale * r[model][split][metric] for r in records]

    return read


def last(read: Callable[[Sequence[Path]], Points], folders: Sequence[Path]) -> list[float]:
    """The last point of a curve for each seed; `folders` are those of one run."""
    values = (read([folder])[1] for folder in folders)
    return [float(v[-1]) for v in values if len(v) and v[-1] is not None]


def pooled(model: str, rounds: int | None = None) -> Callable[[Sequence[Path]], Reading]:
    """Test accuracy as some papers' code counts it: right answers of all devices together, in the best round.

    And by our protocol: the mean over devices, in the round that is best on validation. Of the first `rounds`.
    """

    def read(folders: Sequence[Path]) -> Reading:
        records = [r[model] for r in read_history(folders[0]) if model in r and r["round"] <= (rounds or r["round"])]
        best = max((r["test"]["accuracy_pooled"] for r in records), default=None)
        judged = [r for r in records if "validation" in r]
        chosen = max(judged, key=lambda r: r["validation"]["accuracy"]) if judged else None
        return percent(best), percent(chosen and chosen["test"]["accuracy"])

    return read
