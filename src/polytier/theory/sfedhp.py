"""sFedHP's Theorems 1-3 (Liu, Wang, Shao, Li): server, edges, devices.

eta_t = eta1 beta R is the step of a whole round; L_F and mu_F are the smoothness and strong convexity of F_ij
(Theorem 1); d_s: number of parameters (the paper counts the non-zeros only);
lam = lambda1 lambda2 / sqrt(lambda1^2 + lambda2^2), lam_bar = lambda1 lambda2 / (lambda1 + lambda2).
"""

from __future__ import annotations

from polytier.theory.formulas import Condition, Known, Prediction, condition, prediction, with_derived

GIVEN = {
    "delta": "error of a device's solution (Lemma 2)",
    "Delta0": "|w^0 - w*|^2",
    "sigma_F1": "root of the mean of |grad F_ij(w*)|^2",
    "Delta_F": "F(w^0) - F*",
    "gap_T": "F(w^T) - F*",
    "sigma_l": "how far the devices' gradients differ (Assumption 3)",
}
ORDER = "up to constant factors, which the paper does not give"
PRINTED = "printed as <=; Lemma 4 and the proof need >="


def derived(known: Known) -> dict[str, float]:
    """The letters and the constants of Theorems 1 to 3 that follow from them."""
    return with_derived(
        known,
        eta_t="eta1 * beta * R",
        L_F="lam2 + gamma2 / rho",
        mu_F="lam1 * lam2 * mu / (lam1 * mu + lam2 * mu + lam1 * lam2)",
        lam="lam1 * lam2 / sqrt(lam1 ** 2 + lam2 ** 2)",
        lam_bar="lam1 * lam2 / (lam1 + lam2)",
        M1="8 * delta ** 2 * lam_bar ** 2 / mu_F",
        M2="6 * (1 + 64 * L_F / (mu_F * beta)) * sigma_F1 ** 2 + 128 * L_F * delta ** 2 * lam_bar ** 2 / (mu_F * beta)",
        sigma_F2="sqrt(lam ** 2 / (lam ** 2 - 16 * (L + gamma1 / rho) ** 2)) * sigma_l",
        ball="gamma2 ** 2 * d_s ** 2 / lam_bar ** 2 + delta ** 2",
        G1="3 * beta * lam_bar ** 2 * delta ** 2",
        G2="3 * L_F * (49 * R * sigma_F2 ** 2 + 16 * delta ** 2 * lam_bar ** 2) / R",
    )


def conditions(known: Known) -> list[Condition]:
    """Theorem 2 if the objective is strongly convex, otherwise Theorems 1 and 3."""
    c = derived(known)
    step = condition("a device's descent", "eta2 <= 1 / (L + gamma1 / rho + lam1)", c, "not a condition of the paper")
    if known["mu"] > 0:
        bound = "min(1 / mu_F, 1 / (3 * L_F * (3 + 128 * L_F / (mu_F * beta))))"
        return [condition("Theorem 2", f"eta_t <= {bound}", c), step]
    return [
        condition("Theorem 1", "lam2 > 4 * L + 4 * gamma1 / rho", c),
        condition("Theorem 1, its proof", "lam1 > 2 * (L + gamma1 / rho)", c),
        condition("Theorem 1, its proof", "lam2 > 2 * lam1", c),
        condition("Theorem 3", "eta_t <= min(1 / (588 * L_F * lam ** 2), beta / (2 * L_F))", c),
        condition("Theorem 3", "lam >= sqrt(16 * (L + gamma1 / rho) ** 2 + 1)", c, PRINTED),
        step,
    ]


def predictions(known: Known) -> list[Prediction]:
    """The bounds of Theorem 2 if the objective is strongly convex, otherwise of Theorem 3."""
    c = derived(known)
    if known["mu"] > 0:
        mean = "Delta0 / (eta_t * T) + M1 + eta_t * M2"
        devices = "(L_F + lam ** 2) / (lam ** 2 * mu_F) * gap_T + sigma_F1 ** 2 / lam ** 2 + ball"
        return [
            prediction("Theorem 2 (a)", "mean of F(w^t) - F*, at most", mean, c),
            prediction("Theorem 2 (b)", "mean of |theta_ij(w^T) - w*|^2, of the order of", devices, c, ORDER),
        ]
    mean = "4 * (Delta_F / (eta_t * T) + G1 + eta_t * G2)"
    devices = f"{mean} + sigma_F2 ** 2 / lam ** 2 + ball"
    return [
        prediction("Theorem 3 (a)", "mean of |grad F(w^t)|^2, at most", mean, c),
        prediction("Theorem 3 (b)", "mean of |theta_ij(w^t) - w^t|^2, of the order of", devices, c, ORDER),
    ]
