"""Claims about curves and values that several papers make, checked on run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from polytier.papers.plan import Claim, PlannedRun, Points, Reading
from polytier.papers.run_values import by_round

Finished = Sequence[Sequence[Path]]  # for each run, the folders of its finished seeds
SLACK = 0.1  # percentage points; smaller differences are ignored


def told(names: Sequence[str], values: Sequence[float]) -> str:
    """The values that decide a claim, as text."""
    return ", ".join(f"{name}: {value:.2f}" for name, value in zip(names, values, strict=True))


def ahead(
    text: str, runs: Sequence[PlannedRun], names: Sequence[str], read: Callable[[Sequence[Path]], Reading]
) -> Claim:
    """The claim that the value of the first run (read by `read`, mean over seeds) is above the values of all others."""

    def holds(finished: Finished) -> tuple[bool, str]:
        found = [[read([folder])[0] or 0.0 for folder in folders] for folders in finished]
        first, *others = values = [sum(v) / len(v) for v in found]
        return first > max(others), told(names, values)

    return Claim(text, tuple(runs), holds)


def rising(text: str, runs: Sequence[PlannedRun], names: Sequence[str], model: str) -> Claim:
    """The claim that no run is slower than the one before it, and that the last one is faster than the first.

    Speed is the mean test accuracy over the rounds in which all runs were evaluated.
    """

    def holds(finished: Finished) -> tuple[bool, str]:
        values = over_rounds(by_round(model), finished)
        rises = values[-1] > values[0] + SLACK and all(b > a - SLACK for a, b in pairwise(values))
        return rises, told(names, values)

    return Claim(text, tuple(runs), holds)


def alike(text: str, runs: Sequence[PlannedRun], names: Sequence[str], model: str, points: float = 2.0) -> Claim:
    """The claim that all runs are equally fast: their mean accuracies over the rounds differ by at most `points`."""

    def holds(finished: Finished) -> tuple[bool, str]:
        values = over_rounds(by_round(model), finished)
        return max(values) - min(values) <= points, told(names, values)

    return Claim(text, tuple(runs), holds)


def over_rounds(read: Callable[[Sequence[Path]], Points], finished: Finished) -> list[float]:
    """The mean of a curve for each run, over its seeds and over the rounds in which all runs were evaluated."""
    curves = [[dict(zip(*read([folder]), strict=True)) for folder in folders] for folders in finished]
    shared = set.intersection(*(set(points) for seeds in curves for points in seeds))
    assert shared, "the runs of a claim have no evaluated round in common"
    values = [[float(points[r] or 0) for points in seeds for r in shared] for seeds in curves]
    return [sum(v) / len(v) for v in values]


def settled(text: str, run: PlannedRun, model: str, rounds: int, points: float = 1.0) -> Claim:
    """The claim that the run is within `points` of its best test accuracy before round `rounds`, with every seed."""

    def holds(finished: Finished) -> tuple[bool, str]:
        curves = [by_round(model)([folder]) for folder in finished[0]]
        best = [max(y or 0 for y in accuracies) for _, accuracies in curves]
        reached = [
            next(x for x, y in zip(*curve, strict=True) if (y or 0) >= top - points)
            for curve, top in zip(curves, best, strict=True)
        ]
        return max(reached) < rounds, f"within {points:g} of the best in round {', '.join(f'{r:g}' for r in reached)}"

    return Claim(text, (run,), holds)
