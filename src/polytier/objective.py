"""Losses and gradients of a stack of devices, for any torch module and any loss a sample.

A model is a flat row [d]; the module sees views of it. The gradient of a stack [n, d] is
`vmap(grad(loss))`, traced once a shape and then run without autograd. How a stack is run is its
`batching`, found by `choose_batching`:

    stacked | the traced graph of n rows
    single  | the traced graph of one row, row by row: where a row's bits would depend on its neighbours
    eager   | autograd, row by row: where the module cannot be traced
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from polytier import random
from polytier.data.batches import Batch

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [B, ...], targets [B, ...]) -> one loss a sample [B]
BATCHINGS = ("stacked", "single", "eager")


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes; sequences ([B, T, C] with [B, T]) give the mean over their positions."""
    # log_softmax and gather instead of F.cross_entropy: its row-stable parts trace to the same bits in any stack
    chosen = torch.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -chosen if chosen.ndim == 1 else -chosen.flatten(1).mean(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance."""
    difference = outputs.reshape(targets.shape) - targets
    return 0.5 * (difference * difference).reshape(len(targets), -1).sum(1)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 a sample whose largest output is the target; for sequences the share of the positions."""
    hits = (outputs.argmax(-1) == targets).to(outputs.dtype)
    return hits if hits.ndim == 1 else hits.flatten(1).mean(1)


def itself(function: Callable) -> Callable:
    return function


class Objective:
    """f(theta) = mean loss over a batch + l2/2 |theta|^2, for every row of a stack."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss = cross_entropy,
        *,
        l2: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batching: str = "stacked",
    ) -> None:
        self.module = copy.deepcopy(module).to(device=device, dtype=dtype)
        self.sample_loss, self.l2, self.dtype, self.batching = loss, l2, dtype, batching
        parameters = dict(self.module.named_parameters())
        if not parameters:
            raise ValueError("the model has no parameters to train")
        self.names = list(parameters)
        self.shapes = [tuple(p.shape) for p in parameters.values()]
        self.sizes = [p.numel() for p in parameters.values()]
        self.dimension = sum(self.sizes)
        self.initial = torch.cat([p.detach().reshape(-1) for p in parameters.values()])  # [d]
        self.dropouts = key_dropouts(self.module)
        self.module.requires_grad_(False)
        self._compiled: dict[Any, Callable] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": {}}  # graphs are traced anew in another process

    # -- one row ---------------------------------------------------------------------------------

    def parameters(self, row: Tensor) -> dict[str, Tensor]:
        """Views of a row [d] (or of a stack [n, d]) by parameter name."""
        parts = row.split(self.sizes, dim=-1)
        lead = row.shape[:-1]
        return {
            n: p.reshape(*lead, *s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)
        }

    def apply(self, row: Tensor, inputs: Tensor, key: Tensor | None = None) -> Tensor:
        """Outputs [B, ...] of the model `row`; `key` [B] draws the dropout of training."""
        for layer in self.dropouts:
            layer.key = key
        return functional_call(self.module, self.parameters(row), (inputs,))

    def row_loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor) -> Tensor:
        outputs = self.apply(row, x, key if self.dropouts else None)
        value = (weight * self.sample_loss(outputs, y)).sum()
        return value + 0.5 * self.l2 * (row * row).sum() if self.l2 else value

    # -- a stack of rows -------------------------------------------------------------------------

    def grad(self, theta: Tensor, batch: Batch, loss: Callable | None = None, extra: tuple = ()) -> Tensor:
        """[n, d] gradients, each of its own row on its own samples.

        `loss(apply, row, x, y, weight, *extra)` replaces the objective; `extra` are rows [n, ...].
        """
        return self._stack(grad, theta, batch, loss, extra)

    def loss(self, theta: Tensor, batch: Batch, loss: Callable | None = None, extra: tuple = ()) -> Tensor:
        """[n] values of the objective."""
        return self._stack(itself, theta, batch, loss, extra)

    def outputs(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """[n, B, ...] outputs of each row on its own inputs [n, B, ...]."""
        return self._run(("apply",), lambda row, x: self.apply(row, x), theta, inputs)

    def _stack(self, transform: Callable, theta: Tensor, batch: Batch, loss: Callable | None, extra: tuple):
        function: Callable = self.row_loss
        if loss is not None:

            def function(row, x, y, weight, key, *more):
                return loss(lambda r, i: self.apply(r, i, key if self.dropouts else None), row, x, y, weight, *more)

        parts = [
            self._run(
                (transform, loss), transform(function),
                theta[g.rows], g.x, g.y, g.weight, g.key, *(e[g.rows] for e in extra),
            )
            for g in batch.groups
        ]  # fmt: skip
        if len(parts) == 1:
            return parts[0]
        result = torch.empty((len(theta), *parts[0].shape[1:]), dtype=parts[0].dtype, device=theta.device)
        for group, part in zip(batch.groups, parts, strict=True):
            result[group.rows] = part
        return result

    def _run(self, tag: Any, function: Callable, *stacks: Tensor) -> Tensor:
        """`function` of every row: in pieces of 2^k rows, so that few shapes are traced."""
        n = len(stacks[0])
        if self.batching == "eager":
            return torch.stack([self._eager(tag, function, [s[i] for s in stacks]) for i in range(n)])
        if self.batching == "single":
            return torch.stack([self._traced(tag, function, [s[i] for s in stacks]) for i in range(n)])
        if n & (n - 1) == 0:
            return self._traced(tag, vmap(function), stacks)
        pieces, start = [], 0
        for k in reversed(range(n.bit_length())):
            if n & (1 << k):
                end = start + (1 << k)
                pieces.append(self._traced(tag, vmap(function), [s[start:end] for s in stacks]))
                start = end
        return torch.cat(pieces)

    def _traced(self, tag: Any, function: Callable, inputs) -> Tensor:
        signature = (tag, *((i.shape, i.dtype) for i in inputs))
        compiled = self._compiled.get(signature)
        if compiled is None:
            compiled = self._compiled[signature] = trace(function, inputs)
        with torch.no_grad():
            return compiled(*inputs)

    def _eager(self, tag: Any, function: Callable, inputs) -> Tensor:
        if tag[0] is not grad:
            with torch.no_grad():
                return function(*inputs)
        # autograd itself: torch.func does not pass through every old autograd function
        row = inputs[0].detach().requires_grad_()
        with torch.enable_grad():
            value = function.__wrapped__(row, *inputs[1:])
        return torch.autograd.grad(value, row)[0]


def trace(function: Callable, inputs) -> Callable:
    """The function as a graph of plain tensor operations for inputs of these shapes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tracing internals, nothing a user could act on
        graph = make_fx(lambda *given: function(*given))(*(i.clone() for i in inputs))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph.forward


def choose_batching(objective: Objective, batch: Batch, generator_key: int = 0) -> str:
    """The fastest batching whose rows do not depend on their neighbours, to the bit; tried on a real batch."""
    noise = random.uniform(random.node_keys(generator_key, torch.arange(batch.num_rows)), objective.dimension)
    theta = objective.initial + (0.1 * (noise - 0.5)).to(objective.dtype)
    found = "eager"
    for batching in ("stacked", "single"):
        objective.batching = batching
        try:
            whole = objective.grad(theta, batch)
            alone = [objective.grad(theta[i : i + 1], batch.row(i)) for i in range(len(theta))]
            values = objective.loss(theta, batch)
            values_alone = [objective.loss(theta[i : i + 1], batch.row(i)) for i in range(len(theta))]
        except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, AssertionError):
            continue  # not traceable or not stackable: the next one down
        if torch.equal(whole, torch.cat(alone)) and torch.equal(values, torch.cat(values_alone)):
            found = batching
            break
    objective.batching = found
    return found


class KeyedDropout(nn.Module):
    """Dropout whose mask is drawn from a key a sample, so that it is the same in any stack."""

    def __init__(self, p: float, layer: int, channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels
        self.key: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.key is None or self.p == 0:
            return x
        shape = x.shape[1:2] if self.channels else x.shape[1:]
        draws = random.uniform(random.node_keys(self.layer, self.key), math.prod(shape))
        mask = (draws >= self.p).to(x.dtype) / (1 - self.p)
        mask = mask.reshape(len(x), *shape)
        return x * (mask[..., None, None] if self.channels and x.ndim == 4 else mask)


def key_dropouts(module: nn.Module) -> list[KeyedDropout]:
    """Replace every dropout layer inside `module` by a keyed one."""
    found: list[KeyedDropout] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d):
                found.append(KeyedDropout(child.p, len(found), not isinstance(child, nn.Dropout)))
                setattr(parent, name, found[-1])
    return found
