"""Whether PerMFL or pFedMT diverges with given settings on given data.

will diverge | quadratics only: a round is a linear map of the error of x, and its spectral radius is above 1
may diverge  | otherwise: the round linearised at the initial model has an eigenvalue below -1 by a margin

An eigenvalue above 1 says nothing where curvature may be negative, and one just below -1 nothing where gradients are
bounded, as those of cross-entropy are: curvature falls as errors grow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from polytier.algorithms import PerMFL
from polytier.method.call import Clock
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step
from polytier.models.losses import cross_entropy
from polytier.runs.loop import Loop
from polytier.runs.smoothness import quick_smoothness
from polytier.theory.curvature import is_quadratic, quadratic_matrices
from polytier.theory.linearised import least_eigenvalue
from polytier.theory.round_map import Level, multiplier, round_map

WILL, MAY, STABLE = "will diverge", "may diverge", "stable"
NO_SIGN, UNKNOWN = "no sign of divergence", "not judged"
LARGE = 1 << 24  # largest total number of elements of all A for which a round on quadratics is computed as a matrix
QUICK_WORK, MOST_WORK = 1 << 31, 1 << 36  # multiplications in a round that is linearised: before a run, in a check
# An eigenvalue below -MARGIN counts. The gradient of cross-entropy is bounded, so that errors grow only until curvature
# has fallen to that of the l2 term; its margin was chosen after runs on digits (docs/theory.md)
MARGIN, BOUNDED_MARGIN = 1.1, 3.0
SLACK = 1.5  # the curvature is estimated on a few devices, and that of others may be larger by this factor
MOST_MOVE = 1e6  # a larger factor, or infinity, is not used for advice
SAFE = 0.8  # advised steps are by this factor below the largest stable one


def warnings(loop: Loop) -> list[str]:
    """A sentence per model that will or may diverge; only for PerMFL and pFedMT, and if it can be known quickly."""
    lines = []
    for context in loop.context.parts:
        method = context.algorithm
        if isinstance(method, PerMFL) and context.optimizer.plain:  # the theory is about sgd
            quadratic = has_round_matrix(context)
            verdict, why = judge_quadratics(context, method) if quadratic else judge_quickly(context, method)
            name = f"{context.name}: " if context.name else ""
            lines += [f"{name}{verdict}: {why}"] if verdict in (WILL, MAY) else []
    return lines


def judge(context: Context, mu: float, smoothness: float) -> tuple[str, str]:
    """A verdict and its reason, for PerMFL and pFedMT; `mu` and `smoothness` are the least and largest curvature."""
    method = context.algorithm
    if not isinstance(method, PerMFL):
        return UNKNOWN, "divergence is predicted only for PerMFL and pFedMT"
    if has_round_matrix(context):
        return judge_quadratics(context, method)
    m = multipliers(context, method, mu, smoothness)
    top = np.abs(m).max() if np.isfinite(m).all() else np.inf
    if top <= 1 + 1e-9:
        return STABLE, f"|m| <= {top:.4g} along every curvature up to {smoothness:.3g}"
    verdict, why = judge_linearised(context, method, smoothness, MOST_WORK)
    return verdict, f"{why} (|m| is up to {top:.3g} if all devices share the curvature)"


def judge_quickly(context: Context, method: PerMFL) -> tuple[str, str]:
    """The same for the line before a run: the round is linearised only if a shared curvature is a reason to."""
    smoothness = quick_smoothness(context)
    if smoothness is None:
        return UNKNOWN, "the curvature is not known"
    m = multipliers(context, method, 0.0, SLACK * smoothness)
    if np.isfinite(m).all() and m.min() >= -margin(context, method):
        return NO_SIGN, f"m >= {m.min():.4g} along every curvature at the initial model"
    return judge_linearised(context, method, smoothness, QUICK_WORK)


def judge_linearised(context: Context, method: PerMFL, smoothness: float, most_work: float) -> tuple[str, str]:
    """The verdict from the eigenvalues of the round linearised at the initial model."""
    if work(context, method) > most_work:
        return UNKNOWN, "a round takes too long to be linearised"
    least, counts = least_eigenvalue(context), -margin(context, method)
    if least >= counts:
        return NO_SIGN, f"the round linearised at the initial model has no eigenvalue below {counts:g}"
    changes = smaller_steps(context, method, smoothness)
    if not changes:  # then it is the server's step, to which the move of x is proportional
        changes["server_lr"] = SAFE * 2 * method.server_lr / min(1 - least, MOST_MOVE)
    return MAY, f"at the initial model, a round multiplies errors by up to {least:.3g}; try {shown(changes)}"


def judge_quadratics(context: Context, method: PerMFL) -> tuple[str, str]:
    """The verdict from the spectral radius of a round, which is a linear map of the error of x."""
    radius = spectral_radius(context, method)
    told = f"a round multiplies the error of x by up to {radius:.4g}"
    if radius <= 1 + 1e-9:
        return STABLE, told
    A = quadratic_matrices(context)
    changes = smaller_steps(context, method, float(torch.linalg.eigvalsh(A)[:, -1].max()))
    calmer = dataclasses.replace(method, **changes)
    move = 1 - float(np.linalg.eigvalsh(round_matrix(context, calmer)).min())
    if move > 2:
        changes["server_lr"] = SAFE * 2 * method.server_lr / move
    always = not has_schedule(method) and all(rule.everybody for rule in context.participation[1:])
    return (WILL if always else MAY), f"{told}; try {shown(changes) or 'a larger device_pull'}"


def has_schedule(method: PerMFL) -> bool:
    """Whether a step changes from round to round."""
    fields = (method.device_lr, method.team_lr)
    return any(isinstance(v, str) for f in fields for v in (f.values() if isinstance(f, Mapping) else (f,)))


def has_round_matrix(context: Context) -> bool:
    """Whether a round is a linear map that is small enough to be computed as a matrix."""
    return is_quadratic(context) and context.batches.federation.x.numel() <= LARGE


def margin(context: Context, method: PerMFL) -> float:
    """An eigenvalue below minus this counts."""
    flat = multiplier([max(context.objective.l2, 1e-9)], *largest_settings(context, method))[0]
    bounded = context.objective.sample_loss is cross_entropy and flat >= -MARGIN
    return BOUNDED_MARGIN if bounded else MARGIN


def work(context: Context, method: PerMFL) -> float:
    """Multiplications by parameters of all devices in a round."""
    _, _, steps, levels, _ = settings(context, method)
    federation = context.batches.federation
    batch = federation.samples.max() if isinstance(context.batch_size, str) else context.batch_size
    rounds = np.prod([level.rounds for level in levels], initial=1.0)
    return float(steps * rounds * int(batch) * context.objective.dimension * len(federation))


def multipliers(context: Context, method: PerMFL, mu: float, smoothness: float) -> np.ndarray:
    """m(a) for curvatures from mu to smoothness, with the largest steps of any node."""
    smoothness = max(smoothness, 1e-9)  # 0 for a model whose outputs do not depend on its parameters
    least = max(mu, 1e-6 * smoothness)
    a = np.unique(np.concatenate([np.geomspace(least, smoothness, 400), np.linspace(least, smoothness, 400)]))
    return multiplier(a, *largest_settings(context, method))


def largest_settings(context: Context, method: PerMFL) -> tuple[float, float, int, list[Level], float]:
    """`settings` with the largest step of any node of a tier."""
    alpha, lam, steps, levels, beta = settings(context, method)
    levels = [level._replace(step=float(np.max(level.step))) for level in levels]
    return float(np.max(alpha)), lam, steps, levels, beta


def smaller_steps(context: Context, method: PerMFL, smoothness: float) -> dict[str, float]:
    """Values for those steps of devices and teams that overshoot by themselves."""
    alpha, lam, _, levels, _ = settings(context, method)
    changes = {}
    if np.max(alpha) * (smoothness + lam) >= 2:
        changes["device_lr"] = SAFE / (smoothness + lam)
    pulls = [lam, *(level.pull for level in levels)]
    sums = [below + level.pull for level, below in zip(levels, pulls, strict=False)]
    if any(np.max(level.step) * total >= 2 for level, total in zip(levels, sums, strict=True)):
        changes["team_lr"] = SAFE / max(sums)
    return changes


def shown(changes: dict[str, float]) -> str:
    """Advised values, e.g. "device_lr=0.1, server_lr=0.3"."""
    return ", ".join(f"{name}={value:.2g}" for name, value in changes.items())


# -- the arguments of `round_map` ---------------------------------------------------------------------


def settings(context: Context, method: PerMFL) -> tuple[Any, float, int, list[Level], float]:
    """The arguments of `round_map`: the steps, pulls and rounds of this tree in its first round."""
    leaf = context.topology.leaf
    levels = [
        Level(
            numbers(context, tier, method.team_lr),
            most(context, tier, method.team_pull),
            int(most(context, tier, method.team_rounds)),
        )
        for tier in range(leaf - 1, 0, -1)
    ]
    return numbers(context, leaf, method.device_lr), method.device_pull, method.device_steps, levels, method.server_lr


def spectral_radius(context: Context, method: PerMFL) -> float:
    """The largest factor by which a round on quadratics multiplies the length of an error of x."""
    found = round_matrix(context, method)
    return float(np.abs(np.linalg.eigvalsh(found)).max()) if np.isfinite(found).all() else float("inf")


def round_matrix(context: Context, method: PerMFL) -> np.ndarray:
    """[d, d] the matrix that multiplies an error of x in a round on quadratics with all devices taking part."""
    topology = context.topology

    def mean(tier: int) -> Callable[[np.ndarray], np.ndarray]:
        parent, above = topology.parents[tier].numpy(), topology.size(tier - 1)
        weight = context.samples[tier].double().numpy() if method.weights == "samples" else np.ones(len(parent))
        share = np.zeros((above, len(parent)))
        share[parent, np.arange(len(parent))] = weight
        share /= share.sum(1, keepdims=True)
        return lambda values: np.tensordot(share, values, 1)

    A = quadratic_matrices(context)[topology.order].numpy()
    return round_map(A, *settings(context, method), means=[mean(tier) for tier in range(topology.leaf, 0, -1)])[0]


def quadratic_problem(context: Context) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [n, d, d], b [n, d] and team [n] of a federation of quadratics, in the order of the tree."""
    federation, topology = context.batches.federation, context.topology
    b = torch.stack([federation.device(k)[1].double().mean(0) for k in range(len(federation))])
    A = quadratic_matrices(context)
    return A[topology.order].numpy(), b[topology.order].numpy(), topology.parents[topology.leaf].numpy()


def numbers(context: Context, tier: int, value: Step) -> Any:
    """The values of a field at a tier in the first round: one number, or one per node [n]."""
    kind = LocalProblem if tier == context.topology.leaf else Children
    found = kind(context, tier, torch.arange(context.topology.size(tier)), Clock(0)).value(value)
    return found.squeeze(1).double().cpu().numpy() if isinstance(found, torch.Tensor) else found


def most(context: Context, tier: int, value: Step) -> float:
    """The largest value of a field at a tier in the first round."""
    return float(np.max(numbers(context, tier, value)))
