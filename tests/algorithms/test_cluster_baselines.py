"""SCAFFOLD, IFCA, FC and Oracle: their oracles in plain NumPy, and what each must reduce to."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracles import Problem, draw_uniform, fedavg, sgd
from polytier import FedAvg, Federation, Run, check_algorithm, train
from polytier.algorithms import LocalTraining, ifca
from polytier.algorithms.fc import FC
from polytier.algorithms.ifca import IFCA
from polytier.algorithms.oracle import Oracle
from polytier.algorithms.scaffold import SCAFFOLD
from polytier.data.synthetic import quadratic_clusters
from polytier.method.algorithm import Algorithm
from polytier.runs.loop import make_loop
from polytier.tree.random import key

FEATURES, CLASSES = 2, 3
NAMES = ["d5", "d0", "d3", "d1", "d6", "d2", "d4"]
GROUP = np.array(["b", "a", "b", "a", "c", "a", "b"])
# d6, all of group c, never takes part; in the third round nobody does
TABLE = np.array([[1, 1, 0, 1, 0, 0, 1], [0, 1, 1, 0, 0, 1, 1], [0] * 7, [1, 0, 1, 1, 0, 1, 0]])
RULES: list[Any] = [{}, {"fraction": 0.6}, {"table": TABLE}]
SETTINGS: dict[str, Any] = {"dtype": "float64", "batch_size": 4, "seed": 3, "l2": 0.1, "batching": "eager"}
LR = np.linspace(0.1, 0.4, len(NAMES))
LR_OF = dict(zip(NAMES, LR, strict=True))


def make(names: Any = NAMES, cluster: Any = GROUP, shift=1.0) -> Federation:
    """Devices of 3 to 9 training samples and 2 test samples around their group's own place."""
    xs, ys, bounds, start = [], [], [], 0
    for name, group in zip(names, cluster, strict=True):
        rng = np.random.default_rng(int(name[1:]))
        size = int(rng.integers(3, 10))
        xs.append(rng.normal(size=(size + 2, FEATURES)) + shift * (ord(group) - ord("b")))
        ys.append((rng.integers(0, 2, size + 2) + ord(group)) % CLASSES)
        bounds.append([start, start + size, start + size, start + size + 2])
        start += size + 2
    return Federation(
        torch.from_numpy(np.concatenate(xs)),
        torch.from_numpy(np.concatenate(ys)),
        torch.tensor(bounds),
        np.array(names),
        cluster=np.array(cluster),
        num_classes=CLASSES,
    )


DATA = make()


def problem(federation: Federation, rule: dict) -> Problem:
    names = federation.ids.tolist()
    data: Any = {name: tuple(v.numpy() for v in federation.device(k)) for k, name in enumerate(names)}
    return Problem(data, [{"server": names}], CLASSES, l2=0.1, seed=3, participation=[{}, rule])


def run(method: Algorithm, rule: dict, rounds: int = 4, federation: Federation = DATA) -> tuple[Run, Any, np.ndarray]:
    """The run, the server's last state, and the initial model."""
    taken = rule.get("fraction", rule.get("table", 1.0))
    with make_loop(method, federation, "mclr", device_participation=taken, **SETTINGS) as training:
        x0 = training.context.objective.initial.numpy().copy()
        return training.run(rounds), training.state, x0


def close(found: Any, expected: Any, atol: float = 1e-10) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def rows(found: torch.Tensor | None) -> np.ndarray:
    assert found is not None
    return found.numpy()


# -- SCAFFOLD -----------------------------------------------------------------------------------------


def scaffold(p: Problem, x, rounds, server_lr, steps, option):
    """Algorithm 1."""
    c, own = np.zeros_like(x), {d: np.zeros_like(x) for d in p.nodes[1]}
    for t in range(rounds):
        moved, changed = [], []
        for d in p.present(0, "server", t, 0):
            y, batches = x, p.batches(d, t, 0)
            for _ in range(steps):
                y = y - LR_OF[d] * (p.grad(y, d, next(batches)) - own[d] + c)
            if option == "I":
                new = p.grad(x, d, next(p.batches(d, t, 0, "control")))
            else:
                new = own[d] - c + (x - y) / (steps * LR_OF[d])
            moved.append(y - x)
            changed.append(new - own[d])
            own[d] = new
        if moved:
            x = x + server_lr * np.mean(moved, 0)
            c = c + len(moved) / len(own) * np.mean(changed, 0)
    return x, c, own


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("rule", RULES)
def test_scaffold_is_its_oracle(rule, option):
    found, state, x0 = run(SCAFFOLD(tuple(LR), 0.7, 3, option), rule)
    x, c, own = scaffold(problem(DATA, rule), x0, 4, 0.7, 3, option)
    close(rows(found.global_), x)
    close(state["control"][0], c)
    close(c, np.mean(list(own.values()), 0))  # what |S|/N is for
    assert abs(c).max() > 1e-2
    assert found.personal is None


