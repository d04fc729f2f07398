"""The conditions and predictions of PerMFL's Theorems 1 and 2, and the limit of a run on quadratics.

Banerjee, Dadras, Yurtsever, Bhuyan: "Personalized Multi-Tier Federated Learning". Numbers in brackets are
its equations. Quadratics are f_ij(t) = 1/2 t'A_ij t - b_ij't, with uniform means in a team, then over teams.
mu_f, L_f: least and largest curvature (mu, smoothness); lambda, gamma: device_pull, team_pull; alpha, eta,
beta: device_lr, team_lr, server_lr; L, K, T: device_steps, team_rounds, rounds.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.linalg import eigvalsh, inv, norm

from polytier.theory.formulas import Condition, Known, Prediction, compute, condition, prediction, with_derived

GIVEN = {
    "Gamma1": "of (55), one per team or the worst: 2 |x^t - prox(x^t)|^2",
    "Gamma3": "of (58): mean of |grad f~_ij(w)|^2 / lambda^2 in a team",
    "Gamma4": "mean of Gamma1 over teams, (61)",
    "Gamma5": "mu_F~^2 |x^0 - x*|^2 / (6 gamma^2), (61)",
    "gap": "phi(x^0) - phi(x*); for cross-entropy at most the loss of the initial model",
    "nu": "error of the teams' solutions, (63)",
}
TEAM_ROUNDS = "(T * log(1 - beta * mu_Ft / 2) + log(Gamma5 / Gamma4)) / log(1 - eta * (mu_F + gamma) / 2)"  # (61)
DEVICE_STEPS = (  # (58)
    "(K_61 * log(1 - eta * (mu_F + gamma) / 2) + log(Gamma1 / (2 * Gamma3 * Gamma2))) / log(1 - alpha * mu_f)"
)

FOR_K = "K_61 is the K that (61) asks for"


class Envelopes(NamedTuple):
    """Least and largest curvature of a team's loss F_i (5) and of its Moreau envelope F~_i (6)."""

    mu_F: float
    mu_F_tilde: float
    L_F: float
    L_F_tilde: float


class Steps(NamedTuple):
    """The largest steps that Theorem 1 allows, and whether gamma > 2 lambda > 4 L_f holds."""

    device_lr: float
    team_lr: float
    server_lr: float
    separated: bool


def envelope_constants(mu: float, smoothness: float, device_pull: float, team_pull: float) -> Envelopes:
    """Remark 5: an envelope with pull p turns curvature c into c p / (c + p).

    The paper bounds L_F by lambda and L_F~ by gamma; the same formula gives sharper values.
    """
    if not 0 < mu <= smoothness:
        raise ValueError(
            f"curvature from {mu} to {smoothness} is outside Theorem 1, which needs 0 < mu <= smoothness; "
            "try an l2 term in the loss, its coefficient is then a valid mu"
        )
    check_pulls(device_pull, team_pull)
    mu_F, L_F = (c * device_pull / (c + device_pull) for c in (mu, smoothness))
    mu_F_tilde, L_F_tilde = (c * team_pull / (c + team_pull) for c in (mu_F, L_F))  # (27)
    return Envelopes(mu_F, mu_F_tilde, L_F, L_F_tilde)


def check_pulls(device_pull: float, team_pull: float) -> None:
    """Raise an error unless both pulls are above 0."""
    if not (device_pull > 0 and team_pull > 0):
        raise ValueError(f"device_pull {device_pull} and team_pull {team_pull} must be above 0; try 0.5, 1.5")


def admissible_steps(mu: float, smoothness: float, device_pull: float, team_pull: float) -> Steps:
    """The largest step sizes of Theorem 1. The paper's own experiments exceed them, so callers only warn."""
    constants = envelope_constants(mu, smoothness, device_pull, team_pull)
    # differs from the paper: mu_F~ / (4 gamma) bounds the beta that (36) renames, and lets a run with a large
    # mu_F~ diverge; the proof needs 1 - 2 beta gamma >= 0, so the smaller of both.
    beta = min(constants.mu_F_tilde / (4 * team_pull), 1 / (2 * team_pull))
    eta = 1 / (2 * (device_pull + team_pull))
    alpha = 1 / (smoothness + device_pull)
    return Steps(alpha, eta, beta, bool(team_pull > 2 * device_pull > 4 * smoothness))


