"""What the programs of a run share: the world they run in, and the messages between nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from polytier.data.batches import Batches
from polytier.ledger import Ledger
from polytier.memory import Memory
from polytier.objective import Objective
from polytier.participation import Participation
from polytier.rows import Rows, map_rows
from polytier.topology import Topology

if TYPE_CHECKING:
    from polytier.algorithm import Algorithm


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


class Engine(Protocol):
    def deliver(self, call: Call) -> Iterator[Any]:
        """Run the call at its receivers. Yields, in order, rows [k, ...], or `Folded` blocks if `call.blocks`."""
        ...


@dataclass
class World:
    """What every program of a run shares. An engine has one in each process.

    scopes | where several models share one pool of devices: a world for each, by name, with its own algorithm,
             objective, data, memory and ledger; the world above them only says who trains what
    module | the model as it was given
    hold   | rounds for which a schedule keeps its value (a frame of MFA-RR)
    """

    algorithm: Algorithm
    topology: Topology
    objective: Objective
    batches: Batches
    memory: Memory
    participation: tuple[Participation, ...]  # by tier; the server's is never read
    seed: int = 0
    batch_size: int | str = 32
    absent: str = "skip"
    device_steps: int = 0  # gradient evaluations on one mini-batch by one device, so far
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    engine: Engine = field(default=None, repr=False)  # type: ignore[assignment]
    ledger: Ledger = field(default=None, repr=False)  # type: ignore[assignment]
    module: nn.Module = field(default=None, repr=False)  # type: ignore[assignment]
    name: str = ""
    scopes: dict[str, World] = field(default_factory=dict)
    hold: int = 1

    @cached_property
    def samples(self) -> tuple[Tensor, ...]:
        """By tier: training samples below each node."""
        return self.topology.summed(self.batches.federation.samples[self.topology.order])

    def true_groups(self, tier: int) -> np.ndarray | None:
        """[nodes] the true group of each node of a tier; None if the data have none, or a node mixes them."""
        cluster = self.batches.federation.cluster
        if cluster is None:
            return None
        of_device, node = cluster[self.topology.order.numpy()], self.topology.ancestor(tier).numpy()
        first = np.unique(node, return_index=True)[1]
        return of_device[first] if (of_device == of_device[first][node]).all() else None

    def scope(self, name: str) -> World:
        return self.scopes[name] if name else self

    @property
    def parts(self) -> list[World]:
        """The worlds that models are trained in: the scopes, or this one."""
        return list(self.scopes.values()) or [self]

    @property
    def all_steps(self) -> int:
        return sum(part.device_steps for part in self.parts)
