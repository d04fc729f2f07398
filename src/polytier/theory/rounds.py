"""What a round of PerMFL does to an error of the global model, on a tree of any depth.

Numbers in brackets are PerMFL's equations; letters are those of permfl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.linalg import eigh


class Level(NamedTuple):
    """A tier of teams: its step eta (one number, or one a team [m]), pull gamma and rounds K."""

    step: Any
    pull: float
    rounds: int


def round_map(
    A,
    device_lr: Any,
    device_pull: float,
    device_steps: int,
    levels: Sequence[Level],
    server_lr: float,
    means: Sequence[Callable[[np.ndarray], np.ndarray]] | None = None,
) -> np.ndarray:
    """[..., d, d] what a round of (4), (9), (13) multiplies the error of x by, for the curvatures A [n, d, d].

    `levels`: tiers of teams from the innermost one up; none: the server is above the devices. `means` average over
    the children, from the devices up to the server; left out, every A is that of a whole population.
    """
    means = means or [lambda values: values] * (len(levels) + 1)
    eye, pull, alpha = np.eye(np.shape(A)[-1]), device_pull, column(device_lr)[..., 0]
    a, basis = eigh(A)
    with np.errstate(all="ignore"):  # what overflows has diverged
        t = (pull + a * (1 - alpha * (a + pull)) ** device_steps) / (a + pull)  # theta = T w after L steps (4)
        T = (basis * t[..., None, :]) @ basis.swapaxes(-1, -2)
        for level, mean in zip(levels, means, strict=False):
            eta, T = column(level.step), mean(T)
            r = np.broadcast_to(eye, T.shape)  # w = r x
            for _ in range(level.rounds):
                r = r - eta * (pull * (r - T @ r) + level.pull * (r - eye))  # (9)
            T, pull = r, level.pull
        return eye - server_lr * pull * (eye - means[-1](T))  # (13)


def column(step: Any) -> np.ndarray:
    """A step, one for all or one a node, beside matrices."""
    return np.asarray(step, float).reshape(-1, 1, 1)


def round_multiplier(
    a,
    device_lr: float,
    team_lr: float,
    server_lr: float,
    device_pull: float,
    team_pull: float,
    device_steps: int,
    team_rounds: int,
) -> np.ndarray:
    """m(a): what a round multiplies the error of x by along curvature a, if all devices share it.

    |m(a)| <= 1 between mu_f and L_f: no error grows on quadratics, whatever curvature each device has in between.
    """
    levels = [Level(team_lr, team_pull, team_rounds)]
    return multiplier(a, device_lr, device_pull, device_steps, levels, server_lr)


def multiplier(a, *settings: Any) -> np.ndarray:
    """m(a) of any tree: `settings` are those of `round_map`."""
    a = np.asarray(a, float)
    return round_map(a.reshape(-1, 1, 1), *settings).reshape(a.shape)
