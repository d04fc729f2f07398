"""Means over seeds with their 95 % intervals, and a paired test over devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import Any

from polytier.models.metrics import MetricInfo

LEVEL = 0.05  # methods whose test has a larger p-value do not differ significantly


def interval(values: Iterable[float | None]) -> dict[str, Any] | None:
    """The mean of values and half the width of its 95 % interval (Student's t).

    Args:
        values: One per seed; None is left out.

    Returns:
        {mean, half, seeds}; `half` is None for fewer than two values. None without values.

    Example:
        >>> interval([1.0, None, 3.0])["mean"]
        2.0
        >>> interval([0.5])
        {'mean': 0.5, 'half': None, 'seeds': 1}
    """
    there = [value for value in values if value is not None]
    if len(there) < 2:
        return {"mean": there[0], "half": None, "seeds": 1} if there else None
    half = quantile(len(there) - 1) * stdev(there) / len(there) ** 0.5
    return {"mean": fmean(there), "half": half, "seeds": len(there)}


@cache
def quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def interval_text(found: dict[str, Any] | None, metric: MetricInfo) -> str:
    """The mean of an interval ± half its width, as the metric is shown; "-" if there is none."""
    return "-" if found is None else metric.text(found["mean"], found["half"])


def paired_test(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The p-value of the Wilcoxon signed-rank test; None without pairs."""
    if not pairs or all(a == b for a, b in pairs):  # the test is not defined if nothing differs
        return 1.0 if pairs else None
    from scipy.stats import wilcoxon

    result: Any = wilcoxon([a for a, _ in pairs], [b for _, b in pairs])
    return float(result.pvalue)
