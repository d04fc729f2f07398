"""Compares a run with the predictions of theory: `polytier check --measure`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from polytier.algorithms import PerMFL
from polytier.method.call import Clock, Diverged
from polytier.method.context import Context
from polytier.method.local_problem import LocalProblem
from polytier.models.losses import cross_entropy
from polytier.report.blocks import Lines, Panels, Series
from polytier.runs.loop import Callback, Loop
from polytier.runs.read_files import KINDS
from polytier.theory.check import Report, left_out
from polytier.theory.curvature import is_quadratic
from polytier.theory.linearised import round_of
from polytier.theory.permfl import stationary_point, team_means
from polytier.theory.stability import quadratic_problem, settings

MFA_BOUNDS = ("Theorem 1", "Theorem 2", "Corollary 1")  # of the distance of a model from its optimum
EXACT = 40  # steps and team rounds after which problems of teams and devices count as solved


class Trail(Callback):
    """Records the global models x^0, x^1, ... of every model of the run."""

    def __init__(self) -> None:
        self.x: dict[str, list[np.ndarray]] = {}

    def on_start(self, loop: Loop) -> None:
        self.note(loop)

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        self.note(loop)

    def note(self, loop: Loop) -> None:
        """Append a copy of the current global model of each part."""
        for part in loop.context.parts:
            x = part.algorithm.global_model(loop.part_state(part.name))
            if x is not None:
                self.x.setdefault(part.name, []).append(x[0].double().numpy().copy())


def measure(loop: Loop, rounds: int, reports: list[Report]) -> None:
    """Run the method and write the measured values into each report."""
    trail, stopped = Trail(), None
    try:
        loop.run(rounds, [trail])
    except Diverged as error:
        stopped = str(error)
    for context, report in zip(loop.context.parts, reports, strict=True):
        x = np.array(trail.x.get(context.name, []))
        found = {"rounds": loop.round, "stopped": stopped, "loss": losses(loop, context.name)}
        report.measured = found | (rates(context, report, x) if len(x) > 2 else {"what": None})


def rates(context: Context, report: Report, x: np.ndarray) -> dict[str, Any]:
    """What a theorem bounds, in every round, beside its bound; the steps of the global model if there is no bound."""
    with np.errstate(all="ignore"):
        what, values, where, bound = track(context, report, x)
        found = {"what": what, "factor": mean_factor(values), "first": values[0], "last": values[-1]}
        found["values"] = values.tolist()
        if bound is None:
            return found
        keeps, worst = bool((values <= bound * (1 + 1e-9)).all()), float(np.max(values / bound))
        return {**found, "where": where, "bound": bound.tolist(), "keeps": keeps, "worst": worst}


def track(context: Context, report: Report, x: np.ndarray) -> tuple[str, np.ndarray, str, np.ndarray | None]:
    """What is measured, its value in every round, the place of the bound, and the bound in every round."""
    promised = {p.where: p.value for p in report.predictions}
    optimum, of_model = optimum_of(context), next((w for w in MFA_BOUNDS if promised.get(w) is not None), None)
    if optimum is not None:
        distance = np.sum((x - optimum) ** 2, axis=1)
        if promised.get("(62)") is None:
            return "|x^t - x*|^2", distance, "", None
        factors = np.array([report.at(t)[1].value for t in range(len(x))], float)
        return "|x^t - x*|^2", distance, "(62)", factors * distance[0]
    if of_model is not None and is_quadratic(context):
        A, b, _ = quadratic_problem(context)
        distance = np.linalg.norm(x - np.linalg.solve(A.mean(0), b.mean(0)), axis=1)
        bound = np.array([report.at(t + 1)[0].value for t in range(len(x))], float)  # the paper counts from 1
        return "|w_t - w*|", distance, of_model, bound
    if "(63)" in promised and bounded_below(context):
        return gradients_of_phi(context, report, x)
    return "|x^{t+1} - x^t|", np.linalg.norm(np.diff(x, axis=0), axis=1), "", None


def bounded_below(context: Context) -> bool:
    """Whether (63) can be compared with a run: full gradients of cross-entropy, all nodes, one tier of teams."""
    method = context.algorithm
    return (
        isinstance(method, PerMFL)
        and method.weights == "uniform"
        and context.topology.num_tiers == 3
        and context.optimizer.plain
        and all(rule.everybody for rule in context.participation[1:])
        and context.objective.sample_loss is cross_entropy
        and left_out(context, 0) == 0
    )


def gradients_of_phi(context: Context, report: Report, x: np.ndarray) -> tuple[str, np.ndarray, str, np.ndarray]:
    """The mean of |grad phi(x^s)|^2 over s < t, and (63) with the measured error of the rounds in place of gamma^2 nu.

    A round whose teams and devices solve their problems moves x by -beta grad phi(x). phi(x^0) - phi(x*) is at most
    the loss of the initial model, because cross-entropy is not below 0 and an envelope not above its function.
    """
    k, method = report.letters, context.algorithm
    assert isinstance(method, PerMFL)
    exact = dataclasses.replace(
        method,
        device_lr=1 / (k["L_f"] + k["lambda"]),
        team_lr=1 / (k["lambda"] + k["gamma"]),
        device_steps=EXACT,
        team_rounds=EXACT,
    )
    round_ = round_of(dataclasses.replace(context, algorithm=exact))
    found = [(at - round_(torch.from_numpy(at).to(context.objective.initial)).double().numpy()) for at in x[:-1]]
    gradients = np.stack(found) / k["beta"]
    error = float(np.sum((-np.diff(x, axis=0) / k["beta"] - gradients) ** 2, axis=1).max())
    t = np.arange(1, len(x))
    mean = np.cumsum(np.sum(gradients**2, axis=1)) / t
    return "mean of |grad phi(x^s)|^2 over s < t", mean, "(63)", 2 * loss_at_start(context) / (k["beta"] * t) + error


def loss_at_start(context: Context) -> float:
    """The loss of the initial model: the mean over teams of the mean over their devices."""
    leaf = context.topology.leaf
    devices = LocalProblem(context, leaf, torch.arange(context.topology.size(leaf)), Clock(0))
    losses = devices.loss(context.objective.initial.expand(context.topology.size(leaf), -1))
    return float(team_means(losses.double().numpy(), context.topology.parents[leaf].numpy()).mean())


def picture(reports: list[Report]) -> Panels:
    """What was measured and the bound by round, a chart for each model."""
    charts = []
    for report in reports:
        m = report.measured or {}
        if m.get("what") is None:
            continue
        first = m["rounds"] + 1 - len(m["values"])
        lines = [
            ("measured", m["values"], False),
            *([(f"bound {m['where']}", m["bound"], True)] if "bound" in m else []),
        ]
        series = [
            Series(name, range(first, m["rounds"] + 1), [v if v > 0 else None for v in values], dashed=dashed)
            for name, values, dashed in lines
        ]
        charts.append(Lines(report.model or report.method, "round", m["what"], series, scale="log"))
    return Panels(f"{reports[0].method}: measured and predicted", charts)


def optimum_of(context: Context) -> np.ndarray | None:
    """x* of PerMFL's (2) on quadratics: one tier of teams, uniform means."""
    method = context.algorithm
    if not (isinstance(method, PerMFL) and is_quadratic(context) and context.topology.num_tiers == 3):
        return None
    alike = all(
        len(set(zip(p.tolist(), s.tolist(), strict=True))) == len(set(p.tolist()))
        for p, s in zip(context.topology.parents[1:], context.samples[1:], strict=True)
    )
    if method.weights == "samples" and not alike:
        return None
    try:
        return stationary_point(*quadratic_problem(context), method.device_pull, settings(context, method)[3][0].pull)[
            0
        ]
    except ValueError:  # a pull of 0, or no unique minimiser
        return None


def mean_factor(values: np.ndarray) -> float | None:
    """The geometric mean of the factors from one value to the next."""
    return float((values[-1] / values[0]) ** (1 / (len(values) - 1))) if values[0] > 0 else None


def losses(loop: Loop, name: str) -> dict[str, list[float]]:
    """The training loss in the first and in the last evaluation, by kind of model."""
    seen: dict[str, list[float]] = {}
    for record in loop.history:
        figures = record["models"][name] if name and "models" in record else record
        for kind in KINDS:
            if "train" in figures.get(kind, {}):
                seen.setdefault(kind, []).append(figures[kind]["train"]["loss"])
    return {kind: [values[0], values[-1]] for kind, values in seen.items() if len(values) > 1}
