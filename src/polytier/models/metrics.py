"""Metrics: how the outputs of a model are judged on the samples of a device.

A metric is one of four kinds:

per="sample" | a function of outputs and targets that gives one value per sample; a device's value is their mean
per="device" | a function of all outputs and targets of one device, as NumPy arrays, that gives one number
per="loss"   | a function of the device's mean training loss
per="token"  | a function of the device's mean training loss per token (perplexity is its exponential)

The first metric that a run requests is the leading one: best rounds, tables, charts and comparisons use it. The default
of the task (accuracy for classes, also perplexity for tokens, the loss for numbers) is recorded too.

This module does not import torch, because reports use it for names, units and directions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from polytier._errors import unknown
from polytier.data import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

# the metrics that a run may request; see `resolve_metrics`
Asked: TypeAlias = "str | Metric | Iterable[str | Metric] | Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None"

DIRECTIONS = ("higher", "lower")
KINDS_OF_METRICS = ("sample", "device", "loss", "token")
# endings of the keys that a metric adds to a run's files
SUFFIXES = ("_std", "_worst_decile", "_pooled", "_undefined", "_tokens")
CLASSES, NUMBERS = "classes", "numbers"  # what targets are


# -- the contract -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricInfo:
    """What a reader of results knows about a metric: how values are compared and shown.

    Args:
        name: The key in the files of a run.
        better: Whether "higher" or "lower" values are better.
        unit: "%" for fractions that are shown in percent. Any other text is written after the number.

    Examples:
        >>> MetricInfo("accuracy", unit="%").text(0.9152)
        '91.52 %'
        >>> MetricInfo("mae", better="lower").text(12.34567)
        '12.35'
    """

    name: str
    better: str = field(default="higher", kw_only=True)
    unit: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if self.better not in DIRECTIONS:
            raise ValueError(f"better={self.better!r} of metric {self.name} is unknown; allowed: higher, lower")

    @property
    def sign(self) -> int:
        """1 if higher values are better, -1 if lower ones are: `sign * value` is always better when it is higher."""
        return 1 if self.better == "higher" else -1

    @property
    def factor(self) -> float:
        """The factor by which a value is multiplied before it is shown."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest possible value, as far as the unit tells."""
        return (0.0, 1.0) if self.unit == "%" else (-inf, inf)

    @property
    def axis_limits(self) -> tuple[float, float]:
        """The same as it is shown, for charts."""
        return self.factor * self.limits[0], self.factor * self.limits[1]

    @property
    def axis(self) -> str:
        """The name with its unit, for the axis of a chart."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def text(self, value: float | None) -> str:
        """The value as it is shown, with its unit.

        Args:
            value: The value as it is in the files; None gives "-".
        """
        return "-" if value is None else self.with_unit(self.number(value))

    def number(self, value: float) -> str:
        """The value without its unit: percent with two decimals, or a number with four significant digits."""
        return f"{self.factor * value:{'.2f' if self.unit == '%' else '.4g'}}"

    def with_unit(self, text: str) -> str:
        """A text made of numbers, and the unit after it."""
        return f"{text} {self.unit}" if self.unit else text

    def short(self, value: float) -> str:
        """A round value such as a level to reach: 90 %, 0.25."""
        return self.with_unit(f"{self.factor * value:g}")

    def as_dict(self) -> dict[str, str]:
        """Name, direction and unit, as a run's files hold them."""
        return {"name": self.name, "better": self.better, "unit": self.unit}


