"""Checks the settings of a method on its data against the theorems of its paper.

`polytier check` prints the full report; `polytier run` prints a line per model that may diverge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from polytier._text import SCHEDULE, schedule
from polytier.algorithms import CoBo, FedAvg, MFARand, PerMFL, PFedMT, SFedHP
from polytier.data.batches import GROW
from polytier.method.call import Clock
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step
from polytier.runs.loop import Loop
from polytier.theory import cobo, mfa, permfl, sfedhp
from polytier.theory.curvature import Curvature, curvature, is_quadratic, quadratic_matrices, quick_curvature
from polytier.theory.rounds import Level, multiplier, round_map
from polytier.theory.rules import Condition, Known, Prediction, condition, shown

WILL, MAY, STABLE, UNKNOWN = "will diverge", "may diverge", "stable", "not judged"
LARGE = 1 << 24  # largest total number of elements of all A for which a round on quadratics is computed as a matrix


@dataclass(frozen=True)
class Subject:
    """What is checked: values by letter, the letters of mu and L, the letters that users may give, and the theorems."""

    theory: str
    letters: dict[str, Any]
    curvature: tuple[str, str] = ("mu", "L")
    given: Mapping[str, str] = field(default_factory=dict)
    conditions: Callable[[Known], list[Condition]] = lambda known: []
    predictions: Callable[[Known], list[Prediction]] = lambda known: []


@dataclass
class Report:
    """The result of `polytier check` for one model."""

    method: str
    model: str
    theory: str
    letters: dict[str, Any]
    curvature: Curvature | None
    conditions: list[Condition]
    predictions: list[Prediction]
    verdict: str
    why: str
    measured: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        return dataclasses.asdict(self)


def check_training(loop: Loop, rounds: int, given: Mapping[str, float]) -> list[Report]:
    """Check a run: one report per model."""
    return [check_context(context, loop, rounds, given) for context in loop.context.parts]


def check_context(context: Context, loop: Loop, rounds: int, given: Mapping[str, float]) -> Report:
    """Check one model of a run."""
    subject = subject_of(context, loop, rounds)
    mu, L = subject.curvature
    allowed = {mu: "strong convexity", L: "smoothness", **subject.given}
    for letter in given:
        if letter not in allowed:
            told = "; ".join(f"{name}: {meaning}" for name, meaning in allowed.items())
            raise ValueError(f"--given {letter}: {context_name(context)} has no such letter; available: {told}")
    found = None if {mu, L} <= set(given) else curvature(context)
    known = {**subject.letters, **({} if found is None else {mu: found.mu, L: found.smoothness}), **given}
    verdict, why = judge(context, known[mu], known[L], found is None or found.kind == "exact")
    plain = {shown(letter): float(value) for letter, value in known.items() if np.ndim(value) == 0}
    return Report(
        context_name(context),
        context.name,
        subject.theory,
        plain,
        found,
        subject.conditions(known),
        subject.predictions(known),
        verdict,
        why,
    )


def context_name(context: Context) -> str:
    """The name of the method of a context, for messages."""
    return type(context.algorithm).__name__


def warnings(loop: Loop) -> list[str]:
    """One line for each model that will or may diverge, by quick estimates; only for PerMFL and pFedMT."""
    lines = []
    for context in loop.context.parts:
        if isinstance(context.algorithm, PerMFL):
            found = quick_curvature(context)
            mu, smoothness = (0.0, 0.0) if found is None else (found.mu, found.smoothness)
            verdict, why = judge(context, mu, smoothness, exact=found is not None)
            name = f"{context.name}: " if context.name else ""
            lines += [f"{name}{verdict}: {why}; see `polytier check`"] if verdict in (WILL, MAY) else []
    return lines


# -- the theorems of each method ----------------------------------------------------------------------


def subject_of(context: Context, loop: Loop, rounds: int) -> Subject:
    """The theorems and values for the method of a context."""
    method, above = context.algorithm, loop.algorithm
    if isinstance(method, PerMFL):
        return permfl_subject(context, method, rounds)
    if isinstance(method, SFedHP):
        return sfedhp_subject(context, method, rounds)
    if isinstance(method, CoBo):
        return cobo_subject(context, method, rounds)
    if above.parts() and isinstance(method, FedAvg):
        return mfa_subject(context, method, rounds, len(above.parts()), frames=not isinstance(above, MFARand))
    lr, pull = getattr(method, "device_lr", None), getattr(method, "device_pull", None)
    letters: dict[str, Any] = {} if lr is None else {"device_lr": most(context, context.topology.leaf, lr)}
    extra = {"device_pull": most(context, context.topology.leaf, pull)} if isinstance(pull, int | float) else {}
    text = "device_lr < 2 / (L + device_pull)" if extra else "device_lr < 2 / L"
    told = (
        f"no theorem of {context_name(context)} is available; only the curvature and the bound of a gradient step "
        "are shown"
    )
    return Subject(told, letters | extra, conditions=lambda known: [condition("descent", text, known)])


def permfl_subject(context: Context, method: PerMFL, rounds: int) -> Subject:
    """The subject of PerMFL and pFedMT."""
    tree, tiers = settings(context, method), context.topology.num_tiers - 2
    letters = {
        "alpha": float(np.max(tree[0])),
        "lam": tree[1],
        "L": tree[2],
        "beta": method.server_lr,
        "T": rounds,
        **({"eta": float(np.max(tree[3][0].step)), "gamma": tree[3][0].pull, "K": tree[3][0].rounds} if tiers else {}),
    }
    told = "PerMFL's Theorems 1 and 2"
    told += ", its means by samples" if isinstance(method, PFedMT) else ""
    told += {0: "; they are about teams, and this tree has none", 1: ""}.get(
        tiers, "; they are about one tier of teams, and the innermost one is used"
    )
    if is_quadratic(context) and tiers == 1 and isinstance(found := quadratic_gammas(context, method), dict):
        letters |= found
    return Subject(told, letters, ("mu_f", "L_f"), permfl.GIVEN, permfl.conditions, permfl.predictions)


def quadratic_gammas(context: Context, method: PerMFL) -> dict[str, Any] | None:
    """The constants of (58) and (61) for quadratics."""
    if method.weights != "uniform" or min(method.device_pull, settings(context, method)[3][0].pull) <= 0:
        return None
    A, b, team = quadratic_problem(context)
    try:
        return permfl.gammas(
            A,
            b,
            team,
            context.objective.initial.double().numpy(),
            method.device_pull,
            settings(context, method)[3][0].pull,
        )
    except ValueError:  # not strongly convex, or at the optimum
        return None


def sfedhp_subject(context: Context, method: SFedHP, rounds: int) -> Subject:
    """The subject of sFedHP."""
    leaf = context.topology.leaf
    letters = {
        "eta2": most(context, leaf, method.device_lr),
        "beta": method.server_lr,
        "lam1": method.device_pull,
        "K": method.device_steps,
        "gamma1": method.device_sparsity,
        "gamma2": method.team_sparsity,
        "rho": method.smoothing,
        "T": rounds,
    }
    told = "sFedHP's Theorems 1 to 3"
    if leaf > 1:
        letters |= {
            letter: most(context, leaf - 1, value)
            for letter, value in (("eta1", method.team_lr), ("lam2", method.team_pull), ("R", method.team_rounds))
        }
    told += {1: "; they are about teams, and this tree has none", 2: ""}.get(
        leaf, "; they are about one tier of teams, and the innermost one is used"
    )
    return Subject(told, letters, given=sfedhp.GIVEN, conditions=sfedhp.conditions, predictions=sfedhp.predictions)


def cobo_subject(context: Context, method: CoBo, rounds: int) -> Subject:
    """The subject of CoBo."""
    groups = context.true_groups(1)
    size = {} if groups is None else {"c": int(np.unique(groups, return_counts=True)[1].min())}
    batch = {"b": context.batch_size} if isinstance(context.batch_size, int) else {}
    letters = {
        "eta": most(context, context.topology.leaf, method.device_lr),
        "rho": method.device_pull,
        "n": context.topology.size(1),
        "T": rounds,
        **batch,
        **size,
    }
    told = "CoBo's Theorem I" + (" (the smallest true group)" if size else "")
    return Subject(told, letters, given=cobo.GIVEN, conditions=cobo.conditions, predictions=cobo.predictions)


def mfa_subject(context: Context, method: FedAvg, rounds: int, models: int, frames: bool) -> Subject:
    """The subject of MFA-RR and MFA-Rand."""
    letters: dict[str, Any] = {
        "E": method.device_steps,
        "M": models,
        "N": context.topology.size(context.topology.leaf),
        "T": rounds,
    }
    told = f"MFA-{'RR' if frames else 'Rand'}'s Theorem {2 if frames else 1}, of each model that FedAvg trains"
    step = SCHEDULE.fullmatch(method.device_lr) if isinstance(method.device_lr, str) else None
    if step is None:
        told += (
            "; it needs a step size A/(B+t), where beta = A and gamma = B - 1, but the step size of this run is "
            "constant"
        )
    else:
        letters |= {"beta": float(step[1]), "gamma": float(step[2]) - 1, "every": int(step[3] or 1)}
        lr = schedule(str(method.device_lr))
        letters["left"] = max(left_out(context, t) / lr(t - t % context.hold) for t in (0, rounds - 1))
    return Subject(
        told,
        letters,
        given=mfa.GIVEN,
        conditions=lambda known: mfa.conditions(known, frames),
        predictions=lambda known: mfa.predictions(known, frames),
    )


def left_out(context: Context, round_: int) -> float:
    """The largest share of a device's samples that a mini-batch of this round leaves out."""
    rule = context.batch_size
    if isinstance(rule, str):
        return min(1.0, schedule(rule.removeprefix(GROW))(round_ - round_ % context.hold))
    return max(0.0, 1 - rule / int(context.batches.federation.samples.max()))


