"""What the papers' theorems ask of a method's settings, and what they promise: a file a paper.

rules.py    | a condition or a rate as a text in the paper's letters, which is both shown and computed
permfl.py   | Theorems 1 and 2, stationary points of quadratics; rounds.py: what a round does to an error
sfedhp.py, mfa.py, cobo.py | their theorems

Nothing here knows of data, engines or torch: `checking.py` brings the numbers.
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
from polytier.theory.rounds import Level, round_map, round_multiplier

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