def rate(beta: float, mu_F_tilde: float, T: int) -> float:
    """The factor in |x^T - x*|^2 <= factor |x^0 - x*|^2, (62); valid with the K and L of `loops`."""
    return 2 * (1 - beta * mu_F_tilde / 2) ** T


def stationary_point(A, b, team, device_pull: float, team_pull: float) -> tuple[np.ndarray, ...]:
    """The minimiser x [d], w [M, d], theta [n, d] of (2) for A [n, d, d], b [n, d], team [n].

    w is in the order of the teams' sorted names.
    """
    A, b, lam, gamma = np.asarray(A, float), np.asarray(b, float), device_pull, team_pull
    check_pulls(lam, gamma)
    if b.ndim != 2 or A.shape != (*b.shape, b.shape[1]) or np.shape(team) != b.shape[:1]:
        raise ValueError(f"A {A.shape}, b {b.shape}, team {np.shape(team)} are not [n, d, d], [n, d], [n]")
    index, eye = np.unique(team, return_inverse=True)[1], np.eye(b.shape[1])
    inner = inv(A + lam * eye)  # theta = inner (b + lambda w): the minimiser of (3), [n, d, d]
    F = lam * team_means(A @ inner, index)  # F_i of (5) has the gradient F w - f, [M, d, d]
    f = lam * team_means(times(inner, b), index)
    if not np.allclose(A, A.swapaxes(1, 2)) or eigvalsh(A).min() < -1e-9 or eigvalsh(F.mean(0)).min() < 1e-12:
        raise ValueError("with these A, (2) has no unique minimiser; try symmetric positive definite ones")
    outer = inv(F + gamma * eye)  # w = outer (f + gamma x): the minimiser of (6)
    # x = mean w, the zero of the gradient of (10); outer F is 1 - gamma outer without the cancellation
    x = np.linalg.solve((outer @ F).mean(0), times(outer, f).mean(0))
    w = times(outer, f + gamma * x)
    return x, w, times(inner, b + lam * w[index])


