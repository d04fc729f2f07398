"""What sFedHP's experiments read of their run folders: bytes of one edge, non-zeros, and what its claims rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean

from polytier.papers.plan import Points, Reading
from polytier.papers.readings import accuracy, by_round, last
from polytier.runs.read import read_history, read_summary

Found = Sequence[Sequence[Path]]  # what a claim is given: the folders of each of its runs
Holds = Callable[[Found], tuple[bool, str]]
Figure = Callable[[Sequence[Path]], float]  # of a run, over its seeds


def one_child(folder: Path, *ways: str) -> list[float]:
    """Bytes of each round between the server and one edge (of a flat method: one device), the mean over all."""
    found = []
    for record in read_history(folder):
        link = next(name for name in record["bytes"] if name.startswith("server-"))
        children = record["participants"][link.removeprefix("server-")]
        found.append(sum(record["bytes"][link][way] for way in ways) / children)
    return found


def cumulated(folders: Sequence[Path]) -> Points:
    """Megabytes of one edge until each round, down and up."""
    sums = [total / 1e6 for total in accumulate(one_child(folders[0], "down", "up"))]
    return range(1, len(sums) + 1), sums


def nonzeros(folders: Sequence[Path]) -> Points:
    """Percent of the global model's parameters that are not zero, after each round but the last.

    From what the server sent in the next round: 64 bits each and 1 bit a parameter, or dense, 64 bits a parameter.
    """
    summary = read_summary(folders[0])
    if summary is None:
        return [], []
    size = summary["parameters"]
    sent = one_child(folders[0], "down")[1:]
    shares = [100.0 if b >= 8 * size else 100 * (b - -(-size // 8)) / (8 * size) for b in sent]
    return range(1, len(shares) + 1), shares


def nonzeros_left(folders: Sequence[Path]) -> Reading:
    return next(iter(last(nonzeros, folders)), None), None


def saved(folders: Sequence[Path]) -> Reading:
    """Percent that one edge of the first run sent less, in all, than one child of the second run's server."""
    ours, theirs = (sum(one_child(folder, "down", "up")) for folder in folders)
    return 100 * (1 - ours / theirs) if theirs else None, None


# -- a figure of a run, over its seeds ----------------------------------------------------------------


def best(model: str) -> Figure:
    """The best round's accuracy, the paper's protocol."""

    def figure(folders: Sequence[Path]) -> float:
        return mean(value for value, _ in (accuracy(model)([folder]) for folder in folders) if value is not None)

    return figure


def final(folders: Sequence[Path]) -> float:
    return mean(last(by_round("global"), folders))


def sparsity(folders: Sequence[Path]) -> float:
    return mean(last(nonzeros, folders))


def speed(folders: Sequence[Path]) -> float:
    """Mean accuracy of the global model over the evaluated rounds: of two that end alike the faster one has more."""
    return mean(float(value) for folder in folders for value in by_round("global")([folder])[1] if value is not None)


# -- claims: what holds of the runs, in their order ---------------------------------------------------


def ahead(
    figure: Figure, names: Sequence[str], firsts: int = 1, margin: float = 0.0,
    of: Callable[[Iterable[float]], float] = max,
) -> Holds:  # fmt: skip
    """The best (of = min: each) of the first runs is more than `margin` above all the others."""

    def holds(runs: Found) -> tuple[bool, str]:
        values = [figure(folders) for folders in runs]
        return of(values[:firsts]) - max(values[firsts:]) > margin, told(names, values)

    return holds


def rising(figure: Figure, names: Sequence[str], sign: int = 1) -> Holds:
    """The figure grows from run to run; with sign -1 it falls."""

    def holds(runs: Found) -> tuple[bool, str]:
        values = [figure(folders) for folders in runs]
        return all(sign * (after - before) > 0 for before, after in pairwise(values)), told(names, values)

    return holds


def told(names: Sequence[str], values: Sequence[float]) -> str:
    return "; ".join(f"{name}: {value:.2f}" for name, value in zip(names, values, strict=True))
