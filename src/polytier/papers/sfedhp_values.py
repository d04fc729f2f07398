"""Functions that read sFedHP's values from run folders, and the conditions of its claims.

The values are the bytes of one edge, the share of non-zeros and accuracies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean

from polytier.papers.plan import Points, Reading
from polytier.papers.run_values import accuracy, by_round, last
from polytier.papers.stored_runs import open_run

Found = Sequence[Sequence[Path]]  # for each run of a claim, its folders, one per seed
Holds = Callable[[Found], tuple[bool, str]]
Figure = Callable[[Sequence[Path]], float]  # one number of a run, from the folders of its seeds


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


# -- a figure of a run, over its seeds ----------------------------------------------------------------


def best(model: str) -> Figure:
    """The accuracy in the best round on test samples, as in the paper."""

    def figure(folders: Sequence[Path]) -> float:
        return mean(value for value, _ in (accuracy(model)([folder]) for folder in folders) if value is not None)

    return figure


def final(folders: Sequence[Path]) -> float:
    """The accuracy of the global model in the last round."""
    return mean(last(by_round("global"), folders))


def sparsity(folders: Sequence[Path]) -> float:
    """The percentage of non-zeros at the end of the run."""
    return mean(last(nonzeros, folders))


def speed(folders: Sequence[Path]) -> float:
    """The mean accuracy of the global model over the evaluated rounds, which is higher for a faster method."""
    return mean(float(value) for folder in folders for value in by_round("global")([folder])[1] if value is not None)


# -- conditions of claims -----------------------------------------------------------------------------


def ahead(
    figure: Figure,
    names: Sequence[str],
    firsts: int = 1,
    margin: float = 0.0,
    of: Callable[[Iterable[float]], float] = max,
) -> Holds:
    """Whether the best of the first runs (with of = min: each of them) is more than `margin` above all others."""

    def holds(runs: Found) -> tuple[bool, str]:
        values = [figure(folders) for folders in runs]
        return of(values[:firsts]) - max(values[firsts:]) > margin, told(names, values)

    return holds


def rising(figure: Figure, names: Sequence[str], sign: int = 1) -> Holds:
    """Whether the value rises (with sign -1: falls) from each run to the next."""

    def holds(runs: Found) -> tuple[bool, str]:
        values = [figure(folders) for folders in runs]
        return all(sign * (after - before) > 0 for before, after in pairwise(values)), told(names, values)

    return holds


def told(names: Sequence[str], values: Sequence[float]) -> str:
    """The values that decide a claim, as text."""
    return "; ".join(f"{name}: {value:.2f}" for name, value in zip(names, values, strict=True))