def test_scaffold_on_identical_devices_is_fedavg():
    """Full gradients and a uniform mean; the controls are all alike, and not 0."""
    one = DATA.device(0)
    size, n = len(one[1]), 5
    ends = size * torch.arange(1, n + 1)
    bounds = torch.stack([ends - size, ends, ends, ends], 1)
    alike = Federation(one[0].repeat(n, 1), one[1].repeat(n), bounds, np.arange(n), num_classes=CLASSES)
    kwargs = {**SETTINGS, "batch_size": 99, "rounds": 4}
    a, b = (train(m, alike, "mclr", **kwargs) for m in (SCAFFOLD(0.3, 1.0, 3), FedAvg(0.3, 3)))
    close(rows(a.global_), rows(b.global_))
    other = train(SCAFFOLD(0.3, 0.5, 3), alike, "mclr", **kwargs)
    assert abs(rows(other.global_) - rows(b.global_)).max() > 1e-3


def test_scaffold_does_not_drift():
    """Devices with their own curvature and optimum: FedAvg ends elsewhere than at the minimum of the mean."""
    data = quadratic_clusters(4, 2, 2, seed=1)
    optimum = (data.y.sum(0) / data.x[:, 0, 0].sum()).numpy()  # of sum_i a_i/2 |t - mu_i|^2; y is a_i mu_i
    kwargs: dict[str, Any] = {"rounds": 25, "dtype": "float64", "eval_every": 25, "batching": "eager"}
    found = [rows(train(m, data, "quadratic", **kwargs).global_) for m in (SCAFFOLD(0.4, 1.0, 4), FedAvg(0.4, 4))]
    assert abs(found[0] - optimum).max() < 1e-6
    assert abs(found[1] - optimum).max() > 1e-3


# -- IFCA ---------------------------------------------------------------------------------------------


def loss(p: Problem, theta, device):
    """On all training samples."""
    x, y = p.data[device]
    W, b = theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES), theta[CLASSES * FEATURES :]
    z = x @ W.T + b
    value = np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]
    return value.mean() + p.l2 / 2 * theta @ theta


def least(p: Problem, centres, device) -> int:
    return int(np.argmin([loss(p, c, device) for c in centres]))


def first_centres(x0, k, spread):
    """Slots of the key "centres", round 0: parameter after parameter, centre after centre."""
    u = [draw_uniform(key(3, "centres", 0), slot) for slot in range((k - 1) * len(x0))]
    return [x0, *(x0 + spread * (2 * np.array(u).reshape(k - 1, len(x0)) - 1))]


def clustered(p: Problem, x0, rounds, k, spread, steps, weights):
    centres, choice = first_centres(x0, k, spread), dict.fromkeys(p.nodes[1], -1)
    for t in range(rounds):
        answers: list[list] = [[] for _ in range(k)]
        for d in p.present(0, "server", t, 0):
            choice[d] = least(p, centres, d)
            y = sgd(p, d, centres[choice[d]], t, 0, LR_OF[d], steps)
            answers[choice[d]].append((y, p.samples(1, d) if weights == "samples" else 1))
        for j, some in enumerate(answers):
            if some:
                centres[j] = sum(w * y for y, w in some) / sum(w for _, w in some)
    return np.stack(centres), choice


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("rule", RULES)
def test_ifca_is_its_oracle(rule, weights):
    k, p = 4, problem(DATA, rule)
    found, state, x0 = run(IFCA(tuple(LR), 3, weights, k, 0.8), rule)
    centres, choice = clustered(p, x0, 4, k, 0.8, 3, weights)
    close(state["centres"][0], centres)
    assert state["choice"].tolist() == list(choice.values())
    taken = set(choice.values()) - {-1}
    assert 1 < len(taken) < k  # else this would show little; a centre that nobody took is where it was
    unmoved = [j for j in range(k) if np.array_equal(centres[j], first_centres(x0, k, 0.8)[j])]
    assert unmoved
    # everybody has a personal model, also those who never took part
    close(rows(found.personal), np.stack([centres[least(p, centres, d)] for d in NAMES]))
    assert found.global_ is None
    last = np.array(list(choice.values()))
    learned = np.nan_to_num(found.collaboration[4].dense())
    assert np.array_equal(learned, (last[:, None] == last) & (last >= 0) & ~np.eye(7, dtype=bool))


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("kind", [IFCA, Oracle])
def test_one_cluster_is_fedavg_to_the_bit(kind, share, weights):
    kwargs = {**SETTINGS, "dtype": "float32", "rounds": 4, "device_participation": share}
    data = make(cluster=["a"] * 7)
    own = {"num_clusters": 1} if kind is IFCA else {}
    a = train(kind(0.3, 3, weights, **own), data, "mclr", **kwargs)
    b = train(FedAvg(0.3, 3, weights), data, "mclr", **kwargs)
    assert b.global_ is not None
    assert a.personal is not None
    took = (a.personal != b.context.objective.initial).any(1)
    assert took.sum() > 4
    assert torch.equal(a.personal[took], b.global_.expand(int(took.sum()), -1))
    assert kind is Oracle or took.all()