def team_means(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """[M, ...] the mean of the devices' values [n, ...] in each team; `index` [n] is the team of each device."""
    return np.stack([values[index == i].mean(0) for i in range(index.max() + 1)])


def times(matrices: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[n, d] the product of each matrix [n, d, d] with its row [n, d]."""
    return (matrices @ rows[..., None])[..., 0]


def gammas(A, b, team, x0, device_pull: float, team_pull: float) -> dict[str, Any]:
    """Gamma^(1) to Gamma^(5) of (55)-(61) for quadratics; Gamma1 and Gamma3 have one value per team.

    The paper's values are for one round and team round; these are bounds for all of them: (62) keeps x^t within
    sqrt(2) |x^0 - x*| of x*, by induction over t, (50) keeps w^{t,k} near prox(x^t), and a proximal map shrinks
    distances.
    """
    lam, gamma, mu, smoothness = device_pull, team_pull, float(eigvalsh(A).min()), float(eigvalsh(A).max())
    (x, w, theta), index = stationary_point(A, b, team, lam, gamma), np.unique(team, return_inverse=True)[1]
    mu_F, mu_F_tilde, L_F, _ = envelope_constants(mu, smoothness, lam, gamma)
    if not (start := float(norm(x0 - x))):
        raise ValueError("x0 is the stationary point, which no finite K and L keep exactly; try another x0")
    far = sqrt(2) * start
    # differs from the paper: (51) bounds |grad F~_i(x^t)|^2 by 2 L_F~ (F~_i(x^t) - F~_i(x*)), which may be
    # negative, as x* does not minimise F~_i. Gamma^(1) = 2 |x^t - prox(x^t)|^2, from the line before that.
    gamma1 = 2 * (norm(x - w, axis=1) + L_F / (L_F + gamma) * far) ** 2  # [M]
    gamma2 = 12 * (lam / (mu_F + gamma)) ** 2  # (55)
    reach = gamma / (mu_F + gamma) * far + np.sqrt(gamma1)  # >= |w_i^{t,k} - w_i*| by (50), [M]
    gap = norm(theta - w[index], axis=1) + smoothness / (smoothness + lam) * reach[index]
    gamma3 = team_means(gap**2, index)  # gap >= |w^{t,k} - prox(w^{t,k})| = |grad f~(w^{t,k})| / lambda
    gamma5 = mu_F_tilde**2 / (6 * gamma**2) * start**2
    return {"Gamma1": gamma1, "Gamma2": gamma2, "Gamma3": gamma3, "Gamma4": float(gamma1.mean()), "Gamma5": gamma5}


def loops(
    A, b, team, x0, rounds: int, device_pull: float, team_pull: float, steps: Steps | None = None
) -> tuple[int, int]:
    """K (team_rounds) and L (device_steps) with which (62) holds after every round up to T.

    `steps` are by default the largest ones that Theorem 1 allows.
    """
    mu, smoothness = float(eigvalsh(A).min()), float(eigvalsh(A).max())
    largest = admissible_steps(mu, smoothness, device_pull, team_pull)
    alpha, eta, beta, _ = steps = steps or largest
    if not all(0 < step <= bound * (1 + 1e-9) for step, bound in zip(steps[:3], largest[:3], strict=True)):
        raise ValueError(f"{steps} are not allowed by Theorem 1; try steps above 0 and at most {largest}")
    c = derived(
        {
            "alpha": alpha,
            "eta": eta,
            "beta": beta,
            "lam": device_pull,
            "gamma": team_pull,
            "mu_f": mu,
            "T": rounds,
            **gammas(A, b, team, x0, device_pull, team_pull),
        }
    )
    return int(c["K_61"]), max(1, ceil(np.max(compute(DEVICE_STEPS, c))))


# -- conditions and predictions ------------------------------------------------------------------------


def derived(known: Known) -> dict[str, Any]:
    """mu_F of a team's loss, mu_Ft of its envelope (27) and the K that (61) asks for, for mu_f > 0."""
    if not known["mu_f"] > 0:
        return dict(known)
    return with_derived(
        known,
        mu_F="lam * mu_f / (lam + mu_f)",
        mu_Ft="lam * gamma * mu_f / (lam * mu_f + gamma * mu_f + lam * gamma)",
        Gamma2="12 * (lam / (mu_F + gamma)) ** 2",
        K_61=f"max(1, ceil({TEAM_ROUNDS}))",
    )


def conditions(known: Known) -> list[Condition]:
    """Theorem 1 if the objective is strongly convex, otherwise Theorem 2; then conditions against divergence."""
    c = derived(known)
    if known["mu_f"] > 0:
        where = "Theorem 1"
        found = [
            condition(where, "beta <= mu_Ft / (4 * gamma)", c),
            condition("Theorem 1, (36)", "beta <= 1 / (2 * gamma)", c, "the proof needs it too"),
            condition(where, "eta <= 1 / (2 * (lam + gamma))", c),
            condition(where, "alpha <= 1 / (L_f + lam)", c),
        ]
    else:
        where = "Theorem 2"
        found = [
            condition(where, "beta <= 1 / (4 * gamma)", c),
            condition(where, "eta <= 1 / (lam + gamma)", c),
            condition(where, "alpha <= 1 / lam", c),
        ]
    found += [condition(where, "gamma > 2 * lam", c), condition(where, "lam > 2 * L_f", c)]
    if known["mu_f"] > 0:
        found += [condition("(61)", f"K >= {TEAM_ROUNDS}", c), condition("(58)", f"L >= {DEVICE_STEPS}", c, FOR_K)]
    return found + stability(c)


def stability(known: Known) -> list[Condition]:
    """Sufficient conditions under which no single step overshoots."""
    texts = ("beta * gamma < 2", "eta * (lam + gamma) < 2", "alpha * (L_f + lam) < 2")
    return [condition("stability", text, known, "sufficient; not a condition of the paper") for text in texts]


def predictions(known: Known) -> list[Prediction]:
    """The predictions of Theorem 1 or 2."""
    c = derived(known)
    if known["mu_f"] > 0:
        rates = [
            prediction("(62)", "factor of |x^t - x*|^2 per round", "1 - beta * mu_Ft / 2", c),
            prediction("(62)", "|x^T - x*|^2 / |x^0 - x*|^2, at most", "2 * (1 - beta * mu_Ft / 2) ** T", c),
        ]
        note = "as printed; false, because the proof renames beta"
        return [*rates, prediction("(15)", "|x^T - x*|^2 / |x^0 - x*|^2, at most", "2 * (1 - beta) ** T", c, note)]
    what = "mean of |grad phi(x^t)|^2, at most"
    return [
        prediction("(63)", what, "2 * gap / (beta * T) + gamma ** 2 * nu", c),
        prediction("(16)", what, "gap / (beta * T)", c, "as printed; the proof gives (63)"),
    ]
