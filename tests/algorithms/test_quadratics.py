"""PerMFL on strongly convex quadratics ends where the linear system says, no slower than Eq. (62)."""

from typing import Any

import numpy as np
import pytest

from polytier import Callback, Federation, PerMFL, Topology, theory, train
from polytier.data.synthetic import quadratics

TEAM = np.array([0, 0, 1, 1, 1, 2, 2, 0])


class Trail(Callback):
    """x^1, x^2, ..."""

    def __init__(self) -> None:
        self.x: list[np.ndarray] = []

    def on_round(self, training: Any, record: dict[str, Any]) -> None:
        self.x.append(training.state[0].numpy().copy())


def run(algorithm: PerMFL, federation: Federation, rounds: int):
    trail = Trail()
    topology = Topology.build(federation.ids, TEAM[: len(federation)])
    settings = {"dtype": "float64", "batching": "stacked", "eval_every": rounds, "callbacks": [trail]}
    return train(algorithm, federation, "quadratic", rounds=rounds, topology=topology, **settings), np.stack(trail.x)


def test_reaches_the_stationary_point_no_slower_than_the_theorem():
    # gamma > 2 lambda > 4 L_f; strong curvature makes |x*| small, and with it the rounds to 1e-6 and the K and L
    # that they ask for (some 10^5 steps in all)
    mu_f, L_f, lam, gamma, rounds = 3400.0, 3600.0, 7210.0, 14430.0, 98
    federation = quadratics(8, 3, seed=1, mu=mu_f, smoothness=L_f)
    A, b = federation.x.numpy(), federation.y.numpy()
    steps = theory.admissible_steps(mu_f, L_f, lam, gamma)
    assert steps.separated
    K, L = theory.loops(A, b, TEAM, np.zeros(3), rounds, lam, gamma, steps)
    algorithm = PerMFL(*steps[:3], lam, gamma, L, K)
    result, trail = run(algorithm, federation, rounds)
    x, w, theta = theory.stationary_point(A, b, TEAM, lam, gamma)
    assert np.abs(result.row().numpy() - x).max() < 1e-6
    assert result.team is not None
    assert result.personal is not None
    assert np.abs(result.team.numpy() - w).max() < 1e-6
    assert np.abs(result.personal.numpy() - theta).max() < 1e-6
    assert np.abs(x).max() > 4e-4  # far from where it started: 0
    mu = theory.envelope_constants(mu_f, L_f, lam, gamma).mu_F_tilde
    error = ((trail - x) ** 2).sum(1) / (x**2).sum()  # x^0 = 0
    bound = [theory.rate(steps.server_lr, mu, t) for t in range(1, rounds + 1)]
    assert (error <= bound).all()


@pytest.mark.parametrize("beta", [0.3, 1.2])
def test_a_round_multiplies_the_error_as_predicted(beta):
    """All share one curvature: the error shrinks, or grows, by m(a) each round."""
    a, lam, gamma = 2.0, 0.5, 1.5
    federation = quadratics(4, 1, seed=3, mu=a, smoothness=a)
    result, trail = run(PerMFL(0.1, 0.3, beta, lam, gamma, 4, 9), federation, 6)
    m = theory.round_multiplier(a, 0.1, 0.3, beta, lam, gamma, 4, 9)
    ratio = np.diff(trail, axis=0)[1:] / np.diff(trail, axis=0)[:-1]
    np.testing.assert_allclose(ratio, m, rtol=1e-9)
    assert result.history[-1]["round"] == 6
