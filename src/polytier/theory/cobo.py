"""CoBo's Theorem I (Hashemi, He, Jaggi 2024), for the clients of one true cluster of size c.

eta: device_lr; rho: device_pull; b: batch size; n: clients; T: rounds; gap: the mean over pairs of the cluster of
f_ij(z_ij^0) - f_ij*. The theorem has no condition on gamma, the step of the weights: its proof assumes fixed weights.
"""

from __future__ import annotations

from polytier.theory.formulas import Condition, Known, Prediction, condition, prediction

GIVEN = {
    "M_ij": "how far clients of a cluster differ, (5)",
    "sigma": "noise of a stochastic gradient (A2)",
    "c": "size of the cluster; known where the data name true groups",
    "gap": "mean over a cluster's pairs of f_ij(z_ij^0) - f_ij*",
    "zeta": "least root of |grad f_i|^2 + |grad f_k|^2 of clients of different clusters, (6)",
    "sum_ik": "largest |grad f_i + grad f_k| of clients of different clusters",
}


def conditions(known: Known) -> list[Condition]:
    """The conditions of Theorem I."""
    return [
        condition(
            "stability", "eta * rho * n < 2", known, "for the box and the initial weights; not a condition of the paper"
        ),
        condition("Theorem I", "M_ij ** 2 < 1 / 5", known, "as printed"),
        condition("Theorem I, its proof", "M_ij < 1 / 5", known, "what the proof needs"),
        condition("Theorem I", "b >= 2 / c ** 2 * 2 * L * eta * (c - 2) * sigma ** 2", known),
        condition("Theorem I", "zeta ** 2 >= sum_ik ** 2", known),
        condition("Theorem I", "rho >= sqrt(3) * L / c", known),
        condition("Theorem I", "eta <= 1 / (2 * sqrt(3) * L)", known),
        condition("Theorem I", "eta <= 2 / (sigma * sqrt(L * T)) * sqrt(gap)", known),
        condition("Lemma 4", "eta <= 1 / (2 * rho * c)", known),
    ]


def predictions(known: Known) -> list[Prediction]:
    """The predictions of Theorem I."""
    consensus = "6 * M_ij ** 2 / (rho ** 2 * c ** 2) * sqrt(L * sigma ** 2 * gap / T)"
    gradient = "3 * sqrt(L * sigma ** 2 * gap / T)"
    return [
        prediction("Theorem I", "mean of |x_i - x_j|^2 in a cluster, at most", consensus, known),
        prediction("Theorem I", "mean of |grad f_ij(z_ij)|^2, at most", gradient, known),
    ]
