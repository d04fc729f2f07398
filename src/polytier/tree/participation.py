"""Who takes part: all children of a parent, a fraction, a number of them, or those that a table or a schedule says
are there."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.tree import random

NEVER = 1 << 62  # the round in which those leave who stay to the end


@dataclass(frozen=True)
class Participation:
    """One rule for a tier. At most one of fraction and count; a table or a schedule limits who can be drawn.

    table    | [rounds, nodes] round t reads row t modulo the number of rows; columns are the nodes in the order of
               the topology
    schedule | (id, join, leave): there from round `join`, counted from 1, up to and without `leave` (None: to the
               end). An id may come several times; ids that do not come are always there
    spans    | [lines, 3] the schedule as node, join, leave; made by `of`
    """

    fraction: float = 1.0
    count: int | None = None
    table: Tensor | None = None
    schedule: Sequence[tuple[Any, Any, Any]] | None = None
    spans: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"participation is a fraction in (0, 1]; got {self.fraction}; a number is count:N")
        if self.count is not None and self.count < 1:
            raise ValueError(f"participation count:N needs N of at least 1; got {self.count}")
        if self.schedule is not None:
            object.__setattr__(self, "schedule", tuple(as_line(line) for line in self.schedule))

    @classmethod
    def parse(cls, value: float | str | np.ndarray | Participation) -> Participation:
        """0.5, "0.5", "count:4", "table:FILE.npy" (or .csv), "schedule:FILE.csv", or the table itself."""
        if isinstance(value, Participation):
            return value
        if isinstance(value, np.ndarray):
            return cls(table=as_table(value, "the participation table"))
        if isinstance(value, str) and value.startswith("table:"):
            return cls(table=read_table(Path(value.removeprefix("table:"))))
        if isinstance(value, str) and value.startswith("schedule:"):
            return cls(schedule=read_schedule(Path(value.removeprefix("schedule:"))))
        try:
            if isinstance(value, str) and value.startswith("count:"):
                return cls(count=int(value.removeprefix("count:")))
            return cls(fraction=float(value))
        except ValueError as error:
            if "participation" in str(error):
                raise
            raise ValueError(
                f"participation {value!r} is not understood; "
                "give a fraction such as 0.5, count:4, table:FILE or schedule:FILE"
            ) from None

    @property
    def everybody(self) -> bool:
        limits = (self.count, self.table, self.schedule, self.spans)
        return self.fraction == 1 and all(limit is None for limit in limits)

    def of(self, names: np.ndarray) -> Participation:
        """The rule for the nodes of a tier by their names, in the order of the topology: the schedule as numbers."""
        if self.schedule is None:
            return self
        place = {str(name): k for k, name in enumerate(names.tolist())}
        for name, _, _ in self.schedule:
            if name not in place:
                near = difflib.get_close_matches(name, place, 3) or list(place)[:3]
                raise ValueError(f"the participation schedule names {name!r}; ids are such as {', '.join(near)}")
        spans = torch.tensor([(place[name], join, leave) for name, join, leave in self.schedule], dtype=torch.int64)
        return replace(self, schedule=None, spans=spans.reshape(-1, 3))

    def draw(self, base: int, round_: int, keys: Tensor, kids: Tensor, position: Tensor, m: int) -> Tensor:
        """A mask over `kids`: of the children at the same `position` (of m), the ones with the smallest draws."""
        if self.everybody:
            return torch.ones(len(kids), dtype=torch.bool)
        there = torch.ones(len(kids), dtype=torch.bool)
        if self.table is not None:
            there = self.table[round_ % len(self.table)][kids]
        assert self.schedule is None, "a schedule is drawn from after of(names)"
        if self.spans is not None:
            node, join, leave = self.spans.T
            now = (join <= round_ + 1) & (round_ + 1 < leave)
            there = there & (torch.isin(kids, node[now]) | ~torch.isin(kids, node))
        registered = torch.bincount(position, minlength=m)
        if self.count is None:
            quota = (self.fraction * registered.double()).round().long().clamp(min=1)
        else:
            quota = registered.clamp(max=self.count)
        draws = random.uniform(random.node_keys(base, keys), 1).squeeze(1)
        draws = torch.where(there, draws, draws + 1)  # the absent come last and are cut off below
        order = torch.from_numpy(np.lexsort((draws.numpy(), position.numpy())))
        rank = torch.empty_like(order)
        first = registered.cumsum(0) - registered
        rank[order] = torch.arange(len(kids)) - first[position[order]]
        return (rank < quota[position]) & there


def read_table(path: Path) -> Tensor:
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"cannot read the participation table {path}: {error}") from None
    return as_table(values, str(path))


def as_table(values: np.ndarray, name: str) -> Tensor:
    if values.ndim != 2 or not len(values) or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name} needs 0 or 1 for every round (rows) and node (columns)")
    return torch.from_numpy(values.astype(bool))


def read_schedule(path: Path) -> list[tuple[Any, ...]]:
    """Lines id,join,leave; the first one may say just that."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [tuple(part.strip() for part in line) for line in csv.reader(file) if line]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"cannot read the participation schedule {path}: {error}") from None
    return lines[1:] if lines[:1] == [("id", "join", "leave")] else lines


def as_line(line: Sequence[Any]) -> tuple[str, int, int]:
    """The id as text, and two rounds."""
    try:
        name, join, leave = line
        start, end = int(str(join)), NEVER if leave in (None, "") else int(str(leave))
        if not 1 <= start < end:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"a line of a participation schedule is id,join,leave, rounds from 1 with leave after join (or nothing: "
            f"to the end), such as 7,10,20; got {line!r}"
        ) from None
    return str(name), start, end
