"""CoBo's Theorem I and Corollary II (Hashemi, He, Jaggi 2024), for the clients of one true cluster of size c.

eta: device_lr; rho: device_pull; b: batch size; n: clients; T: rounds; gap: the mean over pairs of the cluster of
f_ij(z_ij^0) - f_ij*. The theorem has no condition on gamma, the step of the weights: its proof assumes fixed weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polytier.theory.formulas import Condition, Known, Prediction, condition, prediction

GIVEN = {
    "M_ij": "how far clients of a cluster differ, (5)",
    "sigma": "noise of a stochastic gradient (A2)",
    "c": "size of the cluster; known where the data name true groups",
    "gap": "mean over a cluster's pairs of f_ij(z_ij^0) - f_ij*",
    "zeta": "least root of |grad f_i|^2 + |grad f_k|^2 of clients of different clusters, (6)",
    "sum_ik": "largest |grad f_i + grad f_k| of clients of different clusters",
}
UNBOUNDED = "the sum of two gradients of quadratics is not bounded"


def conditions(known: Known) -> list[Condition]:
    """The conditions of Theorem I."""
    return [
        condition(
            "stability", "eta * rho * n < 2", known, "for the box and the initial weights; not a condition of the paper"
        ),
        condition("Theorem I", "M_ij ** 2 < 1 / 5", known, "as printed"),
        condition("Theorem I, its proof", "M_ij < 1 / 5", known, "what the proof needs"),
        condition("Theorem I", "b >= 2 / c ** 2 * 2 * L * eta * (c - 2) * sigma ** 2", known),
        condition("Theorem I", "zeta ** 2 >= sum_ik ** 2", known, UNBOUNDED if known.get("sum_ik") == np.inf else ""),
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
        prediction("Corollary II", "mean of |grad f_i(x_i)|^2, at most", "4 * sqrt(L * sigma ** 2 * gap / T)", known),
    ]


def quadratic_constants(A: np.ndarray, b: np.ndarray, group: np.ndarray, x0: np.ndarray) -> dict[str, Any]:
    """M_ij, gap (one per cluster), zeta and sum_ik for f_i(x) = 1/2 x'A_i x - b_i'x; x0 is the model of every client.

    Clients with the same minimiser have M_ij = |(A_i - A_j) (A_i + A_j)^-1|, which is |a_i - a_j| / (a_i + a_j) in
    Example 2, where A_i = a_i I. Without a common minimiser (5) has no M_ij.
    differs from the paper: the least value of (6) is a_i^2 a_k^2 / (a_i^2 + a_k^2) |mu_i - mu_k|^2, by the minimum
    over x; Example 2 squares the denominator.
    """
    own = np.linalg.solve(A, b[..., None])[..., 0]  # [n, d] the minimisers
    squares = np.linalg.inv(A @ A)
    M, zeta, gaps = 0.0, np.inf, []
    for members in (np.flatnonzero(group == k) for k in np.unique(group)):
        others = np.flatnonzero(group != group[members[0]])
        both, pushes = (A[members, None] + A[members]) / 2, (b[members, None] + b[members]) / 2  # [c, c, ...] of f_ij
        best = np.linalg.solve(both, pushes[..., None])[..., 0]
        gaps.append(float(np.einsum("ijk,ijkl,ijl->ij", x0 - best, both, x0 - best).mean() / 2))
        alike = np.allclose(own[members], own[members[0]], rtol=1e-9, atol=1e-12)
        ratio = (A[members, None] - A[members]) @ np.linalg.inv(2 * both)
        M = max(M, float(np.linalg.norm(ratio, 2, axis=(2, 3)).max())) if alike else np.inf
        for i in members if len(others) else ():
            apart = own[i] - own[others]
            least = (apart * np.linalg.solve(squares[i] + squares[others], apart[..., None])[..., 0]).sum(1)
            zeta = min(zeta, float(np.sqrt(least.min())))
    return {"M_ij": M, "gap": np.array(gaps), "zeta": zeta, "sum_ik": np.inf if len(gaps) > 1 else 0.0}
