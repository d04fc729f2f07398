"""Detection of divergence during a run, from the losses that evaluations measure.

A run is warned of if the training loss of a model is more than WARN_FACTOR times the smallest one so far, larger than
that of the initial model, and has grown over the last two evaluations. It stops if the loss is more than STOP_FACTOR
times that of the initial model and parameters are so large that changes of 1 are lost in rounding. Neither alone is
enough: a loss may grow in a healthy run, and a regression on unscaled data has large parameters.

A healthy run pays nothing: the initial model and the parameters are looked at only if a loss is suspicious.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.call import Diverged
from polytier.method.context import Context
from polytier.method.local_problem import LocalProblem
from polytier.runs.evaluate import answers_of, ask_devices, measure_rows, models_of
from polytier.stack.rows import Rows

if TYPE_CHECKING:
    from polytier.runs.loop import Loop

log = logging.getLogger("polytier")
WARN_FACTOR, STOP_FACTOR = 100, 1000  # growth of the loss at which a run is warned of, and may be stopped
LARGE_LOSS = 1000  # a larger loss is compared with that of the initial model even in the first evaluation
NO_MODELS = ("models", "bytes", "participants")  # entries of a record that are dicts, but not figures of a model


class Past(NamedTuple):
    """The training losses of one kind of model so far: the smallest, and the last two."""

    smallest: float
    before: float
    last: float

    def then(self, loss: float) -> Past:
        """With the next loss."""
        return Past(min(self.smallest, loss), self.last, loss)


class DivergenceWatch:
    """Looks at the evaluations of a run, and reports divergence.

    Args:
        history: The records of the rounds so far, if the run continues from a checkpoint.
    """

    def __init__(self, history: Iterable[dict[str, Any]] = ()) -> None:
        self._past: dict[tuple[str, str], Past] = {}
        self._initial: dict[str, float] = {}  # by name of the model: the loss of the initial model, once it is needed
        self._told = False
        for record in history:
            self._note(record)

    def look(self, loop: Loop, record: dict[str, Any]) -> None:
        """Compare an evaluation with those before it.

        Args:
            loop: The run.
            record: The figures of the evaluation.

        Raises:
            Diverged: A model has left the range of its dtype.
        """
        for name, kind, losses in losses_of(record):
            past = self._past.get((name, kind), Past(math.inf, math.inf, math.inf))
            if name in self._initial or max(losses.values()) > min(LARGE_LOSS, WARN_FACTOR * abs(past.smallest)):
                self._judge(loop, loop.context.scope(name), kind, losses, past)
        self._note(record)

    def _judge(self, loop: Loop, context: Context, kind: str, losses: dict[str, float], past: Past) -> None:
        if context.name not in self._initial:
            self._initial[context.name] = initial_loss(context, loop.part_state(context.name), loop.round)
        initial, loss = self._initial[context.name], losses["train"]
        reference = max(abs(initial), abs(min(initial, past.smallest)))  # losses of quadratics may be below 0
        if (worst := max(losses.values())) > STOP_FACTOR * reference:
            check_range(loop, context, kind, f"is {worst:.3g}, that of the initial model {initial:.3g}")
        grows = loss > past.last > past.before
        if grows and loss > max(reference, WARN_FACTOR * abs(past.smallest)) and not self._told:
            self._told = True
            what = f"the training loss of the {titled(kind, context)} grew from {past.smallest:.3g} to {loss:.3g}"
            log.warning("round %d: %s and goes on growing; %s", loop.round, what, smaller_steps(context.algorithm))

    def _note(self, record: dict[str, Any]) -> None:
        for name, kind, losses in losses_of(record):
            past = self._past.get((name, kind), Past(math.inf, math.inf, math.inf))
            self._past[name, kind] = past.then(losses["train"])


def losses_of(record: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """The model, the kind of model and its loss by split, for all models that have a training loss in this record."""
    for name, figures in (record.get("models") or {"": record}).items():
        for kind, splits in figures.items():
            if isinstance(splits, dict) and kind not in NO_MODELS and "train" in splits:
                # without a value, the losses of all devices are NaN: outputs have overflowed
                yield name, kind, {split: loss_or_infinity(values.get("loss")) for split, values in splits.items()}


def loss_or_infinity(loss: float | None) -> float:
    """The loss; infinity if it is undefined."""
    return math.inf if loss is None or math.isnan(loss) else loss


def titled(kind: str, context: Context) -> str:
    """What a model is called in messages."""
    return f"{kind} model" + (f" of {context.name}" if context.name else "")


# -- the initial model, and the range of parameters ---------------------------------------------------


def initial_loss(context: Context, state: Rows, round_: int) -> float:
    """The mean over devices of the training loss of the initial model."""
    present, found = answers_of(context, ask_devices(context, state, round_, measure_initial))
    count = context.samples[context.topology.leaf]
    return float((found["initial"][:, 0] / count)[present & (count > 0)].mean())


def measure_initial(algorithm: Algorithm, rows: dict[str, Tensor], local: LocalProblem) -> Rows:
    """Program of devices: [n, columns] the sums over training samples for the initial model, the loss first."""
    return measure_rows(algorithm, {"initial": local.initial}, "train", local)


def largest_values(context: Context, state: Rows, round_: int, kind: str) -> Tensor:
    """[n] the largest magnitude of a parameter of the model that each device is evaluated with; 0 without an answer."""
    return answers_of(context, ask_devices(context, state, round_, measure_largest))[1][kind].squeeze(1)


def measure_largest(algorithm: Algorithm, rows: dict[str, Tensor], local: LocalProblem) -> Rows:
    """Program of devices: [n, 1] the largest magnitude of a parameter of every model."""
    models = models_of(algorithm, rows, local)
    return {kind: model.abs().amax(1, keepdim=True).cpu().double() for kind, model in models.items()}


def range_of(initial: Tensor) -> float:
    """The magnitude beyond which training cannot recover: a change of 1, or of `initial` if larger, has no effect."""
    return 2 / torch.finfo(initial.dtype).eps * max(1.0, float(initial.abs().max()))


def check_range(loop: Loop, context: Context, kind: str, about_loss: str) -> None:
    """Raise `Diverged` if parameters of a kind of model have left the range of their dtype."""
    initial, topology = context.objective.initial, context.topology
    largest = largest_values(context, loop.part_state(context.name), loop.round, kind)
    beyond = ~(largest <= range_of(initial))
    if not beyond.any():
        return
    tier = {"personal": topology.leaf, "team": topology.leaf - 1, "global": 0}.get(kind)
    tier = topology.tier_names.index(kind) if tier is None else tier
    nodes = torch.unique(topology.ancestor(tier)[beyond])
    dtype = str(initial.dtype).removeprefix("torch.")
    reach = f"its parameters reach {float(largest.max()):.3g}, beyond the range that {dtype} can recover from"
    advice = " or ".join(step_fields(context.algorithm)) or "the steps"
    why = f"the loss of the {titled(kind, context)} {about_loss}, and {reach}; lower {advice}"
    raise Diverged(loop.round, topology.tier_names[tier], [str(n) for n in topology.names[tier][nodes.numpy()]], why)


# -- advice -------------------------------------------------------------------------------------------


def step_fields(algorithm: Algorithm) -> dict[str, Any]:
    """The fields of a method that are step sizes, with their values."""
    fields = [f for f in dataclasses.fields(algorithm) if f.metadata.get("meaning", "").startswith("step size")]
    return {field.name: getattr(algorithm, field.name) for field in fields}


def smaller_steps(algorithm: Algorithm) -> str:
    """Advice: a tenth of the step size that exceeds its default most."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(algorithm)}
    steps = step_fields(algorithm)
    if not steps:
        return "try smaller steps"
    numbers = {name: value for name, value in steps.items() if isinstance(value, int | float) and defaults[name]}
    if not numbers:
        return f"try a smaller {' or '.join(steps)}"
    name = max(numbers, key=lambda name: numbers[name] / defaults[name])
    return f"try a smaller step, for example {name}={numbers[name] / 10:.2g}"
