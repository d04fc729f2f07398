"""Conditions of the papers' theorems on the settings of a method, and their predictions; one file per paper.

formulas.py | a condition or a rate as a text in the paper's letters, which is both shown and computed
permfl.py   | Theorems 1 and 2, and stationary points of quadratics; round_map.py: the effect of a round on an error
sfedhp.py, mfa.py, cobo.py | the theorems of these papers

These modules depend neither on data nor on engines or torch: `check.py` provides the numbers.

stability.py | whether a run will or may diverge; linearised.py: a round linearised at the initial model
"""

from polytier.theory.permfl import (
    Envelopes,
    Steps,
    admissible_steps,
    check_pulls,
    envelope_constants,
    loops,
    rate,
    stationary_point,
)
from polytier.theory.round_map import Level, round_map, round_multiplier

__all__ = [
    "Envelopes",
    "Level",
    "Steps",
    "admissible_steps",
    "check_pulls",
    "envelope_constants",
    "loops",
    "rate",
    "round_map",
    "round_multiplier",
    "stationary_point",
]
