"""What a plan is made of: the runs, the paper's figures beside them, and what is read from the run folders.

A paper is a module with `items(scale) -> list[Item]`: scale is "full", the paper's rounds, sizes and repetitions, or
"quick", the same shape in minutes. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What a row reads of its runs, for one seed: ours by the paper's own protocol (mostly the best round on test data), and
# by ours (the round that is best on validation data); None: there is no such figure.
Reading = tuple[float | None, float | None]
# The points of a curve, for one seed.
Points = tuple[Sequence[float], Sequence[float | None]]


@dataclass(frozen=True)
class PlannedRun:
    """Settings of `polytier run`, repeated for some seeds. `name` is the folder's; equal names are one run."""

    name: str
    settings: Mapping[str, Any]
    seeds: int = 1


@dataclass(frozen=True)
class Row:
    """A figure of the paper and ours.

    labels    | its place in the table, a word for each of the item's columns
    runs      | those it is read from; `read` gets their folders for one seed, in this order
    paper     | the paper's figure and its deviation in the item's unit; None: it gives none
    differs   | why the two cannot be compared, if so
    """

    labels: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    read: Callable[[Sequence[Path]], Reading]
    paper: float | None = None
    deviation: float | None = None
    differs: str = ""


@dataclass(frozen=True)
class Curve:
    """A line of a figure: mean and interval over the seeds of its runs."""

    name: str
    runs: tuple[PlannedRun, ...]
    read: Callable[[Sequence[Path]], Points]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Matrix:
    """Who listens to whom over time, of the run's first seed, from its collaboration.npz."""

    title: str
    run: PlannedRun


@dataclass(frozen=True)
class Claim:
    """What the paper says of a figure, and whether our runs show it.

    `holds` gets, for each run, the folders of its finished seeds, and returns whether, and the numbers it rests on.
    """

    text: str
    runs: tuple[PlannedRun, ...]
    holds: Callable[[Sequence[Sequence[Path]]], tuple[bool, str]]


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper; the same table twice (as 600 rounds of one of 100) is two items.

    reduced  | what `quick` made smaller; empty for `full`
    notes    | how the paper is read where it is silent or contradicts itself
    margin   | two figures that are nearer than this agree, in the item's unit
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
        """Each run once, in the order of their use."""
        users = (*self.rows, *(curve for chart in self.charts for curve in chart.curves), *self.claims)
        found = {run.name: run for user in users for run in user.runs} | {m.run.name: m.run for m in self.matrices}
        return list(found.values())
