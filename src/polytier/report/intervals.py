"""Means over seeds and how far seeds differ, and a paired test over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import inf
from statistics import fmean, stdev
from typing import Any

from polytier.models.metrics import MetricInfo

LEVEL = 0.05  # methods whose test has a larger p-value do not differ significantly
FEWEST = 3  # seeds for an interval; Student's t of two is 12.7 times their standard error and says nothing
HALF, CUT, RANGE = "half", "cut", "range"  # how the spread of a figure is shown
NOTES = {
    HALF: "± half the 95 % interval over seeds (Student's t)",
    CUT: "in brackets the 95 % interval, cut at the limits of the metric",
    RANGE: "in brackets the lowest and the highest seed",
}


def interval(values: Iterable[float | None], limits: tuple[float, float] = (-inf, inf)) -> dict[str, Any] | None:
    """The mean over seeds and its spread: the 95 % interval of the mean, or the range with fewer than three seeds.

    Args:
        values: One per seed; None is left out.
        limits: The lowest and the highest possible value, which the spread does not exceed.

    Returns:
        {mean, half, seeds, low, high}. `half` is half the width of the interval (Student's t), or None with fewer than
        three values. `low` and `high` are the bounds of the interval, or the lowest and highest value. None without
        values.

    Examples:
        >>> interval([1.0, None, 3.0])
        {'mean': 2.0, 'half': None, 'seeds': 2, 'low': 1.0, 'high': 3.0}
        >>> found = interval([0.9, 0.95, 1.0], limits=(0, 1))
        >>> round(found["half"], 3), round(found["low"], 3), found["high"]
        (0.124, 0.826, 1)
    """
    there = [value for value in values if value is not None]
    if not there:
        return None
    found = {"mean": fmean(there), "half": None, "seeds": len(there), "low": min(there), "high": max(there)}
    if len(there) >= FEWEST:
        half = quantile(len(there) - 1) * stdev(there) / len(there) ** 0.5
        low, high = max(limits[0], found["mean"] - half), min(limits[1], found["mean"] + half)
        found |= {"half": half, "low": low, "high": high}
    return found


@cache
def quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


# -- for people ---------------------------------------------------------------------------------------


def spread(found: dict[str, Any] | None) -> str | None:
    """How the spread of a figure is shown: `HALF`, `CUT` or `RANGE`; None if it has none."""
    if found is None or found.get("low") == found.get("high"):
        return None
    if found["half"] is None:
        return RANGE
    whole = (found["mean"] - found["half"], found["mean"] + found["half"])
    return HALF if whole == (found["low"], found["high"]) else CUT


def with_spread(found: dict[str, Any] | None, text: Callable[[float], str]) -> str:
    """The mean and its spread, numbers written by `text`; "-" if there is no figure.

    Examples:
        >>> with_spread(interval([1.0, 3.0]), "{:.1f}".format)
        '2.0 (1.0 to 3.0)'
        >>> with_spread(interval([1.0, 2.0, 3.0]), "{:.1f}".format)
        '2.0 ± 2.5'
    """
    if found is None:
        return "-"
    kind = spread(found)
    if kind == HALF:
        return f"{text(found['mean'])} ± {text(found['half'])}"
    return text(found["mean"]) + (f" ({text(found['low'])} to {text(found['high'])})" if kind else "")


def interval_text(found: dict[str, Any] | None, metric: MetricInfo) -> str:
    """The mean of a metric and its spread, as the metric is shown; "-" if there is no figure.

    Examples:
        >>> interval_text(interval([0.9, 0.95, 1.0], limits=(0, 1)), MetricInfo("accuracy", unit="%"))
        '95.00 (82.58 to 100.00) %'
    """
    return "-" if found is None else metric.with_unit(with_spread(found, metric.number))


def spread_note(figures: Iterable[dict[str, Any] | None]) -> str:
    """What the spreads of these figures are, in words; empty if they have none.

    Examples:
        >>> spread_note([interval([1.0, 3.0]), interval([2.0])])
        'in brackets the lowest and the highest seed'
    """
    kinds = {spread(found) for found in figures}
    return "; ".join(words for kind, words in NOTES.items() if kind in kinds)


def paired_test(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The p-value of the Wilcoxon signed-rank test; None without pairs."""
    if not pairs or all(a == b for a, b in pairs):  # the test is not defined if nothing differs
        return 1.0 if pairs else None
    from scipy.stats import wilcoxon

    result: Any = wilcoxon([a for a, _ in pairs], [b for _, b in pairs])
    return float(result.pvalue)