def test_ifca_personalises_on_training_data_alone():
    """The same with other test samples, by which many would choose another centre."""
    flipped = replace(DATA, y=DATA.y.clone(), x=DATA.x.clone())
    for _, _, start, end in DATA.bounds.tolist():
        flipped.y[start:end], flipped.x[start:end] = (DATA.y[start:end] + 1) % CLASSES, -3 * DATA.x[start:end]
    a, b = (run(IFCA(0.3, 3, num_clusters=3, spread=0.8), {}, federation=f)[0] for f in (DATA, flipped))
    assert np.array_equal(rows(a.personal), rows(b.personal))
    assert a.history[-1]["personal"]["test"] != b.history[-1]["personal"]["test"]


def test_ifca_finds_groups():
    """Two optima far apart and a centre near each: found at once, and both reached."""
    data = quadratic_clusters(6, 2, 3, seed=4, spread=3.0)
    method = IFCA(0.8, 4, num_clusters=2, spread=1.0)
    found = train(method, data, "quadratic", rounds=10, dtype="float64", eval_every=10, batching="eager")
    assert found.collaboration[10].match(np.asarray(data.cluster))["adjusted_rand_index"] == 1
    close(rows(found.personal), (data.y / data.x[:, 0, :1]).numpy(), 1e-6)


# -- FC -----------------------------------------------------------------------------------------------


def federated_clustering(p: Problem, x0, rounds, beta, nearest, cluster_rounds):
    """`nearest`: a number, or 0 for the size of the true group among those that ever took part."""
    X: dict[str, Any] = dict.fromkeys(p.nodes[1], x0)
    M, near = {}, {d: set() for d in p.nodes[1]}
    group = dict(zip(NAMES, GROUP, strict=True))
    for t in range(rounds):
        present = p.present(0, "server", t, 0)
        for d in present:
            g = p.grad(X[d], d, next(p.batches(d, t, 0)))
            M[d] = (1 - beta) * g + beta * M.get(d, 0)
        for i in present:
            v = M[i]
            number = min(nearest, len(M)) or sum(group[j] == group[i] for j in M)
            for _ in range(cluster_rounds):
                distance = {j: np.linalg.norm(M[j] - v) for j in M}
                tau = sorted(distance.values())[number - 1]
                near[i] = {j for j in M if distance[j] <= tau}
                v = sum(M[j] if j in near[i] else v for j in M) / len(M)
            X[i] = X[i] - LR_OF[i] * v
    return np.stack(list(X.values())), [[float(j in near[i]) for j in NAMES] for i in NAMES]


@pytest.mark.parametrize("nearest", [0, 3, 9])
@pytest.mark.parametrize("rule", RULES)
def test_fc_is_its_oracle(rule, nearest):
    found, state, x0 = run(FC(tuple(LR), 0.6, nearest, 3), rule)
    x, near = federated_clustering(problem(DATA, rule), x0, 4, 0.6, nearest, 3)
    close(rows(found.personal), x)
    off = ~np.eye(7, dtype=bool)
    assert np.array_equal(found.collaboration[4].dense()[off], np.array(near)[off])
    assert state["pairs"].tolist() == sorted(state["pairs"].tolist())


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_fc_of_one_without_momentum_is_local_to_the_bit(share):
    kwargs = {**SETTINGS, "dtype": "float32", "rounds": 4, "device_participation": share}
    a, b, c = (train(m, DATA, "mclr", **kwargs) for m in (FC(0.3, 0.0, 1), LocalTraining(0.3, 1), FC(0.3, 0.0, 2)))
    assert np.array_equal(rows(a.personal), rows(b.personal))
    assert not np.array_equal(rows(c.personal), rows(b.personal))


def test_fc_holds_few_distances(monkeypatch):
    """In pieces it is the same."""
    whole = run(FC(0.3, nearest=3), {"fraction": 0.6})
    monkeypatch.setattr("polytier.algorithms.fc.HELD", 1)
    pieces = run(FC(0.3, nearest=3), {"fraction": 0.6})
    close(rows(whole[0].personal), rows(pieces[0].personal), 1e-14)
    assert torch.equal(whole[1]["pairs"], pieces[1]["pairs"])


