"""Functions that read sFedHP's values from run folders, and the conditions of its claims.

The values are the bytes of one edge, the share of non-zeros and accuracies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from polytier.papers.claims import each_above, first_above, told
from polytier.papers.plan import Points, Reading
from polytier.papers.run_values import accuracy, by_round, last
from polytier.papers.stored_runs import open_run

Found = Sequence[Sequence[Path]]  # for each run of a claim, its folders, one per seed
Holds = Callable[[Found], tuple[bool | None, str]]
Figure = Callable[[Path], float]  # one number of a run with one seed
Choice = Callable[..., Sequence[float]]  # min or max


def one_child(folder: Path, *ways: str) -> list[float]:
    """Bytes of each round between the server and one edge (flat methods: one device), averaged over all of them."""
    found = []
    for record in open_run(folder).history:
        link = next(name for name in record["bytes"] if name.startswith("server-"))
        children = record["participants"][link.removeprefix("server-")]
        found.append(sum(record["bytes"][link][way] for way in ways) / children)
    return found


def cumulated(folders: Sequence[Path]) -> Points:
    """Megabytes that one edge has sent and received up to each round."""
    sums = [total / 1e6 for total in accumulate(one_child(folders[0], "down", "up"))]
    return range(1, len(sums) + 1), sums


def nonzeros(folders: Sequence[Path]) -> Points:
    """Percentage of the global model's parameters that are not zero, after each round except the last.

    It is computed from the bytes that the server sent in the next round: 64 bits per non-zero and 1 bit per parameter,
    or 64 bits per parameter for a dense message.
    """
    summary = open_run(folders[0]).summary
    if summary is None:
        return [], []
    size = summary["parameters"]
    sent = one_child(folders[0], "down")[1:]
    shares = [100.0 if b >= 8 * size else 100 * (b - -(-size // 8)) / (8 * size) for b in sent]
    return range(1, len(shares) + 1), shares


def nonzeros_left(folders: Sequence[Path]) -> Reading:
    """The percentage of non-zeros after the last round for which it is known."""
    return next(iter(last(nonzeros, folders)), None), None


def saved(folders: Sequence[Path]) -> Reading:
    """By how many percent one edge of the first run sent less than one child of the server in the second run."""
    ours, theirs = (sum(one_child(folder, "down", "up")) for folder in folders)
    return 100 * (1 - ours / theirs) if theirs else None, None


# -- a figure of a run ---------------------------------------------------------------------------------


def best(model: str) -> Figure:
    """The accuracy in the best round on test samples, as in the paper."""

    def figure(folder: Path) -> float:
        return accuracy(model)([folder])[0] or 0.0

    return figure


def final(folder: Path) -> float:
    """The accuracy of the global model in the last round."""
    return last(by_round("global"), [folder])[0]


def sparsity(folder: Path) -> float:
    """The percentage of non-zeros at the end of the run."""
    return last(nonzeros, [folder])[0]


def speed(folder: Path) -> float:
    """The mean accuracy of the global model over the evaluated rounds, which is higher for a faster method."""
    return fmean(float(value) for value in by_round("global")([folder])[1] if value is not None)


# -- conditions of claims -----------------------------------------------------------------------------


def ahead(figure: Figure, names: Sequence[str], firsts: int = 1, margin: float = 0.0, of: Choice = max) -> Holds:
    """Whether the best of the first runs (with of = min: the worst of them) is more than `margin` above all others."""

    def holds(runs: Found) -> tuple[bool | None, str]:
        values = [[figure(folder) for folder in folders] for folders in runs]
        own = [value - margin for value in of(values[:firsts], key=sum)]
        return first_above([own, *values[firsts:]]), told(names, values)

    return holds


def rising(figure: Figure, names: Sequence[str], sign: int = 1) -> Holds:
    """Whether the value rises (with sign -1: falls) from run to run: see `each_above`."""

    def holds(runs: Found) -> tuple[bool | None, str]:
        values = [[figure(folder) for folder in folders] for folders in runs]
        return each_above([[sign * value for value in own] for own in values]), told(names, values)

    return holds
