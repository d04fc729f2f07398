"""`LocalProblem`: what the program of a device is given, the only node with data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from polytier.data.batches import Batch, Walk, batch_sizes, share_of_batch
from polytier.method.node import Node
from polytier.stack.objective import Piece
from polytier.stack.optimizers import LocalOptimizer
from polytier.tree import random


class LocalProblem(Node):
    """A device: the only node with data. It stands for the devices `ids` [n], one row per device.

    Polytier creates it and passes it to `Algorithm.device` and to every method of an algorithm whose last parameter
    is named `local`. In simulation it stands for many devices at once; on a real device n is 1.

    Args:
        context: what the programs of a run share.
        tier: the tier of the devices.
        ids: [n] their numbers in the tier.
        clock: the round and the number of the call.
        quiet: True during an evaluation.
        only: [devices] bool, the devices that may be reached; None: all.

    Examples:
        A device program that takes two steps, one on a mini-batch and one on all training samples:

        >>> from dataclasses import dataclass
        >>> from polytier import Algorithm, Federation, train
        >>> @dataclass(frozen=True)
        ... class Alone(Algorithm):
        ...     def server(self, x, devices):
        ...         devices.solve({})  # an empty message: devices only have to run
        ...         return x
        ...
        ...     def device(self, sent, local):
        ...         theta = local.memory("model", local.initial)  # [n, d]
        ...         theta = theta - 0.1 * local.grad(theta)
        ...         theta = theta - 0.1 * local.grad(theta, local.full())
        ...         local.keep(model=theta)  # evaluated as the personal model of each device
        ...         return {}
        >>> x, y, device = [[0.0], [1.0], [2.0]], [0, 1, 1], ["a", "b", "b"]
        >>> federation = Federation.from_arrays(x, y, device, shares=(1, 0, 0))
        >>> run = train(Alone(), federation, "mclr", rounds=1)
        >>> tuple(run.personal.shape)  # 2 devices; weights and biases of 2 classes
        (2, 4)
    """

    @cached_property
    def rows(self) -> Tensor:
        """[n] the numbers of these devices in the federation."""
        return self._context.topology.order[self.ids]

    statistics: Tensor | None = None
    """[n, s] the running statistics of BatchNorm layers, which gradients change; None: the initial ones are used."""

    @cached_property
    def _walks(self) -> dict[tuple[int | str, str], Walk]:
        """By batch size and stream: where each device is in its samples."""
        return {}

    @property
    def device(self) -> torch.device:
        return self._context.objective.device

    @property
    def optimizer(self) -> LocalOptimizer:
        """How the solvers of `polytier.stack.solvers` step."""
        return self._context.optimizer

    def batch(self, size: int | None = None, stream: str = "") -> Batch:
        """The next mini-batch of each device.

        Args:
            size: samples per mini-batch; by default the batch size of the run. A device with fewer samples uses all.
            stream: mini-batches of different streams are drawn independently of each other.
        """
        rule = self._context.batch_size if size is None else size
        if (rule, stream) not in self._walks:
            sizes = rule if isinstance(rule, int) else batch_sizes(rule, self.samples, self.held_round)
            at, shuffle = (self.clock.round, self.clock.call), self._context.shuffle
            self._walks[rule, stream] = self._context.batches.walk(self.rows, *at, sizes, stream, shuffle)
        return self._walks[rule, stream].next()

    def full(self, split: str = "train") -> Batch:
        """All samples of each device in a split: train, validation or test."""
        return self._context.batches.whole(self.rows, split)

    def subset(self, count: int, width: int | None = None) -> Batch:
        """A fixed choice of training samples of each device, spread evenly over all it has.

        Args:
            count: samples per device at most; a device with fewer uses all.
            width: the size to which the batch is padded; by default `count`.

        Returns:
            A batch of one group, x [n, width, ...], whose weights [n, width] are 0 where it is padded.
        """
        batches, samples = self._context.batches, self.samples.unsqueeze(1)
        number, slot = samples.clamp(max=count), torch.arange(count if width is None else width)
        place = batches.federation.bounds[self.rows, :1] + torch.minimum(slot, number - 1) * samples // number
        weight = share_of_batch(number, len(slot), batches.dtype)
        key = random.bits(batches.keys[self.rows], len(slot)) if batches.keyed else None
        return Batch([batches.gather(slice(None), place, weight, key)], len(self.ids))

    def grad(
        self, theta: Tensor, batch: Batch | None = None, loss: Callable | None = None, extra: tuple = ()
    ) -> Tensor:
        """Gradients of the objective, one per device. Counted as one device step per device.

        Args:
            theta: [n, d] the models.
            batch: the samples; by default the next mini-batch (``local.full()``: all training samples).
            loss: ``loss(apply, row, x, y, weight, *extra)``, which replaces the objective, without its l2 term;
                it sees one device: row [d], x [B, ...], y [B, ...], weight [B].
            extra: further arguments of `loss`, [n, ...] each.

        Returns:
            [n, d]
        """
        if not self.quiet:
            self._context.device_steps += len(theta)
        batch = self.batch() if batch is None else batch
        return self._context.objective.grad(theta, batch, loss, extra, self.statistics)

    def grad_pieces(self, theta: Tensor, batch: Batch | None = None) -> Iterator[tuple[Tensor | slice, list[Piece]]]:
        """The same gradients for some rows at a time and by parameter, for the solvers (`Objective.grad_pieces`)."""
        if not self.quiet:
            self._context.device_steps += theta.shape[0]
        return self._context.objective.grad_pieces(theta, self.batch() if batch is None else batch, self.statistics)

    def loss(
        self, theta: Tensor, batch: Batch | None = None, loss: Callable | None = None, extra: tuple = ()
    ) -> Tensor:
        """[n] values of the objective at theta [n, d], on all training samples or on the given batch.

        `loss` and `extra` are those of `grad`.
        """
        batch = self.full() if batch is None else batch
        return self._context.objective.loss(theta, batch, loss, extra, self.statistics)

    def apply(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """[n, B, ...] the outputs of the models theta [n, d] on inputs [n, B, ...]."""
        return self._context.objective.outputs(theta, inputs, self.statistics)
