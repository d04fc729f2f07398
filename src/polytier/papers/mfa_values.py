"""Functions that read the values of MFA's figures from run folders: the gap to the optimum, and the gain.

The gain is defined as in studies/gain.py: the last round of a run of one model gives the model's target, and T_M is the
first evaluated round of the run of several models in which all of them have reached their targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from math import log10
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from polytier.papers.claims import compare, told
from polytier.papers.plan import Points, Reading
from polytier.papers.run_values import percent
from polytier.papers.stored_runs import open_run

Finished = Sequence[Sequence[Path]]  # for each run, the folders of its finished seeds
NO_DIFFERENCE = 0.05  # smaller differences of log10(F - F*) are ignored
MUCH_MORE = 1.5  # least ratio of the deviations of two methods


# -- the strongly convex problem ----------------------------------------------------------------------


@cache
def optimum() -> float:
    """F* of the tridiagonal problem."""
    import numpy as np

    from polytier.data.synthetic import tridiagonal

    data = tridiagonal()
    hessian, b = data.x.mean(0).numpy(), data.y.mean(0).numpy()
    return float(-0.5 * b @ np.linalg.solve(hessian, b))


def gaps(folder: Path) -> dict[int, list[float]]:
    """log10(F - F*) of every model, by evaluated round."""
    records = (r for r in open_run(folder).history if "models" in r)
    return {
        r["round"]: [log10(m["global"]["train"]["loss"] - optimum()) for m in r["models"].values()] for r in records
    }


def mean_gap(folders: Sequence[Path]) -> Points:
    """The mean gap over the models of a run, by evaluated round."""
    found = gaps(folders[0])
    return list(found), [fmean(models) for models in found.values()]


def spread_of_gaps(folders: Sequence[Path]) -> Points:
    """The standard deviation of the gap over the models of a run, which all have the same task."""
    found = gaps(folders[0])
    return list(found), [stdev(models) for models in found.values()]


def late(folders: Sequence[Path]) -> tuple[float, float]:
    """Mean and standard deviation of the gap over all models and seeds, averaged over the second half of the rounds."""
    seeds = [gaps(folder) for folder in folders]
    rounds = [r for r in seeds[0] if 2 * r > max(seeds[0])]
    models = [[gap for seed in seeds for gap in seed[r]] for r in rounds]
    return fmean(fmean(m) for m in models), fmean(stdev(m) for m in models)


def same_mean(finished: Finished) -> tuple[bool, str]:
    """Whether the mean gaps of MFA-Rand and MFA-RR are about equal."""
    (rand, _), (rr, _) = (late(folders) for folders in finished)
    return abs(rand - rr) <= NO_DIFFERENCE, f"MFA-Rand {rand:.3f}, MFA-RR {rr:.3f}, second half of the rounds"


def rr_lower(finished: Finished) -> tuple[bool | None, str]:
    """Whether the mean gap of MFA-RR is lower than that of MFA-Rand."""
    rand, rr = ([late([folder])[0] for folder in folders] for folders in finished)
    order = compare(rand, rr, NO_DIFFERENCE)
    words = told(["MFA-Rand", "MFA-RR"], [rand, rr], "{:.3f}")
    return None if order == 0 else order > 0, f"{words}, second half of the rounds"


def rand_varies_more(finished: Finished) -> tuple[bool, str]:
    """Whether the gaps of MFA-Rand have a much larger deviation than those of MFA-RR."""
    (_, rand), (_, rr) = (late(folders) for folders in finished)
    told = f"deviation over models and seeds: MFA-Rand {rand:.4f}, MFA-RR {rr:.4f}, second half of the rounds"
    return rand > MUCH_MORE * rr, told


# -- the gain -----------------------------------------------------------------------------------------


def figure(figures: dict[str, Any], split: str) -> float:
    """The accuracy of the global model, or its negative loss if there is no accuracy: higher is better."""
    found = figures["global"][split]
    return found["accuracy"] if "accuracy" in found else -found["loss"]


def judged(folder: Path, split: str) -> list[dict[str, Any]]:
    """The records of rounds that were evaluated on a split."""
    return [r for r in open_run(folder).history if split in r.get("global", {})]


def rounds_together(folders: Sequence[Path], split: str) -> tuple[int, int | None, int]:
    """T_1, T_M (None: not reached) and M.

    Args:
        folders: Runs of one model (one for all models, or one for each), then the run of all models together.
        split: The split on which the models are evaluated.
    """
    *alone, together = folders
    last = [judged(folder, split)[-1] for folder in alone]
    records = judged(together, split)
    number = len(records[0]["models"])
    targets = [figure(r, split) for r in last] * (number if len(last) == 1 else 1)
    for record in records:
        models = record["models"].values()
        if all(figure(m, split) >= target for m, target in zip(models, targets, strict=True)):
            return last[0]["round"], record["round"], number
    return last[0]["round"], None, number


def gain(split: str) -> Callable[[Sequence[Path]], Reading]:
    """The gain M T_1 / T_M; None if a target was not reached."""

    def read(folders: Sequence[Path]) -> Reading:
        single, together, number = rounds_together(folders, split)
        return None if together is None else number * single / together, None

    return read


def gain_by_models(split: str) -> Callable[[Sequence[Path]], Points]:
    """The gain against M.

    The first folder is a run of one model, which has a gain of 1; the others are runs of several models.
    """

    def read(folders: Sequence[Path]) -> Points:
        single, *several = folders
        numbers = [len(judged(folder, split)[0]["models"]) for folder in several]
        return [1, *numbers], [1.0, *(gain(split)([single, folder])[0] for folder in several)]

    return read


def mean_gains(split: str, finished: Finished) -> tuple[list[int], list[float | None]]:
    """M, and the mean gain over seeds; None where a seed did not reach its targets."""
    runs = [{(open_run(folder).summary or {}).get("seed"): folder for folder in folders} for folders in finished]
    shared = [seed for seed in runs[0] if all(seed in run for run in runs)]
    seeds = [gain_by_models(split)([run[seed] for run in runs]) for seed in shared]
    columns = list(zip(*(gains for _, gains in seeds), strict=True))
    means = [fmean([g for g in column if g is not None]) if None not in column else None for column in columns]
    return [int(m) for m in seeds[0][0]], means


def gains_told(numbers: Sequence[int], gains: Sequence[float | None]) -> str:
    """The gains that decide a claim, as text."""
    words = ("not reached" if gain is None else f"{gain:.2f}" for gain in gains)
    return ", ".join(f"M = {m}: {word}" for m, word in zip(numbers, words, strict=True))


def growing(split: str) -> Callable[[Finished], tuple[bool, str]]:
    """Whether the gain grows with M."""

    def holds(finished: Finished) -> tuple[bool, str]:
        numbers, gains = mean_gains(split, finished)
        known = [g for g in gains if g is not None]
        return len(known) == len(gains) and all(a < b for a, b in pairwise(known)), gains_told(numbers, gains)

    return holds


def sublinear(split: str) -> Callable[[Finished], tuple[bool, str]]:
    """Whether the gain grows with M and stays below M."""

    def holds(finished: Finished) -> tuple[bool, str]:
        grows, rests_on = growing(split)(finished)
        numbers, gains = mean_gains(split, finished)
        return grows and all(g is not None and g < m for m, g in list(zip(numbers, gains, strict=True))[1:]), rests_on

    return holds


def above_one(split: str) -> Callable[[Finished], tuple[bool, str]]:
    """Whether the gain is above 1 for every M."""

    def holds(finished: Finished) -> tuple[bool, str]:
        numbers, gains = mean_gains(split, finished)
        return all(g is not None and g > 1 for g in gains[1:]), gains_told(numbers, gains)

    return holds


def accuracy_alone(split: str) -> Callable[[Sequence[Path]], Reading]:
    """The accuracy of the global model in the last round."""

    def read(folders: Sequence[Path]) -> Reading:
        return percent(judged(folders[0], split)[-1]["global"][split]["accuracy"]), None

    return read


def accuracy_together(split: str, name: str) -> Callable[[Sequence[Path]], Reading]:
    """The accuracy of one of the models in round T_M."""

    def read(folders: Sequence[Path]) -> Reading:
        at = rounds_together(folders, split)[1]
        reached = {r["round"]: r["models"][name]["global"][split]["accuracy"] for r in judged(folders[-1], split)}
        return percent(None if at is None else reached[at]), None

    return read
