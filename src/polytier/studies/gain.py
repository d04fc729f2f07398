"""The gain of training several models together, M T_1 / T_M (Bhuyan, Moharir, Joshi 2022, Eq. 3), measured.

M   | number of models
T_1 | number of rounds for which each model is trained alone, by its own method on all devices; the leading metric of
      its global model in the last round is the target of the model
T_M | the first round of training together in which all models reach their targets at the same time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import inf
from statistics import fmean, stdev
from typing import Any

from polytier.models.metrics import Metric
from polytier.report.intervals import interval
from polytier.runs.assemble import assemble
from polytier.runs.evaluate import evaluate
from polytier.runs.loop import Loop
from polytier.runs.spec import RunSpec


@dataclass(frozen=True)
class Gain:
    """The gain for each seed.

    Attributes:
        models: Number of models, M.
        single: Rounds of each model alone, T_1.
        most: The round after which training together stops if the targets are not reached.
        targets: By seed: the target of each model, by name.
        rounds: By seed: T_M, or None if a target was not reached.
    """

    models: int
    single: int
    most: int
    targets: dict[int, dict[str, float]]
    rounds: dict[int, int | None]

    @property
    def gains(self) -> dict[int, float]:
        """The gain by seed, for seeds that reached the targets."""
        return {seed: self.models * self.single / rounds for seed, rounds in self.rounds.items() if rounds is not None}

    @property
    def mean(self) -> float | None:
        """The mean over the seeds that reached the targets; None if there are none."""
        return fmean(self.gains.values()) if self.gains else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None with fewer than two seeds."""
        return stdev(self.gains.values()) if len(self.gains) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean (Student's t); the range of two seeds; None with fewer."""
        found = interval(self.gains.values(), (0, inf))
        return None if found is None or found["seeds"] < 2 else (found["low"], found["high"])

    def as_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        derived = ("gains", "mean", "deviation", "interval")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        """The mean gain with its interval, and the number of seeds that did not reach the targets."""
        missing = len(self.rounds) - len(self.gains)
        lost = f"not reached in {self.most} rounds by {missing} of {len(self.rounds)} seeds" if missing else ""
        if self.mean is None:
            return lost
        text = f"{self.mean:.2f}"
        if self.interval is not None:
            text += " ({:.2f} .. {:.2f})".format(*self.interval)
        return f"{text}; {lost}" if lost else text


def measure_gain(
    make: Callable[[int], Loop],
    single_rounds: int,
    seeds: Iterable[int],
    split: str = "test",
    most_rounds: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Gain:
    """Measure the gain of training several models together.

    For each seed, each model is first trained alone for `single_rounds` with its own settings. Models with the same
    data, method and settings are trained once. Then the models are trained together until all reach their targets.

    Args:
        make: Returns, for a seed, a run of several models before its first round.
        single_rounds: Number of rounds of each model alone; the metric after the last one is the target.
        seeds: The seeds.
        split: The samples on which the targets are measured: "train", "validation" or "test".
        most_rounds: Training together stops after this many rounds; by default 10 M T_1, which is a gain of 0.1.
        progress: Called with a line of text after each step of the measurement.

    Returns:
        The gain for each seed, with mean and confidence interval.

    Raises:
        ValueError: The run has one model only, a method has no global model, the split is empty, or no seed is given.

    Examples:
        >>> import polytier
        >>> method = polytier.MFARR({"a": polytier.FedAvg(device_steps=2), "b": polytier.FedAvg(device_steps=1)})
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> gain = polytier.measure_gain(
        ...     lambda seed: polytier.make_loop(method, federation, "mclr", seed=seed), single_rounds=1, seeds=[0])
        >>> gain.models, gain.single
        (2, 1)
    """
    if single_rounds < 1:
        raise ValueError(f"each model is trained alone for at least 1 round; got {single_rounds}")
    targets: dict[int, dict[str, float]] = {}
    rounds: dict[int, int | None] = {}
    number = most = 0
    for seed in seeds:
        with make(seed) as together:
            number = len(together.context.scopes)
            most = most_rounds or 10 * number * single_rounds
            targets[seed] = found = targets_of(together, single_rounds, split)
            progress(f"seed {seed}: alone {', '.join(f'{name} {value:.4g}' for name, value in found.items())}")
            rounds[seed] = rounds_together(together, found, most, split)
            progress(f"seed {seed}: {Gain(number, single_rounds, most, {}, {seed: rounds[seed]})}")
    if not rounds:
        raise ValueError("a gain is measured over at least one seed; none is given")
    return Gain(number, single_rounds, most, targets, rounds)


def targets_of(together: Loop, rounds: int, split: str) -> dict[str, float]:
    """The target of each model: its metric after being trained alone."""
    if not together.context.scopes:
        raise ValueError(f"{type(together.algorithm).__name__} trains one model; a gain needs several, try mfa-rr")
    for name, context in together.context.scopes.items():  # raises errors before the first round
        figure(evaluate(context, together.part_state(name), 0).figures(), name, split, context.metrics[0])
    seen: list[tuple[tuple[Any, ...], float]] = []
    result = {}
    for name in together.context.scopes:
        what = identity(together, name)
        reached = next((value for other, value in seen if other == what), None)
        if reached is None:
            with alone(together, name, rounds) as single:
                run = single.run(rounds)
            reached = figure(run.history[-1], name, split, together.context.scopes[name].metrics[0])
            seen.append((what, reached))
        result[name] = reached
    return result


def rounds_together(together: Loop, targets: dict[str, float], most: int, split: str) -> int | None:
    """The first round in which all targets are reached."""

    def as_good(name: str, target: float) -> bool:
        metric = together.context.scopes[name].metrics[0]
        value = figure(together.history[-1]["models"][name], name, split, metric)
        return metric.sign * value >= metric.sign * target

    def reached() -> bool:
        return bool(together.history) and all(as_good(name, target) for name, target in targets.items())

    together.eval_every = 1
    together.run(most, stop=reached)
    return together.round if reached() else None


def figure(figures: dict[str, Any], name: str, split: str, metric: Metric) -> float:
    """The leading metric of the global model of `name` on `split`."""
    if "global" not in figures:
        raise ValueError(f"the method of {name} has no global model, which the gain is measured on; try fedavg")
    if split not in figures["global"]:
        raise ValueError(f"{name} has no samples in the split {split}; try {', '.join(figures['global'])}")
    found = figures["global"][split].get(metric.name)
    if found is None:
        raise ValueError(f"the {metric.name} of {name} on {split} is undefined on all devices; try another metric")
    return found


def identity(together: Loop, name: str) -> tuple[Any, ...]:
    """The settings that the training of one model depends on. Models with equal settings have the same target."""
    context, (module, loss) = together.context.scopes[name], together.assembly.given[name]
    return context.algorithm, id(context.batches.federation), id(module), id(loss), models_of(together.spec)[name]


def models_of(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """The settings of each model by name."""
    assert isinstance(spec.models, dict)
    return spec.models


def alone(together: Loop, name: str, rounds: int) -> Loop:
    """A run of one of the models with the same settings, evaluated after the last round only."""
    context, assembly = together.context.scopes[name], together.assembly
    module, loss = assembly.given[name]
    return Loop(
        assemble(
            assembly.spec.replace(models=None, eval_every=rounds, **models_of(assembly.spec)[name]),
            algorithm=context.algorithm,
            federation=context.batches.federation,
            model=module,
            loss=loss,
            topology=context.topology,
            metrics=context.metrics,
            participation=(context.participation[1], context.participation[-1]),
            codec=assembly.codec,
            upload=assembly.upload,
            objectives=assembly.objectives,
        )
    )
