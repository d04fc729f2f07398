"""What the programs of a run share. Internal to the package: algorithms use the named parts of a node instead."""

from __future__ import annotations

from collections.abc import Iterator
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
from polytier.method.travel import Travel
from polytier.models.metrics import Metric
from polytier.stack.objective import Objective
from polytier.stack.optimizers import LocalOptimizer
from polytier.stack.rows import share_of_samples
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology

if TYPE_CHECKING:
    from polytier.method.algorithm import Algorithm

SGD = LocalOptimizer()


class Delivery(Protocol):
    """What the programs of a method need of an engine; `polytier.engines.protocol.Engine` is all of it."""

    def deliver(self, call: Call) -> Iterator[Any]:
        """Run the program of a call at its receivers.

        Args:
            call: The program, its receivers and the rows sent to them.

        Yields:
            If `call.blocks` is None, the answers in the order of the receivers: rows [k, ...] of the next k receivers,
            or `Answered`, which says whose they are. Otherwise sums of the blocks (`Folded`), in order.

        A receiver that does not answer is absent from what is yielded, and means are over those that answered.
        """
        ...


@dataclass
class Context:
    """What all programs of a run share. An engine has one in each process.

    field         | meaning
    batches       | the samples of the devices that this process computes; None where there are none
    participation | one rule per tier; that of the server is not used
    absent        | "skip", or "stale": children that do not take part count with their last answer
    device_steps  | number of gradients of one device on one mini-batch so far
    module        | the model as it was given
    optimizer     | how the local solvers of devices step
    travel        | what of a model is not sent; by default all of it is
    population    | what is known of all devices without their samples; by default that of the data in `batches`
    name, scopes  | if several models are trained on one pool of devices: a context per model, by name, each with its
                    own algorithm, objective, data, memory and ledger; the context above them has the name ""
    hold          | number of rounds during which a schedule keeps its value (see `Algorithm.frame`)
    """

    algorithm: Algorithm
    topology: Topology
    objective: Objective
    batches: Batches
    memory: Memory
    participation: tuple[Participation, ...]
    seed: int = 0
    batch_size: int | str = 32
    shuffle: bool = True
    absent: str = "skip"
    device_steps: int = 0
    metrics: tuple[Metric, ...] = ()  # the leading one first
    engine: Delivery = field(default=None, repr=False)  # type: ignore[assignment]
    ledger: Ledger = field(default=None, repr=False)  # type: ignore[assignment]
    module: nn.Module = field(default=None, repr=False)  # type: ignore[assignment]
    name: str = ""
    scopes: dict[str, Context] = field(default_factory=dict)
    hold: int = 1
    optimizer: LocalOptimizer = SGD
    travel: Travel = field(default=None, repr=False)  # type: ignore[assignment]
    population: Population = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.travel is None and self.objective is not None:
            self.travel = Travel.of(self.objective)
        if self.population is None and self.batches is not None:
            self.population = self.batches.federation.population

    @cached_property
    def samples(self) -> tuple[Tensor, ...]:
        """By tier: [nodes] number of training samples of each node, its own or those of all devices below it."""
        return self.topology.summed(self.population.samples[self.topology.order])

    @cached_property
    def shares(self) -> tuple[Tensor, ...]:
        """By tier: [nodes] the share of each node in the samples of its parent."""
        return tuple(share_of_samples(own, p) for own, p in zip(self.samples, self.topology.parents, strict=True))

    def true_groups(self, tier: int) -> np.ndarray | None:
        """[nodes] the true group of each node of a tier; None if the data have none, or a node has several."""
        cluster = self.population.cluster
        if cluster is None:
            return None
        of_device, node = cluster[self.topology.order.numpy()], self.topology.ancestor(tier).numpy()
        first = np.unique(node, return_index=True)[1]
        return of_device[first] if (of_device == of_device[first][node]).all() else None

    def scope(self, name: str) -> Context:
        """The context of a model by name; "" is this one."""
        return self.scopes[name] if name else self

    @property
    def parts(self) -> list[Context]:
        """The contexts in which models are trained: the scopes, or this one."""
        return list(self.scopes.values()) or [self]

    @property
    def all_steps(self) -> int:
        """`device_steps` of all models."""
        return sum(part.device_steps for part in self.parts)
