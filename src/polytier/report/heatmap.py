"""Heat maps of the weights between clients over time, from the collaboration.npz of a run: page block and figure."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from polytier.files.write import atomic
from polytier.report import figures
from polytier.report.blocks import Matrices
from polytier.runs.read_files import check_result
from polytier.tree.collaboration import FILE, Collaboration, load

PANELS, SHOWN = 6, 400  # rounds and clients in the figure


def matrices(source: Path | str, frames: int, shown: int) -> Matrices:
    """The matrices as a block of a page.

    Args:
        source: A collaboration.npz.
        frames: At most this many rounds.
        shown: At most this many rows; where there are more clients, a cell is the mean of several.

    Returns:
        Matrices with the clients sorted by true group, or by the groups found last if the true ones are not known.
    """
    snapshots, true = load(source)
    rounds = sorted(snapshots)
    rounds = [rounds[k] for k in evenly(len(rounds), frames)]
    last = snapshots[rounds[-1]]
    group = last.groups() if true is None else true
    order = np.argsort(group, kind="stable")
    number = min(shown, len(order))
    block = np.empty(len(order), dtype=int)
    block[order] = np.arange(len(order)) * number // len(order)
    found = []
    for r in rounds:
        index = 0.0 if true is None else round(snapshots[r].match(true)["adjusted_rand_index"], 2) + 0.0  # no -0.00
        score = "" if true is None else f", ARI {index:.2f}"
        found.append((f"round {r}{score}", means(snapshots[r], block, number)))
    side = f"{len(order) / number:.0f}"
    many = f", a cell is the mean of {side} x {side}" if number < len(order) else ""
    known = "Sorted by true group. ARI: adjusted Rand index of the groups found."
    how = "Sorted by the groups found last." if true is None else known
    title = f"Who (row) listens to whom (column): {len(last):,} clients{many}"
    return Matrices(title, found, [f"group {group[order[block[order].searchsorted(k)]]}" for k in range(number)], how)


def means(learned: Collaboration, block: np.ndarray, number: int) -> np.ndarray:
    """[number, number] the mean weight between blocks of clients; NaN where there are no pairs."""
    i, j = learned.pairs.T
    base, size = learned.base.astype(float), np.bincount(block, minlength=number).astype(float)
    sums = np.bincount(block, base, number)[:, None] * size  # without the listed pairs, with a base on the diagonal
    np.add.at(sums, (block[i], block[j]), learned.weights - base[i])
    sums[np.diag_indices(number)] -= np.bincount(block, base, number)
    pairs = size[:, None] * size - np.diag(size)
    return np.divide(sums, pairs, out=np.full_like(sums, np.nan), where=pairs > 0)


def evenly(number: int, most: int) -> np.ndarray:
    """At most `most` of the indices below `number`, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, number - 1, most).round().astype(int))


def draw(source: Path | str, out: Path | str) -> None:
    """Write the matrices of up to six rounds as a PNG file."""
    figures.save(matrices(source, PANELS, SHOWN), out, "png")


def draw_beside(folder: Path, again: bool = True) -> None:
    """Draw collaboration.npz of a run folder, if there is one and matplotlib is installed.

    Args:
        folder: The run folder.
        again: Whether a picture that is there is replaced.
    """
    picture = folder / "collaboration.png"
    if (folder / FILE).exists() and find_spec("matplotlib") is not None and (again or not picture.is_file()):
        with atomic(picture) as partial:
            draw(check_result(folder, FILE), partial)
