"""Text conversions: sizes and durations for display; parsing of `name:arg,key=value` and of schedules `A/(B+t)`."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from polytier._errors import unknown


def size(nbytes: float) -> str:
    """A number of bytes with its unit, as text."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 10 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


SHOWN = 12  # names that a message lists


def listed(names: Sequence[str]) -> str:
    """At most `SHOWN` names, as text."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def counted(number: int, what: str) -> str:
    """A number and what it counts, as text.

    Examples:
        >>> counted(1, "group"), counted(1200, "device")
        ('1 group', '1,200 devices')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration with its unit, as text."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def parse_text(text: str) -> tuple[str, list[str], dict[str, str]]:
    """Parse `name[:arg,arg,key=value]`."""
    name, _, rest = text.partition(":")
    args: list[str] = []
    kwargs: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if equals and key not in kwargs:
            kwargs[key] = value
        elif equals or kwargs:
            raise ValueError(f"{text!r}: {item!r} comes twice or after a key=value; write name:arg,key=value")
        else:
            args.append(item)
    return name.strip(), args, kwargs


def truth(text: str) -> bool:
    """The bool that a text stands for."""
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]


WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
REAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)


def whole(text: str) -> int:
    """A whole number. Unlike `int`, underscores and digits of other scripts are refused.

    Examples:
        >>> whole("12")
        12
        >>> whole("1_000")
        Traceback (most recent call last):
        ValueError: 1_000
    """
    if not WHOLE.fullmatch(text):
        raise ValueError(text)
    return int(text)


def finite(text: str) -> float:
    """A finite number, written with plain digits."""
    if not REAL.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by "x" or "+"."""
    return tuple(whole(part) for part in re.split("[x+]", text))


CONVERT: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (whole, "a whole number"),
    "float": (finite, "a number"),
    "bool": (truth, "true or false"),
    "str": (str, "a word"),
    "tuple[int, ...]": (integers, "whole numbers such as 500x200"),
}


def own_arguments(function: Callable) -> dict[str, str]:
    """Names and types of the keyword-only parameters, which a user may set in `name:...`."""
    found = {}
    for key, parameter in inspect.signature(function).parameters.items():
        hint = parameter.annotation
        if parameter.kind == parameter.KEYWORD_ONLY:
            found[key] = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    return found


def convert(name: str, key: str, text: str, hint: str) -> Any:
    """Convert the argument `key` of `name` to the type `hint`; the error message says what is allowed."""
    function, words = CONVERT.get(hint, (str, "a word"))
    try:
        return function(text)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{key} of {name} must be {words}; got {text!r}") from error


def bind(text: str, table: Mapping[str, Callable], kind: str) -> tuple[str, Callable, dict[str, Any]]:
    """Look up `name[:arg,key=value]` in a table.

    Returns:
        The name, the function in the table, and the given arguments converted to their types.
    """
    name, args, given = parse_text(text)
    if name not in table:
        raise unknown(kind, name, list(table))
    own = own_arguments(table[name])
    allowed = f"it takes {', '.join(own)}" if own else "it takes no arguments"
    if len(args) > len(own):
        raise ValueError(f"{kind} {name} got {len(args)} arguments ({', '.join(args)}); {allowed}")
    placed = dict(zip(own, args, strict=False))
    for key in given:
        if key not in own or key in placed:
            twice = " twice" if key in placed else ""
            raise ValueError(f"{kind} {name} got {key!r}{twice}; {allowed}")
    values = {key: convert(name, key, value, own[key]) for key, value in {**placed, **given}.items()}
    return name, table[name], values


NUMBER = r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*"


SCHEDULE = re.compile(rf"{NUMBER}/\s*\({NUMBER}\+\s*t\s*(?://\s*(\d+)\s*)?\)\s*", re.IGNORECASE | re.ASCII)


@lru_cache
def schedule(text: str) -> Callable[[int], float]:
    """`A/(B+t)` or `A/(B+t//M)` as a function of the round, counted from 0."""
    found = SCHEDULE.fullmatch(text)
    scale, shift, every = (0.0, 0.0, 0) if found is None else (float(found[1]), float(found[2]), int(found[3] or 1))
    if not (scale > 0 and shift > 0 and every > 0 and math.isfinite(scale / shift)):
        raise ValueError(f"the schedule {text!r} is not understood; write A/(B+t) or A/(B+t//M) with numbers above 0")
    return lambda t: scale / (shift + t // every)
