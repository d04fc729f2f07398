"""MFA-Rand's Theorems 1 and 3, MFA-RR's Theorem 2 and Corollary 1 (Bhuyan, Moharir, Joshi 2022).

They are about each model, which FedAvg trains.

The step of round t, counted from 0, is A/(B+t) or, in MFA-RR, A/(B+t//M): beta = A and, as the paper counts from 1,
gamma = B - 1. E: device_steps; N: devices; M: models; T: rounds; share: the part of a device's samples that a
mini-batch leaves out, and left = the largest share / step in the first and in the last round.
"""

from __future__ import annotations

import numpy as np
from numpy.linalg import eigvalsh, norm

from polytier.theory.formulas import Condition, Known, Prediction, condition, prediction, with_derived

GIVEN = {
    "G": "bound of a stochastic gradient's length (Assumption 3)",
    "beta1": "of |grad f|^2 <= beta1 + beta2 |grad F_k|^2 (Assumption 4)",
    "beta2": "of |grad f|^2 <= beta1 + beta2 |grad F_k|^2 (Assumption 4)",
    "V": "how fast mini-batches grow (Theorem 2)",
    "Gamma": "min F - mean min F_k: how far the devices differ",
    "Delta1": "distance from the optimum at the start",
}


def derived(known: Known) -> dict[str, float]:
    """The letters and the constants of Theorems 1 and 2 that follow from them."""
    return with_derived(
        known,
        B="6 * L * Gamma + 4 * (beta1 + beta2 * G ** 2) / N + 8 * (E - 1) ** 2 * G ** 2",
        C="(M - 1) / (N - 1) * E ** 2 * G ** 2",
        nu="max(beta ** 2 * (B + C) / (beta * mu - 1), Delta1 ** 2 * (1 + gamma))",
        nu_1="max(beta ** 2 * B / (beta * mu - 1), Delta1 ** 2 * (1 + gamma))",
        Y="L * G * E ** 2 * (M - 1) / (2 * M)",
        Z="L * G * E * (E - 1)",
        phi="beta * E * G * (M - 1) / M + max(beta ** 2 * (Y + Z + V) / (beta * mu - 1), (1 + gamma) * Delta1)",
    )


def conditions(known: Known, frames: bool) -> list[Condition]:
    """The conditions of Theorem 2 (MFA-RR) if `frames`, otherwise of Theorem 1 (MFA-Rand)."""
    where = "Theorem 2" if frames else "Theorem 1"
    note = "the step is A/(B+t//every)"
    found = [condition(where, "beta > 1 / mu", known)]
    if not frames:
        few = "E >= 2" if known["E"] >= 2 else "N > 1 + 6 * L * Gamma / G ** 2"
        return [
            *found,
            condition(where, "gamma > 4 * L * beta - 1", known),
            condition(where, "every == 1", known, note),
            condition("Theorem 3", "M <= N / 2", known),
            condition("Theorem 3", few, known),
        ]
    share = "left <= V / (2 * E * sqrt(beta1 + beta2 * G ** 2))"
    full = full_gradients(known)
    return [
        *found,
        condition(where, "gamma > beta * L - 1", known),
        condition(where, "every == M", known, note),
        condition("Corollary 1", "left == 0", known, "full gradients satisfy (31) with V = 0")
        if full
        else condition("Theorem 2, (31)", share, known),
    ]


def predictions(known: Known, frames: bool) -> list[Prediction]:
    """The bounds of Theorem 2 or Corollary 1 (MFA-RR) if `frames`, otherwise of Theorems 1 and 3 (MFA-Rand)."""
    what = "E|w_T - w*|, at most"
    if frames:
        full = full_gradients(known)
        c = derived({**known, "V": 0.0} if full else known)
        return [prediction("Corollary 1" if full else "Theorem 2", what, "phi / (T / M + gamma)", c)]
    c, gain = derived(known), "gain M T_1 / T_M for small errors, above 1; T_1 and T_M are those of the bounds"
    return [
        prediction("Theorem 1", what, "sqrt(nu) / sqrt(T + gamma)", c),
        prediction("Theorem 3", gain, "M * nu_1 / nu", c, "nu_1: nu for M = 1"),
    ]


def full_gradients(known: Known) -> bool:
    """Whether devices use all of their samples in each step."""
    return known.get("left") == 0


def quadratic_constants(A: np.ndarray, b: np.ndarray, x0: np.ndarray) -> dict[str, float]:
    """G, beta1, beta2, Gamma and Delta1 for f_k(w) = 1/2 w'A_k w - b_k'w with one sample per device.

    With steps of at most 1/L, a step of device k takes w to a distance of at most (1 - eta mu) |w - w*| + eta |grad
    F_k(w*)| from w*, so that models never leave the ball of radius max(|x0 - w*|, max |grad F_k(w*)| / mu). G bounds
    the gradients there.
    """
    best, own = np.linalg.solve(A.mean(0), b.mean(0)), np.linalg.solve(A, b[..., None])[..., 0]
    curvature, pushes = eigvalsh(A), norm(A @ best - b, axis=1)
    start = float(norm(x0 - best))
    radius = max(start, float(pushes.max() / curvature.min()))
    lowest = -0.5 * float(b.mean(0) @ best), -0.5 * float((b * own).sum(1).mean())
    return {
        "G": float((curvature[:, -1] * radius + pushes).max()),
        "beta1": 0.0,  # the only sample of a device is its objective
        "beta2": 1.0,
        "Gamma": lowest[0] - lowest[1],
        "Delta1": start,
    }
