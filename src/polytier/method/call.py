"""Messages between nodes, and the errors of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polytier._errors import Fault
from polytier.stack.rows import Rows, map_rows

if TYPE_CHECKING:
    from polytier.method.algorithm import Algorithm


class Diverged(Fault):
    """Training has diverged: some rows hold NaN or infinity, or values so large that training cannot recover.

    Args:
        round_: the round, counted from 1.
        tier: the name of the tier, e.g. ``"device"``.
        nodes: the names of the nodes with these rows.
        why: what has happened and what to do, if the rows are finite.

    Attributes:
        round: the round, counted from 1.
        tier: the name of the tier.
        nodes: the names of the nodes.

    Examples:
        >>> from polytier import Diverged
        >>> error = Diverged(3, "team", ["north", "south"])
        >>> print(error)
        diverged in round 3: the model of team north, south is no longer finite; lower team_lr, then device_lr
        >>> error.nodes
        ['north', 'south']
    """

    def __init__(self, round_: int, tier: str, nodes: Sequence[str], why: str = "") -> None:
        super().__init__(round_, tier, nodes, why)
        self.round, self.tier, self.nodes, self.why = round_, tier, list(nodes), why

    def __str__(self) -> str:
        if self.why:
            return f"diverged in round {self.round}: {self.why}"
        some = ", ".join(self.nodes[:5]) + (f" and {len(self.nodes) - 5} more" if len(self.nodes) > 5 else "")
        kind = self.tier.rstrip("0123456789")
        # a too large step of a team or of the server is often first noticed at the devices
        steps = {
            "device": "device_lr (or team_lr and server_lr, if they are large)",
            "team": "team_lr, then device_lr",
            "server": "server_lr, then team_lr",
        }
        where = self.tier if kind == "server" else f"{self.tier} {some}"
        return f"diverged in round {self.round}: the model of {where} is no longer finite; lower {steps[kind]}"


class NodesLost(Fault):
    """The process of some nodes has ended, and the rows that these nodes kept are lost."""


@dataclass(frozen=True)
class Clock:
    """When a program runs. It is part of the key of every random draw.

    field | meaning
    round | the round, counted from 0
    call  | the number of the call: call_of_the_parent * 2^16 + k for the k-th call of the same method

    k counts the calls of each method separately. So a method that calls something else between its training steps draws
    the same numbers for training as one that does not.
    """

    round: int
    call: int = 0


@dataclass(frozen=True)
class Call:
    """A message to some nodes of one tier.

    field  | shape          | meaning
    tier   |                | the tier of the receivers
    ids    | [n]            | the receivers, by number in their tier
    method |                | a method of the algorithm by name ("solve": the program of the tier), or a function
    clock  |                | when the receivers run
    rows   | [senders, ...] | what is sent
    sender | [n]            | the row of `rows` that each receiver gets
    blocks | [n] or None    | the block in which each answer is summed; None: all answers are returned
    shares | [n] or None    | each receiver's share of the samples in the sum of its parent
    quiet  |                | True for an evaluation: traffic is not counted and nothing is kept
    scope  |                | the model that this call is about, if there are several; else ""
    only   | [devices] or None | the devices that may be reached, in the order of the federation; None: all
    """

    tier: int
    ids: Tensor
    method: str | Callable[[Algorithm, Any, Any], Rows]
    clock: Clock
    rows: Rows
    sender: Tensor
    blocks: Tensor | None = None
    shares: Tensor | None = None
    quiet: bool = False
    scope: str = ""
    only: Tensor | None = None

    def part(self, start: int, end: int) -> Call:
        """The same call to the receivers start .. end - 1."""
        return self if (start, end) == (0, len(self.ids)) else self.take(slice(start, end))

    def received(self, start: int, end: int) -> Rows:
        """[end - start, ...] what the receivers start .. end - 1 get; a view of `rows` where each gets the next one."""
        sender = self.sender.numpy()[start:end]
        first = int(sender[0]) if len(sender) else 0
        if len(sender) and (sender == np.arange(first, first + len(sender))).all():
            return map_rows(lambda r: r[first : first + len(sender)], self.rows)
        return map_rows(lambda r: r.index_select(0, self.sender[start:end]), self.rows)

    def take(self, which: Tensor | slice) -> Call:
        """The same call to some of the receivers. If answers are summed, these must be consecutive whole blocks."""
        used, sender = used_rows(self.sender[which])
        blocks = None if self.blocks is None else self.blocks[which]
        return dataclasses.replace(
            self,
            ids=self.ids[which],
            rows=map_rows(lambda r: r[used], self.rows),
            sender=sender,
            blocks=None if blocks is None else blocks - blocks[0],
            shares=None if self.shares is None else self.shares[which],
        )


def used_rows(sender: Tensor) -> tuple[Tensor | slice, Tensor]:
    """Which rows are sent, and the place of each receiver's row among these.

    They are a slice, which copies nothing, if the senders are in order and no row between them is unused.
    """
    step = np.diff(sender.numpy())
    if len(sender) and ((step == 0) | (step == 1)).all():
        return slice(int(sender[0]), int(sender[-1]) + 1), sender - sender[0]
    return torch.unique(sender, return_inverse=True)
