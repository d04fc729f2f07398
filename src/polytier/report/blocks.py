"""The blocks of a page: plain descriptions of text, tables and charts, which page.py and figures.py draw.

Numbers in charts have the unit in which they are shown: fractions are already in percent.

Examples:
    >>> losses = Series("fedavg", x=[1, 2, 3], y=[0.9, 0.5, 0.4])
    >>> Lines("Loss by round", "round", "loss", [losses]).series[0].name
    'fedavg'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Heading:
    """A heading."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; a leading one says what was found."""

    text: str
    leading: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell of a table; the column is sorted by `value`, and `tone` is "", "good", "bad" or "muted"."""

    text: str
    value: float | str | None = None
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a title, the names of its columns, its rows and a note."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    note: str = ""


@dataclass(frozen=True)
class Devices:
    """A table of devices to search and sort in, one method at a time.

    ids     | the devices
    facts   | pairs (column, one value per device): team, samples, ...
    methods | triples (name, [(kind of model, one value per device or None)], the kind that it is judged by)
    local   | the values of the devices with Local, which gains are against; empty if they are not known
    unit    | of all values
    better  | whether "higher" or "lower" values are better; devices with the worst come first
    """

    title: str
    ids: Sequence[str]
    facts: Sequence[tuple[str, Sequence[str | int]]]
    methods: Sequence[tuple[str, Sequence[tuple[str, Sequence[float | None]]], str]]
    local: Sequence[float | None] = ()
    unit: str = ""
    better: str = "higher"
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line with its band. The line is interrupted where y, low or high is None.

    `like` is the name of the series whose colour it uses, if not its own.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dashed: bool = False
    like: str = ""


@dataclass(frozen=True)
class Lines:
    """A line chart; `x` and `y` are the labels of the axes.

    `scale` is "", "log" (y is logarithmic) or "bytes" (x is logarithmic, in bytes).
    """

    title: str
    x: str
    y: str
    series: Sequence[Series]
    note: str = ""
    scale: str = ""


@dataclass(frozen=True)
class Panels:
    """Charts side by side with one legend; charts with the same `y` share its range."""

    title: str
    charts: Sequence[Lines]
    note: str = ""


@dataclass(frozen=True)
class Matrices:
    """Square matrices over time with a slider; `frames` are pairs (label, values [n, n]).

    None is no value (the diagonal). `groups` [n] is the group of each row; rows of a group are adjacent, and borders
    are drawn between groups.
    """

    title: str
    frames: Sequence[tuple[str, Any]]
    groups: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Histogram:
    """Small bar charts with a common scale; `series` are triples (name, heights of the bars, mark or None).

    `edges` are the limits of the bars, one more than there are bars; `y` is the label of the heights.
    """

    title: str
    x: str
    y: str
    edges: Sequence[float]
    series: Sequence[tuple[str, Sequence[float], float | None]]
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """Coloured cells with `values` [rows, columns]; None is no value.

    columns   | the name of each column, shown when the pointer is on it
    groups    | the group of each column; columns of a group are adjacent, and borders are drawn between groups
    ends      | a short text at the end of each row
    x, unit   | the labels of the columns and of the values
    diverging | whether values above and below zero have different colours
    zero      | whether the palest colour stands for 0; otherwise for the lowest value
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Any
    groups: Sequence[str] = ()
    ends: Sequence[str] = ()
    x: str = ""
    unit: str = ""
    diverging: bool = False
    zero: bool = True
    note: str = ""


@dataclass(frozen=True)
class Tree:
    """Bytes by link on a drawing of the tree: `methods` [(name, [(tier, nodes)] from the top, [(link, down, up)])]."""

    title: str
    methods: Sequence[tuple[str, Sequence[tuple[str, int]], Sequence[tuple[str, float, float]]]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; a folded section is hidden until it is clicked."""

    title: str
    blocks: Sequence[Any] = field(default_factory=list)
    folded: bool = False
