"""Who listens to whom over time, from the collaboration.npz of a run: for a page, and as a figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polytier.collaboration import load
from polytier.report import figures
from polytier.report.blocks import Matrices

PANELS, SHOWN = 6, 400  # rounds and clients in the figure


def matrices(source: Path | str, frames: int, shown: int) -> Matrices:
    """At most so many rounds and clients; clients sorted by true group, else by the groups found last."""
    snapshots, true = load(source)
    rounds = sorted(snapshots)
    rounds = [rounds[k] for k in evenly(len(rounds), frames)]
    last = snapshots[rounds[-1]]
    group = last.groups() if true is None else true
    order = np.argsort(group, kind="stable")
    order = order[evenly(len(order), shown)]
    found = []
    for r in rounds:
        score = "" if true is None else f", ARI {snapshots[r].match(true)['adjusted_rand_index']:.2f}"
        found.append((f"round {r}{score}", snapshots[r].take(order).dense()))
    some = "" if len(order) == len(last) else f", {len(order)} shown"
    how = "Sorted by the groups found last." if true is None else (
        "Sorted by true group. ARI: adjusted Rand index of the groups found."
    )  # fmt: skip
    title = f"Who (row) listens to whom (column): {len(last)} clients{some}"
    return Matrices(title, found, [str(name) for name in group[order]], how)


def evenly(number: int, most: int) -> np.ndarray:
    """At most so many places, with the first and the last."""
    return np.unique(np.linspace(0, number - 1, most).round().astype(int))


def draw(source: Path | str, out: Path | str) -> None:
    """Matrices of up to six rounds as a picture."""
    figures.save(matrices(source, PANELS, SHOWN), out, "png")
