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
    """A line with its band; y, low and high may hold None, where the line is broken."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """A chart; `x` and `y` say what the axes are."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    note: str = ""


@dataclass(frozen=True)
class Panels:
    """Charts side by side; a name has the same colour in all of them, and one legend."""

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
class Section:
    """Blocks that belong together; folded: shown on demand."""

    title: str
    blocks: Sequence[Any] = field(default_factory=list)
    folded: bool = False
