"""The parts of a paper's plan: its runs, the values that the paper reports, and how ours are read from run folders.

A paper is a module with `items(scale) -> list[Item]`. The scale "full" has the paper's rounds, sizes and number of
seeds; "quick" is a smaller version of the same tables and figures that takes minutes. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# Our value for a row and one seed: by the paper's protocol (mostly the best round on test samples) and by our own (the
# round that is best on validation samples). None if there is no such value.
Reading = tuple[float | None, float | None]
# The points of a curve, for one seed.
Points = tuple[Sequence[float], Sequence[float | None]]


@dataclass(frozen=True)
class PlannedRun:
    """A run of `polytier run` that a paper needs, for one or more seeds.

    Args:
        name: The name of its folder; runs with the same name are the same run.
        settings: The settings of `polytier run`.
        seeds: Number of seeds, starting at 0.

    Examples:
        >>> PlannedRun("fedavg-mnist", {"algorithm": "fedavg", "data": "mnist"}, seeds=3).seeds
        3
    """

    name: str
    settings: Mapping[str, Any]
    seeds: int = 1


@dataclass(frozen=True)
class Row:
    """A value of the paper and how ours is read.

    labels    | its place in the table, one text for each of the item's columns
    runs      | the runs it is read from; `read` is given their folders for one seed, in this order
    paper     | the paper's value and its deviation in the item's unit; None if the paper gives none
    differs   | why the two values cannot be compared; empty if they can
    """

    labels: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    read: Callable[[Sequence[Path]], Reading]
    paper: float | None = None
    deviation: float | None = None
    differs: str = ""


@dataclass(frozen=True)
class Curve:
    """A line of a figure: the mean and the interval over the seeds of its runs."""

    name: str
    runs: tuple[PlannedRun, ...]
    read: Callable[[Sequence[Path]], Points]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of an item with one or more curves."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Matrix:
    """The learned collaboration over time, read from collaboration.npz of the run's first seed."""

    title: str
    run: PlannedRun


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and a function that checks whether it holds for our runs.

    `holds` is given, for each run, the folders of the seeds that all runs of the claim have finished, in the same
    order. It returns whether the claim holds (None: our values are level, so they decide nothing), and the numbers
    that decided it.
    """

    text: str
    runs: tuple[PlannedRun, ...]
    holds: Callable[[Sequence[Sequence[Path]]], tuple[bool | None, str]]


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper. A table with values after 100 and after 600 rounds is two items.

    reduced  | what is smaller at the scale "quick"; empty for "full"
    notes    | what we assumed where the paper does not state it or contradicts itself
    margin   | two values agree if they differ by at most this, in the item's unit
    """

    name: str
    title: str
    columns: tuple[str, ...] = ()
    rows: Sequence[Row] = ()
    charts: Sequence[Chart] = ()
    matrices: Sequence[Matrix] = ()
    claims: Sequence[Claim] = ()
    reduced: str = ""
    notes: Sequence[str] = field(default_factory=tuple)
    unit: str = "%"
    margin: float = 2.0

    def runs(self) -> list[PlannedRun]:
        """All runs without duplicates, in the order in which rows, charts, claims and matrices use them."""
        users = (*self.rows, *(curve for chart in self.charts for curve in chart.curves), *self.claims)
        found = {run.name: run for user in users for run in user.runs} | {m.run.name: m.run for m in self.matrices}
        return list(found.values())

    def only(self, patterns: Sequence[str]) -> Item:
        """The item with those rows, curves, matrices and claims whose runs all match one of the patterns.

        A pattern is compared with the names of runs, METHOD-DATA-MODEL; `*` stands for any text.

        Examples:
            >>> runs = [PlannedRun(name, {}) for name in ("fedavg-mnist-mclr", "fedavg-fmnist-mclr")]
            >>> item = Item("table1", "Two rows", rows=[Row((), (run,), lambda _: (None, None)) for run in runs])
            >>> [run.name for run in item.only(["*-mnist-*"]).runs()]
            ['fedavg-mnist-mclr']
        """

        def kept(runs: Sequence[PlannedRun]) -> bool:
            return all(any(fnmatchcase(run.name, pattern) for pattern in patterns) for run in runs)

        curves = [replace(chart, curves=[c for c in chart.curves if kept(c.runs)]) for chart in self.charts]
        return replace(
            self,
            rows=[row for row in self.rows if kept(row.runs)],
            charts=[chart for chart in curves if chart.curves],
            matrices=[matrix for matrix in self.matrices if kept([matrix.run])],
            claims=[claim for claim in self.claims if kept(claim.runs)],
        )
