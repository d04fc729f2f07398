"""Compares a run with the predictions of theory: `polytier check --measure`."""

from __future__ import annotations

from typing import Any

import numpy as np

from polytier.algorithms import PerMFL
from polytier.method.call import Diverged
from polytier.method.context import Context
from polytier.runs.loop import Callback, Loop
from polytier.runs.read_files import KINDS
from polytier.theory.check import Report
from polytier.theory.curvature import is_quadratic
from polytier.theory.permfl import rate, stationary_point
from polytier.theory.stability import quadratic_problem, settings


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
    """Rates of the distance to the optimum of (2) if it is known, otherwise of the steps of the global model."""
    optimum = optimum_of(context)
    with np.errstate(all="ignore"):
        if optimum is None:
            moves = np.linalg.norm(np.diff(x, axis=0), axis=1)
            return {"what": "|x^{t+1} - x^t|", "factor": mean_factor(moves), "first": moves[0], "last": moves[-1]}
        distance = np.sum((x - optimum) ** 2, axis=1)
        found = {
            "what": "|x^t - x*|^2",
            "factor": mean_factor(distance),
            "first": distance[0],
            "last": distance[-1],
        }
        promised = next((p.value for p in report.predictions if p.where == "(62)"), None)
        if promised is None:
            return found
        mu = 2 * (1 - promised) / report.letters["beta"]
        bound = np.array([rate(report.letters["beta"], mu, t) for t in range(len(x))]) * distance[0]
        keeps = bool((distance <= bound * (1 + 1e-9)).all())
        return {**found, "predicted": promised, "keeps_62": keeps, "worst_of_62": float(np.max(distance / bound))}


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
