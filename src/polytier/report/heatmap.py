"""A figure of who listens to whom over time, made from the collaboration.npz of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polytier.collaboration import load

PANELS, SHOWN = 6, 400  # rounds and clients in the figure
BORDERS, NAMED = 40, 12  # more groups have no borders, no names


def draw(source: Path | str, out: Path | str) -> None:
    """Matrices of up to six rounds, clients sorted by true group (else by the groups found last), as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('figures need an extra: pip install "polytier[plots]"') from error

    snapshots, true = load(source)
    rounds = sorted(snapshots)
    rounds = [rounds[k] for k in np.unique(np.linspace(0, len(rounds) - 1, PANELS).round().astype(int))]
    last = snapshots[rounds[-1]]
    group = last.groups() if true is None else true
    order = np.argsort(group, kind="stable")
    order = order[np.unique(np.linspace(0, len(order) - 1, SHOWN).round().astype(int))]
    names, sizes = np.unique(group[order], return_counts=True)
    matrices = [snapshots[r].take(order).dense() for r in rounds]
    low, high = min(0, *(np.nanmin(m) for m in matrices)), max(np.nanmax(m) for m in matrices)

    columns = len(rounds) if len(rounds) <= 3 else -(-len(rounds) // 2)
    lines = -(-len(rounds) // columns)
    figure = Figure(figsize=(2.7 * columns + 1.2, 2.8 * lines + 0.7), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    ends = np.cumsum(sizes)
    for axis, r, matrix in zip(axes.flat, rounds, matrices, strict=False):
        image = axis.imshow(matrix, vmin=low, vmax=high, cmap="Blues", interpolation="nearest")
        axis.set_facecolor("0.85")  # the diagonal
        score = "" if true is None else f", ARI {snapshots[r].match(true)['adjusted_rand_index']:.2f}"
        axis.set_title(f"round {r}{score}", fontsize=10)
        for end in ends[:-1] if len(ends) <= BORDERS else ():
            axis.axhline(end - 0.5, color="tab:orange", linewidth=0.8)
            axis.axvline(end - 0.5, color="tab:orange", linewidth=0.8)
        axis.set_xticks([])
        axis.set_yticks([])
    for axis in axes.flat[len(rounds) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("group found" if true is None else "true group")
        if len(sizes) <= NAMED:
            axis.set_yticks(ends - sizes / 2 - 0.5, names)
            axis.tick_params(length=0, labelsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight")
    some = "" if len(order) == len(last) else f", {len(order)} shown"
    what = "" if true is None else "\nARI: adjusted Rand index of the groups found"
    figure.suptitle(f"Who (row) listens to whom (column): {len(last)} clients{some}{what}", fontsize=11)
    figure.savefig(out, dpi=150, format="png")
