"""Who did not answer: absences.csv, and the simulation of a run with the same absences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polytier.engines.stacked import Stacked
from polytier.files.csv_records import read_records, write_records
from polytier.method.call import Call
from polytier.method.context import Context
from polytier.stack.rows import Answered, Folded, Rows, cat_rows, fold, share_of_samples

FILE = "absences.csv"


class Absence(NamedTuple):
    """A node that did not answer a call; a line of absences.csv.

    Args:
        round: Counted from 1.
        call: The number of the call in its round (`Clock.call`).
        tier: The name of the node's tier.
        name: The name of the node.
        method: What was called.
        model: The name of the model, if there are several.
        why: The reason.
    """

    round: int
    call: int
    tier: str
    name: str
    method: str
    model: str
    why: str


def write_absences(path: Path, lines: Iterable[Absence]) -> None:
    """Write absences.csv as a whole."""
    write_records(path, Absence, lines)


def read_absences(path: Path) -> list[Absence]:
    """The lines of absences.csv; none if there is no such file.

    Raises:
        ValueError: The file cannot be read.
    """
    return read_records(path, Absence)


class Replayed(Stacked):
    """Simulates a run in which some nodes did not answer some calls.

    Args:
        context: What the programs share.
        absences: Who did not answer what.
        settings: As those of `Stacked`.
    """

    def __init__(self, context: Context, *, absences: Iterable[Absence], **settings: Any) -> None:
        super().__init__(context, **settings)
        self._absent: dict[tuple, set[str]] = defaultdict(set)
        for line in absences:
            self._absent[line.round, line.call, line.tier, line.method, line.model].add(line.name)

    def deliver(self, call: Call) -> Iterator[Answered | Folded | Rows]:
        """Run the program of a call at the receivers that answered it; see `Engine.deliver`."""
        part = self.context.scope(call.scope)
        tier = part.topology.tier_names[call.tier]
        absent = self._absent.get((call.clock.round + 1, call.clock.call, tier, call.method, call.scope))
        if call.quiet or absent is None:
            yield from super().deliver(call)
            return
        names = part.topology.names[call.tier][call.ids.numpy()]
        which = torch.tensor([k for k, name in enumerate(names) if str(name) not in absent], dtype=torch.int64)
        pieces = list(super().deliver(replace(call, blocks=None, shares=None).take(which))) if len(which) else []
        if not pieces:
            return
        rows = cat_rows(pieces)  # type: ignore[arg-type]
        if call.blocks is None:
            yield Answered(rows, which)
            return
        shares = share_of_samples(part.samples[call.tier][call.ids[which]], call.sender[which])
        yield fold(rows, shares, call.blocks[which])
