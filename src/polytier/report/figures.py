"""Charts as PNG, SVG or PDF files for a paper, drawn by matplotlib; the same block gives the same bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytier._text import size
from polytier.report import blocks
from polytier.report.blocks import Heat, Histogram, Lines, Matrices, Panels, Tree
from polytier.report.palette import DIVERGING, LIGHT, MARKERS, names_in

FORMATS = ("png", "svg", "pdf")
CHARTS = (Lines, Panels, Matrices, Histogram, Heat, Tree)
STYLE = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.edgecolor": "0.3",
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # embeds fonts as TrueType, so that text can be edited
    "svg.hashsalt": "polytier",
    "savefig.dpi": 200,
}
NO_DATES = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
WIDTH = 3.4  # inches: a column of a paper
CHARACTERS = 20  # of a caption, per inch
TITLE = 32  # characters per line of a panel's title
PANELS = 6  # matrices in a figure
BORDERS, NAMED = 40, 12  # with more groups than this, no borders or no names are drawn


def save(block: Any, path: Path | str, form: str | None = None, names: Sequence[str] = ()) -> None:
    """Draw a block and write it to a file.

    Args:
        block: One of `CHARTS`.
        path: The file.
        form: "png", "svg" or "pdf"; by default the ending of the file's name.
        names: The k-th of these names has the k-th colour; by default the names in the block.
    """
    form = form or Path(path).suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise ValueError(f"figures are .png, .svg or .pdf; got {Path(path).name}")
    require()
    import matplotlib
    from matplotlib.figure import Figure

    draw = {Lines: lines, Panels: panels, Matrices: matrices, Histogram: histogram, Heat: heat, Tree: tree}[type(block)]
    # a fixed style, independent of the caller's settings of matplotlib
    style: Any = {**matplotlib.rcParamsDefault, **STYLE, "backend": matplotlib.get_backend()}
    with matplotlib.rc_context(style):
        figure = Figure(layout="constrained")
        draw(figure, block, colours(names or names_in([block])))
        figure.savefig(path, format=form, metadata=NO_DATES[form])


def require() -> None:
    """Raise an error with advice if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError('figures need matplotlib, which is not installed: pip install "polytier[plots]"') from error


