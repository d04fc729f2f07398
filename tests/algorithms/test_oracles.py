"""Every method equals its oracle, a plain NumPy loop, to 1e-10, whatever the tree, the draws and the steps."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from oracle_cases import CLASSES, FEATURES, ROUNDS, SETTINGS, STEPS, WEIGHTS, Case, agree, cases
from polytier import FedAvg, FedAvgFT, Federation, FedProx, HierFedAvg, PerMFL, PFedMe, PFedMT, Topology
from polytier.algorithms import LocalTraining


@SETTINGS
@given(cases(tiers=(2,)), STEPS)
def test_local(case, steps):
    lr, lr_of = case.device_steps(0.01, 1)
    agree(case, LocalTraining(lr, steps), oracles.local, device_lr=lr_of, device_steps=steps)


@SETTINGS
@given(cases(tiers=(2,)), STEPS, WEIGHTS)
def test_fedavg(case, steps, weights):
    lr, lr_of = case.device_steps(0.01, 1)
    agree(case, FedAvg(lr, steps, weights), oracles.fedavg, device_lr=lr_of, device_steps=steps, weights=weights)


@SETTINGS
@given(cases(tiers=(2,)), STEPS, WEIGHTS, st.floats(0.01, 1), st.integers(0, 4))
def test_fedavg_ft(case, steps, weights, tune_lr, tune_steps):
    lr, lr_of = case.device_steps(0.01, 1)
    algorithm = FedAvgFT(lr, steps, weights, tune_lr, tune_steps)
    fields = {"device_lr": lr_of, "device_steps": steps, "tune_lr": tune_lr, "tune_steps": tune_steps}
    agree(case, algorithm, oracles.fedavg, weights=weights, **fields)


@SETTINGS
@given(cases(tiers=(2,)), STEPS, WEIGHTS, st.floats(0, 1))
def test_fedprox(case, steps, weights, pull):
    lr, lr_of = case.device_steps(0.01, 1)
    fields = {"device_steps": steps, "weights": weights, "device_pull": pull}
    agree(case, FedProx(device_lr=lr, **fields), oracles.fedavg, device_lr=lr_of, **fields)


@SETTINGS
@given(cases(), STEPS, WEIGHTS)
def test_hier_fedavg(case, steps, weights):
    lr, lr_of = case.device_steps(0.01, 1)
    K, K_of = case.by_tier(ROUNDS)
    algorithm = HierFedAvg(lr, steps, weights, K)
    fields = {"device_lr": lr_of, "device_steps": steps, "weights": weights, "team_rounds": K_of}
    agree(case, algorithm, oracles.hier_fedavg, **fields)


@SETTINGS
@given(cases(tiers=(2,)), STEPS, ROUNDS, WEIGHTS, st.floats(0.1, 2), st.floats(0, 1))
def test_pfedme(case, steps, rounds, weights, beta, pull):
    lr, lr_of = case.device_steps(0.01, 0.5)
    eta, eta_of = case.device_steps(0.01, 0.5)
    fields = {
        "server_lr": beta,
        "device_pull": pull,
        "device_steps": steps,
        "local_rounds": rounds,
        "weights": weights,
    }
    algorithm = PFedMe(device_lr=lr, local_lr=eta, **fields)
    agree(case, algorithm, oracles.pfedme, device_lr=lr_of, local_lr=eta_of, **fields)


@pytest.mark.parametrize(("method", "weights"), [(PerMFL, "uniform"), (PFedMT, "samples")])
@SETTINGS
@given(cases(), STEPS, st.booleans(), st.floats(0.1, 0.6), st.floats(0, 1))
def test_permfl_and_pfedmt(method, weights, case, steps, swap, beta, pull):
    weights = {"uniform": "samples", "samples": "uniform"}[weights] if swap else weights
    lr, lr_of = case.device_steps(0.01, 0.5)
    eta, eta_of = case.team_steps(0.01, 0.3)
    gamma, gamma_of = case.by_tier(st.floats(0, 1.5))
    K, K_of = case.by_tier(ROUNDS)
    fields = {"server_lr": beta, "device_pull": pull, "device_steps": steps}
    chosen = {"weights": weights} if swap else {}  # else the method's own default
    algorithm = method(device_lr=lr, team_lr=eta, team_pull=gamma, team_rounds=K, **fields, **chosen)
    fields |= {"device_lr": lr_of, "team_lr": eta_of, "team_pull": gamma_of, "team_rounds": K_of}
    agree(case, algorithm, oracles.permfl, weights=weights, **fields)


@pytest.mark.parametrize("devices", ["all", "half"])
@pytest.mark.parametrize("teams", ["all", "half"])
@pytest.mark.parametrize("method", [HierFedAvg, PerMFL])
def test_full_and_partial_teams_and_devices(method, teams, devices):
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 6, 16)
    ends = np.cumsum(sizes)
    x, y = rng.normal(size=(ends[-1], FEATURES)), rng.integers(0, CLASSES, ends[-1])
    bounds = torch.from_numpy(np.stack([ends - sizes, ends, ends, ends], 1))
    federation = Federation(torch.from_numpy(x), torch.from_numpy(y), bounds, np.arange(16), num_classes=CLASSES)
    topology = Topology.build(federation.ids, np.repeat([0, 1, 2, 3], 4))
    data = {
        k: (x[end - size : end], y[end - size : end]) for k, (end, size) in enumerate(zip(ends, sizes, strict=True))
    }
    children = [{"server": [0, 1, 2, 3]}, {k: [4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3] for k in range(4)}]
    rule = {"all": {}, "half": {"fraction": 0.5}}
    problem = oracles.Problem(data, children, CLASSES, participation=[{}, rule[teams], rule[devices]])
    share = {"all": 1.0, "half": 0.5}
    settings = {
        "seed": 0,
        "batch_size": 4,
        "dtype": "float64",
        "batching": "stacked",
        "topology": topology,
        "team_participation": share[teams],
        "device_participation": share[devices],
    }
    case = Case(federation, settings, topology, problem, 3, None)
    lr, K = dict.fromkeys(range(16), 0.1), {1: 2}
    fields = {"device_lr": lr, "device_steps": 2, "team_rounds": K}
    if method is HierFedAvg:
        agree(case, HierFedAvg(0.1, 2, team_rounds=2), oracles.hier_fedavg, weights="samples", **fields)
    else:
        pulls = {
            "team_lr": {1: dict.fromkeys(range(4), 0.1)},
            "server_lr": 0.5,
            "device_pull": 0.5,
            "team_pull": {1: 1.5},
        }
        algorithm = PerMFL(0.1, 0.1, 0.5, 0.5, 1.5, 2, 2)
        agree(case, algorithm, oracles.permfl, weights="uniform", **fields, **pulls)


def test_large_device_keeps_its_order_for_two_rounds():
    """1,024 samples or more: an epoch lasts longer than a round."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1500, FEATURES)), rng.integers(0, CLASSES, 1500)
    bounds = torch.tensor([[0, 1500, 1500, 1500]])
    federation = Federation(torch.from_numpy(x), torch.from_numpy(y), bounds, np.array([7]), num_classes=CLASSES)
    problem = oracles.Problem({7: (x, y)}, [{"server": [7]}], CLASSES, batch_size=400)
    settings = {"seed": 0, "batch_size": 400, "dtype": "float64", "batching": "eager"}
    case = Case(federation, settings, Topology.build([7]), problem, 5, None)
    algorithm = FedAvg(0.1, 3)
    agree(case, algorithm, oracles.fedavg, device_lr={7: 0.1}, device_steps=3, weights="samples")
