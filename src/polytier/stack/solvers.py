"""Local solvers that several methods share. They return new rows and leave their arguments as they found them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from polytier.data.batches import Batch
from polytier.stack.objective import Piece
from polytier.stack.rows import aligned_copy


class Gradients(Protocol):
    """What a solver needs of a device: gradients of its objective, in pieces (see `Objective.grad_pieces`)."""

    def grad_pieces(self, theta: Tensor, batch: Batch | None = None) -> Iterator[tuple[Tensor | slice, list[Piece]]]:
        """The gradients of some rows at a time, as columns side by side."""
        ...


def sgd(local: Gradients, theta: Tensor, lr: Any, steps: int) -> Tensor:
    """`steps` times theta <- theta - lr * grad f(theta), each on a fresh mini-batch; theta [n, d]."""
    return proximal_sgd(local, theta, theta, lr, 0.0, steps)


def proximal_sgd(
    local: Gradients, theta: Tensor, anchor: Tensor, lr: Any, pull: Any, steps: int, batch: Batch | None = None
) -> Tensor:
    """`steps` times theta <- theta - lr * (grad f(theta) + pull * (theta - anchor)); on `batch`, if one is held."""
    theta = aligned_copy(theta)  # in place from here on, and by pieces: rows are as large as all models together
    for _ in range(steps):
        for rows, pieces in local.grad_pieces(theta, batch):
            x = theta[rows]
            alpha, lam = (v[rows] if isinstance(v, Tensor) else v for v in (lr, pull))
            if isinstance(lam, Tensor) or lam:
                x.lerp_(anchor[rows], alpha * lam)
            for piece, x_k in zip(pieces, x.split([width(piece) for piece in pieces], 1), strict=True):
                step(x_k, piece, alpha)
            if isinstance(rows, Tensor):
                theta[rows] = x
    return theta


def step(x: Tensor, direction: Piece, lr: Any) -> None:
    """x <- x - lr * direction. A product goes straight into each row, which is read and written once."""
    if isinstance(direction, Tensor):
        x -= direction.mul_(lr)  # in two roundings, as methods that write out their steps have it
        return
    left, right = direction
    rows = x.unflatten(1, (left.shape[1], right.shape[2]))
    if isinstance(lr, Tensor) or rows.is_contiguous():  # a stack that lies closely takes another way, with other bits
        alphas = lr.flatten().tolist() if isinstance(lr, Tensor) else [lr] * len(x)
        for row, a, b, alpha in zip(rows, left, right, alphas, strict=True):
            row.addmm_(a, b, alpha=-alpha)
    else:
        rows.baddbmm_(left, right, alpha=-lr)


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
        after = torch.sub(y, direction.mul_(lr), out=direction)
        if small is not None:
            after, x = torch.where(small, y, after), torch.where(small, y, x)  # no momentum is left: it stays
        before, x = x, after
    return x