def colours(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The colour and the marker of each name."""
    return {name: {"color": LIGHT[k % len(LIGHT)], "marker": MARKERS[k % len(MARKERS)]} for k, name in enumerate(names)}


# -- lines --------------------------------------------------------------------------------------------


def lines(figure: Any, block: Lines, looks: dict[str, Any]) -> None:
    """Draw a line chart."""
    beside = len(block.series) > 4
    figure.set_size_inches(WIDTH + (1.3 if beside else 0.6), 2.5)
    axis = figure.subplots()
    plot(axis, block, looks)
    keep_within(axis, block)
    axis.set_title(block.title, loc="left")
    legend(figure, [axis], "outside right upper" if beside else None)
    caption(figure, block.note)


def panels(figure: Any, block: Panels, looks: dict[str, Any]) -> None:
    """Draw charts side by side."""
    charts = block.charts
    columns = 2 if len(charts) == 4 else min(3, len(charts)) or 1
    rows = -(-len(charts) // columns) or 1
    beside = len({series.name for chart in charts for series in chart.series}) > 1
    figure.set_size_inches(max(WIDTH, 2.3 * columns + 0.4) + (1.7 if beside else 0), 2.1 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=len({chart.y for chart in charts}) == 1)
    for k, axis in enumerate(axes.flat):
        if k >= len(charts):
            axis.set_visible(False)
            continue
        plot(axis, charts[k], looks)
        axis.set_title(textwrap.fill(charts[k].title, TITLE), loc="left")
        if k % columns and charts[k].y == charts[k - 1].y:
            axis.set_ylabel("")
    for axis, chart in zip(axes.flat, charts, strict=False):
        keep_within(axis, chart)
    figure.suptitle(block.title, fontsize=9, x=0.01, ha="left")
    legend(figure, axes.flat, "outside right upper")
    caption(figure, block.note)


def plot(axis: Any, chart: Lines, looks: dict[str, Any]) -> None:
    """Draw the lines and bands of a chart."""
    for series in chart.series:
        look = looks[series.like or series.name]
        x, y = numbers(series.x), numbers(series.y)
        style = {"color": look["color"], "linestyle": (0, (4, 2)) if series.dashed else "-", "label": series.name}
        axis.plot(x, y, marker=look["marker"], markersize=3, markevery=[len(x) - 1] if len(x) else None, **style)
        if len(series.low):
            axis.fill_between(
                x, numbers(series.low), numbers(series.high), color=look["color"], alpha=0.15, linewidth=0
            )
    axis.set(xlabel=chart.x, ylabel=chart.y)
    if chart.x == "round":
        axis.xaxis.get_major_locator().set_params(integer=True)
    if chart.scale == "bytes":
        from matplotlib.ticker import LogLocator, NullFormatter

        axis.set_xscale("log")
        low, high = axis.get_xlim()
        if high < 100 * low:  # powers of ten alone would be one or two ticks
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(lambda value, _: size(value).replace(".0 ", " "))
        axis.xaxis.set_minor_formatter(NullFormatter())
    elif chart.scale == "log":
        axis.set_yscale("log")


def keep_within(axis: Any, chart: Lines) -> None:
    """Limit bands of percentages to 0 and 100. It fixes the range, so call it after everything is drawn."""
    low, high = axis.get_ylim()
    possible = all(0 <= value <= 100 for series in chart.series for value in series.y if value is not None)
    if "%" in chart.y and possible and (low < -5 or high > 105):
        axis.set_ylim(max(low, 0) if low < -5 else low, min(high, 100) if high > 105 else high)


def caption(figure: Any, note: str) -> None:
    """Write a note below the figure, broken into lines that fit."""
    if note:
        width, height = figure.get_size_inches()
        text = textwrap.fill(note, int(CHARACTERS * width))
        figure.set_size_inches(width, height + 0.1 * (1 + text.count("\n")))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=6, color="0.4")


def numbers(values: Iterable[float | None]) -> np.ndarray:
    """The values as floats, NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def legend(figure: Any, axes: Iterable[Any], place: str | None) -> None:
    """Draw a legend with each name once."""
    found: dict[str, Any] = {}
    for axis in axes:
        found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if len(found) < 2:
        return
    if place is None:
        figure.axes[0].legend(found.values(), found.keys())
    else:
        figure.legend(found.values(), found.keys(), loc=place)


# -- bars and trees -----------------------------------------------------------------------------------


def histogram(figure: Any, block: Histogram, looks: dict[str, Any]) -> None:
    """Draw small bar charts."""
    columns = min(4, len(block.series))
    rows = -(-len(block.series) // columns)
    figure.set_size_inches(1.6 * columns + 0.4, 1.3 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    edges = np.asarray(block.edges)
    for axis, (name, shares, mark) in zip(axes.flat, block.series, strict=False):
        axis.bar(edges[:-1], shares, np.diff(edges), align="edge", color=looks[name]["color"], linewidth=0)
        axis.set_title(name, loc="left")
        if mark is not None:
            axis.axvline(mark, color="0.2", linewidth=0.8, linestyle=(0, (2, 2)))
    for axis in axes.flat[len(block.series) :]:
        axis.set_visible(False)
    for axis in axes.flat[len(block.series) - columns : len(block.series)]:  # the lowest of each column
        axis.set_xlabel(block.x)
        axis.tick_params(labelbottom=True)
    figure.supylabel(block.y, fontsize=8)
    figure.suptitle(block.title, fontsize=9, x=0.01, ha="left")
    caption(figure, block.note)


def tree(figure: Any, block: Tree, looks: dict[str, Any]) -> None:
    """Draw one bar per link and direction, between the names of the tiers, from the top."""
    columns = min(3, len(block.methods))
    rows = -(-len(block.methods) // columns)
    deepest = max(len(links) for _, _, links in block.methods)
    figure.set_size_inches(2.4 * columns, (0.55 * deepest + 0.75) * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    most = max(max(down, up) for _, _, links in block.methods for _, down, up in links) or 1
    for axis, (name, tiers, links) in zip(axes.flat, block.methods, strict=False):
        for k, (tier, nodes) in enumerate(tiers):
            axis.text(0, -k, tier if nodes == 1 else f"{nodes:,} {tier}s", va="center", fontsize=7, weight="bold")
        for k, (_, *amounts) in enumerate(links):
            for place, way, amount in zip((-k - 0.37, -k - 0.63), ("down", "up"), amounts, strict=True):
                length, look = max(amount / most, 0.008 * (amount > 0)), {"color": looks[name]["color"]}
                axis.barh(place, length, 0.2, left=0.25, alpha=1 if way == "down" else 0.55, **look)
                axis.text(0.22, place, way, ha="right", va="center", fontsize=6, color="0.4")
                axis.text(0.28 + amount / most, place, size(amount), va="center", fontsize=6)
        axis.set(xlim=(0, 1.65), ylim=(-deepest - 0.3, 0.4))
        axis.set_title(name, loc="left")
        axis.axis("off")
    for axis in axes.flat[len(block.methods) :]:
        axis.set_visible(False)
    figure.suptitle(block.title, fontsize=9, x=0.01, ha="left")
    caption(figure, block.note)


# -- cells --------------------------------------------------------------------------------------------


def heat(figure: Any, block: Heat, looks: dict[str, Any]) -> None:
    """Draw coloured cells."""
    from matplotlib.colors import LinearSegmentedColormap

    values = grid(block.values)
    figure.set_size_inches(2 * WIDTH, min(6.0, 0.16 * len(block.rows) + 1.0))
    axis = figure.subplots()
    most = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    least = 0.0 if block.zero or not np.isfinite(values).any() else float(np.nanmin(values))
    low, cmap = (-most, LinearSegmentedColormap.from_list("", DIVERGING)) if block.diverging else (least, "Blues")
    image = axis.imshow(
        values, aspect="auto", cmap=cmap, vmin=low, vmax=most or 1.0, interpolation="nearest", rasterized=True
    )
    every = -(-len(block.rows) // 30)  # with many rows, only some have names
    axis.set_yticks(range(0, len(block.rows), every), block.rows[::every])
    axis.set_xticks([])
    if block.groups:
        borders(axis, block.groups, down=False)
    elif len(block.columns) <= NAMED:
        axis.set_xticks(range(len(block.columns)), block.columns)
    for k, text in enumerate(block.ends):
        axis.text(1.01, k, text, transform=axis.get_yaxis_transform(), va="center", fontsize=6)
    axis.set(xlabel=block.x)
    axis.set_title(block.title, loc="left")
    bare(axis)
    figure.colorbar(image, ax=axis, label=block.unit, pad=0.02 if not block.ends else 0.16, fraction=0.03)
    caption(figure, block.note)


def matrices(figure: Any, block: Matrices, looks: dict[str, Any]) -> None:
    """Draw up to `PANELS` matrices, evenly spaced in time."""
    chosen = np.unique(np.linspace(0, len(block.frames) - 1, PANELS).round().astype(int))
    frames = [(block.frames[k][0], grid(block.frames[k][1])) for k in chosen]
    low, high = min(0.0, *(np.nanmin(v) for _, v in frames)), max(np.nanmax(v) for _, v in frames)
    columns = len(frames) if len(frames) <= 3 else -(-len(frames) // 2)
    rows = -(-len(frames) // columns)
    figure.set_size_inches(2.2 * columns + 0.9, 2.3 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False)
    image = None
    for k, (axis, (label, values)) in enumerate(zip(axes.flat, frames, strict=False)):
        image = axis.imshow(values, vmin=low, vmax=high, cmap="Blues", interpolation="nearest", rasterized=True)
        axis.set_facecolor("0.85")  # the diagonal
        axis.set_title(label)
        axis.set(xticks=[], yticks=[], xlabel="to whom", ylabel="" if k % columns else "who listens")
        if block.groups:
            borders(axis, block.groups, down=True, named=k % columns == 0)
        bare(axis)
    for axis in axes.flat[len(frames) :]:
        axis.set_visible(False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight")
    figure.suptitle(block.title, fontsize=8)
    caption(figure, block.note)


def borders(axis: Any, groups: Sequence[str], down: bool, named: bool = True) -> None:
    """Draw lines between groups of columns (with `down`, also of rows), and the names of a few groups."""
    change = [k for k in range(1, len(groups)) if groups[k] != groups[k - 1]]
    starts, ends = [0, *change], [*change, len(groups)]
    for end in change if len(change) < BORDERS else ():
        axis.axvline(end - 0.5, color="tab:orange", linewidth=0.6)
        if down:
            axis.axhline(end - 0.5, color="tab:orange", linewidth=0.6)
    if named and 1 < len(starts) <= NAMED:
        middles = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
        names = [groups[start] for start in starts]
        (axis.set_yticks if down else axis.set_xticks)(middles, names)


def grid(values: Any) -> np.ndarray:
    """An array of floats; NaN where there is no value."""
    return np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)


def bare(axis: Any) -> None:
    """Remove grid, ticks and frame of an axis."""
    axis.grid(visible=False)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def charts_in(parts: Iterable[Any]) -> list[Any]:
    """All blocks that can be drawn, in order, including those inside sections."""
    found: list[Any] = []
    for part in parts:
        found += charts_in(part.blocks) if isinstance(part, blocks.Section) else [part] * isinstance(part, CHARTS)
    return found
