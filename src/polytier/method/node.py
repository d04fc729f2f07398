"""`Node`: what the programs of all tiers are given."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier._text import schedule
from polytier.method.call import Clock, Diverged
from polytier.method.context import Context
from polytier.method.memory import filled
from polytier.method.parameters import Step
from polytier.stack.rows import Rows, as_dict
from polytier.tree import random


class Node:
    """What the programs of all tiers are given. It stands for the nodes `ids` of one tier, one row per node.

    attribute | shape | meaning
    tier      |       | 0 is the server, the last tier are the devices
    ids       | [n]   | the numbers of these nodes in their tier
    clock     |       | the round and the number of the call
    quiet     |       | True during an evaluation: nothing is kept and no gradient is counted
    only      | [devices] or None | the devices that may be reached; None: all of them, as participation says

    Algorithms use the public attributes and methods alone. `_context` belongs to the package.
    """

    def __init__(
        self, context: Context, tier: int, ids: Tensor, clock: Clock, quiet: bool = False, only: Tensor | None = None
    ) -> None:
        self._context, self.tier, self.ids, self.clock, self.quiet, self.only = context, tier, ids, clock, quiet, only
        self._finite: tuple[Tensor | None, int] = (None, 0)  # the last rows that were found finite, and their version
        self._pending: dict[str, Tensor] = {}  # rows that are kept and not written yet

    # -- the tree and the round ------------------------------------------------------------------

    @property
    def num_tiers(self) -> int:
        """Number of tiers of the tree, server and devices included: 2 if there are no teams."""
        return self._context.topology.num_tiers

    @property
    def round(self) -> int:
        """The current round, counted from 0."""
        return self.clock.round

    @property
    def held_round(self) -> int:
        """The round at which schedules are evaluated: the first round of the current frame (see `Algorithm.frame`)."""
        return self.round - self.round % self._context.hold

    @property
    def device(self) -> torch.device:
        """Where the rows of this node are computed: those of devices on the accelerator, all others on the CPU."""
        return torch.device("cpu")

    # -- the model and the data ------------------------------------------------------------------

    @property
    def initial(self) -> Tensor:
        """[n, d] the model that training starts from, the same at every node."""
        return self._context.objective.initial.to(self.device).expand(len(self.ids), -1)

    @property
    def samples(self) -> Tensor:
        """[n] number of training samples of each node: its own, or those of all devices below it."""
        return self._context.samples[self.tier][self.ids]

    @property
    def num_classes(self) -> int | None:
        """Number of classes if the target of each sample is one class, None for other targets."""
        population = self._context.population
        return None if population.target_shape else population.num_classes

    @property
    def parameter_names(self) -> list[str]:
        """Names of the model's parameters, in the order of their columns in a row."""
        return list(self._context.objective.names)

    @property
    def l2(self) -> float:
        """Coefficient of the term l2/2 |theta|^2 of the objective."""
        return self._context.objective.l2

    def columns(self, pattern: str) -> Tensor:
        """[d] bool, True for the columns of the parameters whose name matches `pattern`, e.g. ``"head.*"``."""
        objective = self._context.objective
        fits = [fnmatch.fnmatch(name, pattern) for name in objective.names]
        return torch.repeat_interleave(torch.tensor(fits), torch.tensor(objective.sizes)).to(self.device)

    # -- rows that last, random numbers, hyper-parameters ----------------------------------------

    def memory(self, name: str, default: Tensor) -> Tensor:
        """Read the rows that were kept under a name.

        Args:
            name: the name given to `keep`.
            default: [n, ...] the rows of nodes that have kept nothing under this name.

        Returns:
            [n, ...]
        """
        if name in self._pending:
            return self._pending[name]
        if self.device.type == "cpu":
            return self._context.memory.read(self.tier, name, self.ids, default)
        found = self._context.memory.find(self.tier, name, self.ids)  # the default stays where it is
        if found is None:
            return default
        rows, kept = (values.to(self.device, non_blocking=True) for values in found)
        return filled(rows, kept, default)

    def keep(self, /, **rows: Tensor) -> None:
        """Keep rows until they are replaced, in this round and in later ones.

        Args:
            rows: [n, ...] by name, which is any text of up to 100 characters. The row ``model`` is the model of this
                node that is evaluated.

        Raises:
            Diverged: if a row holds NaN or infinity.
            ValueError: if a name is too long, or rows of another shape were kept under it.
        """
        if not self.quiet:
            self._pending |= rows
            if self.device.type == "cpu":
                self._write_kept()

    def _write_kept(self) -> None:
        """Write what `keep` was given. Rows on an accelerator are written when the program has ended.

        So a program does not wait for the accelerator.
        """
        pending, self._pending = self._pending, {}
        for name, value in pending.items():
            value = value.cpu()
            check_finite(self, value)
            self._context.memory.write(self.tier, name, self.ids, value)

    def uniform(self, purpose: str, k: int = 1) -> Tensor:
        """[n, k] random numbers in [0, 1), different for each node, round and call.

        Args:
            purpose: any text; draws for different purposes are independent.
            k: numbers per node.
        """
        base = random.key(self._context.seed, purpose, self.clock.round, self.clock.call)
        keys = random.node_keys(base, self._context.topology.keys[self.tier].numpy()[self.ids.numpy()])
        return torch.from_numpy(random.uniform(keys, k)).to(self.device)

    def shared(self, purpose: str, k: int = 1) -> Tensor:
        """[k] random numbers in [0, 1), the same at every node during a round."""
        base = random.key(self._context.seed, purpose, self.clock.round)
        return torch.from_numpy(random.uniform(np.array([random.signed(base)]), k)[0]).to(self.device)

    def value(self, field: Step, tier: int | None = None) -> Any:
        """The value of a hyper-parameter at these nodes.

        Args:
            field: a number, a schedule, one number per node, or a mapping from tier names to these.
            tier: read the value of another tier; it must be one number there.

        Returns:
            A number, or a column [n, 1] if the field has one number per node.

        Raises:
            ValueError: if the field has no value for this tier, or not one number per node.
        """
        topology = self._context.topology
        name = topology.tier_names[self.tier if tier is None else tier]
        if isinstance(field, Mapping):
            if name not in field:
                raise ValueError(
                    f"a field is given by tier ({', '.join(field)}) and none is named {name}; add a value for {name}, "
                    "or give one value for all tiers"
                )
            field = field[name]
        if isinstance(field, str):
            return schedule(field)(self.held_round)
        if isinstance(field, int | float):
            return field
        size = topology.size(self.tier)
        if tier is not None and tier != self.tier:
            raise ValueError(f"{name}: this field takes one number per tier; got {len(field)} numbers; give one")
        if len(field) != size:
            raise ValueError(
                f"{name}: a field with one number per node needs {size}; got {len(field)}; give one number for each "
                f"{name}, or one number for all"
            )
        # devices are numbered as in the federation, in whichever team they are
        places = topology.order[self.ids] if self.tier == topology.leaf else self.ids
        return torch.tensor(field, dtype=self._context.objective.dtype)[places].unsqueeze(1).to(self.device)


def check_finite(node: Node, rows: Rows) -> None:
    """Raise `Diverged`, which names the nodes, if a row holds NaN or infinity."""
    for value in as_dict(rows).values():
        # the sum of all values is a fast first test; it can also overflow, so the rows are then looked at
        if value is node._finite[0] and value._version == node._finite[1]:
            continue  # what a device keeps is often what it answers
        if value.is_floating_point() and not math.isfinite(value.sum()):
            bad = ~torch.isfinite(value.reshape(len(value), -1)).all(1)
            if bad.any():
                names = node._context.topology.names[node.tier][node.ids[bad].numpy()]
                tier = node._context.topology.tier_names[node.tier]
                raise Diverged(node.clock.round + 1, tier, [str(n) for n in names])
        node._finite = value, value._version
