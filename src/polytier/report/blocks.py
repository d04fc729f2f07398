"""What a page is made of: plain descriptions, which `page` draws for a browser and `figures` for a paper.

Numbers in charts are what is shown: accuracies are already percent here. No block knows where its numbers came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph, as it stands."""

    text: str


@dataclass(frozen=True)
class Cell:
    """`value` is what a column is sorted by; `tone` is "", good, bad or muted."""

    text: str
    value: float | str | None = None
    tone: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line with its band; y, low and high may hold None, where the line is broken.

    `like` is the name whose colour it has, if that is not its own.
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
    """A chart; `x` and `y` say what the axes are.

    `scale` is "", log (y is logarithmic) or bytes (x is logarithmic, in bytes).
    """

    title: str
    x: str
    y: str
    series: Sequence[Series]
    note: str = ""
    scale: str = ""


@dataclass(frozen=True)
class Panels:
    """Charts side by side with one legend; those with the same `y` share its range."""

    title: str
    charts: Sequence[Lines]
    note: str = ""


@dataclass(frozen=True)
class Matrices:
    """Square matrices over time, `frames` [(label, values [n, n])], with a slider; None is no value (the diagonal).

    `groups` [n] is the group of each row, in sorted order: borders are drawn between groups.
    """

    title: str
    frames: Sequence[tuple[str, Any]]
    groups: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Histogram:
    """Small charts with one scale, `series` [(name, the height of each bar, a mark or None)], one a name.

    `edges` are those of the bars, one more than bars; `y` says what their heights are.
    """

    title: str
    x: str
    y: str
    edges: Sequence[float]
    series: Sequence[tuple[str, Sequence[float], float | None]]
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """Coloured cells, `values` [rows, columns] with None for no value.

    columns   | the name of each column, for those who ask
    groups    | the group of each column, in sorted order: borders are drawn between groups
    ends      | a short text at the end of each row
    x, unit   | what columns are; what values are
    diverging | zero is the middle: what is above and what is below have different colours
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
    note: str = ""


@dataclass(frozen=True)
class Tree:
    """Bytes by link on the drawn tree: `methods` [(name, [(tier, nodes)] from the top, [(link, down, up)])]."""

    title: str
    methods: Sequence[tuple[str, Sequence[tuple[str, int]], Sequence[tuple[str, float, float]]]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Blocks that belong together; folded: shown on demand."""

    title: str
    blocks: Sequence[Any] = field(default_factory=list)
    folded: bool = False
