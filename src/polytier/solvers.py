"""Local solvers that several methods share. They return new rows and leave their arguments as they found them."""

from __future__ import annotations

from typing import Any

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
    theta = theta.clone()  # in place from here on: rows are as large as all models together
    for _ in range(steps):
        direction = local.grad(theta, batch)
        if isinstance(pull, Tensor) or pull:
            direction += pull * (theta - anchor)
        theta -= direction.mul_(lr)
    return theta