# -- divergence ---------------------------------------------------------------------------------------


def judge(context: Context, mu: float, smoothness: float, exact: bool) -> tuple[str, str]:
    """A verdict and its reason, for PerMFL and pFedMT. A smoothness of 0 means that it is unknown."""
    method = context.algorithm
    if not isinstance(method, PerMFL):
        return UNKNOWN, "divergence is predicted only for PerMFL and pFedMT"
    tree = settings(context, method)
    if is_quadratic(context) and context.batches.federation.x.numel() <= LARGE:
        radius = spectral_radius(context, method)
        told = f"a round multiplies the error of x by up to {radius:.4g} in length"
        return (WILL if radius > 1 + 1e-9 else STABLE), told
    over = overshoots(tree, smoothness if exact else 0.0)
    if smoothness <= 0:
        return (MAY, over) if over else (UNKNOWN, "the curvature is not known")
    least = max(mu, 1e-6 * smoothness)
    a = np.unique(np.concatenate([np.geomspace(least, smoothness, 400), np.linspace(least, smoothness, 400)]))
    m = multiplier(a, float(np.max(tree[0])), *tree[1:3], [largest_step(level) for level in tree[3]], tree[4])
    grows = ~(np.abs(m) <= 1 + 1e-9)
    top = np.nanmax(np.abs(m)) if np.isfinite(m).any() else np.inf
    there = f"{'at most' if exact else 'at the first model'} {smoothness:.3g} here"
    if grows.any():
        where = f"where curvature is above {a[grows.argmax()]:.3g} ({there})"
        return WILL, f"a round multiplies errors by up to {top:.3g} {where}"
    if over:
        return MAY, f"{over} (though |m| <= {top:.4g} along every curvature, {there})"
    return STABLE, f"|m| <= {top:.4g} along every curvature ({there})"


