"""The colours of pages and figures: distinguishable with colour blindness, on light and on dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterable

from polytier.report import blocks

# the k-th colour on a light and on a dark background
PAIRS = (
    ("#0072b2", "#4aa3df"),
    ("#d55e00", "#ff8a3d"),
    ("#009e73", "#2fc79a"),
    ("#b5478f", "#e08bc3"),
    ("#b88400", "#f0b93a"),
    ("#5a5a5a", "#c4c4c4"),
    ("#3a9bd9", "#9fd6ff"),
    ("#7a1f4f", "#d46a9f"),
    ("#7d7d14", "#c2c24a"),
    ("#0b5d3b", "#6fb58f"),
)
LIGHT, DARK = zip(*PAIRS, strict=True)
DIVERGING = ("#c05a00", "#f3f3f0", "#0b5fa5")  # less, the same, more
MARKERS = "os^DvP"  # of matplotlib; they keep names different where there are more names than colours


def names_in(parts: Iterable[object]) -> list[str]:
    """The names of all lines, bars and trees in the order of their first appearance; the k-th has the k-th colour."""
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
