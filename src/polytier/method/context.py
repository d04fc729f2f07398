"""What the programs of a run share: the context they run in, and the messages between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor, nn

from polytier.data.batches import Batches
from polytier.data.population import Population
from polytier.messages.ledger import Ledger
from polytier.method.call import Call
from polytier.method.memory import Memory
from polytier.stack.objective import Objective
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology

if TYPE_CHECKING:
    from polytier.method.algorithm import Algorithm


class Engine(Protocol):
    def deliver(self, call: Call) -> Iterator[Any]:
        """Run the call at its receivers. Yields, in order, rows [k, ...], or `Folded` blocks if `call.blocks`."""
        ...


@dataclass
class Context:
    """What every program of a run shares. An engine has one in each process.

    scopes | where several models share one pool of devices: a context for each, by name, with its own algorithm,
             objective, data, memory and ledger; the context above them only says who trains what
    module | the model as it was given
    batches | the samples of the devices that this process computes; None where there are none
    population | what is known of all devices without their samples; by default that of the data in `batches`
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
    scopes: dict[str, Context] = field(default_factory=dict)
    hold: int = 1
    population: Population = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.population is None and self.batches is not None:
            self.population = self.batches.federation.population

    @cached_property
    def samples(self) -> tuple[Tensor, ...]:
        """By tier: training samples below each node."""
        return self.topology.summed(self.population.samples[self.topology.order])

    def true_groups(self, tier: int) -> np.ndarray | None:
        """[nodes] the true group of each node of a tier; None if the data have none, or a node mixes them."""
        cluster = self.population.cluster
        if cluster is None:
            return None
        of_device, node = cluster[self.topology.order.numpy()], self.topology.ancestor(tier).numpy()
        first = np.unique(node, return_index=True)[1]
        return of_device[first] if (of_device == of_device[first][node]).all() else None

    def scope(self, name: str) -> Context:
        return self.scopes[name] if name else self

    @property
    def parts(self) -> list[Context]:
        """The contexts that models are trained in: the scopes, or this one."""
        return list(self.scopes.values()) or [self]

    @property
    def all_steps(self) -> int:
        return sum(part.device_steps for part in self.parts)