def overshoots(tree: tuple, smoothness: float) -> str:
    """The sufficient bounds on step sizes that do not hold, as text."""
    alpha, lam, _, levels, beta = tree
    pulls = [lam, *(level.pull for level in levels)]
    name = "server_lr * team_pull" if levels else "server_lr * device_pull"
    products = [(name, beta * pulls[-1])]
    for level, below in zip(levels, pulls, strict=False):
        products.append(("team_lr * (pull below + team_pull)", float(np.max(level.step)) * (below + level.pull)))
    curvature_ = f"{smoothness:.3g} + " if smoothness else ""
    products.append((f"device_lr * ({curvature_}device_pull)", float(np.max(alpha)) * (smoothness + lam)))
    return ", ".join(f"{name} = {value:.3g} >= 2" for name, value in products if value >= 2)


def largest_step(level: Level) -> Level:
    """The tier of teams with its largest step size for all teams."""
    return level._replace(step=float(np.max(level.step)))


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


def read_given(texts: Sequence[str]) -> dict[str, float]:
    """Read `LETTER=VALUE` texts."""
    found = {}
    for text in texts:
        letter, _, value = (part.strip() for part in text.partition("="))
        try:
            found[letter] = float(value)
        except ValueError:
            raise ValueError(f"--given {text!r}: write LETTER=VALUE with a number, for example --given G=1") from None
    return found
