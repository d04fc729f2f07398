"""Conditions and rates as texts in a paper's letters.

The text that is shown is also the one that is computed, so the two cannot differ: "beta <= 1 / (4 * gamma)". If the
value of a letter is unknown, the condition is not checked and the letter is listed. `lam` stands for lambda, which is
a keyword in Python.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

RELATIONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}
FUNCTIONS = {"sqrt": np.sqrt, "log": np.log, "min": min, "max": max, "ceil": np.ceil}
Known = Mapping[str, Any]  # numbers by letter; an array has one per team, and the worst one is used


class Unknown(tuple):
    """The value of a letter that cannot be computed: the names of the unknown letters it depends on."""


@dataclass(frozen=True)
class Condition:
    """A condition of a theorem. `holds` is None if it was not checked because of the letters `missing`."""

    where: str
    formula: str
    value: float | None
    allowed: str
    holds: bool | None
    missing: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Prediction:
    """A prediction of a theorem."""

    where: str
    what: str
    formula: str
    value: float | None
    missing: tuple[str, ...] = ()
    note: str = ""


def condition(where: str, text: str, known: Known, note: str = "") -> Condition:
    """Check a condition; `text` is LEFT RELATION RIGHT, as in "eta <= 1 / (lam + gamma)"."""
    left, relation, right = re.split(r"\s(<=|>=|==|<|>)\s", text)
    value, bound = (
        None if unknown_letters(side, known) else worst(compute(side, known), relation, side == left)
        for side in (left, right)
    )
    missing = tuple(dict.fromkeys([*unknown_letters(left, known), *unknown_letters(right, known)]))
    holds = None
    if value is not None and bound is not None and not np.isnan(value - bound):
        met = "=" in relation and np.isclose(value, bound, rtol=1e-9, atol=0)  # tolerance for rounding
        holds = bool(met or RELATIONS[relation](value, bound))
    return Condition(
        where, shown(text), value, "" if bound is None else f"{relation} {bound:.4g}", holds, missing, note
    )


def prediction(where: str, what: str, text: str, known: Known, note: str = "") -> Prediction:
    """Compute a prediction."""
    missing = tuple(unknown_letters(text, known))
    value = None if missing else float(np.max(compute(text, known)))
    return Prediction(where, what, shown(text), value, missing, note)


def with_derived(known: Known, **texts: str) -> dict[str, Any]:
    """The letters with those derived from them, which are computed in this order."""
    found = dict(known)
    for letter, text in texts.items():
        if letter not in found:
            found[letter] = Unknown(unknown_letters(text, found)) or compute(text, found)
    return found


def unknown_letters(text: str, known: Known) -> list[str]:
    """The letters of a text whose values are unknown."""
    names = [name for name in re.findall(r"[A-Za-z_]\w*", text) if name not in FUNCTIONS]
    missing = (known.get(name, (shown(name),)) for name in names)
    return list(dict.fromkeys(letter for each in missing if isinstance(each, tuple) for letter in each))


def compute(text: str, known: Known) -> Any:
    """The value of a text. Only for texts of this package, because it uses eval; x / 0 is infinite."""
    names = {name: np.float64(value) if isinstance(value, int | float) else value for name, value in known.items()}
    with np.errstate(all="ignore"):
        return eval(text, {"__builtins__": {}, **FUNCTIONS}, names)


def worst(values: Any, relation: str, left: bool) -> float:
    """The number for which a relation is hardest to satisfy."""
    return float(np.max(values) if (relation in (">=", ">")) != left else np.min(values))


def shown(text: str) -> str:
    """The text in the form in which it is shown: lambda for lam, ^ for **."""
    return re.sub(r"\blam(?=\d|\b|_)", "lambda", text).replace("**", "^")
