"""Which children take part in a call: all, a fraction, a number, or those in a table or a schedule."""

from __future__ import annotations

import csv
import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier._text import finite, whole
from polytier.files.read import check_file
from polytier.tree import random

NEVER = 1 << 62  # the round of leaving of nodes that stay until the end


@dataclass(frozen=True)
class Participation:
    """The participation rule of one tier.

    Args:
        fraction: share of the children of each parent that takes part, at least one child.
        count: number of children of each parent that take part, instead of a fraction.
        table: [rounds, nodes] bool, which nodes are available; round t uses row t modulo the number of rows; columns
            are the nodes in the order of the topology.
        schedule: (id, join, leave): the node is available from round `join`, counted from 1, to round `leave` - 1
            (None: to the end). An id may have several lines; nodes without a line are always available.
        spans: [lines, 3] the schedule as node, join, leave; made by `of`.

    A table or a schedule limits who can be drawn by fraction or count. A custom rule is a subclass that overrides
    `draw`.

    Raises:
        ValueError: if fraction, count or a line of the schedule is not allowed.

    Examples:
        >>> import polytier
        >>> class EvenRounds(polytier.Participation):
        ...     def draw(self, base, round_, keys, kids, position, m):
        ...         return (kids + round_) % 2 == 0
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> run = polytier.train(polytier.FedAvg(device_steps=1), federation, "mclr", rounds=1,
        ...                      device_participation=EvenRounds())
        >>> run.history[0]["participants"]
        {'device': 4}
    """

    fraction: float = 1.0
    count: int | None = None
    table: Tensor | None = None
    schedule: Sequence[tuple[Any, ...]] | None = None
    spans: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"participation is a fraction in (0, 1]; got {self.fraction}; for a number of nodes use count:N"
            )
        if self.count is not None and not 1 <= self.count < NEVER:
            raise ValueError(f"participation count:N needs N of at least 1; got {self.count}; use e.g. count:4")
        if self.schedule is not None:
            if not self.schedule:
                raise ValueError("the participation schedule is empty; give lines id,join,leave, such as 7,10,20")
            object.__setattr__(self, "schedule", tuple(as_line(line) for line in self.schedule))

    @classmethod
    def parse(cls, value: float | str | np.ndarray | Participation) -> Participation:
        """The rule from 0.5, "0.5", "count:4", "table:FILE.npy" (or .csv), "schedule:FILE.csv", or a table.

        "lines:7,10,20;8,30," is a schedule of two lines, 7,10,20 and 8,30.
        """
        if isinstance(value, Participation):
            return value
        if isinstance(value, np.ndarray):
            return cls(table=as_table(value, "the participation table"))
        if isinstance(value, str) and value.startswith("table:"):
            return cls(table=read_table(Path(value.removeprefix("table:"))))
        if isinstance(value, str) and value.startswith("schedule:"):
            return cls(schedule=read_schedule(Path(value.removeprefix("schedule:"))))
        if isinstance(value, str) and value.startswith("lines:"):
            return cls(schedule=[tuple(line.split(",")) for line in value.removeprefix("lines:").split(";")])
        try:
            if isinstance(value, str) and value.startswith("count:"):
                return cls(count=whole(value.removeprefix("count:")))
            return cls(fraction=finite(value) if isinstance(value, str) else float(value))
        except ValueError as error:
            if "participation" in str(error):
                raise
            raise ValueError(
                f"participation {value!r} is not understood; "
                "give a fraction such as 0.5, count:4, table:FILE, schedule:FILE or lines:ID,JOIN,LEAVE;.."
            ) from None

    @cached_property
    def everybody(self) -> bool:
        """Whether all nodes take part in all rounds."""
        own_rule = type(self).draw is not Participation.draw
        limits = (self.count, self.table, self.schedule, self.spans)
        return not own_rule and self.fraction == 1 and all(limit is None for limit in limits)

    def of(self, names: np.ndarray) -> Participation:
        """The rule with the ids of the schedule replaced by numbers.

        Args:
            names: the names of the nodes of the tier, in the order of the topology.

        Raises:
            ValueError: if the schedule has an id that is no name.
        """
        if self.schedule is None:
            return self
        place = {str(name): k for k, name in enumerate(names.tolist())}
        for name, _, _ in self.schedule:
            if name not in place:
                near = difflib.get_close_matches(name, place, 3) or list(place)[:3]
                raise ValueError(
                    f"the participation schedule names {name!r}; ids are such as {', '.join(near)}; correct the line, "
                    "or remove it"
                )
        spans = torch.tensor([(place[name], join, leave) for name, join, leave in self.schedule], dtype=torch.int64)
        return replace(self, schedule=None, spans=spans.reshape(-1, 3))

    def draw(self, base: int, round_: int, keys: Tensor, kids: Tensor, position: Tensor, m: int) -> Tensor:
        """Draw who takes part: of the children of each parent those with the smallest random numbers.

        Args:
            base: the key of the draw.
            round_: the round, counted from 0.
            keys: [k] the keys of the children's names.
            kids: [k] the children, by number in their tier.
            position: [k] the parent of each, 0 .. m - 1.
            m: number of parents.

        Returns:
            [k] bool
        """
        if self.everybody:
            return torch.ones(len(kids), dtype=torch.bool)
        there = torch.ones(len(kids), dtype=torch.bool)
        if self.table is not None:
            there = self.table[round_ % len(self.table)][kids]
        assert self.schedule is None, "call of(names) before draw"
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
        draws = torch.where(there, draws, draws + 1)  # those that are not available come last and are removed below
        order = torch.from_numpy(np.lexsort((draws.numpy(), position.numpy())))
        rank = torch.empty_like(order)
        first = registered.cumsum(0) - registered
        rank[order] = torch.arange(len(kids)) - first[position[order]]
        return (rank < quota[position]) & there


def read_table(path: Path) -> Tensor:
    """The table of a .npy or .csv file, bool [rounds, nodes]."""
    try:
        check_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file, which is refused below
            values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"cannot read the participation table {path}: {error}; give a .npy or .csv file of 0 and 1, a row per round"
        ) from None
    return as_table(values, str(path))


def as_table(values: np.ndarray, name: str) -> Tensor:
    """The values as bool [rounds, nodes]; `name` is how a message calls them."""
    known = values.dtype.kind in "biuf" and values.ndim == 2
    if not known or not values.size or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name} needs 0 or 1 for every round (rows) and node (columns); got shape {values.shape}")
    return torch.from_numpy(values.astype(bool))


def read_schedule(path: Path) -> list[tuple[Any, ...]]:
    """The lines id,join,leave of a file; a header line with these words is allowed."""
    try:
        check_file(path)
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [tuple(part.strip() for part in line) for line in csv.reader(file) if line]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(
            f"cannot read the participation schedule {path}: {error}; give a .csv file with lines id,join,leave"
        ) from None
    return lines[1:] if lines[:1] == [("id", "join", "leave")] else lines


def as_line(line: Sequence[Any]) -> tuple[str, int, int]:
    """The id as text, and the rounds of joining and leaving."""
    try:
        name, join, leave = line
        start, end = whole(str(join)), NEVER if leave in (None, "") else whole(str(leave))
        if not 1 <= start < end <= NEVER:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"a line of a participation schedule is id,join,leave, rounds from 1 with leave after join (or empty: "
            f"to the end), such as 7,10,20; got {line!r}"
        ) from None
    return str(name), start, end
