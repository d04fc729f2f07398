"""Claims about curves and values that several papers make, checked on run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from polytier.papers.plan import Claim, PlannedRun, Points, Reading
from polytier.papers.run_values import by_round
from polytier.report.intervals import FEWEST, interval, with_spread

Finished = Sequence[Sequence[Path]]  # for each run, the folders of its finished seeds
Read = Callable[[Sequence[Path]], Reading]
HAIR = 0.5  # percentage points; with fewer than three seeds, values that differ by less are level


def compare(one: Sequence[float], other: Sequence[float], hair: float = HAIR) -> int:
    """1 if the first values are above the others, -1 if they are below, 0 if they are level.

    Args:
        one: A value per seed.
        other: The values of the same seeds.
        hair: With fewer than three seeds, mean differences up to this are level. With three or more, differences are
            level if their 95 % interval (Student's t, paired by seed) contains 0.

    Examples:
        >>> compare([90.0], [89.7]), compare([90.0], [80.0]), compare([90, 91, 92], [89.5, 90.4, 91.5])
        (0, 1, 1)
    """
    found = interval(a - b for a, b in zip(one, other, strict=True))
    assert found is not None, "a claim has a value for every seed"
    low, high = (
        (found["low"], found["high"]) if found["seeds"] >= FEWEST else (found["mean"] - hair, found["mean"] + hair)
    )
    return 1 if low > 0 else -1 if high < 0 else 0


def told(names: Sequence[str], values: Sequence[Sequence[float]], how: str = "{:.2f}") -> str:
    """The values that decide a claim, as text: for each name the values of its seeds."""
    each = zip(names, values, strict=True)
    return ", ".join(f"{name}: {with_spread(interval(own), how.format)}" for name, own in each)


def first_above(values: Sequence[Sequence[float]], hair: float = HAIR) -> bool | None:
    """Whether the first run is above all others; None if it is level with the best of them. Values are by run, seed."""
    own, *others = values
    order = compare(own, max(others, key=sum), hair)
    return None if order == 0 else order > 0


def each_above(values: Sequence[Sequence[float]], hair: float = HAIR) -> bool | None:
    """Whether the last run is above the first and none is below the one before; None if the last and first are level.

    Values are by run and seed.
    """
    if any(compare(after, before, hair) < 0 for before, after in pairwise(values)):
        return False
    order = compare(values[-1], values[0], hair)
    return None if order == 0 else order > 0


def ahead(text: str, runs: Sequence[PlannedRun], names: Sequence[str], reads: Read | Sequence[Read]) -> Claim:
    """The claim that the value of the first run is above the values of all others.

    `reads` reads the value of a run: one function for all runs, or one for each.
    """
    each = [reads] * len(runs) if callable(reads) else reads

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = [[read([f])[0] or 0.0 for f in folders] for read, folders in zip(each, finished, strict=True)]
        return first_above(values), told(names, values)

    return Claim(text, tuple(runs), holds)


def rising(text: str, runs: Sequence[PlannedRun], names: Sequence[str], model: str) -> Claim:
    """The claim that no run is slower than the one before it, and that the last one is faster than the first.

    Speed is the mean test accuracy over the rounds in which all runs were evaluated.
    """

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = over_rounds(by_round(model), finished)
        return each_above(values), told(names, values)

    return Claim(text, tuple(runs), holds)


def fastest(text: str, runs: Sequence[PlannedRun], names: Sequence[str], model: str) -> Claim:
    """The claim that the first run is faster than all others, as in `rising`."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = over_rounds(by_round(model), finished)
        return first_above(values), told(names, values)

    return Claim(text, tuple(runs), holds)


def alike(text: str, runs: Sequence[PlannedRun], names: Sequence[str], model: str, points: float = 2.0) -> Claim:
    """The claim that all runs are equally fast: their mean accuracies over the rounds differ by at most `points`."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = over_rounds(by_round(model), finished)
        means = [sum(own) / len(own) for own in values]
        return max(means) - min(means) <= points, told(names, values)

    return Claim(text, tuple(runs), holds)


def over_rounds(read: Callable[[Sequence[Path]], Points], finished: Finished) -> list[list[float]]:
    """The mean of a curve for each run and seed, over the rounds in which all runs were evaluated."""
    curves = [[dict(zip(*read([folder]), strict=True)) for folder in folders] for folders in finished]
    shared = set.intersection(*(set(points) for seeds in curves for points in seeds))
    assert shared, "the runs of a claim have no evaluated round in common"
    return [[sum(float(points[r] or 0) for r in shared) / len(shared) for points in seeds] for seeds in curves]


def settled(text: str, run: PlannedRun, model: str, rounds: int, points: float = 1.0) -> Claim:
    """The claim that the run is within `points` of its best test accuracy before round `rounds`, with every seed.

    Raises:
        ValueError: The run has no more than `rounds` rounds, so the claim could not fail.
    """
    if run.settings["rounds"] <= rounds:
        raise ValueError(f"{run.name} has {run.settings['rounds']} rounds; more than {rounds} are needed to refute it")

    def holds(finished: Finished) -> tuple[bool | None, str]:
        curves = [by_round(model)([folder]) for folder in finished[0]]
        best = [max(y or 0 for y in accuracies) for _, accuracies in curves]
        reached = [
            next(x for x, y in zip(*curve, strict=True) if (y or 0) >= top - points)
            for curve, top in zip(curves, best, strict=True)
        ]
        return max(reached) < rounds, f"within {points:g} of the best in round {', '.join(f'{r:g}' for r in reached)}"

    return Claim(text, (run,), holds)
