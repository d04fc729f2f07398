"""Hyper-parameters: the fields of a method, what they mean and what they may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polytier._text import schedule

Step = float | str | Sequence[float] | Mapping[str, Any]  # a number, a schedule, one a node; or these by tier name


def parameter(
    default: Any, letter: str, meaning: str, *, above: float | None = None, least: float | None = None,
    most: float | None = None, choices: Sequence[str] | None = None, per: str = "",
) -> Any:  # fmt: skip
    """A field of a method: its default, the paper's letter, what it means, and its range.

    `per="tier"`: may also be given by tier name; `per="node"`: by tier name, one value a node, or as a schedule.
    """
    limits = {"above": above, "least": least, "most": most, "choices": choices, "per": per}
    return dataclasses.field(default=default, metadata={"letter": letter, "meaning": meaning, **limits})


def describe_range(meta: Mapping[str, Any]) -> str:
    if meta["choices"]:
        return " | ".join(meta["choices"])
    low = (
        f"> {meta['above']:g}"
        if meta["above"] is not None
        else f">= {meta['least']:g}"
        if meta["least"] is not None
        else ""
    )
    high = f"<= {meta['most']:g}" if meta["most"] is not None else ""
    return ", ".join(filter(None, (low, high)))


def check_value(name: str, value: Any, default: Any, meta: Mapping[str, Any]) -> Any:
    """The value in the field's type, or a ValueError that says what is allowed."""
    if isinstance(value, Mapping):
        if not meta["per"]:
            raise ValueError(f"{name} is one value for the whole run; got {dict(value)}")
        return {str(k): check_value(f"{name}.{k}", v, default, meta) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        if meta["per"] != "node":
            raise ValueError(f"{name} is one value{' a tier' if meta['per'] else ''}; got {len(value)} values")
        return tuple(check_value(name, v, default, meta) for v in value)
    if meta["choices"]:
        if value not in meta["choices"]:
            raise ValueError(f"{name} = {value!r}; allowed: {describe_range(meta)}")
        return value
    kind = type(default)
    if meta["per"] == "node" and kind is float and isinstance(value, str) and "/" in value:
        check_value(name, schedule(value)(0), default, meta)
        return value
    try:
        if isinstance(value, bool) != (kind is bool):
            raise ValueError
        number = kind(value)
        if number != float(value) or not np.isfinite(number):
            raise ValueError
    except (TypeError, ValueError):
        what = {int: "a whole number", bool: "true or false"}.get(kind, "a number")
        raise ValueError(f"{name} = {value!r} is not {what}") from None
    low, least, most = meta["above"], meta["least"], meta["most"]
    if (
        (low is not None and number <= low)
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        raise ValueError(f"{name} = {value} is out of range; allowed: {describe_range(meta)}")
    return number
