"""FedOpt: each of its optimisers against plain NumPy, and FedAvg as its special case."""

from typing import Any

import numpy as np
import pytest

from algorithms.test_cluster_baselines import DATA, LR, LR_OF, RULES, SETTINGS, close, problem, rows, run
from polytier import FedAvg, FedOpt, train
from polytier.algorithms.fedopt import OPTIMIZERS


def fedopt(p, x, rounds, eta, steps, optimizer, beta1, beta2, tau):
    """Algorithm 2 of the paper; FedAvgM as in Hsu et al., Section 3."""
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    for t in range(rounds):
        changes, sizes = [], []
        for d in p.present(0, "server", t, 0):
            y, batches = x.copy(), p.batches(d, t, 0)
            for _ in range(steps):
                y = y - LR_OF[d] * p.grad(y, d, next(batches))
            changes.append(y - x)
            sizes.append(p.samples(1, d))
        if not changes:
            continue
        delta = np.average(changes, axis=0, weights=sizes)
        if optimizer == "momentum":
            m = beta1 * m + delta
            x = x + eta * m
            continue
        m = beta1 * m + (1 - beta1) * delta
        if optimizer == "adagrad":
            v = v + delta**2
        if optimizer == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        if optimizer == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + eta * m / (np.sqrt(v) + tau)
    return x, m, v


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_fedopt_is_its_oracle(rule, optimizer):
    fields: dict[str, Any] = {"momentum": 0.8, "decay": 0.7, "adaptivity": 0.05}
    method = FedOpt(tuple(LR), 0.3, 3, optimizer, **fields)
    found, state, x0 = run(method, rule)
    x, m, v = fedopt(problem(DATA, rule), x0, 4, 0.3, 3, optimizer, 0.8, 0.7, 0.05)
    close(rows(found.global_), x)
    close(state["first"][0], m)
    close(state["second"][0], v)
    assert abs(x - x0).max() > 1e-2
    assert found.personal is None


def test_the_optimisers_differ():
    ends = [rows(run(FedOpt(tuple(LR), 0.3, 3, each), {})[0].global_) for each in OPTIMIZERS]
    assert all(abs(a - b).max() > 1e-3 for k, a in enumerate(ends) for b in ends[:k])


def test_momentum_of_zero_is_fedavg():
    kwargs = {**SETTINGS, "rounds": 4}
    a = train(FedOpt(0.3, 1.0, 3, "momentum", momentum=0.0), DATA, "mclr", **kwargs)
    b = train(FedAvg(0.3, 3), DATA, "mclr", **kwargs)
    close(rows(a.global_), rows(b.global_), 1e-12)
