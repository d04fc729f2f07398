"""Messages between nodes, and what may go wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polytier.stack.rows import Rows, map_rows

if TYPE_CHECKING:
    from polytier.method.algorithm import Algorithm


class Diverged(RuntimeError):
    """Some rows are no longer finite numbers."""

    def __init__(self, round_: int, tier: str, nodes: Sequence[str]) -> None:
        super().__init__(round_, tier, nodes)
        self.round, self.tier, self.nodes = round_, tier, list(nodes)

    def __str__(self) -> str:
        some = ", ".join(self.nodes[:5]) + (f" and {len(self.nodes) - 5} more" if len(self.nodes) > 5 else "")
        kind = self.tier.rstrip("0123456789")
        # devices are the first to show what a team's or the server's step has blown up
        steps = {
            "device": "device_lr (or team_lr and server_lr, if they are large)",
            "team": "team_lr, then device_lr",
            "server": "server_lr, then team_lr",
        }
        where = self.tier if kind == "server" else f"{self.tier} {some}"
        return f"diverged in round {self.round}: the model of {where} is no longer finite; lower {steps[kind]}"


class NodesLost(RuntimeError):
    """Some nodes and what they kept are gone: the process that ran them has ended."""


@dataclass(frozen=True)
class Clock:
    """When a program runs: the round, and the call's number, nested as parent_call * 2^16 + k.

    k counts the calls of one program, so that a method which asks its devices something else in between
    draws the same for its training as one that does not; what it asks draws under streams of its own.
    """

    round: int
    call: int = 0


@dataclass(frozen=True)
class Call:
    """A message to some nodes of a tier.

    rows   | [senders, ...] what is sent
    sender | [n] the row each receiver gets
    method | the name of a method of the algorithm ("solve": the tier's own program), or a function of the house
    blocks | [n] the block in which each answer is summed, or None for all answers
    shares | [n] each receiver's share of the samples in its parent's sum
    quiet  | evaluation: counts no traffic, writes nothing
    scope  | which of several models this is about; "": there is one
    only   | [devices], as in the federation: those that this scope may reach; None: as participation has it
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
        """The same call to the receivers start .. end alone."""
        return self.take(slice(start, end))

    def take(self, which: Tensor | slice) -> Call:
        """The same call to some of the receivers; where answers are summed, to those of neighbouring whole blocks."""
        used, sender = torch.unique(self.sender[which], return_inverse=True)
        blocks = None if self.blocks is None else self.blocks[which]
        return dataclasses.replace(
            self,
            ids=self.ids[which],
            rows=map_rows(lambda r: r[used], self.rows),
            sender=sender,
            blocks=None if blocks is None else blocks - blocks[0],
            shares=None if self.shares is None else self.shares[which],
        )
