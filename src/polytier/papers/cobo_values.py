"""Functions that read the values of CoBo's tables and figures from run folders, and the conditions of its claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polytier.models.metrics import ACCURACY
from polytier.papers import claims
from polytier.papers.claims import each_above, first_above
from polytier.papers.plan import Points, Reading
from polytier.papers.run_values import accuracy, by_round
from polytier.runs.read import RunRecord
from polytier.tree.collaboration import FILE, load

Finished = Sequence[Sequence[Path]]  # for each run, the folders of its finished seeds
Holds = Callable[[Finished], tuple[bool | None, str]]
CLEARLY = 0.1  # least difference of the mean weights within and between true groups


# -- rows and curves ----------------------------------------------------------------------------------


def loss(model: str) -> Callable[[Sequence[Path]], Reading]:
    """The test loss in the round with the best test accuracy, and in the round chosen on validation samples."""

    def read(folders: Sequence[Path]) -> Reading:
        summary: Any = RunRecord(folders[0]).summary or {}
        best, chosen = (((summary.get(how) or {}).get(model) or {}).get("loss") for how in ("best", "chosen"))
        return best, chosen

    return read


def improved(folders: Sequence[Path]) -> Reading:
    """Percentage of devices whose accuracy after the last round is higher in the first run than in the second."""
    own, other = (by_device(folder) for folder in folders)
    assert own.keys() == other.keys(), "the runs have different devices"
    return 100 * fmean(own[device] > other[device] for device in own), None


def by_device(folder: Path) -> dict[str, float]:
    """The test accuracy of each device with its personal model, or with the global model if it has none."""
    run = RunRecord(folder)
    return run.by_device("personal", ACCURACY) or run.by_device("global", ACCURACY)


def against(x: Sequence[float]) -> Callable[[Sequence[Path]], Points]:
    """The accuracy of each run against `x`, the values in which the runs differ."""

    def read(folders: Sequence[Path]) -> Points:
        return list(x), [accuracy("personal")([folder])[0] for folder in folders]

    return read


def until(percent: float) -> Callable[[Sequence[Path]], Reading]:
    """The first evaluated round with at least this accuracy; None if there is none."""

    def read(folders: Sequence[Path]) -> Reading:
        rounds, values = by_round("personal")(folders)
        return next((r for r, v in zip(rounds, values, strict=True) if v is not None and v >= percent), None), None

    return read


# -- claims -------------------------------------------------------------------------------------------


def accuracies(finished: Finished, models: Sequence[str] | None = None) -> list[list[float]]:
    """The accuracy of each run and seed in its best round."""
    models = models or ["personal"] * len(finished)
    return [[accuracy(model)([f])[0] or 0.0 for f in own] for model, own in zip(models, finished, strict=True)]


def told(names: Sequence[Any], values: Sequence[float]) -> str:
    """The values that decide a claim, as text."""
    return ", ".join(f"{name}: {value:.2f}" for name, value in zip(names, values, strict=True))


def first_of(names: Sequence[str], methods: Sequence[str]) -> Holds:
    """Whether the first run has the highest accuracy."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = accuracies(finished, ["global" if method == "fedavg" else "personal" for method in methods])
        return first_above(values), claims.told(names, values)

    return holds


def highest(names: Mapping[str, Any], place: int) -> Holds:
    """Whether the run at index `place` has the highest accuracy."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = accuracies(finished)
        others = [own for k, own in enumerate(values) if k != place]
        return first_above([values[place], *others]), claims.told(list(names)[: len(values)], values)

    return holds


def near(names: Mapping[str, Any], points: float) -> Holds:
    """Whether no run is more than `points` below the last one."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = accuracies(finished)
        means = [fmean(own) for own in values]
        return min(means) >= means[-1] - points, claims.told(list(names), values)

    return holds


def rising(x: Sequence[float]) -> Holds:
    """Whether the accuracy increases from run to run: see `each_above`."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = accuracies(finished)
        return each_above(values), claims.told([str(each) for each in x], values)

    return holds


def level(x: Sequence[float], points: float) -> Holds:
    """Whether all accuracies differ by at most `points`."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        values = accuracies(finished)
        means = [fmean(own) for own in values]
        return max(means) - min(means) <= points, claims.told([str(each) for each in x], values)

    return holds


def faster(percent: float, times: float) -> Holds:
    """Whether the first run needs at most `times` the iterations of the second run to reach `percent`."""

    def holds(finished: Finished) -> tuple[bool, str]:
        found = [[until(percent)([folder])[0] for folder in folders] for folders in finished]
        if any(None in rounds for rounds in found):
            return False, f"{percent:g} % is not reached by both runs"
        own, other = (fmean(r for r in rounds if r is not None) for rounds in found)
        return own <= times * other, f"{percent:g} % after {own:g} and {other:g} iterations"

    return holds


# -- claims about who listens to whom -----------------------------------------------------------------


def matches(folder: Path) -> dict[int, dict[str, float]]:
    """How well the groups found match the true groups, by round."""
    snapshots, true = load(folder / FILE)
    assert true is not None, "the true groups are not known"
    return {number: one.match(true) for number, one in snapshots.items()}


def found(most: int) -> Holds:
    """Whether, with every seed, all groups are correct from an iteration that is at most `most` until the end."""

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
    """Whether the weights separate the groups in the first saved iteration that is at least `by`.

    They do if the mean weight within groups exceeds the mean weight between groups by at least `CLEARLY`.
    """

    def holds(finished: Finished) -> tuple[bool, str]:
        kept = [sorted((n, m) for n, m in matches(folder).items() if n >= by)[0] for folder in finished[0]]
        words = ", ".join(f"{match['contrast']:.2f} after {number}" for number, match in kept)
        return all(
            match["contrast"] >= CLEARLY for _, match in kept
        ), f"mean weight within groups minus that between them: {words}"

    return holds


def one_cluster(finished: Finished) -> tuple[bool, str]:
    """Whether there is only one group after the last round."""
    groups = [matches(folder) for folder in finished[0]]
    numbers = [int(each[max(each)]["groups"]) for each in groups]
    return all(
        number == 1 for number in numbers
    ), f"number of clusters after the last round: {', '.join(map(str, numbers))}"


def mistakes(finished: Finished) -> tuple[bool, str]:
    """Whether the groups are wrong in some iteration of the second half."""
    lowest = 1.0
    for match in (matches(folder) for folder in finished[0]):
        lowest = min(lowest, *(m["adjusted_rand_index"] for number, m in match.items() if 2 * number > max(match)))
    return lowest < 1, f"lowest adjusted Rand index: {lowest:.2f}"
