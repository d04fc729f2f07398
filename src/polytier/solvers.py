"""Local solvers that several methods share. They return new rows and leave their arguments as they found them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polytier.algorithm import Local
from polytier.data.batches import Batch
from polytier.objective import Piece
from polytier.rows import aligned_copy


def sgd(local: Local, theta: Tensor, lr: Any, steps: int) -> Tensor:
    """`steps` times theta <- theta - lr * grad f(theta), each on a fresh mini-batch; theta [n, d]."""
    return proximal_sgd(local, theta, theta, lr, 0.0, steps)


def proximal_sgd(
    local: Local, theta: Tensor, anchor: Tensor, lr: Any, pull: Any, steps: int, batch: Batch | None = None
) -> Tensor:
    """`steps` times theta <- theta - lr * (grad f(theta) + pull * (theta - anchor)); on `batch`, if one is held."""
    theta = aligned_copy(theta)  # in place from here on, and by pieces: rows are as large as all models together
    for _ in range(steps):
        for rows, pieces in local.grad_pieces(theta, batch):
            x, to = theta[rows], anchor[rows]
            alpha, lam = (v[rows] if isinstance(v, Tensor) else v for v in (lr, pull))
            widths = [width(piece) for piece in pieces]
            for piece, x_k, to_k in zip(pieces, x.split(widths, 1), to.split(widths, 1), strict=True):
                if isinstance(piece, Tensor):
                    step(x_k, piece, to_k, alpha, lam)
                else:
                    step_by_product(x_k, *piece, to_k, alpha, lam)
            if isinstance(rows, Tensor):
                theta[rows] = x
    return theta


def step(x: Tensor, direction: Tensor, anchor: Tensor, lr: Any, pull: Any) -> None:
    if isinstance(pull, Tensor) or pull:
        direction += pull * (x - anchor)
    x -= direction.mul_(lr)


def step_by_product(x: Tensor, left: Tensor, right: Tensor, anchor: Tensor, lr: Any, pull: Any) -> None:
    """The direction is left @ right: it goes straight into each row, which is read and written once."""
    shape = (left.shape[1], right.shape[2])
    for k, (alpha, lam) in enumerate(zip(each(lr, len(x)), each(pull, len(x)), strict=True)):
        if lam:
            x[k].lerp_(anchor[k], alpha * lam)
        x[k].view(shape).addmm_(left[k], right[k], alpha=-alpha)


def each(value: Any, n: int) -> list[float]:
    """A number, or a column of them, row by row."""
    return value.flatten().tolist() if isinstance(value, Tensor) else [value] * n


def width(piece: Piece) -> int:
    return piece.shape[1] if isinstance(piece, Tensor) else piece[0].shape[1] * piece[1].shape[2]


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
