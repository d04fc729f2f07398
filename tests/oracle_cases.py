"""Federations drawn at random, or fixed, for a method and its oracle."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

import oracles
from polytier import Federation, Topology
from polytier.runs.loop import make_loop

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
    """A rule as Loop takes it, and as the oracle does; `size` None: no table (several tiers share the rule)."""
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
        "team_participation": teams,
        "device_participation": devices,
        "topology": topology,
        "dtype": "float64",
        "tile": draw(st.sampled_from([1, 2, 8])),
        "inner_tile": draw(st.sampled_from([None, 1])),
        "batching": draw(st.sampled_from(["stacked", "eager"])),
        "eval_every": 1000,
    }
    return Case(federation, {**settings, **engine}, topology, problem, draw(st.integers(1, 3)), draw)


def agree(case: Case, algorithm, oracle, **fields) -> None:
    """Train, run the oracle, and compare all models at all nodes."""
    with make_loop(algorithm, case.federation, "mclr", **case.settings) as training:
        x0 = training.context.objective.initial.numpy().copy()
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
            start = training.context.objective.initial.expand(len(rows), -1)
            close(training.context.memory.read(tier, "model", ids, start), rows)
            if tier == case.topology.leaf - 1 and team:
                close(run.team, rows)


def close(found, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-10)


STEPS = st.integers(1, 4)
ROUNDS = st.integers(1, 3)
WEIGHTS = st.sampled_from(["samples", "uniform"])
LABELS = {2: [], 3: [np.repeat([0, 1, 2, 3], 3)], 4: [np.repeat([0, 1, 2, 3], 3), np.array([0, 0, 1, 1])]}


def fixed_case(tiers: int, rounds: int = 5, **settings: Any) -> Case:
    """Twelve devices of 3 to 9 samples; half of the teams and 0.6 of their devices take part."""
    rng = np.random.default_rng(4)
    sizes = rng.integers(3, 10, 12)
    ends = np.cumsum(sizes)
    x, y = rng.normal(size=(ends[-1], FEATURES)), rng.integers(0, CLASSES, ends[-1])
    bounds = torch.from_numpy(np.stack([ends - sizes, ends, ends, ends], 1))
    federation = Federation(torch.from_numpy(x), torch.from_numpy(y), bounds, np.arange(12), num_classes=CLASSES)
    topology = Topology.build(federation.ids, *LABELS[tiers])
    children = [
        {
            topology.names[t][i]: topology.names[t + 1][topology.parents[t + 1].numpy() == i].tolist()
            for i in range(topology.size(t))
        }
        for t in range(topology.leaf)
    ]
    data = {
        k: (x[end - size : end], y[end - size : end]) for k, (end, size) in enumerate(zip(ends, sizes, strict=True))
    }
    rules = [{}, *[{"fraction": 0.5}] * (tiers - 2), {"fraction": 0.6}]
    shared = {"seed": 3, "batch_size": 3, **settings}
    problem = oracles.Problem(data, children, CLASSES, participation=rules, **shared)
    engine = {
        "dtype": "float64",
        "batching": "stacked",
        "topology": topology,
        "eval_every": 1000,
        "team_participation": 0.5,
        "device_participation": 0.6,
    }
    return Case(federation, {**shared, **engine}, topology, problem, rounds, None)
