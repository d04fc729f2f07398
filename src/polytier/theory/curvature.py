"""Least and largest curvature of the devices' objectives on their training data: mu and L of the theorems.

kind     | objectives                | values
exact    | quadratics                | the extreme eigenvalues of every A
exact    | softmax of a linear layer | the smallest numbers that hold for all models: see `softmax_smoothness`
estimate | all others                | of the Hessian at the initial model, by power iteration; other models may differ
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polytier.method.context import Context
from polytier.models.losses import cross_entropy
from polytier.models.zoo import Quadratic
from polytier.runs.smoothness import (
    MOST_SAMPLES,
    QUICK_DEVICES,
    QUICK_SAMPLES,
    QUICK_STEPS,
    first_vector,
    hessian_product,
    largest,
    spread,
)

MOST_DEVICES = 16  # at most so many are used for a Hessian


@dataclass(frozen=True)
class Curvature:
    """mu and smoothness over all devices; `range` is the smallest and the largest smoothness of a single device."""

    mu: float
    smoothness: float
    range: tuple[float, float]
    kind: str  # exact | estimate
    how: str


def curvature(context: Context) -> Curvature:
    """The curvature of the objective of a context.

    Raises:
        ValueError: The second derivatives are not available.
    """
    l2, devices = context.objective.l2, range(len(context.batches.federation))
    if is_quadratic(context):
        values = torch.linalg.eigvalsh(quadratic_matrices(context))  # [n, d]
        return make(values[:, 0].tolist(), values[:, -1].tolist(), "exact", "eigenvalues of all devices' quadratics")
    if is_softmax_regression(context):
        found = [softmax_smoothness(inputs(context, k), context.seed) + l2 for k in devices]
        return make([l2] * len(found), found, "exact", "for all models: half the largest eigenvalue of X'X/n, + l2")
    some = spread(len(devices), MOST_DEVICES)
    try:
        start = first_vector(context.objective.dimension, context.seed, context.objective.initial)
        ends = [extremes(hessian_product(context, k), start.to(context.objective.device), 1e-3) for k in some]
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"the model has no second derivatives here ({error}); give the least and largest curvature with --given"
        ) from None
    samples = f"at most {MOST_SAMPLES} samples each"
    how = f"Hessian at the first model, power iteration, {len(some)} of {len(devices)} devices, {samples}"
    return make([e[0] for e in ends], [max(abs(e[0]), e[1]) for e in ends], "estimate", how)


def steepest(context: Context) -> Tensor:
    """[d] about the direction of the largest curvature of the mean of a few devices' objectives at the initial model.

    A random direction if the model has no second derivatives.
    """
    v = first_vector(context.objective.dimension, context.seed, context.objective.initial)
    v = v.to(context.objective.device)
    try:
        some = spread(len(context.batches.federation), QUICK_DEVICES)
        products = [hessian_product(context, k, QUICK_SAMPLES) for k in some]
        for _ in range(QUICK_STEPS):
            image = torch.stack([product(v) for product in products]).mean(0)
            v = image / image.norm() if float(image.norm()) else v
    except (RuntimeError, NotImplementedError):
        pass
    return v


def make(mu: list[float], smoothness: list[float], kind: str, how: str) -> Curvature:
    """The curvature over all devices, from the values of each."""
    return Curvature(min(mu), max(smoothness), (min(smoothness), max(smoothness)), kind, how)


def inputs(context: Context, device: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[n, F] the training inputs of a device, flattened."""
    federation = context.batches.federation
    return federation.inputs(federation.device(device)[0], dtype).flatten(1)


# -- quadratics ---------------------------------------------------------------------------------------


def is_quadratic(context: Context) -> bool:
    """Whether the objective is a quadratic."""
    return isinstance(context.objective.module, Quadratic)


def quadratic_matrices(context: Context) -> Tensor:
    """[n, d, d] each device's A with the l2 term, the mean over its samples, in the order of the federation."""
    federation = context.batches.federation
    A = torch.stack([federation.device(k)[0].double().mean(0) for k in range(len(federation))])
    return A + context.objective.l2 * torch.eye(A.shape[-1], dtype=A.dtype)


# -- softmax regression -------------------------------------------------------------------------------


def is_softmax_regression(context: Context) -> bool:
    """Whether the model is one linear layer with cross-entropy, with all of its parameters trained."""
    if context.objective.frozen:
        return False
    layers = [m for m in context.objective.module.modules() if not isinstance(m, nn.Sequential | nn.Flatten)]
    if len(layers) != 1 or not isinstance(layers[0], nn.Linear) or layers[0].bias is None or layers[0].out_features < 2:
        return False
    return context.batches.federation.y.ndim == 1 and context.objective.sample_loss is cross_entropy


def softmax_smoothness(x: Tensor, seed: int, tolerance: float = 1e-9) -> float:
    """The smallest L for which cross-entropy over inputs x [n, F] is L-smooth at all weights and biases.

    With X = [x, 1] the Hessian is the mean over samples of (diag(p) - pp') (x) XX', and diag(p) - pp' <= 1/2 for any
    probabilities p, so half the largest eigenvalue of X'X/n is an upper bound. It is the smallest one: with weights of
    zero and two equal biases far above the others, every p is arbitrarily close to (1/2, 1/2, 0, ..). If p tends to
    (1, 0, ..), the Hessian tends to 0, so mu is 0 without an l2 term.
    """

    def product(v: Tensor) -> Tensor:
        outputs = x @ v[:-1] + v[-1]
        return torch.cat([x.T @ outputs, outputs.sum(0, keepdim=True)]) / len(x)

    return 0.5 * largest(product, first_vector(x.shape[1] + 1, seed, x), tolerance)


# -- power iteration ----------------------------------------------------------------------------------


def extremes(product: Callable[[Tensor], Tensor], start: Tensor, tolerance: float) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric map v -> H v."""
    far = largest(product, start, tolerance)  # the eigenvalue of largest magnitude
    other = far + largest(lambda v: product(v) - far * v, start, tolerance)
    return min(far, other), max(far, other)
