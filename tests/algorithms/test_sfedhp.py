"""sFedHP equals a plain NumPy loop of its Algorithm 1, and is what it must be where the answer is known."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle_cases import ROUNDS, SETTINGS, STEPS, WEIGHTS, Case, agree, cases, fixed_case
from oracles import NEST, Models
from polytier import Codec, PerMFL, Topology, check_algorithm, make_engine, train
from polytier.algorithms.sfedhp import SFedHP
from polytier.data.synthetic import quadratics
from polytier.runs.loop import make_loop

# -- the oracle ---------------------------------------------------------------------------------------


def sfedhp(
    p,
    x0,
    rounds,
    device_lr,
    team_lr,
    server_lr,
    device_pull,
    team_pull,
    device_steps,
    team_rounds,
    device_sparsity,
    team_sparsity,
    smoothing,
    tiny,
    least_nonzeros,
    sparse_rounds,
    threshold,
    accuracy,
    solver,
    weights,
    seen=None,
):
    """Liu et al., Algorithm 1, over any number of tiers. `seen` counts which branches were taken."""
    seen = Counter() if seen is None else seen
    models = Models(x0, team={tier: {} for tier in range(1, p.leaf)})
    pull = {**team_pull, p.leaf: device_pull}
    dense = device_sparsity == 0 and team_sparsity == 0

    def cut(row):
        return row if dense else np.array([0.0 if abs(v) < threshold * smoothing else v for v in row])

    def device(c, phi, t, call):
        held, gamma1 = next(p.batches(c, t, call)), device_sparsity
        kept = cut(models.personal.get(c, x0))
        if sum(v != 0 for v in kept) / len(kept) < least_nonzeros:
            gamma1 = min(tiny, gamma1)
            seen["few non-zeros"] += 1
        else:
            seen["many non-zeros"] += 1
        theta = last = phi
        for k in range(device_steps):
            y = theta + (k / (k + 3) if solver == "nesterov" else 0) * (theta - last)
            h = p.grad(y, c, held) + gamma1 * np.tanh(y / smoothing) + device_pull * (y - phi)  # grad H of (8)
            if accuracy > 0 and sum(h * h) <= accuracy:  # (9)
                theta = y
                seen[f"stopped after {'no' if k == 0 else 'some'} steps"] += 1
                break
            theta, last = y - device_lr[c] * h, theta
        else:
            seen["did all steps"] += 1
        models.personal[c] = cut(theta)
        seen["zeros"] += sum(models.personal[c] == 0)
        return models.personal[c]

    def node(tier):
        def program(c, x, t, call):
            w = phi = x
            gamma2 = min(tiny, team_sparsity) if t >= sparse_rounds else team_sparsity
            seen["gamma2 is tiny" if t >= sparse_rounds else "gamma2"] += 1
            for r in range(team_rounds[tier]):
                lam1, lam2 = pull[tier + 1], pull[tier]
                below = device if tier + 1 == p.leaf else node(tier + 1)
                theta = p.ask(tier, c, cut(phi), t, call * NEST + r, below, weights)
                phi = (lam1 * theta + lam2 * w) / (lam1 + lam2)  # (10)
                w = w - team_lr[tier][c] * (lam2 * (w - phi) + gamma2 * np.tanh(w / smoothing))  # (11)
            models.team[tier][c] = cut(w)
            return models.team[tier][c]

        return program

    w = x0
    for t in range(rounds):
        mean = p.ask(0, "server", cut(w), t, 0, device if p.leaf == 1 else node(1), weights)
        w = (1 - server_lr) * w + server_lr * mean
    models.everywhere = cut(w)
    return models


# -- against the oracle -------------------------------------------------------------------------------

DENSE = {
    "server_lr": 0.9,
    "device_pull": 2.0,
    "device_steps": 4,
    "device_sparsity": 0.0,
    "team_sparsity": 0.0,
    "smoothing": 0.05,
    "tiny": 1e-4,
    "least_nonzeros": 0.75,
    "sparse_rounds": 2,
    "threshold": 1.0,
    "accuracy": 0.0,
    "solver": "nesterov",
    "weights": "uniform",
}
SPARSE = {**DENSE, "device_sparsity": 0.3, "team_sparsity": 0.15}


def agree_with_fields(case: Case, **fields: Any) -> Counter:
    """Steps, pulls and rounds that differ by node and tier where they may; what the oracle saw."""
    tiers, names = range(1, case.topology.leaf), case.topology.tier_names
    lr = {c: 0.1 + 0.01 * c for c in range(12)}
    eta = {t: {c: 0.2 + 0.02 * k for k, c in enumerate(case.nodes(t))} for t in tiers}
    lam, rounds = {t: 1.0 + t for t in tiers}, {t: 1 + t for t in tiers}
    by_tier = {
        "team_lr": {names[t]: tuple(eta[t].values()) for t in tiers} or 0.1,
        "team_pull": {names[t]: lam[t] for t in tiers} or 1.0,
        "team_rounds": {names[t]: rounds[t] for t in tiers} or 1,
    }
    seen: Counter = Counter()
    values = {"device_lr": lr, "team_lr": eta, "team_pull": lam, "team_rounds": rounds, "seen": seen}
    agree(case, SFedHP(device_lr=tuple(lr.values()), **by_tier, **fields), sfedhp, **values, **fields)
    return seen


@pytest.mark.parametrize("tiers", [2, 3, 4])
def test_dense(tiers):
    seen = agree_with_fields(fixed_case(tiers), **DENSE)
    assert seen["zeros"] == 0


@pytest.mark.parametrize("tiers", [2, 3, 4])
@pytest.mark.parametrize("solver", ["nesterov", "plain"])
def test_sparse_with_every_branch(tiers, solver):
    fields = {**SPARSE, "solver": solver, "accuracy": 0.02}
    seen = agree_with_fields(fixed_case(tiers), **fields)
    branches = ["zeros", "few non-zeros", "many non-zeros", "did all steps", "stopped after some steps"]
    branches += ["gamma2", "gamma2 is tiny"] if tiers > 2 else []
    assert all(seen[b] > 3 for b in branches), seen


@pytest.mark.parametrize("one", ["device_sparsity", "team_sparsity"])
def test_one_of_the_two_is_enough_to_cut(one):
    seen = agree_with_fields(fixed_case(3, absent="stale"), **{**DENSE, one: 0.08, "weights": "samples"})
    assert seen["zeros"] > 3


@SETTINGS
@given(cases(), STEPS, ROUNDS, WEIGHTS, st.sampled_from([DENSE, SPARSE]), st.sampled_from([0.0, 0.1]), st.booleans())
def test_any_tree(case, steps, sparse_rounds, weights, base, accuracy, nesterov):
    lr, lr_of = case.device_steps(0.01, 0.2)
    eta, eta_of = case.team_steps(0.01, 0.3)
    lam, lam_of = case.by_tier(st.floats(0.5, 3))
    R, R_of = case.by_tier(ROUNDS)
    solver = "nesterov" if nesterov else "plain"
    fields = {**base, "device_steps": steps, "sparse_rounds": sparse_rounds, "weights": weights}
    fields |= {"accuracy": accuracy, "solver": solver}
    algorithm = SFedHP(device_lr=lr, team_lr=eta, team_pull=lam, team_rounds=R, **fields)
    agree(case, algorithm, sfedhp, device_lr=lr_of, team_lr=eta_of, team_pull=lam_of, team_rounds=R_of, **fields)


# -- where the answer is known ------------------------------------------------------------------------


def test_dense_plain_and_one_team_round_is_permfl():
    """On full gradients; PerMFL's K = 1, eta = eta1 lambda2 / (lambda1 + lambda2), gamma -> 0, beta gamma = beta."""
    lam1, lam2, eta1, beta, gamma = 0.8, 1.7, 0.4, 0.7, 1e-12
    case = fixed_case(3)
    settings = {**case.settings, "batch_size": 99, "rounds": 4, "l2": 0.1}
    shared = {"device_lr": 0.1, "device_pull": lam1, "device_steps": 3, "team_rounds": 1}
    dense = {"device_sparsity": 0, "team_sparsity": 0, "solver": "plain"}
    permfl = PerMFL(team_lr=eta1 * lam2 / (lam1 + lam2), server_lr=beta / gamma, team_pull=gamma, **shared)
    sparse = SFedHP(team_lr=eta1, server_lr=beta, team_pull=lam2, **shared, **dense)
    a = train(sparse, case.federation, "mclr", **settings)
    b = train(permfl, case.federation, "mclr", **settings)
    for found, expected in ((a.global_, b.global_), (a.team, b.team), (a.personal, b.personal)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (a.row() - a.context.objective.initial).abs().max() > 1e-2  # not two runs that stand still


def test_ends_at_the_stationary_point_of_quadratics():
    """R = 1 and exact devices: w = mean prox(w), the least of the mean of the envelopes."""
    lam, n = 2.0, 6
    federation = quadratics(n, 3, seed=1, mu=4.0, smoothness=6.0)
    A, b = federation.x.numpy(), federation.y.numpy()
    inner = np.linalg.inv(A + lam * np.eye(3))  # theta = inner (b + lambda1 w)
    pulled = np.einsum("nij,nj->ni", inner, b)
    w = np.linalg.solve((A @ inner).mean(0), pulled.mean(0))  # 1 - lambda1 inner = A inner
    theta = pulled + lam * np.einsum("nij,j->ni", inner, w)
    fields = {"device_pull": lam, "team_pull": lam, "device_steps": 25, "team_rounds": 1}
    algorithm = SFedHP(0.14, 1.0, device_sparsity=0, team_sparsity=0, **fields)
    settings = {"dtype": "float64", "batching": "stacked", "eval_every": 1000}
    topology = Topology.build(federation.ids, np.arange(n) // 2)
    run = train(algorithm, federation, "quadratic", rounds=25, topology=topology, **settings)
    assert run.personal is not None
    assert np.abs(w).max() > 0.05  # far from where it started: 0
    np.testing.assert_allclose(run.row().numpy(), w, rtol=0, atol=1e-9)
    np.testing.assert_allclose(run.personal.numpy(), theta, rtol=0, atol=1e-9)


# -- what travels, and the contract -------------------------------------------------------------------


class Spy(Codec):
    """A codec that changes nothing and keeps what travels."""

    name = "spy"

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def through(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows.append(rows.clone())
        return rows

    def nbytes(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.int64)


@pytest.mark.parametrize("fields", [DENSE, SPARSE])
def test_what_travels_has_exact_zeros_or_none(fields):
    case = fixed_case(4)
    with make_loop(SFedHP(team_rounds=2, **fields), case.federation, "mclr", **case.settings) as training:
        spy = Spy()
        training.use(make_engine("stacked", training.context, codec=spy))
        run = training.run(4)
    assert run.global_ is not None
    small = fields["threshold"] * fields["smoothing"]
    sent = torch.cat([*spy.rows, run.global_.unsqueeze(0)]).abs()
    near, zero = (sent > 0) & (sent < small), sent == 0
    assert (sent >= small).any()
    if fields is SPARSE:
        assert zero.any()
        assert not near.any()
    else:
        assert near.any()
        assert not zero.any()


def test_what_diverges_is_not_cut_to_zero():
    algorithm = SFedHP()
    assert torch.isnan(algorithm.cut(torch.tensor([[float("nan"), 1e-9, 1.0]]))).tolist() == [[True, False, False]]


def test_contract():
    check_algorithm(SFedHP(team_rounds=2, accuracy=0.1, smoothing=0.05, device_sparsity=0.1))
    check_algorithm(SFedHP(team_rounds=2, device_steps=2), absent="stale", dtype="float32")
