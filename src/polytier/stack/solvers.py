"""Local solvers that several methods share. They return new rows and leave their arguments unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from polytier.data.batches import Batch
from polytier.stack.objective import Piece
from polytier.stack.optimizers import LocalOptimizer
from polytier.stack.rows import aligned_copy

EVERY_ROW = slice(None)


class Gradients(Protocol):
    """What a solver needs of a device: its optimiser, and the gradients of its objective.

    `grad_pieces` gives them by parameter (see `Objective.grad_pieces`).
    """

    @property
    def optimizer(self) -> LocalOptimizer:
        """How a device steps."""
        ...

    @property
    def quiet(self) -> bool:
        """True during an evaluation: no state is kept."""
        ...

    def memory(self, name: str, default: Tensor) -> Tensor:
        """Read rows that were kept."""
        ...

    def keep(self, /, **rows: Tensor) -> None:
        """Keep rows."""
        ...

    def grad(self, theta: Tensor, batch: Batch | None = None) -> Tensor:
        """The gradients [n, d] at theta [n, d]."""
        ...

    def grad_pieces(self, theta: Tensor, batch: Batch | None = None) -> Iterator[tuple[Tensor | slice, list[Piece]]]:
        """Yield some rows of theta [n, d] at a time, and their gradients as a list of consecutive columns."""
        ...


def sgd(local: Gradients, theta: Tensor, lr: Any, steps: int) -> Tensor:
    """Stochastic gradient descent: `steps` times theta <- theta - lr * grad f(theta), each on a new mini-batch.

    The step is that of the run's local optimiser (`--optimizer`), sgd by default.

    Args:
        local: the devices.
        theta: [n, d] where the steps start.
        lr: the step size: a number, or a column [n, 1].
        steps: number of steps.

    Returns:
        [n, d]
    """
    return proximal_sgd(local, theta, theta, lr, 0.0, steps)


def proximal_sgd(
    local: Gradients, theta: Tensor, anchor: Tensor, lr: Any, pull: Any, steps: int, batch: Batch | None = None
) -> Tensor:
    """SGD with a proximal term: `steps` times theta <- theta - lr * (grad f(theta) + pull * (theta - anchor)).

    Another local optimiser of the run (`--optimizer`) steps along the same direction.

    Args:
        local: the devices.
        theta: [n, d] where the steps start.
        anchor: [n, d] the models that theta is pulled to.
        lr: the step size: a number, or a column [n, 1].
        pull: the strength of the pull: a number, or a column [n, 1].
        steps: number of steps.
        batch: the samples of all steps; by default each step uses a new mini-batch.

    Returns:
        [n, d]
    """
    if not local.optimizer.plain:
        return follow(local, theta, lambda x: local.grad(x, batch) + pull * (x - anchor), lr, steps)
    theta = aligned_copy(theta)  # changed in place below, piece by piece: another copy of all models would be large
    columns: Sequence[Tensor] = ()  # of all rows; the same in all steps
    for _ in range(steps):
        for rows, pieces in local.grad_pieces(theta, batch):
            if isinstance(rows, slice) and rows == EVERY_ROW:
                columns = columns or split(theta, pieces)
                proximal_step(theta, columns, pieces, anchor, lr, pull)
                continue
            x, around = theta[rows], anchor[rows]
            alpha, lam = (v[rows] if isinstance(v, Tensor) else v for v in (lr, pull))
            proximal_step(x, split(x, pieces), pieces, around, alpha, lam)
            if isinstance(rows, Tensor):
                theta[rows] = x
    return theta


def proximal_step(
    x: Tensor, columns: Sequence[Tensor], pieces: Sequence[Piece], anchor: Tensor, lr: Any, pull: Any
) -> None:
    """One step of `proximal_sgd`, in place; `columns` are views of x, one for each piece of the gradient."""
    if isinstance(pull, Tensor) or pull:
        x.lerp_(anchor, lr * pull)
    for piece, x_k in zip(pieces, columns, strict=True):
        step(x_k, piece, lr)


def split(x: Tensor, pieces: Sequence[Piece]) -> Sequence[Tensor]:
    """Views of the columns of x [n, d] that belong to each piece of a gradient."""
    return x.split([width(piece) for piece in pieces], 1) if len(pieces) > 1 else [x]


def follow(
    local: Gradients, theta: Tensor, direction: Callable[[Tensor], Tensor], lr: Any, steps: int, name: str = ""
) -> Tensor:
    """Steps of the local optimiser along any direction; sgd: `steps` times theta <- theta - lr * direction(theta).

    Args:
        local: the devices.
        theta: [n, d] where the steps start.
        direction: from [n, d] to [n, d], such as gradients on mini-batches, as new rows.
        lr: the step size: a number, or a column [n, 1].
        steps: number of steps.
        name: the name of the model that is trained, if a device trains several; each has a state of its own.

    Returns:
        [n, d]
    """
    optimizer, prefix = local.optimizer, f"optimizer {name}" if name else "optimizer"
    state = optimizer.start(theta)
    kept = optimizer.keep and not local.quiet
    if kept:
        state = {key: local.memory(f"{prefix} {key}", rows) for key, rows in state.items()}
    for _ in range(steps):
        theta = optimizer.step(theta, direction(theta), lr, state)
    if kept:
        local.keep(**{f"{prefix} {key}": rows for key, rows in state.items()})
    return theta


def step(x: Tensor, direction: Piece, lr: Any) -> None:
    """x <- x - lr * direction, in place.

    If the direction is given as two factors, their product is added to x without being stored.
    """
    if isinstance(direction, Tensor):
        x -= direction.mul_(lr)  # rounded twice, as in a method that writes out this step
        return
    left, right = direction
    rows = x.unflatten(1, (left.shape[1], right.shape[2]))
    if isinstance(lr, Tensor) or rows.is_contiguous():  # baddbmm_ on a contiguous stack has other bits
        alphas = lr.flatten().tolist() if isinstance(lr, Tensor) else [lr] * len(x)
        for row, a, b, alpha in zip(rows, left, right, alphas, strict=True):
            row.addmm_(a, b, alpha=-alpha)
    else:
        rows.baddbmm_(left, right, alpha=-lr)


def width(piece: Piece) -> int:
    """Number of columns of a piece."""
    return piece.shape[1] if isinstance(piece, Tensor) else piece[0].shape[1] * piece[1].shape[2]


def descend(
    gradient: Callable[[Tensor], Tensor], x: Tensor, lr: Any, steps: int, nesterov: bool = False, accuracy: float = 0.0
) -> Tensor:
    """Gradient descent on a fixed function, with or without Nesterov's momentum.

    `steps` times y = x_k + m_k (x_k - x_{k-1}), x_{k+1} = y - lr * gradient(y), where m_k = k / (k + 3) with `nesterov`
    and 0 otherwise.

    Args:
        gradient: the gradients [n, d] at [n, d], as new rows; always of the same function, e.g. on one mini-batch.
        x: [n, d] where the steps start.
        lr: the step size: a number, or a column [n, 1].
        steps: number of steps.
        nesterov: whether to use momentum.
        accuracy: a row stops at the first y with |gradient(y)|^2 <= accuracy; 0: no row stops.

    Returns:
        [n, d]
    """
    before = x
    for k in range(steps):
        y = x.add(x - before, alpha=k / (k + 3)) if nesterov and k else x
        direction = gradient(y)
        small = (direction * direction).sum(1, keepdim=True) <= accuracy if accuracy else None
        after = torch.sub(y, direction.mul_(lr), out=direction)
        if small is not None:
            after, x = (
                torch.where(small, y, after),
                torch.where(small, y, x),
            )  # equal rows have no momentum: the row stays at y
        before, x = x, after
    return x
