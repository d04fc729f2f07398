"""The largest curvature of the devices' objectives at the initial model, by power iteration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polytier.method.context import Context
from polytier.tree import random

MOST_SAMPLES = 1024  # at most so many are used for a Hessian
QUICK_DEVICES, QUICK_SAMPLES, QUICK_PARAMETERS = 4, 128, 1 << 18  # limits of the estimate before a run
QUICK_STEPS = 30  # of its power iteration


def quick_smoothness(context: Context) -> float | None:
    """An estimate before a run: the largest curvature at the initial model on a few devices and samples.

    None if the model has no second derivatives, or so many parameters that this takes long.
    """
    if context.objective.dimension > QUICK_PARAMETERS:
        return None
    some = spread(len(context.batches.federation), QUICK_DEVICES)
    start = first_vector(context.objective.dimension, context.seed, context.objective.initial)
    start = start.to(context.objective.device)
    try:
        return max(abs(largest(hessian_product(context, k, QUICK_SAMPLES), start, 0.02, QUICK_STEPS)) for k in some)
    except (RuntimeError, NotImplementedError):
        return None


def spread(n: int, most: int) -> list[int]:
    """At most `most` of n indices, evenly spaced."""
    return torch.linspace(0, n - 1, min(n, most)).round().long().tolist()


def hessian_product(context: Context, device: int, most: int = MOST_SAMPLES) -> Callable[[Tensor], Tensor]:
    """The map v -> H v of a device's objective at the initial model, on its first samples, without dropout."""
    objective, federation = context.objective, context.batches.federation
    batch = context.batches.whole(torch.tensor([device]), chunk=min(most, int(federation.samples[device])))
    group = batch.groups[0]
    row = objective.initial.to(objective.device).clone().requires_grad_()
    value = objective.row_loss(row, group.x[0], group.y[0], group.weight[0])
    slope = torch.autograd.grad(value, row, create_graph=True)[0]

    def product(v: Tensor) -> Tensor:
        # not grad(slope, row, v): for that torch first imports sympy
        return torch.autograd.grad((slope * v).sum(), row, retain_graph=True)[0]

    return product


def first_vector(size: int, seed: int, like: Tensor) -> Tensor:
    """A random start vector for power iteration, of the dtype and device of `like`."""
    draws = random.uniform(torch.tensor([random.signed(random.key(seed, "curvature"))]), size)[0] - 0.5
    return draws.to(like)


def largest(product: Callable[[Tensor], Tensor], v: Tensor, tolerance: float, most: int = 5000) -> float:
    """The eigenvalue of largest magnitude of a symmetric v -> H v, up to a relative change of `tolerance`."""
    value = 0.0
    for k in range(most):
        v = v / v.norm()
        image = product(v)
        before, value = value, float((image * v).sum())
        if not float(image.norm()) or (k > 3 and abs(value - before) <= tolerance * abs(value)):
            break
        v = image
    return value
