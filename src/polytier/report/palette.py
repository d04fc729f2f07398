"""The colours of pages and figures: told apart by those who see few colours, on light and on dark ground."""

from __future__ import annotations

from collections.abc import Iterable

from polytier.report import blocks

LIGHT = (
    "#0072b2", "#d55e00", "#009e73", "#b5478f", "#b88400", "#3a9bd9", "#5a5a5a", "#7a1f4f", "#7d7d14", "#0b5d3b",
)  # fmt: skip
DARK = (
    "#4aa3df", "#ff8a3d", "#2fc79a", "#e08bc3", "#f0b93a", "#9fd6ff", "#c4c4c4", "#d46a9f", "#c2c24a", "#6fb58f",
)  # fmt: skip
DIVERGING = ("#c05a00", "#f3f3f0", "#0b5fa5")  # less, the same, more
MARKERS = "os^Dv"  # as matplotlib names them; more names than colours are then still different


def names_in(parts: Iterable[object]) -> list[str]:
    """The names of all lines, bars and trees, in the order of their first appearance; the place is the colour."""
    found: dict[str, None] = {}
    for part in parts:
        match part:
            case blocks.Section():
                found |= dict.fromkeys(names_in(part.blocks))
            case blocks.Panels():
                found |= dict.fromkeys(names_in(part.charts))
            case blocks.Lines():
                found |= dict.fromkeys(series.like or series.name for series in part.series)
            case blocks.Histogram():
                found |= dict.fromkeys(name for name, _, _ in part.series)
            case blocks.Tree():
                found |= dict.fromkeys(name for name, _, _ in part.methods)
    return list(found)