def test_fc_finds_groups():
    """As long as models move: at their optima momenta are 0, in whatever group."""
    data = quadratic_clusters(12, 3, 5, seed=2, spread=2.0)
    found = train(FC(0.5, 0.2), data, "quadratic", rounds=6, dtype="float64", eval_every=6, batching="eager")
    for learned in found.collaboration.values():
        assert learned.match(np.asarray(data.cluster))["adjusted_rand_index"] == 1
    apart = [rows(found.personal)[np.asarray(data.cluster) == k].std(0).max() for k in range(3)]
    assert max(apart) < 0.1 * rows(found.personal).std(0).min()


# -- Oracle -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_oracle_is_fedavg_on_each_group_alone(weights):
    """NumPy's and the package's FedAvg, of a federation with these devices only."""
    found, _, x0 = run(Oracle(tuple(LR), 3, weights), {"table": TABLE})
    assert found.global_ is None
    for group in "abc":
        inside = group == GROUP
        alone, rule = make(np.array(NAMES)[inside], GROUP[inside]), {"table": TABLE[:, inside]}
        same = run(FedAvg(tuple(LR[inside]), 3, weights), rule, federation=alone)[0]
        expected = fedavg(problem(alone, rule), x0, 4, LR_OF, 3, weights).everywhere
        assert expected is not None
        assert np.array_equal(expected, x0) == (group == "c")  # its one device never takes part
        for model in rows(found.personal)[inside]:
            close(model, rows(same.global_), 1e-12)
            close(model, expected)


def test_oracle_with_a_fraction():
    """The draw is over all devices, as FedAvg's; a group nobody of whom was drawn stays."""
    rule = {"fraction": 0.3}
    p = problem(DATA, rule)
    found, state, x0 = run(Oracle(0.3, 2), rule)
    models, seen = dict.fromkeys("abc", x0), set()
    for t in range(4):
        present = p.present(0, "server", t, 0)
        seen |= set(present)
        answers: dict[str, list] = {}
        for d in present:
            group = GROUP[NAMES.index(d)]
            answers.setdefault(group, []).append((sgd(p, d, models[group], t, 0, 0.3, 2), p.samples(1, d)))
        models |= {g: sum(w * y for y, w in some) / sum(w for _, w in some) for g, some in answers.items()}
    close(state["centres"][0], np.stack(list(models.values())))
    assert 2 < len(seen) < 7
    close(rows(found.personal), np.stack([models[g] if d in seen else x0 for d, g in zip(NAMES, GROUP, strict=True)]))


# -- all of them --------------------------------------------------------------------------------------


SHORT: Any = {"device_steps": 2}
EACH = [SCAFFOLD(**SHORT, option="I"), IFCA(**SHORT), FC(), Oracle(**SHORT)]


@pytest.mark.parametrize("method", EACH, ids=lambda m: type(m).__name__)
def test_contract(method):
    check_algorithm(method, federation=make([f"d{k}" for k in range(11)], list("abcabcabcab")))


def test_advice(monkeypatch, caplog):
    nameless = replace(DATA, cluster=None)
    wrong: list[tuple[Algorithm, Federation, Any, str]] = [
        (Oracle(), nameless, {}, "clusters-permuted or clusters-disjoint, or give your .npz a column cluster"),
        (FC(), nameless, {}, "these data have none; give nearest, from 1 to 7"),
        (IFCA(num_clusters=8), DATA, {}, "num_clusters = 8 is more than the 7 devices; use at most 7"),
        (SCAFFOLD(), DATA, {"absent": "stale"}, 'use absent = "skip"'),
        (IFCA(), DATA, {"absent": "stale"}, 'use absent = "skip"'),
        (Oracle(), DATA, {"absent": "stale"}, 'use absent = "skip"'),
    ]
    for method, data, more, told in wrong:
        with pytest.raises(ValueError, match=told):
            make_loop(method, data, "mclr", **SETTINGS, **more)
    for make_it in (lambda: SCAFFOLD(option="III"), lambda: IFCA(num_clusters=0), lambda: FC(momentum=1.1)):
        with pytest.raises(ValueError, match="allowed"):
            make_it()
    monkeypatch.setattr(ifca, "RECORDED", 6)
    with caplog.at_level(logging.WARNING, "polytier"):
        assert not run(IFCA(device_steps=1), {}, 1)[0].collaboration
        run(FC(nearest=8), {}, 1)
    assert "7 devices are more than 6: IFCA records no collaboration matrix" in caplog.text
    assert "nearest = 8 is more than the 7 clients" in caplog.text
