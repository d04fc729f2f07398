"""Theory against a plain loop of PerMFL on quadratics."""

import numpy as np
import pytest

from polytier.theory import (
    Steps,
    admissible_steps,
    envelope_constants,
    loops,
    rate,
    round_multiplier,
    stationary_point,
)

MU, SMOOTHNESS, LAM, GAMMA = 3.2, 3.6, 7.3, 14.7  # gamma > 2 lambda > 4 L_f
TEAM = np.array(["b", "a", "b", "c", "a", "b"])  # teams of 2, 3 and 1 devices


def quadratics(seed, n=6, d=4):
    """A with curvatures from MU to SMOOTHNESS and b, both different on every device."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(n, d, d)))[0]
    curvature = rng.uniform(MU, SMOOTHNESS, size=(n, d))
    curvature[:, 0], curvature[:, -1] = MU, SMOOTHNESS
    return basis @ (curvature[:, :, None] * basis.swapaxes(1, 2)), rng.normal(size=(n, d))


def permfl(A, b, team, x, rounds, steps, lam, gamma, K, L):
    """x^0, x^1, ..., x^T by (4), (9), (13); devices are rows."""
    alpha, eta, beta = steps
    names, index = np.unique(team, return_inverse=True)
    mean = (index == np.arange(len(names))[:, None]) / np.bincount(index)[:, None]  # [M, n]
    S = np.eye(b.shape[1]) - alpha * (A + lam * np.eye(b.shape[1]))
    trail = [x]
    for _ in range(rounds):
        w = np.repeat(x[None], len(names), axis=0)
        for _ in range(K):
            theta = w[index][..., None]
            push = alpha * (b + lam * w[index])[..., None]
            for _ in range(L):
                theta = S @ theta + push  # theta - alpha (A theta - b) - alpha lambda (theta - w), (4)
            w = (1 - eta * (lam + gamma)) * w + eta * gamma * x + lam * eta * (mean @ theta[..., 0])  # (9)
        x = (1 - beta * gamma) * x + beta * gamma * w.mean(0)  # (13)
        trail.append(x)
    return np.array(trail)


def objective(A, b, team, x, w, theta, lam, gamma):
    """Eq. (2), word for word."""
    total = 0.0
    for i, name in enumerate(np.unique(team)):
        members = np.flatnonzero(team == name)
        for j in members:
            loss = theta[j] @ A[j] @ theta[j] / 2 - b[j] @ theta[j]
            pulls = lam / 2 * np.sum((theta[j] - w[i]) ** 2) + gamma / 2 * np.sum((w[i] - x) ** 2)
            total += (loss + pulls) / len(members)
    return total / len(np.unique(team))


@pytest.mark.parametrize("seed", range(3))
def test_stationary_point_has_no_gradient(seed):
    A, b = quadratics(seed)
    point = stationary_point(A, b, TEAM, 0.7, 1.9)
    flat = np.concatenate([part.ravel() for part in point])
    cuts = np.cumsum([point[0].size, point[1].size])

    def value(flat):
        x, w, theta = np.split(flat, cuts)
        return objective(A, b, TEAM, x, w.reshape(-1, 4), theta.reshape(-1, 4), 0.7, 1.9)

    # central differences are exact for a quadratic, but for rounding
    gradient = [(value(flat + e) - value(flat - e)) / 2 for e in np.eye(len(flat))]
    np.testing.assert_allclose(gradient, 0, atol=1e-12)
    curvature = [value(flat + e) + value(flat - e) - 2 * value(flat) for e in np.eye(len(flat))]
    assert min(curvature) > 0


def test_stationary_point_of_equal_devices_is_their_optimum():
    A, b = quadratics(0)
    A, b = np.repeat(A[:1], 6, axis=0), np.repeat(b[:1], 6, axis=0)
    x, w, theta = stationary_point(A, b, TEAM, 0.5, 1.5)
    best = np.linalg.solve(A[0], b[0])
    for rows in (x[None], w, theta):
        np.testing.assert_allclose(rows, np.broadcast_to(best, rows.shape), rtol=1e-12)


@pytest.mark.parametrize(("seed", "team", "rounds"), [(0, TEAM, 220), (1, TEAM == "a", 30), (2, TEAM, 5)])
def test_permfl_keeps_the_rate_of_62(seed, team, rounds):
    A, b = quadratics(seed)
    x0 = np.zeros(4)
    steps = admissible_steps(MU, SMOOTHNESS, LAM, GAMMA)
    assert steps.separated
    K, L = loops(A, b, team, x0, rounds, LAM, GAMMA)
    trail = permfl(A, b, team, x0, rounds, steps[:3], LAM, GAMMA, K, L)
    x, _, _ = stationary_point(A, b, team, LAM, GAMMA)
    distance = np.sum((trail - x) ** 2, axis=1)
    mu = envelope_constants(MU, SMOOTHNESS, LAM, GAMMA).mu_F_tilde
    bound = [rate(steps.server_lr, mu, t) * distance[0] for t in range(rounds + 1)]
    assert (distance <= bound).all()
    if rounds == 220:
        assert np.sqrt(distance[-1]) < 1e-6


def test_smaller_steps_need_longer_loops():
    A, b = quadratics(0)
    largest = admissible_steps(MU, SMOOTHNESS, LAM, GAMMA)
    half = Steps(largest.device_lr / 2, largest.team_lr / 2, largest.server_lr, True)
    short, long = (loops(A, b, TEAM, np.zeros(4), 50, LAM, GAMMA, steps) for steps in (largest, half))
    assert all(isinstance(count, int) for count in short)
    assert long[0] > short[0]
    assert long[1] > short[1]
    assert loops(A, b, TEAM, np.zeros(4), 500, LAM, GAMMA) > short


def test_too_few_loops_end_somewhere_else():
    A, b = quadratics(0)
    trail = permfl(A, b, TEAM, np.zeros(4), 2000, (0.02, 0.01, 0.05), LAM, GAMMA, K=2, L=2)
    x, _, _ = stationary_point(A, b, TEAM, LAM, GAMMA)
    assert np.linalg.norm(trail[-1] - trail[-2]) < 1e-9
    assert np.linalg.norm(trail[-1] - x) > 1e-4


def test_constants_of_the_paper():
    lam, gamma, mu = 0.5, 1.5, 0.1
    constants = envelope_constants(mu, 0.2, lam, gamma)
    assert constants.mu_F == pytest.approx(lam * mu / (lam + mu))
    mu_F_tilde = lam * gamma * mu / (lam * mu + gamma * mu + lam * gamma)  # (27)
    assert constants.mu_F_tilde == pytest.approx(mu_F_tilde)
    assert constants.mu_F_tilde <= constants.L_F_tilde <= gamma
    steps = admissible_steps(mu, 0.2, lam, gamma)
    assert steps == pytest.approx((1 / 0.7, 1 / 4, constants.mu_F_tilde / 6, True))
    assert not admissible_steps(mu, 0.3, lam, gamma).separated


def test_server_step_stays_safe_at_any_scale():
    # curvatures a thousand times larger: the printed mu_F~ / (4 gamma) alone diverges
    mu, lam, gamma = 1000.0, 2100.0, 4300.0
    steps = admissible_steps(mu, mu, lam, gamma)
    printed = envelope_constants(mu, mu, lam, gamma).mu_F_tilde / (4 * gamma)
    assert steps.separated
    wild, steady = (
        round_multiplier(mu, steps.device_lr, steps.team_lr, beta, lam, gamma, 50, 50)
        for beta in (printed, steps.server_lr)
    )
    assert 0 < steady < 1 < abs(wild)


@pytest.mark.parametrize(
    ("a", "steps", "lam", "gamma", "K", "L"),
    [
        (0.3, (0.01, 0.03, 0.6), 0.5, 1.5, 10, 20),
        (2.0, (0.1, 0.2, 0.9), 0.5, 3.0, 3, 1),
        (25.0, (0.01, 0.03, 0.99), 5.0, 5.0, 30, 20),  # diverges, with every single step stable
        (25.0, (0.09, 0.03, 0.6), 0.5, 1.5, 2, 20),  # the device's steps overshoot
    ],
)
def test_multiplier_is_what_a_round_does(a, steps, lam, gamma, K, L):
    alpha, eta, beta = steps
    predicted = round_multiplier(a, alpha, eta, beta, lam, gamma, device_steps=L, team_rounds=K)
    A, b, team = np.full((3, 1, 1), a), np.zeros((3, 1)), np.array([0, 0, 1])
    trail = permfl(A, b, team, np.ones(1), 40, steps, lam, gamma, K, L)[:, 0]
    np.testing.assert_allclose(trail[1:] / trail[:-1], predicted, rtol=1e-12)
    assert (abs(trail[-1]) > 1) == (abs(predicted) > 1)


def test_multiplier_predicts_divergence():
    curvature = np.linspace(0.1, 25, 50)
    steady = round_multiplier(curvature, 0.01, 0.03, 0.6, 0.5, 1.5, 20, 10)
    wild = round_multiplier(curvature, 0.01, 0.03, 0.99, 5.0, 5.0, 20, 30)
    assert steady.shape == curvature.shape
    assert np.abs(steady).max() < 1 < np.abs(wild).max()


def test_advice():
    A, b = quadratics(0)
    with pytest.raises(ValueError, match="l2 term"):
        envelope_constants(0.0, 1.0, 0.5, 1.5)
    with pytest.raises(ValueError, match="team_pull 0"):
        envelope_constants(1.0, 1.0, 0.5, 0)
    with pytest.raises(ValueError, match="above 0"):
        stationary_point(A, b, TEAM, 0.0, 1.5)
    with pytest.raises(ValueError, match=r"not \[n, d, d\]"):
        stationary_point(A, b[0], TEAM, 0.5, 1.5)
    with pytest.raises(ValueError, match="positive definite"):
        stationary_point(-A, b, TEAM, 0.5, 1.5)
    with pytest.raises(ValueError, match="positive definite"):
        stationary_point(0 * A, b, TEAM, 0.5, 1.5)
    with pytest.raises(ValueError, match="Theorem 1"):
        loops(A, b, TEAM, np.zeros(4), 10, LAM, GAMMA, Steps(0.01, 0.01, 0.6, True))
    with pytest.raises(ValueError, match="another x0"):
        loops(A, b, TEAM, stationary_point(A, b, TEAM, LAM, GAMMA)[0], 10, LAM, GAMMA)
