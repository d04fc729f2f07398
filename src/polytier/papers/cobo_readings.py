"""What CoBo's tables and figures read of run folders, and the conditions of its claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from polytier.models.metrics import ACCURACY
from polytier.papers.plan import Points, Reading
from polytier.papers.readings import accuracy, by_round
from polytier.runs.read import RunRecord
from polytier.tree.collaboration import FILE, load

Finished = Sequence[Sequence[Path]]  # for each run the folders of its finished seeds
Holds = Callable[[Finished], tuple[bool, str]]
CLEARLY = 0.1  # by which the mean weight within true groups exceeds that between them


# -- rows and curves ----------------------------------------------------------------------------------


def loss(model: str) -> Callable[[Sequence[Path]], Reading]:
    """The test loss in the round with the best test accuracy, and in the round chosen on validation samples."""

    def read(folders: Sequence[Path]) -> Reading:
        summary: Any = RunRecord(folders[0]).summary or {}
        best, chosen = (((summary.get(how) or {}).get(model) or {}).get("loss") for how in ("best", "chosen"))
        return best, chosen

    return read


def improved(folders: Sequence[Path]) -> Reading:
    """Share of the devices whose accuracy is above that of the second run after the last round, %."""
    own, other = (by_device(folder) for folder in folders)
    assert own.keys() == other.keys(), "both runs have the same devices"
    return 100 * fmean(own[device] > other[device] for device in own), None


def by_device(folder: Path) -> dict[str, float]:
    """The test accuracy of each device with its personal model, or with the global one if it has none."""
    run = RunRecord(folder)
    return run.by_device("personal", ACCURACY) or run.by_device("global", ACCURACY)


def against(x: Sequence[float]) -> Callable[[Sequence[Path]], Points]:
    """The accuracy of each run; `x` are the values in which the runs differ."""

    def read(folders: Sequence[Path]) -> Points:
        return list(x), [accuracy("personal")([folder])[0] for folder in folders]

    return read


def until(percent: float) -> Callable[[Sequence[Path]], Reading]:
    """The first evaluated round with this accuracy."""

    def read(folders: Sequence[Path]) -> Reading:
        rounds, values = by_round("personal")(folders)
        return next((r for r, v in zip(rounds, values, strict=True) if v is not None and v >= percent), None), None

    return read


# -- claims -------------------------------------------------------------------------------------------


def means(finished: Finished, models: Sequence[str] | None = None) -> list[float]:
    """The accuracy of each run in its best round, mean over seeds."""
    models = models or ["personal"] * len(finished)
    found = [[accuracy(model)([f])[0] or 0.0 for f in folders] for model, folders in zip(models, finished, strict=True)]
    return [fmean(values) for values in found]


def told(names: Sequence[Any], values: Sequence[float]) -> str:
    return ", ".join(f"{name}: {value:.2f}" for name, value in zip(names, values, strict=True))


def first_of(names: Sequence[str], methods: Sequence[str]) -> Holds:
    """Whether the first run has the highest accuracy."""

    def holds(finished: Finished) -> tuple[bool, str]:
        values = means(finished, ["global" if method == "fedavg" else "personal" for method in methods])
        return values[0] > max(values[1:]), told(names, values)

    return holds


def highest(names: Mapping[str, Any], place: int) -> Holds:
    """Whether the run at index `place` has the highest accuracy."""

    def holds(finished: Finished) -> tuple[bool, str]:
        values = means(finished)
        return values[place] == max(values), told(list(names)[: len(values)], values)

    return holds


def near(names: Mapping[str, Any], points: float) -> Holds:
    """Whether no run is more than `points` below the last one."""

    def holds(finished: Finished) -> tuple[bool, str]:
        values = means(finished)
        return min(values) >= values[-1] - points, told(list(names), values)

    return holds


def rising(x: Sequence[float]) -> Holds:
    """Whether the accuracy rises from run to run."""

    def holds(finished: Finished) -> tuple[bool, str]:
        values = means(finished)
        return all(a < b for a, b in pairwise(values)), told(x, values)

    return holds


def level(x: Sequence[float], points: float) -> Holds:
    """Whether all accuracies lie within `points`."""

    def holds(finished: Finished) -> tuple[bool, str]:
        values = means(finished)
        return max(values) - min(values) <= points, told(x, values)

    return holds


def faster(percent: float, times: float) -> Holds:
    """Whether the first run needs at most `times` as many iterations as the second to reach an accuracy."""

    def holds(finished: Finished) -> tuple[bool, str]:
        found = [[until(percent)([folder])[0] for folder in folders] for folders in finished]
        if any(None in rounds for rounds in found):
            return False, f"{percent:g} % are not reached by all"
        own, other = (fmean(r for r in rounds if r is not None) for rounds in found)
        return own <= times * other, f"{percent:g} % after {own:g} and {other:g} iterations"

    return holds


# -- claims about who listens to whom -----------------------------------------------------------------


def matches(folder: Path) -> dict[int, dict[str, float]]:
    """How well the groups found match the true ones, by round."""
    snapshots, true = load(folder / FILE)
    assert true is not None, "clusters that are made are known"
    return {number: one.match(true) for number, one in snapshots.items()}


def found(most: int) -> Holds:
    """Whether, with every seed, all groups are right from some iteration up to `most` on."""

    def since(folder: Path) -> int | None:
        first = None
        for number, match in sorted(matches(folder).items()):
            first = None if match["adjusted_rand_index"] < 1 else first or number
        return first

    def holds(finished: Finished) -> tuple[bool, str]:
        rounds = [since(folder) for folder in finished[0]]
        words = ", ".join("never" if r is None else f"from iteration {r} on" for r in rounds)
        return all(r is not None and r <= most for r in rounds), words

    return holds


def parted(by: int) -> Holds:
    """Whether the mean weight within groups is above that between them in the first saved iteration from `by` on."""

    def holds(finished: Finished) -> tuple[bool, str]:
        kept = [sorted((n, m) for n, m in matches(folder).items() if n >= by)[0] for folder in finished[0]]
        words = ", ".join(f"{match['contrast']:.2f} after {number}" for number, match in kept)
        return all(match["contrast"] >= CLEARLY for _, match in kept), f"mean weight within above between: {words}"

    return holds


def one_cluster(finished: Finished) -> tuple[bool, str]:
    """Whether one group is left after the last round."""
    groups = [matches(folder) for folder in finished[0]]
    numbers = [int(each[max(each)]["groups"]) for each in groups]
    return all(number == 1 for number in numbers), f"clusters in the end: {', '.join(map(str, numbers))}"


def mistakes(finished: Finished) -> tuple[bool, str]:
    """Whether a group is wrong at some iteration of the second half."""
    lowest = 1.0
    for match in (matches(folder) for folder in finished[0]):
        lowest = min(lowest, *(m["adjusted_rand_index"] for number, m in match.items() if 2 * number > max(match)))
    return lowest < 1, f"lowest adjusted Rand index: {lowest:.2f}"
