"""CoBo: its oracle in plain NumPy, and what must hold whatever the numbers."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import Problem, draw_uniform, node_key
from polytier import Federation, Topology, check_algorithm, train
from polytier.algorithms import LocalTraining, cobo
from polytier.algorithms.cobo import CoBo
from polytier.data.synthetic import quadratic_clusters
from polytier.runs.loop import make_loop
from polytier.tree.pair_weights import project as on_simplex
from polytier.tree.pair_weights import skip
from polytier.tree.random import key, name_key, signed

FEATURES, CLASSES = 2, 3

# -- the oracle ---------------------------------------------------------------------------------------


def project(v):
    """Onto the probability simplex, by sorting."""
    v = v - v.max()
    u = np.sort(v)[::-1]
    tau = max((u[: k + 1].sum() - 1) / (k + 1) for k in range(len(u)))
    return np.maximum(v - tau, 0)


def drawn_pairs(seed, present, t, p):
    """Pairs of the present clients by rank of their key, (0, 1), (0, 2), (1, 2), ..; gaps between drawn ones are
    1 + floor(log(1 - u) / log(1 - p)) for the draws u of key "pairs", round."""
    ranked = sorted(present, key=lambda c: signed(name_key(c)))
    pairs = [(ranked[a], ranked[b]) for b in range(len(ranked)) for a in range(b)]
    if p >= 1:
        return pairs
    found, place, k = [], -1, 0
    while True:
        place += 1 + int(np.floor(np.log1p(-draw_uniform(key(seed, "pairs", t), k)) / np.log1p(-p)))
        if place >= len(pairs):
            return found
        found.append(pairs[place])
        k += 1


def drawn_alone(seed, present, t, p):
    """Clients that compare themselves with themselves: those, by rank, whose draw of key "own", round is below p."""
    ranked = sorted(present, key=lambda c: signed(name_key(c)))
    return [c for k, c in enumerate(ranked) if draw_uniform(key(seed, "own", t), k) < p]


def oracle(p: Problem, x0: np.ndarray, rounds, lr, rho, gamma, domain, sampling, constant_rounds, own_weight=False):
    """Algorithm 1 with dense W; the clients are the nodes below the server."""
    clients = p.nodes[1]
    n = len(clients)
    X: dict[Any, np.ndarray] = dict.fromkeys(clients, x0)
    first = 1.0 if domain == "box" else 1 / n if own_weight else 1 / (n - 1)
    W = {i: {j: first for j in clients if own_weight or j != i} for i in clients}

    def gradient(c, z, t) -> Any:
        if p.leaf == 1:
            return p.grad(z, c, next(p.batches(c, t, 0, "midpoint")))
        kids, base = p.children[1][c], key(p.seed, "participation:midpoint", t, 0)
        number = max(1, round(p.participation[2].get("fraction", 1) * len(kids)))
        there = sorted(kids, key=lambda d: draw_uniform(node_key(base, d)))[:number]
        sizes = [p.samples(2, d) for d in there]
        gradients = [p.grad(z, d, next(p.batches(d, t, 0, "midpoint"))) for d in there]
        return sum(s * g for s, g in zip(sizes, gradients, strict=True)) / sum(sizes)

    for t in range(rounds):
        present = p.present(0, "server", t, 0)
        constant = sampling == "constant" or (sampling == "mixed" and t + 1 <= constant_rounds)
        chance = 1 if sampling == "all" else 1 / max(1, len(present)) if constant else 1 / (t + 1)
        pairs = drawn_pairs(p.seed, present, t, chance)
        for i, j in pairs:
            z = (X[i] + X[j]) / 2
            change = gamma * (gradient(i, z, t) @ gradient(j, z, t))
            W[i][j], W[j][i] = W[i][j] + change, W[j][i] + change
        alone = drawn_alone(p.seed, present, t, chance) if own_weight else []
        for i in alone:
            g = gradient(i, X[i], t)
            W[i][i] += gamma * (g @ g)
        for i in {c for pair in pairs for c in pair} | set(alone):
            others, row = list(W[i]), np.array(list(W[i].values()))
            row = np.clip(row, 0, 1) if domain == "box" else project(row)  # (4)
            W[i] = dict(zip(others, row, strict=True))
        new: dict[Any, Any] = {}
        for i in present:
            pull = sum((W[i][k] * (X[i] - X[k]) for k in present if k != i), np.zeros_like(x0))

            def device(d, x, t, call, pull=pull):
                return x - lr[d] * (p.grad(x, d, next(p.batches(d, t, call))) + rho * pull)  # (3)

            new[i] = device(i, X[i], t, 0) if p.leaf == 1 else p.ask(1, i, X[i], t, 0, device, "samples")
        X |= new
    dense = np.array([[W[i][j] if i != j else np.nan for j in clients] for i in clients])
    return np.stack([X[c] for c in clients]), dense


# -- problems -----------------------------------------------------------------------------------------

NAMES = ["d5", "d0", "d3", "d1", "d6", "d2", "d4"]


def make(names=NAMES, team=None) -> Federation:
    """Clients of 3 to 9 samples; each has its own data, whatever its place."""
    xs, ys, ends = [], [], []
    for name in names:
        rng = np.random.default_rng(int(name[1:]))
        size = int(rng.integers(3, 10))
        xs.append(rng.normal(size=(size, FEATURES)))
        ys.append(rng.integers(0, CLASSES, size))
        ends.append(size)
    stop = np.cumsum(ends)
    bounds = np.stack([stop - ends, stop, stop, stop], 1)
    x, y = np.concatenate(xs), np.concatenate(ys)
    return Federation(
        torch.from_numpy(x),
        torch.from_numpy(y),
        torch.from_numpy(bounds),
        np.array(names),
        team=team,
        num_classes=CLASSES,
    )


def problem_of(federation: Federation, topology: Topology, participation: list[dict], **more: Any) -> Problem:
    data = {name: tuple(v.numpy() for v in federation.device(k)) for k, name in enumerate(federation.ids.tolist())}
    children = [
        {
            str(topology.names[t][i]): topology.names[t + 1][topology.parents[t + 1].numpy() == i].tolist()
            for i in range(topology.size(t))
        }
        for t in range(topology.leaf)
    ]
    return Problem(data, children, CLASSES, participation=participation, **more)  # type: ignore[arg-type]


SETTINGS: dict[str, Any] = {"dtype": "float64", "batch_size": 4, "seed": 3, "l2": 0.1, "batching": "eager"}
FIELDS: dict[str, Any] = {"device_pull": 0.3, "weight_lr": 4.0, "constant_rounds": 3}


def agree(federation: Federation, topology: Topology, rules: list[dict], rounds: int = 7, **fields: Any):
    lr = np.linspace(0.1, 0.4, len(federation))
    method = CoBo(device_lr=tuple(lr), **{**FIELDS, **fields})
    taken = [rule.get("fraction", rule.get("table", 1.0)) for rule in rules]
    part = {"device_participation": taken[-1], "team_participation": taken[1] if len(taken) == 3 else 1.0}
    with make_loop(method, federation, "mclr", topology=topology, **SETTINGS, **part) as training:
        x0 = training.context.objective.initial.numpy().copy()
        run = training.run(rounds)
    problem = problem_of(federation, topology, rules, seed=3, l2=0.1, batch_size=4)
    x, w = oracle(
        problem,
        x0,
        rounds,
        dict(zip(federation.ids.tolist(), lr, strict=True)),
        method.device_pull,
        method.weight_lr,
        method.domain,
        method.sampling,
        method.constant_rounds,
        method.own_weight,
    )
    found = run.personal if method.clients == "devices" else run.team
    assert found is not None
    np.testing.assert_allclose(found.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.collaboration[rounds].dense(), w, rtol=0, atol=1e-10)
    return w


# -- CoBo is its oracle -------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["constant", "inverse", "mixed", "all"])
@pytest.mark.parametrize("domain", ["box", "simplex"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_oracle(domain, sampling, share):
    federation = make()
    w = agree(federation, Topology.build(federation.ids), [{}, {"fraction": share}], domain=domain, sampling=sampling)
    changed = w[~np.isnan(w)] != (1 if domain == "box" else 1 / 6)
    assert changed.any()  # else this would show nothing


@pytest.mark.parametrize("domain", ["box", "simplex"])
@pytest.mark.parametrize(("teams", "devices"), [({}, {}), ({"fraction": 0.75}, {"fraction": 0.6})])
def test_oracle_of_teams_as_clients(domain, teams, devices):
    federation = make([f"d{k}" for k in range(11)])
    topology = Topology.build(federation.ids, np.array(["a", "b", "c", "d", "b", "a", "c", "c", "d", "d", "b"]))
    w = agree(federation, topology, [{}, teams, devices], domain=domain, sampling="all", clients="teams")
    assert len(np.unique(w[~np.isnan(w)])) > 2


@pytest.mark.parametrize("sampling", ["constant", "all"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_oracle_with_own_weights(sampling, share):
    federation = make()
    fields = {"domain": "simplex", "own_weight": True, "sampling": sampling, "weight_lr": 0.5}
    w = agree(federation, Topology.build(federation.ids), [{}, {"fraction": share}], **fields)
    listened = np.nansum(w, 1)  # the rest of 1 is the client's own weight
    assert listened.min() < 0.8  # own weights have grown
    assert len(np.unique(w[~np.isnan(w)].round(6))) > 5


def test_oracle_of_teams_with_own_weights():
    federation = make([f"d{k}" for k in range(11)])
    topology = Topology.build(federation.ids, np.array(["a", "b", "c", "d", "b", "a", "c", "c", "d", "d", "b"]))
    fields = {"domain": "simplex", "own_weight": True, "sampling": "all", "weight_lr": 0.5, "clients": "teams"}
    agree(federation, topology, [{}, {}, {}], **fields)


def test_all_weights_are_reached():
    """Box: some pairs end between the bounds, some at 0 and some at 1, so that clipping is part of the comparison."""
    federation = make()
    fields = {"sampling": "all", "weight_lr": 4.0}
    w = agree(federation, Topology.build(federation.ids), [{}, {}], rounds=12, **fields)
    assert (w == 0).any()
    assert (w == 1).any()
    assert ((w > 0) & (w < 1)).any()


# -- what it must reduce to ---------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_without_pull_it_is_local(share):
    kwargs: dict[str, Any] = {"rounds": 4, "device_participation": share, "batch_size": 4, "batching": "eager"}
    one = train(CoBo(device_pull=0, sampling="all"), make(), "mclr", **kwargs)
    other = train(LocalTraining(0.1, 1), make(), "mclr", **kwargs)
    assert one.personal is not None
    assert other.personal is not None
    assert torch.equal(one.personal, other.personal)


def test_without_learning_it_is_consensus():
    """W stays one: x <- x - eta (g + rho n (x - mean x)); on quadratics g is known."""
    data, eta, rho = quadratic_clusters(6, 2, 3, seed=1), 0.3, 0.2
    run = train(CoBo(eta, rho, 0.0), data, "quadratic", rounds=9, dtype="float64", batching="eager")
    a, b = data.x.numpy(), data.y.numpy()
    x = np.zeros_like(b)
    for _ in range(9):
        x = x - eta * (np.einsum("nij,nj->ni", a, x) - b + rho * len(x) * (x - x.mean(0)))
    assert run.personal is not None
    np.testing.assert_allclose(run.personal.numpy(), x, rtol=0, atol=1e-12)
    assert not len(run.collaboration[9].pairs)


@pytest.mark.parametrize("domain", ["box", "simplex"])
def test_the_order_of_clients_does_not_matter(domain):
    method = CoBo(domain=domain, **FIELDS)
    other = [NAMES[k] for k in (4, 2, 6, 0, 1, 5, 3)]
    runs = [
        train(method, make(names), "mclr", rounds=6, device_participation=0.8, **SETTINGS) for names in (NAMES, other)
    ]
    place = np.argsort(NAMES)[np.argsort(np.argsort(other))]  # where each of `other` is in NAMES
    one, two = (run.collaboration[6].dense() for run in runs)
    np.testing.assert_allclose(one[np.ix_(place, place)], two, rtol=0, atol=1e-12)
    assert len(np.unique(one[~np.isnan(one)])) > 2
    assert runs[0].personal is not None
    assert runs[1].personal is not None
    np.testing.assert_allclose(runs[0].personal[place].numpy(), runs[1].personal.numpy(), rtol=0, atol=1e-12)


def test_clients_leave_and_join():
    """The first leaves for rounds 3 and 4, the last comes in round 4, in round 5 there is nobody."""
    table = np.ones((6, 7), dtype=int)
    table[2:4, 0], table[:3, 6], table[4] = 0, 0, 0
    method, after = CoBo(sampling="all", **FIELDS), []
    with make_loop(method, make(), "mclr", device_participation=table, **SETTINGS) as training:
        initial = training.context.objective.initial
        for _ in range(6):
            training.step()
            run = training.run(training.round)
            assert run.personal is not None
            after.append((run.collaboration[training.round].dense(), run.personal.clone()))
    (_, _), (w2, x2), (w3, x3), (w4, x4), (w5, x5), (w6, _) = after
    for w, x in ((w3, x3), (w4, x4)):
        np.testing.assert_array_equal(w[0], w2[0])
        np.testing.assert_array_equal(w[:, 0], w2[:, 0])
        assert torch.equal(x[0], x2[0])
        assert not torch.equal(x[1], x2[1])
    assert (w2[0, 1:6] != 1).any()  # there was something to keep
    assert np.nanmin(w3[6]) == 1
    assert torch.equal(x3[6], initial)
    assert np.nanmin(w4[6]) < 1
    np.testing.assert_array_equal(w5, w4)
    assert torch.equal(x5, x4)
    assert (w6[0, 1:] != w5[0, 1:]).any()
    agree(make(), Topology.build(NAMES), [{}, {"table": table}], rounds=6, sampling="all")


def test_a_first_round_without_anybody():
    table = np.array([[0] * 7, [1] * 7])
    run = train(CoBo(domain="simplex"), make(), "mclr", rounds=1, device_participation=table, **SETTINGS)
    np.testing.assert_allclose(np.nansum(run.collaboration[1].dense(), 1), 1)


def test_lots_of_midpoints_change_nothing(monkeypatch):
    one = train(CoBo(sampling="all", **FIELDS), make(), "mclr", rounds=3, **SETTINGS)
    monkeypatch.setattr(cobo, "HELD", 20)  # two pairs at a time
    other = train(CoBo(sampling="all", **FIELDS), make(), "mclr", rounds=3, **SETTINGS)
    assert isinstance(one.state, dict)
    assert isinstance(other.state, dict)
    assert len(one.state["weights"])
    assert torch.equal(one.state["weights"], other.state["weights"])


@pytest.mark.parametrize(
    ("method", "dtype"), [(CoBo(), "float64"), (CoBo(domain="simplex"), "float32"), (CoBo(clients="teams"), "float64")]
)
def test_contract(method, dtype):
    check_algorithm(method, dtype=dtype)


# -- its parts ----------------------------------------------------------------------------------------

NUMBERS = st.floats(-3, 3) | st.sampled_from([1e20, -1e20])


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(st.data(), st.integers(2, 6))
def test_rows_are_projected_onto_the_simplex(data, n):
    dense = np.zeros((n, n))
    base = np.array(data.draw(st.lists(NUMBERS, min_size=n, max_size=n)))
    row, w = [], []
    for i in range(n):
        listed = data.draw(st.lists(NUMBERS, max_size=n - 1))
        dense[i, : len(listed)], dense[i, len(listed) :] = listed, base[i]
        row += [i] * len(listed)
        w += listed
    listed, others = on_simplex(torch.tensor(w, dtype=torch.float64), torch.tensor(row).long(), torch.tensor(base))
    for i in range(n):
        own = listed[[k for k, r in enumerate(row) if r == i]].numpy()
        found = np.append(own, [others[i]] * (n - 1 - len(own)))
        np.testing.assert_allclose(found, project(dense[i, : n - 1]), atol=1e-12)
        assert found.min() >= 0
        assert abs(found.sum() - 1) < 1e-12


def test_simplex_rows_of_a_run():
    with make_loop(CoBo(domain="simplex", **FIELDS), make(), "mclr", batch_size=4, batching="eager") as training:
        for _ in range(20):
            training.step()
            (learned,) = training.learned().values()
            w = np.nan_to_num(learned.dense())
            assert w.min() >= 0
            np.testing.assert_allclose(w.sum(1), 1, atol=1e-6)  # float32


def test_pairs_are_drawn_as_often_as_they_should():
    slots, p, times = 28, 1 / 8, 4000
    counts = np.zeros(slots)
    rng = np.random.default_rng(0)
    for _ in range(times):
        u = torch.from_numpy(rng.random(512))
        counts[skip(lambda k, u=u: u[:k], slots, p).numpy()] += 1
    deviation = np.sqrt(times * p * (1 - p))
    assert abs(counts - times * p).max() < 4 * deviation
    assert abs(counts.sum() - slots * times * p) < 4 * np.sqrt(slots) * deviation
    lowest = torch.zeros(10**5, dtype=torch.float64)  # gaps of one: more draws than it first asks for
    assert skip(lambda k: lowest[:k], 1000, p).tolist() == list(range(1000))
    assert skip(lambda k: lowest[:k], 5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert skip(lambda k: lowest[:k], 0, 0.5).tolist() == []


def test_memory_grows_with_the_pairs_drawn():
    n = 2000
    data = quadratic_clusters(n, 4, 2, seed=0)
    with make_loop(CoBo(device_pull=1 / n), data, "quadratic", batching="stacked", tile=64) as training:
        sizes = []
        for _ in range(3):
            training.step()
            assert isinstance(training.state, dict)
            sizes.append(sum(v.numel() for v in training.state.values()))
    # about n / 2 pairs a round in two directions, some of which stay at one
    assert sizes[0] < n + 2.4 * n
    assert sizes[1] <= sizes[2] < n + 6.8 * n


# -- clusters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["constant", "mixed"])
def test_quadratic_clusters_are_found(sampling):
    data = quadratic_clusters(12, 3, 5, seed=2, spread=2.0)
    method = CoBo(0.3, 0.1, 0.5, sampling=sampling)
    run = train(method, data, "quadratic", rounds=120, dtype="float64", eval_every=120, batching="stacked")
    match = run.collaboration[120].match(np.asarray(data.cluster))
    assert match["adjusted_rand_index"] == 1
    assert match["contrast"] == 1
    assert run.personal is not None
    optimum = (data.y / data.x[:, 0, :1]).numpy()
    assert abs(run.personal.numpy() - optimum).max() < 1e-6


def test_quadratic_clusters_are_what_they_say():
    data = quadratic_clusters(7, 3, 2, seed=5, spread=0.5)
    assert data.cluster is not None
    assert np.bincount(data.cluster).tolist() == [3, 2, 2]
    a, mu = data.x[:, 0, 0].numpy(), (data.y / data.x[:, 0, :1]).numpy()
    assert a.min() >= 0.5
    assert a.max() <= 1
    for k in range(3):
        np.testing.assert_allclose(
            mu[data.cluster == k], mu[data.cluster == k][:1].repeat((data.cluster == k).sum(), 0)
        )
    assert len(np.unique(mu.round(9), axis=0)) == 3
    with pytest.raises(ValueError, match="at least as many devices as clusters; got 3 clusters of 2"):
        quadratic_clusters(2, 3, 1)


# -- advice -------------------------------------------------------------------------------------------


def warned(caplog, method: CoBo, data: Federation) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "polytier"), make_loop(method, data, "quadratic", batching="eager"):
        return caplog.text


def test_warns_of_a_pull_that_diverges(caplog):
    data = quadratic_clusters(50, 2, 2)
    assert not warned(caplog, CoBo(0.1, 0.39), data)
    text = warned(caplog, CoBo(0.1, 0.4), data)
    assert "device_lr * device_pull * n = 2 with n = 50 clients" in text
    assert "diverge at 2: use device_pull = 0.2, scaled by 1/n" in text
    assert "= 4 with n" in warned(caplog, CoBo((0.1,) * 49 + (0.2,), 0.4), data)
    assert not warned(caplog, CoBo(0.1, 19.0, domain="simplex"), data)
    assert "n/(n-1) = 2.04082 with n = 50 clients; models diverge at 2: use device_pull = 9.8" in warned(
        caplog, CoBo(0.1, 20.0, domain="simplex"), data
    )
    assert "use device_pull = 0.2" in warned(caplog, CoBo("1/(10+t)", 0.4), data)
    assert not warned(caplog, CoBo(0.1, 19.9, domain="simplex", own_weight=True), data)
    assert "device_pull * 1 = 2 " in warned(caplog, CoBo(0.1, 20.0, domain="simplex", own_weight=True), data)


def test_settings_that_cannot_work():
    with pytest.raises(ValueError, match='got 1; add some, or use domain = "box"'):
        make_loop(CoBo(domain="simplex"), make(["d1"]), "mclr", **SETTINGS)
    with pytest.raises(ValueError, match='own_weight = true needs domain = "simplex"'):
        make_loop(CoBo(own_weight=True), make(), "mclr", **SETTINGS)
    with pytest.raises(ValueError, match="needs a tree with teams"):
        make_loop(CoBo(clients="teams"), make(), "mclr", **SETTINGS)
    run = train(CoBo(), make(["d1"]), "mclr", rounds=2, **SETTINGS)  # alone it trains alone
    assert len(run.collaboration[2]) == 1
