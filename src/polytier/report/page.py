"""The HTML page: one file that holds the blocks as data and the scripts that draw them, and loads nothing else."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib.resources import files
from typing import Any

import numpy as np

from polytier import __version__
from polytier.report.blocks import Cell, Heat, Matrices, Table
from polytier.report.palette import DARK, DIVERGING, LIGHT, names_in

SCRIPTS = ("charts.js", "cells.js", "page.js")
DIGITS = 5  # significant digits of a number on the page
LEVELS = 254  # number of colours of a cell; 0 stands for no value
# the page may load nothing; a live page may ask its own server whether there is a newer version
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"


def render(title: str, blocks: Iterable[Any], subtitle: str = "", live: str = "") -> str:
    """The text of the page.

    Args:
        title: The heading.
        blocks: What it shows (see blocks.py), from top to bottom.
        subtitle: A line below the heading.
        live: The version of what it shows, if a server may have newer ones.
    """
    parts = list(blocks)
    data = {
        "title": title,
        "subtitle": subtitle,
        "live": live,
        "made": f"Polytier {__version__}",
        "names": names_in(parts),
        "blocks": [plain(part) for part in parts],
    }
    # "<" is escaped so that no text of the data can end the script element
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{palette()}{source("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header id="top"></header>
<main id="main" tabindex="-1"></main>
<footer id="end"></footer>
<noscript><p>This page draws its charts with JavaScript, which is switched off here.</p></noscript>
<script type="application/json" id="data">{text}</script>
<script>
{"".join(source(name) for name in SCRIPTS)}</script>
</body>
</html>
"""


def source(name: str) -> str:
    """The text of a file in this package."""
    return files("polytier.report").joinpath(name).read_text(encoding="utf-8")


def palette() -> str:
    """The colours as variables of the style sheet."""
    light, dark = ("".join(f"--c{k}:{colour};" for k, colour in enumerate(own)) for own in (LIGHT, DARK))
    light += "".join(f"--{name}:{colour};" for name, colour in zip(("less", "zero", "more"), DIVERGING, strict=True))
    return f':root{{{light}}}\n:root[data-theme="dark"]{{{dark}}}\n'


# -- blocks as JSON -----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value for JSON: lists, dicts, texts and short numbers; a block becomes a dict with its kind."""
    if isinstance(value, Table):
        rows = [[[c, c] if isinstance(c, str) else plain_cell(c) for c in row] for row in value.rows]
        return {"kind": "Table", **{k: plain(getattr(value, k)) for k in ("title", "columns", "note")}, "rows": rows}
    if isinstance(value, Matrices):
        matrices = [as_floats(matrix) for _, matrix in value.frames]
        shown, low, high = cells(matrices)
        frames = [[label, values] for (label, _), values in zip(value.frames, shown, strict=True)]
        size = len(matrices[0]) if matrices else 0
        own = {"title": value.title, "note": value.note, "groups": list(value.groups)}
        return {"kind": "Matrices", **own, "size": size, "frames": frames, "low": low, "high": high}
    if isinstance(value, Heat):
        shown, low, high = cells([as_floats(value.values)])
        rest = {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.name != "values"}
        return {"kind": "Heat", **rest, "values": shown[0], "low": low, "high": high}
    if hasattr(value, "__dataclass_fields__"):
        return {"kind": type(value).__name__, **{f.name: plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, Sequence | np.ndarray):
        return [plain(each) for each in value]
    return number(float(value))


def plain_cell(cell: Cell) -> list[Any]:
    """[text, the value that the column is sorted by, tone]."""
    value = cell.text if cell.value is None else cell.value
    return [cell.text, value if isinstance(value, str) else number(float(value)), *([cell.tone] if cell.tone else [])]


def number(value: float) -> float | int | None:
    """The number with `DIGITS` significant digits; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def as_floats(values: Any) -> np.ndarray:
    """The values as an array of floats, NaN for None."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return values
    return np.array([[math.nan if v is None else v for v in row] for row in values], dtype=float)


def cells(matrices: Sequence[np.ndarray]) -> tuple[list[str], float | int | None, float | int | None]:
    """Values as bytes in base64 (1: lowest, 255: highest, 0: no value), and the lowest and the highest value."""
    there = [matrix[np.isfinite(matrix)] for matrix in matrices]
    every = np.concatenate(there) if there else np.zeros(0)
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 0.0)
    found = []
    for matrix in matrices:
        level = np.nan_to_num((matrix - low) / ((high - low) or 1.0) * LEVELS).round() + 1
        level[~np.isfinite(matrix)] = 0
        found.append(base64.b64encode(level.astype(np.uint8).tobytes()).decode())
    return found, number(low), number(high)
