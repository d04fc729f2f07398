"""The hyper-parameters of a method: fields with a meaning, the letter of the paper and a range.

A field declared with ``per="node"`` takes a `Step`:

>>> from dataclasses import dataclass
>>> from polytier import Algorithm, Step, parameter
>>> @dataclass(frozen=True)
... class Mine(Algorithm):
...     device_lr: Step = parameter(0.01, "eta", "step size of a device", above=0, per="node")
>>> Mine(0.1).device_lr  # one number for all devices and rounds
0.1
>>> Mine("3/(60+t)").device_lr  # a schedule; t is the round, counted from 0
'3/(60+t)'
>>> Mine([0.1, 0.2, 0.1]).device_lr  # one number per device, in the order of the federation
(0.1, 0.2, 0.1)
>>> Mine({"team": 0.3, "device": 0.1}).device_lr  # by the name of the tier
{'team': 0.3, 'device': 0.1}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from polytier._errors import short
from polytier._text import schedule

MOST = (1 << 31) - 1  # the largest whole number that a field takes
Step = float | str | Sequence[float] | Mapping[str, Any]
"""A hyper-parameter that may differ: a number, a schedule "A/(B+t)" or "A/(B+t//M)", one number per node, or a mapping
from tier names to these. `Node.value` gives its value at some nodes."""


def parameter(
    default: Any,
    letter: str,
    meaning: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] | None = None,
    per: str = "",
) -> Any:
    """Declare a hyper-parameter: a field of an `Algorithm`.

    The value of the field is converted to the type of the default and checked when the algorithm is constructed.

    Args:
        default: the default value; its type is the type of the field: float, int, bool or str.
        letter: the symbol in the paper, or "".
        meaning: what the field means, in a few words.
        above: the value must be greater.
        least: the smallest value that is allowed.
        most: the largest value that is allowed.
        choices: the words that are allowed, for a field of text.
        per: ``"tier"``: may also be given by tier name; ``"node"``: by tier name, with one value per node, or as a
            schedule; ``""``: one value.

    Returns:
        A dataclass field.

    Examples:
        >>> from dataclasses import dataclass
        >>> from polytier import Algorithm, parameter
        >>> @dataclass(frozen=True)
        ... class Mine(Algorithm):
        ...     device_steps: int = parameter(20, "K", "mini-batch steps per device and round", least=1)
        ...     weights: str = parameter("uniform", "", "how models are averaged", choices=("uniform", "samples"))
        >>> Mine(device_steps=5)
        Mine(device_steps=5, weights='uniform')
        >>> Mine(device_steps=0)
        Traceback (most recent call last):
        ...
        ValueError: device_steps = 0 is out of range; allowed: >= 1
    """
    limits = {"above": above, "least": least, "most": most, "choices": choices, "per": per}
    return dataclasses.field(default=default, metadata={"letter": letter, "meaning": meaning, **limits})


def describe_range(meta: Mapping[str, Any]) -> str:
    """The range of a field as text, e.g. ">= 0, <= 1"; "" if there are no limits."""
    if meta["choices"]:
        return " | ".join(meta["choices"])
    signs = {"above": ">", "least": ">=", "most": "<="}
    low = "above" if meta["above"] is not None else "least"
    return ", ".join(f"{signs[name]} {meta[name]:g}" for name in (low, "most") if meta[name] is not None)


def check_value(name: str, value: Any, default: Any, meta: Mapping[str, Any]) -> Any:
    """The value in the type of its field.

    Args:
        name: the name of the field, for messages.
        value: what was given.
        default: the default value, whose type is that of the field.
        meta: the metadata of the field, made by `parameter`.

    Raises:
        ValueError: if the value is not allowed.
    """
    if isinstance(value, Mapping):
        if not meta["per"] or not value:
            per = "one value per tier, or one for all" if meta["per"] else "one value for the whole run"
            raise ValueError(f"{name} is {per}; got {short(dict(value))}")
        return {str(k): check_value(f"{name}.{k}", v, default, meta) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        if meta["per"] != "node" or not len(value) or any(np.ndim(each) for each in value):
            per = {"tier": " per tier", "node": ", or one number for each node"}.get(meta["per"], "")
            raise ValueError(f"{name} is one value{per}; got {len(value)} values: {short(list(value))}")
        return tuple(check_value(name, v, default, meta) for v in value)
    if meta["choices"]:
        if value not in meta["choices"]:
            raise ValueError(f"{name} = {short(value)}; allowed: {describe_range(meta)}")
        return value
    kind = type(default)
    scheduled = meta["per"] == "node" and kind is float
    if scheduled and isinstance(value, str) and "/" in value:
        check_value(name, schedule(value)(0), default, meta)
        return value
    try:
        if isinstance(value, bool) != (kind is bool) or isinstance(value, str):
            raise ValueError
        number = kind(value)
        if number != float(value) or not np.isfinite(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} = {short(value)} is not {describe_type(kind, scheduled, meta)}") from None
    if kind is int and abs(number) > MOST:
        raise ValueError(f"{name} = {short(value)} is too large; allowed: up to {MOST:,}")
    low, least, most = meta["above"], meta["least"], meta["most"]
    if (
        (low is not None and number <= low)
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        raise ValueError(f"{name} = {short(value)} is out of range; allowed: {describe_range(meta)}")
    return number


def check_fit(name: str, value: Any, sizes: Collection[int], largest: float) -> None:
    """Raise an error if a field of a method does not fit a tree or the numbers that a run computes with.

    Args:
        name: the name of the field, for messages.
        value: its value, as `check_value` returns it.
        sizes: how many nodes the tiers have.
        largest: the largest number of the run's dtype.
    """
    if isinstance(value, Mapping):
        for tier, own in value.items():
            check_fit(f"{name}.{tier}", own, sizes, largest)
    elif isinstance(value, tuple):
        if len(value) not in sizes:
            there = " or ".join(map(str, sorted(sizes)))
            raise ValueError(f"{name} has {len(value)} numbers; give {there}, one per node, or one number for all")
        check_fit(name, max(value, key=abs), sizes, largest)
    else:
        number = schedule(value)(0) if isinstance(value, str) and "/" in value else value
        if isinstance(number, float) and abs(number) > largest:
            raise ValueError(
                f"{name} = {value} is too large for the numbers of this run, which end at {largest:.1e}; "
                "give a smaller one, or use --dtype float64"
            )


def describe_type(kind: type, scheduled: bool, meta: Mapping[str, Any]) -> str:
    """What a field takes, e.g. "a number; allowed: > 0, or a schedule such as 3/(60+t)"."""
    what = {int: "a whole number", bool: "true or false"}.get(kind, "a number")
    allowed = [*filter(None, [describe_range(meta)]), *(["a schedule such as 3/(60+t)"] if scheduled else [])]
    return f"{what}; allowed: {', or '.join(allowed)}" if allowed else what
