"""The part of a page about a run over a network: the tree with who is there, and who was absent when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polytier._text import counted, size
from polytier.report.blocks import Cell, Heat, Section, Table, Text
from polytier.runs.read import RunRecord
from polytier.runs.read_files import Record

LINES = 200  # nodes in the table; of larger trees those that are not there or were absent
ROWS, COLUMNS = 40, 60  # nodes and groups of rounds in the chart of absences
INDENT = "\u2003"  # a space that a browser does not drop


def nodes(run: RunRecord) -> Iterator[Section]:
    """The nodes of a run over a network; nothing for other runs."""
    found = run.network
    if found is None or not run.tiers:
        return
    absent = Counter(f"{line['tier']}/{line['name']}" for line in found["absences"])
    blocks: list[Any] = [Text(who_is_there(run, found["present"])), table(run, found, absent)]
    if absent:
        blocks.append(by_round(found["absences"], absent, run.rounds))
    yield Section("Nodes", blocks)


def who_is_there(run: RunRecord, present: set[str]) -> str:
    """How many nodes of each tier are there, as a sentence."""
    texts = []
    for tier in run.tiers[1:]:
        there = sum(f"{tier['tier']}/{name}" in present for name in tier["ids"])
        texts.append(f"{there:,} of {counted(len(tier['ids']), tier['tier'])}")
    verb = "were there at the end" if run.finished else "are there"
    missed = len((run.network or {}).get("absences", ()))
    return f"{' and '.join(texts)} {verb}. Calls that were not answered: {missed:,}."


def tree_order(tiers: Sequence[Record]) -> Iterator[tuple[int, str, str]]:
    """Tier, address and name of every node below the server; the children of a node follow it."""

    def below(tier: int, parent: Any) -> Iterator[tuple[int, str, str]]:
        if tier == len(tiers):
            return
        about = tiers[tier]
        for name, above in zip(about["ids"], about["parents"], strict=True):
            if above == parent:
                yield tier, f"{about['tier']}/{name}", str(name)
                yield from below(tier + 1, name)

    yield from below(1, tiers[0]["ids"][0])


def table(run: RunRecord, found: Record, absent: Counter[str]) -> Table:
    """One line per node, in the order of the tree."""
    last = {f"{line['tier']}/{line['name']}": line for line in found["absences"]}
    order = list(tree_order(run.tiers))
    leaf, there = len(run.tiers) - 1, found["present"]
    shown = [node for node in order if node[0] < leaf or node[1] not in there or absent[node[1]]]
    shown = order if len(order) <= LINES else shown[:LINES]
    rows = []
    for place, (tier, address, name) in enumerate(shown):
        line = last.get(address)
        down, up = found["bytes"].get(address, (None, None))
        rows.append(
            [
                Cell(INDENT * (tier - 1) + name, f"{place:09d}"),  # a text: the column is aligned to the left
                Cell(run.tiers[tier]["tier"]),
                Cell("there", tone="good") if address in there else Cell("not there", tone="bad"),
                Cell(f"{absent[address]:,}" if absent[address] else "-", absent[address]),
                Cell(f"round {line['round']}: {line['why']}", f"{line['round']:09d}")
                if line
                else Cell("-", "", "muted"),
                Cell("-" if down is None else size(down), down),
                Cell("-" if up is None else size(up), up),
            ]
        )
    note = "Teams say who is there below them with each answer. Bytes of models, as in the traffic of the run."
    if len(shown) < len(order):
        note += f" {len(order) - len(shown):,} nodes that are there and were never absent are left out."
    columns = ["node", "tier", "now", "calls not answered", "last absence", "bytes down", "bytes up"]
    return Table("Who is there", columns, rows, note)


def by_round(lines: Sequence[Record], absent: Counter[str], rounds: int) -> Heat:
    """Calls that were not answered, by node and round."""
    names = [name for name, _ in absent.most_common(ROWS)]
    last = max(rounds, *(line["round"] for line in lines))
    width = -(-last // COLUMNS)
    values = np.zeros((len(names), -(-last // width)))
    for line in lines:
        address = f"{line['tier']}/{line['name']}"
        if address in names:
            values[names.index(address), (line["round"] - 1) // width] += 1
    starts = range(1, last + 1, width)
    columns = [f"round {k}" if width == 1 else f"rounds {k} to {min(k + width - 1, last)}" for k in starts]
    ends = [f"{absent[name]:,}" for name in names]
    return Heat("Calls that were not answered", names, columns, values, ends=ends, x="round", unit="calls")
