"""Local solvers that several methods share. They return new rows and leave their arguments as they found them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polytier.algorithm import Local
from polytier.data.batches import Batch


def sgd(local: Local, theta: Tensor, lr: Any, steps: int) -> Tensor:
    """`steps` times theta <- theta - lr * grad f(theta), each on a fresh mini-batch; theta [n, d]."""
    return proximal_sgd(local, theta, theta, lr, 0.0, steps)


def proximal_sgd(
    local: Local, theta: Tensor, anchor: Tensor, lr: Any, pull: Any, steps: int, batch: Batch | None = None
) -> Tensor:
    """`steps` times theta <- theta - lr * (grad f(theta) + pull * (theta - anchor)); on `batch`, if one is held."""
    theta = theta.clone()  # in place from here on, and by pieces: rows are as large as all models together
    for _ in range(steps):
        pieces = local.grad_pieces(theta, batch)
        widths = [g.shape[1] for g in pieces]
        for direction, x, to in zip(pieces, theta.split(widths, 1), anchor.split(widths, 1), strict=True):
            if isinstance(pull, Tensor) or pull:
                direction += pull * (x - to)
            x -= direction.mul_(lr)
    return theta


def descend(
    gradient: Callable[[Tensor], Tensor], x: Tensor, lr: Any, steps: int, nesterov: bool = False, accuracy: float = 0.0
) -> Tensor:
    """`steps` times y = x_k + m_k (x_k - x_{k-1}), x_{k+1} = y - lr * gradient(y); m_k = k / (k + 3), or 0 if plain.

    A row stops at the first y where |gradient(y)|^2 <= accuracy (0: none does). `gradient` answers new rows, and
    is that of one function: on a mini-batch that is held.
    """
    before = x
    for k in range(steps):
        y = x.add(x - before, alpha=k / (k + 3)) if nesterov and k else x
        direction = gradient(y)
        small = (direction * direction).sum(1, keepdim=True) <= accuracy if accuracy else None
        after = y - direction.mul_(lr)
        if small is not None:
            after, x = torch.where(small, y, after), torch.where(small, y, x)  # no momentum is left: it stays
        before, x = x, after
    return x
