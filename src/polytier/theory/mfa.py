"""MFA-Rand's Theorem 1 and MFA-RR's Theorem 2 (Bhuyan, Moharir, Joshi 2022), of each model that FedAvg trains.

The step of round t, counted from 0, is A/(B+t) or, in MFA-RR, A/(B+t//M): beta = A and, as the paper counts from 1,
gamma = B - 1. E: device_steps; N: devices; M: models; T: rounds; share: the part of a device's samples that a
mini-batch leaves out, and left = the largest share / step in the first and in the last round.
"""

from __future__ import annotations

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
        return [
            *found,
            condition(where, "gamma > 4 * L * beta - 1", known),
            condition(where, "every == 1", known, note),
        ]
    return [
        *found,
        condition(where, "gamma > beta * L - 1", known),
        condition(where, "every == M", known, note),
        condition("Theorem 2, (31)", "left <= V / (2 * E * sqrt(beta1 + beta2 * G ** 2))", known),
    ]


def predictions(known: Known, frames: bool) -> list[Prediction]:
    """The bound of Theorem 2 (MFA-RR) if `frames`, otherwise of Theorem 1 (MFA-Rand)."""
    c, what = derived(known), "E|w_T - w*|, at most"
    if frames:
        return [prediction("Theorem 2", what, "phi / (T / M + gamma)", c)]
    return [prediction("Theorem 1", what, "sqrt(nu) / sqrt(T + gamma)", c)]