@dataclass(frozen=True)
class Metric(MetricInfo):
    """A custom metric, or one of `METRICS`.

    Args:
        name: Letters, digits and underscores; the key in the files of a run.
        function: `function(outputs, targets)`. With per="sample" it is given tensors (outputs [B, ...], targets
            [B, ...]) and returns one value per sample, a tensor [B]. With per="device" it is given all outputs and
            targets of one device as NumPy arrays and returns a number, or None where the metric is undefined. With
            per="loss" and per="token" there is none.
        better: Whether "higher" or "lower" values are better.
        unit: "%" for fractions that are shown in percent, otherwise a text written after the number.
        per: "sample", "device", "loss" or "token".
        targets: "classes" or "numbers" if the metric fits only one of them.
        finish: Applied to the mean over a device's samples (not with per="device"), to NumPy arrays: `numpy.sqrt` makes
            a mean squared error a root mean squared error.

    Examples:
        >>> def within_one(outputs, targets):
        ...     return ((outputs.argmax(-1) - targets).abs() <= 1).float()
        >>> metric = Metric("within_one", within_one, unit="%")
        >>> metric.better, metric.per, metric.text(0.5)
        ('higher', 'sample', '50.00 %')

        >>> Metric("highest", lambda outputs, targets: float(outputs.max()), per="device")(np.array([1.0, 3.0]), None)
        3.0
    """

    function: Callable[[Any, Any], Any] | None = None
    per: str = field(default="sample", kw_only=True)
    targets: str | None = field(default=None, kw_only=True)
    finish: Callable[[Any], Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", self.name) or self.name.endswith(SUFFIXES):
            raise ValueError(
                f"{self.name!r} cannot be the name of a metric; use letters, digits and underscores, and none of the "
                f"endings {', '.join(SUFFIXES)}"
            )
        if self.per not in KINDS_OF_METRICS:
            raise ValueError(
                f"per={self.per!r} of metric {self.name} is unknown; allowed: {', '.join(KINDS_OF_METRICS)}"
            )
        if (self.function is None) != self.of_loss:
            wanted = "takes no function" if self.of_loss else "needs a function (outputs, targets)"
            raise ValueError(f"metric {self.name} with per={self.per!r} {wanted}")

    @property
    def of_loss(self) -> bool:
        """Whether it follows from the training loss."""
        return self.per in ("loss", "token")

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """One value per sample, or one number, as `per` says."""
        assert self.function is not None, "a metric of the loss is not a function of outputs"
        return self.function(outputs, targets)

    def finished(self, mean: Any) -> Any:
        """The metric's value, given the mean over samples."""
        return mean if self.finish is None else self.finish(mean)


# -- per sample ---------------------------------------------------------------------------------------


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for a sample whose largest output is the target; for sequences the share of the positions."""
    return share_of(outputs.argmax(-1) == targets, outputs, targets)


def share_of(hits: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    """The hits as numbers; for sequences their share of the positions that count."""
    found = hits.to(outputs.dtype)
    if found.ndim == 1:
        return found
    counts = (targets != IGNORED).to(outputs.dtype)
    return (found * counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)


def among_largest(outputs: Tensor, targets: Tensor, k: int) -> Tensor:
    """1 for a sample whose target is among the k largest outputs; for sequences the share of the positions.

    Of equal outputs the class with the lower number counts as larger.
    """
    place = targets.clamp(min=0).unsqueeze(-1)
    own = outputs.gather(-1, place)
    equal = outputs == own
    behind = (outputs < own).sum(-1) + equal.sum(-1) - equal.cumsum(-1).gather(-1, place).squeeze(-1)
    return share_of(outputs.shape[-1] - 1 - behind < k, outputs, targets)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute difference, mean over the numbers of a target."""
    difference = (outputs.reshape(targets.shape) - targets).abs()
    return difference.reshape(len(targets), -1).mean(1)


# -- per device, with NumPy: the values are scikit-learn's ---------------------------------------------


def predicted(outputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes; the positions of sequences that count, one after another."""
    true = targets.reshape(-1)
    return outputs.argmax(-1).reshape(-1)[true != IGNORED], true[true != IGNORED]


def macro_f1(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The F1 score of each class that occurs among targets or predictions, mean over these classes."""
    found, true = predicted(outputs, targets)
    size = int(max(found.max(), true.max())) + 1
    right = np.bincount(true[found == true], minlength=size)
    total = np.bincount(found, minlength=size) + np.bincount(true, minlength=size)
    there = total > 0
    return float((2 * right[there] / total[there]).mean())


def balanced_accuracy(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The share of right predictions in each class that occurs among the targets, mean over these classes."""
    found, true = predicted(outputs, targets)
    number = np.bincount(true)
    right = np.bincount(true[found == true], minlength=len(number))
    there = number > 0
    return float((right[there] / number[there]).mean())


def auc(outputs: np.ndarray, targets: np.ndarray) -> float | None:
    """The area under the ROC curve, of class 1 against class 0, or of each class that occurs against all others (mean).

    Undefined with one class, and where outputs are not finite.
    """
    true = targets.reshape(-1)
    scores = outputs.reshape(len(true), -1)[true != IGNORED].astype(np.float64)
    true = true[true != IGNORED]
    present = np.unique(true)
    if len(present) < 2 or not np.isfinite(scores).all():
        return None
    if scores.shape[1] == 1:
        return area(scores[:, 0], true == present[1])
    if scores.shape[1] == 2:
        return area(scores[:, 1] - scores[:, 0], true == 1)
    shifted = scores - scores.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))  # in the order of the probabilities
    return float(np.mean([area(logs[:, c], true == c) for c in present]))


def area(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs of a positive and a negative sample that the scores put in order; equal scores count half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place.reshape(-1)]
    number = int(positive.sum())
    above = rank[positive].sum() - number * (number + 1) / 2
    return float(above / (number * (len(scores) - number)))


def r2(outputs: np.ndarray, targets: np.ndarray) -> float | None:
    """The coefficient of determination, mean over the numbers of a target.

    Undefined with one sample, and where outputs are not finite. Where all targets are equal it is 1 for perfect
    predictions and 0 for others.
    """
    true = targets.reshape(len(targets), -1).astype(np.float64)
    found = outputs.reshape(true.shape).astype(np.float64)
    if len(true) < 2 or not np.isfinite(found).all():
        return None
    residual = ((true - found) ** 2).sum(0)
    total = ((true - true.mean(0)) ** 2).sum(0)
    share = np.divide(residual, total, out=(residual > 0).astype(float), where=total > 0)
    return float((1 - share).mean())


# -- per loss -----------------------------------------------------------------------------------------


def exponential(mean: Any) -> Any:
    """The exponential of the mean."""
    with np.errstate(over="ignore"):  # infinite for a model that has diverged
        return np.exp(mean)


# -- by name ------------------------------------------------------------------------------------------


@cache
def top(k: int) -> Metric:
    """The share of samples whose target is among the k largest outputs.

    Examples:
        >>> top(5).name
        'top_5'
    """
    if k < 1:
        raise ValueError(f"top-{k} is not understood; K is a whole number of at least 1, as in top-5")
    return Metric(f"top_{k}", partial(among_largest, k=k), unit="%", targets=CLASSES)


LOSS = Metric("loss", better="lower", per="loss")
TOKENS = "tokens"  # the number of targets that count, under which it is summed up for metrics per token
ACCURACY = Metric("accuracy", correct, unit="%", targets=CLASSES)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        ACCURACY,
        top(5),  # any other number is allowed too
        Metric("macro_f1", macro_f1, unit="%", per="device", targets=CLASSES),
        Metric("balanced_accuracy", balanced_accuracy, unit="%", per="device", targets=CLASSES),
        Metric("auc", auc, per="device", targets=CLASSES),
        Metric("perplexity", better="lower", per="token", targets=CLASSES, finish=exponential),
        Metric("mae", absolute_error, better="lower", targets=NUMBERS),
        Metric("r2", r2, per="device", targets=NUMBERS),
        LOSS,
    )
}


def default_metrics(classes: bool, tokens: bool = False) -> tuple[Metric, ...]:
    """The metrics of a run that names none: accuracy for classes, perplexity first for tokens, the loss for numbers."""
    return (METRICS["perplexity"], ACCURACY) if tokens else (ACCURACY,) if classes else (LOSS,)


def find_metric(name: str) -> Metric:
    """The metric of this name.

    Args:
        name: One of `METRICS`; dashes count as underscores. `top-K`, `top:K` and `topK` are understood for any K.

    Raises:
        ValueError: There is no such metric; the message names the nearest one.

    Examples:
        >>> find_metric("macro-f1").name, find_metric("top-3").name
        ('macro_f1', 'top_3')
    """
    key = re.sub("[-: ]", "_", name.strip().lower())
    if number := re.fullmatch(r"top_?(\d+)", key):
        return top(int(number[1]))
    if key not in METRICS:
        raise unknown("metric", key, [known if known != "top_5" else "top_K" for known in METRICS])
    return METRICS[key]


def describe(entry: str | Mapping[str, str]) -> MetricInfo:
    """The metric of an entry in a run's files, which is a name, or a mapping with name, direction and unit."""
    if not isinstance(entry, str):
        return MetricInfo(entry["name"], better=entry.get("better", "higher"), unit=entry.get("unit", ""))
    try:
        return find_metric(entry)
    except ValueError:
        return MetricInfo(entry)  # a custom metric


def resolve_metrics(asked: Asked, classes: bool, tokens: bool = False) -> tuple[Metric, ...]:
    """The metrics of a run, the leading one first, the default of the task among them.

    Args:
        asked: Names (see `find_metric`; one text may hold several with commas between) and `Metric` objects; or a
            mapping from names to functions (outputs, targets) -> one value per sample, for which higher is better;
            or None for the default.
        classes: Whether the targets are classes; otherwise they are numbers.
        tokens: Whether the targets are tokens, one per position of a sample.

    Returns:
        Each metric once. The training loss is always measured; it is listed where it leads or was asked for.

    Raises:
        ValueError: A name is unknown or given twice, or a metric does not fit the targets.

    Examples:
        >>> [metric.name for metric in resolve_metrics(["macro-f1", "auc"], classes=True)]
        ['macro_f1', 'auc', 'accuracy']
        >>> [metric.name for metric in resolve_metrics("r2,mae", classes=False)]
        ['r2', 'mae', 'loss']
    """
    found: dict[str, Metric] = {}
    for metric in asked_metrics(asked):
        if found.get(metric.name, metric) != metric or (metric.name == LOSS.name and metric != LOSS):
            taken = "the training loss" if metric.name == LOSS.name else "another metric"
            raise ValueError(f"{metric.name} is the name of {taken}; give yours another name")
        if metric.targets not in (None, CLASSES if classes else NUMBERS):
            there, fit = (CLASSES, NUMBERS) if classes else (NUMBERS, CLASSES)
            others = ", ".join(name for name, known in METRICS.items() if known.targets in (None, there))
            raise ValueError(f"metric {metric.name} needs {fit} and the targets are {there}; try {others}")
        found[metric.name] = metric
    for default in default_metrics(classes, tokens):
        found.setdefault(default.name, default)
    return tuple(found.values())


def asked_metrics(asked: Asked) -> list[Metric]:
    """The requested metrics as `Metric` objects."""
    if asked is None:
        return []
    if isinstance(asked, Mapping):
        given = {str(name).replace("-", "_"): value for name, value in asked.items()}
        return [replace(v, name=n) if isinstance(v, Metric) else Metric(n, function_of(n, v)) for n, v in given.items()]
    if isinstance(asked, str):
        return [find_metric(name) for name in asked.split(",")]
    several = [asked] if isinstance(asked, Metric) else list(asked)
    result: list[Metric] = []
    for one in several:
        if not isinstance(one, str | Metric):
            raise ValueError(
                f"{one!r} is not a metric; give a name, a polytier.Metric or a mapping from names to functions"
            )
        result += asked_metrics(one) if isinstance(one, str) else [one]
    return result


def function_of(name: str, value: Any) -> Callable[[Any, Any], Any]:
    """The function of a metric; an error if it is not callable."""
    if not callable(value):
        raise ValueError(f"metric {name} is {value!r}; give a function (outputs, targets) -> one value per sample")
    return value


# -- before the first round ---------------------------------------------------------------------------


def check_metric(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Try a metric on the outputs and targets of a few samples.

    Args:
        metric: The metric.
        outputs: [B, ...] outputs of a model.
        targets: [B, ...] the targets of the same samples.

    Raises:
        ValueError: The metric fails, or its result does not have the shape that its kind requires.
    """
    shapes = f"outputs of shape {list(outputs.shape)} and targets of shape {list(targets.shape)}"
    if metric.of_loss:
        return
    given = (outputs.cpu().numpy(), targets.cpu().numpy()) if metric.per == "device" else (outputs, targets)
    try:
        value = metric(*given)
    except Exception as error:
        raise ValueError(
            f"metric {metric.name} failed on {shapes}: {error}; check its function on such arrays"
        ) from error
    if metric.per == "sample":
        if tuple(getattr(value, "shape", ())) != (len(targets),):
            got = f"shape {list(value.shape)}" if hasattr(value, "shape") else f"{type(value).__name__}"
            raise ValueError(
                f"metric {metric.name} gave {got} for {shapes}; return one value per sample, shape [{len(targets)}], "
                'or make it a polytier.Metric(..., per="device") that returns one number'
            )
    elif value is not None and not np.isscalar(value) and getattr(value, "shape", None) != ():
        raise ValueError(f"metric {metric.name} gave {type(value).__name__} for {shapes}; return one number or None")
