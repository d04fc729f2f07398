"""The effect of a round of PerMFL on an error of the global model, for a tree of any depth.

Numbers in brackets are PerMFL's equations; letters are those of permfl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.linalg import eigh


class Level(NamedTuple):
    """A tier of teams: its step eta (one number, or one per team [m]), pull gamma and rounds K."""

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
    """[..., d, d] the matrix by which a round of (4), (9), (13) multiplies the error of x.

    A [n, d, d] are the curvatures of the devices. `levels` are the tiers of teams from the innermost one up; without
    any, the server is directly above the devices. `means` average over the children, from the devices up to the server;
    without them, every A is treated as that of a whole population.
    """
    means = means or [lambda values: values] * (len(levels) + 1)
    eye, pull, alpha = np.eye(np.shape(A)[-1]), device_pull, column(device_lr)[..., 0]
    a, basis = eigh(A)
    with np.errstate(all="ignore"):  # an overflow means that the error diverges
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
    """A step, one for all nodes or one per node, in a shape that multiplies matrices."""
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
    """m(a): the factor of the error of x in a round along curvature a, if all devices have this curvature.

    If |m(a)| <= 1 between mu_f and L_f, no error grows on quadratics, whatever the curvature of each device in between.
    """
    levels = [Level(team_lr, team_pull, team_rounds)]
    return multiplier(a, device_lr, device_pull, device_steps, levels, server_lr)


def multiplier(a, *settings: Any) -> np.ndarray:
    """m(a) for any tree; `settings` are the arguments of `round_map`."""
    a = np.asarray(a, float)
    return round_map(a.reshape(-1, 1, 1), *settings).reshape(a.shape)
