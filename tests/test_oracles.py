"""Every method equals its oracle, a plain NumPy loop, to 1e-10, whatever the tree, the draws and the steps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import oracles
from polytier import FedAvg, FedAvgFT, Federation, FedProx, HierFedAvg, PerMFL, PFedMe, PFedMT, Topology
from polytier.algorithms import Local
from polytier.training import Training

FEATURES, CLASSES = 2, 3
SETTINGS = settings(
    deadline=None,
    max_examples=12,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.generate],  # an example trains for up to a second: no shrinking
)


@dataclass
class Case:
    """A drawn federation, the settings of its training, and the same for the oracle."""

    federation: Federation
    settings: dict[str, Any]
    topology: Topology
    problem: oracles.Problem
    rounds: int
    draw: Any

    def nodes(self, tier: int) -> list:
        return self.topology.names[tier].tolist()

    def device_steps(self, low: float, high: float) -> tuple[Any, dict]:
        """A field that is one number or one a device (in the federation's order), and its value by name."""
        names = self.federation.ids.tolist()
        return self._field(names, low, high)

    def team_steps(self, low: float, high: float) -> tuple[Any, dict]:
        """One number, one a node, or by tier; and the value by tier and name."""
        tiers = range(1, self.topology.leaf)
        given, values = {}, {}
        for tier in tiers:
            given[self.topology.tier_names[tier]], values[tier] = self._field(self.nodes(tier), low, high)
        if len(given) == 1 and self.draw(st.booleans()):
            return next(iter(given.values())), values
        return given or 0.1, values

    def by_tier(self, strategy) -> tuple[Any, dict]:
        """A field by tier, or one number for all tiers."""
        tiers = range(1, self.topology.leaf)
        if not tiers or self.draw(st.booleans()):
            value = self.draw(strategy)
            return value, dict.fromkeys(tiers, value)
        values = {tier: self.draw(strategy) for tier in tiers}
        return {self.topology.tier_names[tier]: v for tier, v in values.items()}, values

    def _field(self, names: list, low: float, high: float) -> tuple[Any, dict]:
        one = st.floats(low, high)
        if self.draw(st.booleans()):
            values = [self.draw(one) for _ in names]
            return tuple(values), dict(zip(names, values, strict=True))
        value = self.draw(one)
        return value, dict.fromkeys(names, value)


def draw_participation(draw, size: int | None) -> tuple[Any, dict]:
    """A rule as Training takes it, and as the oracle does; `size` None: no table (several tiers share the rule)."""
    kind = draw(st.sampled_from(["all", "fraction", "count", *(["table"] if size else [])]))
    if kind == "fraction":
        fraction = draw(st.sampled_from([0.1, 0.3, 0.5, 0.75]))
        return fraction, {"fraction": fraction}
    if kind == "count":
        count = draw(st.integers(1, 3))
        return f"count:{count}", {"count": count}
    if kind == "table" and size:
        row = st.lists(st.integers(0, 1), min_size=size, max_size=size)
        table = np.array(draw(st.lists(row, min_size=1, max_size=2)))
        return table, {"table": table}
    return 1.0, {}


@st.composite
def cases(draw, tiers: tuple[int, ...] = (2, 3, 4)) -> Case:
    depth = draw(st.sampled_from(tiers))
    n = draw(st.integers(1, 10))  # several blocks at times
    names = np.array(draw(st.permutations([f"d{k}" for k in range(n)] if draw(st.booleans()) else list(range(n)))))
    sizes = [draw(st.integers(1, 7)) for _ in range(n)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ends = np.cumsum(sizes)
    bounds = np.stack([ends - sizes, ends, ends, ends], 1)
    x, y = rng.normal(size=(ends[-1], FEATURES)), rng.integers(0, CLASSES, ends[-1])
    federation = Federation(
        torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(bounds), names, num_classes=CLASSES
    )
    labels, count = [], n
    for _ in range(depth - 2):
        labels.append(np.array([draw(st.integers(0, 2)) for _ in range(count)]))
        count = len(np.unique(labels[-1]))
    topology = Topology.build(names, *labels)
    teams, team_rule = draw_participation(draw, topology.size(1) if depth == 3 else None)
    devices, device_rule = draw_participation(draw, n)
    settings = {
        "seed": draw(st.integers(0, 99)),
        "l2": draw(st.sampled_from([0.0, 0.1])),
        "batch_size": draw(st.sampled_from([1, 2, 3, 5, 16])),
        "absent": draw(st.sampled_from(["skip", "skip", "stale"])),
    }
    children = [
        {
            topology.names[t][i]: topology.names[t + 1][topology.parents[t + 1].numpy() == i].tolist()
            for i in range(topology.size(t))
        }
        for t in range(topology.leaf)
    ]
    data = {name: (x[a:b], y[a:b]) for name, (a, b) in zip(names.tolist(), bounds[:, :2].tolist(), strict=True)}
    rules = [{}, *[team_rule] * (depth - 2), device_rule]
    problem = oracles.Problem(data, children, CLASSES, participation=rules, **settings)
    engine = {
        "team_participation": teams, "device_participation": devices, "topology": topology, "dtype": "float64",
        "tile": draw(st.sampled_from([1, 2, 8])), "inner_tile": draw(st.sampled_from([None, 1])),
        "batching": draw(st.sampled_from(["stacked", "eager"])), "eval_every": 1000,
    }  # fmt: skip
    return Case(federation, {**settings, **engine}, topology, problem, draw(st.integers(1, 3)), draw)


def agree(case: Case, algorithm, oracle, **fields) -> None:
    """Train, run the oracle, and compare all models at all nodes."""
    with Training(algorithm, case.federation, "mclr", **case.settings) as training:
        x0 = training.world.objective.initial.numpy().copy()
        run = training.run(case.rounds)
        expected = oracle(case.problem, x0, case.rounds, **fields)
        if expected.everywhere is not None:
            close(run.global_, expected.everywhere)
        names = case.federation.ids.tolist()
        if expected.personal:
            close(run.personal, np.stack([expected.personal.get(name, x0) for name in names]))
        for tier, team in expected.team.items():
            rows = np.stack([team.get(name, x0) for name in case.nodes(tier)])
            ids = torch.arange(len(rows))
            start = training.world.objective.initial.expand(len(rows), -1)
            close(training.world.memory.read(tier, "model", ids, start), rows)
            if tier == case.topology.leaf - 1 and team:
                close(run.team, rows)


def close(found, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-10)


STEPS = st.integers(1, 4)
ROUNDS = st.integers(1, 3)
WEIGHTS = st.sampled_from(["samples", "uniform"])


@SETTINGS
@given(cases(tiers=(2,)), STEPS)
def test_local(case, steps):
    lr, lr_of = case.device_steps(0.01, 1)
    agree(case, Local(lr, steps), oracles.local, device_lr=lr_of, device_steps=steps)


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
        "server_lr": beta, "device_pull": pull, "device_steps": steps, "local_rounds": rounds, "weights": weights,
    }  # fmt: skip
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
        "seed": 0, "batch_size": 4, "dtype": "float64", "batching": "stacked", "topology": topology,
        "team_participation": share[teams], "device_participation": share[devices],
    }  # fmt: skip
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
