"""Checks the settings of a method on its data against the theorems of its paper.

`polytier check` prints the report. The verdict on divergence is that of stability.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polytier._text import SCHEDULE, schedule
from polytier.algorithms import CoBo, FedAvg, MFARand, PerMFL, PFedMT, SFedHP
from polytier.data.batches import GROW
from polytier.method.context import Context
from polytier.runs.loop import Loop
from polytier.theory import cobo, mfa, permfl, sfedhp
from polytier.theory.curvature import Curvature, curvature, is_quadratic
from polytier.theory.formulas import Condition, Known, Prediction, condition, shown
from polytier.theory.stability import has_round_matrix, judge, most, quadratic_problem, settings

MOST_PAIRS = 1 << 26  # most elements of the matrices of all pairs of clients


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
    """The result of `polytier check` for one model; `at` gives the predictions for another number of rounds."""

    method: str
    model: str
    theory: str
    letters: dict[str, Any]
    curvature: Curvature | None
    conditions: list[Condition]
    predictions: list[Prediction]
    verdict: str
    why: str
    at: Callable[[int], list[Prediction]]
    measured: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "at"}


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
    verdict, why = judge(context, known[mu], known[L])
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
        lambda rounds: subject.predictions({**known, "T": rounds}),
    )


def context_name(context: Context) -> str:
    """The name of the method of a context, for messages."""
    return type(context.algorithm).__name__


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
        "d_s": context.objective.dimension,
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
    if groups is not None and method.clients == "devices" and comparable_quadratics(context):
        A, b, start = problem_and_start(context)
        letters |= cobo.quadratic_constants(A, b, groups, start)
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
    told = (
        f"MFA-{'RR' if frames else 'Rand'}'s Theorem{' 2' if frames else 's 1 and 3'}, of each model that FedAvg trains"
    )
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
        if letters["left"] == 0 and has_round_matrix(context):
            letters |= mfa.quadratic_constants(*problem_and_start(context))
    return Subject(
        told,
        letters,
        given=mfa.GIVEN,
        conditions=lambda known: mfa.conditions(known, frames),
        predictions=lambda known: mfa.predictions(known, frames),
    )


def problem_and_start(context: Context) -> Any:
    """A, b and the initial model of a federation of quadratics, in the order of the tree."""
    A, b, _ = quadratic_problem(context)
    return A, b, context.objective.initial.double().numpy()


def comparable_quadratics(context: Context) -> bool:
    """Whether the objective is a quadratic, with few enough clients to look at all pairs of them."""
    federation = context.batches.federation
    return is_quadratic(context) and federation.x.numel() * len(federation) <= MOST_PAIRS


def left_out(context: Context, round_: int) -> float:
    """The largest share of a device's samples that a mini-batch of this round leaves out."""
    rule = context.batch_size
    if isinstance(rule, str):
        return min(1.0, schedule(rule.removeprefix(GROW))(round_ - round_ % context.hold))
    return max(0.0, 1 - rule / int(context.batches.federation.samples.max()))


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
