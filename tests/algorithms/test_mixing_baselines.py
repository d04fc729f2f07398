"""FedAMP, HeurFedAMP, validation-based weights, AL2GD and DemLearn: oracles in plain NumPy, and what each must be."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from oracles import NEST, Models, Problem, draw_uniform, sgd
from polytier import FedAvg, Federation, Topology, check_algorithm, train
from polytier.algorithms import LocalTraining, demlearn, fedamp, validation
from polytier.algorithms.al2gd import AL2GD
from polytier.algorithms.demlearn import DemLearn
from polytier.algorithms.fedamp import FedAMP, HeurFedAMP
from polytier.algorithms.validation import ValidationWeights
from polytier.data.synthetic import quadratic_clusters
from polytier.runs.loop import make_loop
from polytier.tree import pair_weights as pairs
from polytier.tree.random import key, name_key, signed

FEATURES, CLASSES = 2, 3
NAMES = ["d5", "d0", "d3", "d1", "d6", "d2", "d4", "d8", "d7"]
TEAMS = np.array(["a", "b", "c", "a", "b", "b", "a", "c", "b"])
LR = {name: 0.1 + 0.03 * k for k, name in enumerate(NAMES)}
SETTINGS: dict[str, Any] = {"dtype": "float64", "batch_size": 4, "seed": 3, "l2": 0.1, "batching": "eager"}
NOBODY = np.ones((3, len(NAMES)), dtype=int)  # in round 1 one device, in round 2 nobody
NOBODY[0], NOBODY[1] = 0, 0
NOBODY[0, 4] = 1
LATER = np.roll(NOBODY, 1, axis=0)  # after a round of all: devices that never came are all alike, their groups any
PARTS = {"all": (1.0, {}), "some": (0.6, {"fraction": 0.6}), "nobody": (NOBODY, {"table": NOBODY})}
PARTS["later"] = (LATER, {"table": LATER})


def make(names=NAMES, shift=(0.0, 0.0)) -> Federation:
    """Devices of 3 to 9 training, 2 to 4 validation and 2 test samples; `shift` moves the last two."""
    xs, ys, sizes = [], [], []
    for name in names:
        rng = np.random.default_rng(int(name[1:]))
        size = np.array([rng.integers(3, 10), rng.integers(2, 5), 2])
        x = rng.normal(size=(size.sum(), FEATURES)) + np.repeat([0, *shift], size)[:, None]
        xs.append(x)
        ys.append(rng.integers(0, CLASSES, size.sum()))
        sizes.append(size)
    ends = np.cumsum(np.sum(sizes, 1))
    bounds = np.stack(
        [ends - np.sum(sizes, 1), *(ends[:, None] - np.cumsum(np.array(sizes)[:, ::-1], 1))[:, 1::-1].T, ends]
    )
    x, y, bounds = (torch.from_numpy(v) for v in (np.concatenate(xs), np.concatenate(ys), bounds.T.copy()))
    return Federation(x, y, bounds, np.array(names), num_classes=CLASSES)


def problem_of(topology: Topology, rules: list[dict]) -> Problem:
    federation = make()
    data = {name: tuple(v.numpy() for v in federation.device(k)) for k, name in enumerate(NAMES)}
    children = [
        {
            str(topology.names[t][i]): topology.names[t + 1][topology.parents[t + 1].numpy() == i].tolist()
            for i in range(topology.size(t))
        }
        for t in range(topology.leaf)
    ]
    return Problem(data, children, CLASSES, 0.1, 3, 4, rules)  # type: ignore[arg-type]


def agree(method, oracle, part="all", rounds=5, topology=None, teams="all", **fields):
    """Train, run the oracle, compare all models and, if the oracle has them, the weights."""
    topology = topology or Topology.build(NAMES)
    rules = [{}, *([PARTS[teams][1]] if topology.leaf == 2 else []), PARTS[part][1]]
    taken = {"device_participation": PARTS[part][0], "team_participation": PARTS[teams][0]}
    with make_loop(method, make(), "mclr", topology=topology, **SETTINGS, **taken) as training:
        x0 = training.context.objective.initial.numpy().copy()
        run = training.run(rounds)
    expected, weights = oracle(problem_of(topology, rules), x0, rounds, **fields)
    close(run.personal, [expected.personal.get(c, x0) for c in NAMES])
    if expected.everywhere is None:
        assert run.global_ is None
    else:
        close(run.global_, expected.everywhere)
    for team in expected.team.values():
        close(run.team, [team.get(c, x0) for c in run.team_ids])
    if weights is not None:
        dense = [[weights[i].get(j, 0) if i != j else np.nan for j in NAMES] for i in NAMES]
        close(torch.from_numpy(run.collaboration[rounds].dense()), dense)
    return run, expected


def close(found, expected) -> None:
    assert found is not None
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=0, atol=1e-10)


def same(one, other) -> None:
    assert one.personal is not None
    assert other.personal is not None
    assert torch.equal(one.personal, other.personal)
    assert (one.personal - one.context.objective.initial).abs().max() > 1e-2  # not two runs that stand still


# -- FedAMP and HeurFedAMP ----------------------------------------------------------------------------


def message_passing(p, x0, rounds, attention, device_steps, device_pull):
    """Huang et al.: u_i = sum_j xi_ij w_j, then w_i is near argmin f_i(w) + pull/2 |w - u_i|^2."""
    weights: dict[str, Any] = {c: {} for c in NAMES}
    w: dict[str, Any] = dict.fromkeys(NAMES, x0)
    for t in range(rounds):
        old = dict(w)
        for i in p.present(0, "server", t, 0):
            xi = attention(old, i, [j for j in p.present(0, "server", t, 0) if j != i])
            u = (1 - sum(xi.values())) * old[i] + sum((xi[j] * old[j] for j in xi), np.zeros_like(x0))
            w[i], weights[i] = sgd(p, i, u, t, 0, LR[i], device_steps, u, device_pull), xi
    return Models(None, w), weights


def by_distance(alpha, sigma):
    return lambda w, i, others: {j: alpha / sigma * np.exp(-np.sum((w[i] - w[j]) ** 2) / sigma) for j in others}


def by_angle(own, sigma):
    def attention(w, i, others):
        e = {j: np.exp(sigma * (w[i] @ w[j]) / np.sqrt((w[i] @ w[i]) * (w[j] @ w[j]))) for j in others}
        return {j: (1 - own) * e[j] / sum(e.values()) for j in others}

    return attention


STEPS: dict[str, Any] = {"device_lr": tuple(LR.values()), "device_steps": 3}


@pytest.mark.parametrize(("part", "pull"), [("all", 0.0), ("some", 0.7), ("nobody", 0.7)])
def test_fedamp(part, pull):
    method = FedAMP(**STEPS, device_pull=pull, attention_lr=0.05, sigma=0.5)
    agree(method, message_passing, part, attention=by_distance(0.05, 0.5), device_steps=3, device_pull=pull)


@pytest.mark.parametrize(("part", "own"), [("all", 0.5), ("some", 0.1), ("nobody", 0.5)])
def test_heur_fedamp(part, own):
    method = HeurFedAMP(**STEPS, device_pull=0.7, self_weight=own, sigma=3.0)
    run, _ = agree(method, message_passing, part, attention=by_angle(own, 3.0), device_steps=3, device_pull=0.7)
    sums = np.nansum(run.collaboration[5].dense(), 1)
    np.testing.assert_allclose(sums[sums > 0], 1 - own, rtol=0, atol=1e-12)


def test_without_attention_it_is_the_proximal_point_method():
    """The anchor is the model as it was at the start, not the one that moves: else the pull would do nothing."""
    fields = {"device_steps": 3, "device_pull": 0.7}
    run, _ = agree(FedAMP(**STEPS, device_pull=0.7, attention_lr=0), message_passing, attention=lambda *_: {}, **fields)
    free = train(FedAMP(**STEPS, device_pull=0, attention_lr=0), make(), "mclr", rounds=5, **SETTINGS)
    assert run.personal is not None
    assert free.personal is not None
    assert (run.personal - free.personal).abs().max() > 1e-3


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_without_attention_and_pull_it_is_local(share):
    kwargs: dict[str, Any] = {"rounds": 4, "device_participation": share, "batch_size": 4, "batching": "eager"}
    method = FedAMP(0.1, 3, device_pull=0, attention_lr=0)
    same(train(method, make(), "mclr", **kwargs), train(LocalTraining(0.1, 3), make(), "mclr", **kwargs))


def test_weights_in_pieces_and_not_kept(monkeypatch):
    one = train(FedAMP(**STEPS), make(), "mclr", rounds=3, **SETTINGS)
    monkeypatch.setattr(fedamp, "HELD", 20)  # two rows at a time
    other = train(FedAMP(**STEPS), make(), "mclr", rounds=3, **SETTINGS)
    assert one.personal is not None
    close(other.personal, one.personal.numpy())
    close(torch.from_numpy(other.collaboration[3].dense()), one.collaboration[3].dense())
    monkeypatch.setattr(pairs, "SHOWN", 8)
    hidden = train(FedAMP(**STEPS), make(), "mclr", rounds=3, **SETTINGS)
    same(hidden, other)
    assert not hidden.collaboration
    monkeypatch.setattr(demlearn, "SHOWN", 8)
    assert not train(DemLearn(**STEPS), make(), "mclr", rounds=1, **SETTINGS).collaboration


def test_fedamp_warns_of_negative_weights():
    with make_loop(FedAMP(attention_lr=5.0), make(), "mclr", **SETTINGS) as training:
        (told,) = training.algorithm.check(training_server(training))
    assert "use attention_lr = 1.25" in told  # 10 / 8
    with make_loop(FedAMP(attention_lr=1.25), make(), "mclr", **SETTINGS) as training:
        assert not training.algorithm.check(training_server(training))


def training_server(training):
    from polytier.method.call import Clock
    from polytier.method.children import Children

    return Children(training.context, 0, torch.zeros(1, dtype=torch.int64), Clock(0))


# -- validation-based weights -------------------------------------------------------------------------


def loss(theta, samples, l2=0.1):
    x, y = samples
    z = x @ theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).T + theta[CLASSES * FEATURES :]
    return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]) + l2 / 2 * theta @ theta


def validated(p, x0, rounds, temperature, candidates, device_steps):
    federation, models, weights = make(), Models(None), {c: {} for c in NAMES}
    held = {c: tuple(v.numpy() for v in federation.device(k, "validation")) for k, c in enumerate(NAMES)}
    for t in range(rounds):
        present = p.present(0, "server", t, 0)
        theta = {c: sgd(p, c, models.personal.get(c, x0), t, 0, LR[c], device_steps) for c in present}
        ranked = sorted(present, key=lambda c: signed(name_key(c)))
        u = [draw_uniform(key(p.seed, "candidates", t), k) for k in range(len(ranked))]
        circle = [ranked[k] for k in np.argsort(u)] if ranked else []
        for i in present:
            at, k = circle.index(i), min(candidates or len(present), len(present) - 1)
            those = [i, *(circle[(at + s) % len(circle)] for s in range(1, k + 1))]
            e = {j: np.exp(-loss(theta[j], held[i]) / temperature) for j in those}
            weights[i] = {j: e[j] / sum(e.values()) for j in those}
            models.personal[i] = sum(weights[i][j] * theta[j] for j in those)
    return models, weights


@pytest.mark.parametrize(("part", "candidates"), [("all", 0), ("all", 2), ("all", 50), ("some", 2), ("nobody", 0)])
def test_validation(part, candidates):
    method = ValidationWeights(**STEPS, temperature=0.05, candidates=candidates)
    fields = {"temperature": 0.05, "candidates": candidates, "device_steps": 3}
    run, _ = agree(method, validated, part, **fields)
    listened = (np.nan_to_num(run.collaboration[5].dense()) > 0).sum(1)
    assert part != "all" or set(listened) == {candidates if candidates == 2 else 8}


def test_candidates_change_from_round_to_round():
    runs = [train(ValidationWeights(**STEPS, candidates=2), make(), "mclr", rounds=k, **SETTINGS) for k in (1, 2, 3)]
    whom = [run.collaboration[len(run.history)].dense() > 0 for run in runs]
    assert all((one != other).any() for one, other in pairwise(whom))


def test_validation_at_its_ends():
    """A high temperature is the plain mean, so that all start alike: FedAvg. A low one takes the best model."""
    kwargs: dict[str, Any] = {"rounds": 4, **SETTINGS}
    one = train(ValidationWeights(**STEPS, temperature=1e13), make(), "mclr", **kwargs)
    other = train(FedAvg(**STEPS, weights="uniform"), make(), "mclr", **kwargs)
    assert other.global_ is not None
    close(one.personal, other.global_.expand(len(NAMES), -1).numpy())
    best = train(ValidationWeights(**STEPS, temperature=1e-6), make(), "mclr", **kwargs)
    dense = np.nan_to_num(best.collaboration[4].dense())
    assert set(np.unique(dense.round(6))) == {0, 1}
    assert 0 < dense.sum() <= len(NAMES)


def test_only_validation_samples_choose_weights():
    method = ValidationWeights(**STEPS, temperature=0.05)
    one, test, held = (
        train(method, make(shift=shift), "mclr", rounds=3, **SETTINGS) for shift in ((0, 0), (0, 5), (5, 0))
    )
    same(one, test)
    assert one.personal is not None
    assert held.personal is not None
    assert not torch.equal(one.personal, held.personal)


def test_validation_in_pieces(monkeypatch):
    one = train(ValidationWeights(**STEPS), make(), "mclr", rounds=3, **SETTINGS)
    monkeypatch.setattr(validation, "HELD", 150)  # two devices at a time
    other = train(ValidationWeights(**STEPS), make(), "mclr", rounds=3, **SETTINGS)
    same(one, other)
    np.testing.assert_array_equal(one.collaboration[3].dense(), other.collaboration[3].dense())


def test_validation_needs_validation_samples():
    federation = make()
    federation.bounds[2, 1] = federation.bounds[2, 2]
    with pytest.raises(ValueError, match="1 of 9 devices have no validation samples.*--split 3:1:1"):
        train(ValidationWeights(), federation, "mclr", rounds=1, **SETTINGS)


# -- AL2GD --------------------------------------------------------------------------------------------


def loopless(p, x0, rounds, device_lr, device_pull, server_pull, p_team, p_server, steps):
    """Step by step, every mean anew. Mini-batches are of calls: a new one at the first local step after a pull."""
    models, means = Models(x0, dict.fromkeys(NAMES, x0)), {}
    x, seen = models.personal, {"local": 0, "team": 0, "server": 0}
    for t in range(rounds):
        tops = p.present(0, "server", t, 0)
        team = {"server": tops} if p.leaf == 1 else {c: p.present(1, c, t, 0) for c in tops}
        team = {c: there for c, there in team.items() if there}
        run, last = 0, "local"
        walks: dict[Any, Any] = {}
        for k in range(steps):
            u = draw_uniform(key(p.seed, "coin", t), k)
            kind = "team" if u < p_team else "server" if u < p_team + p_server else "local"
            if kind == "local" and last != "local":
                run, walks = run + 1, {}
            mean = {c: np.mean([x[i] for i in there], 0) for c, there in team.items()}
            if team and kind == "server":
                models.everywhere = g = np.mean(list(mean.values()) if p.leaf == 2 else [x[i] for i in tops], 0)
            new = {}
            for c, there in team.items():
                for i in there:
                    if kind == "local":
                        call = run if p.leaf == 1 else run * NEST
                        walks[i] = walks.get(i) or p.batches(i, t, call)
                        new[i] = x[i] - device_lr / (1 - p_team - p_server) * p.grad(x[i], i, next(walks[i]))
                    elif kind == "team":
                        new[i] = x[i] - device_lr * device_pull / p_team * (x[i] - mean[c])
                    else:
                        new[i] = x[i] - device_lr * server_pull / p_server * (x[i] - g)
            x |= new
            if kind != "local":
                means |= {c: np.mean([x[i] for i in there], 0) for c, there in team.items()}
            seen[kind] += 1
            last = kind
    assert min(n for kind, n in seen.items() if kind != "team" or p_team) > 2
    models.team = {1: means} if p.leaf == 2 else {}
    return models, None


COINS: dict[str, Any] = {"device_lr": 0.05, "device_pull": 2.0, "server_pull": 3.0, "steps": 12}


@pytest.mark.parametrize(
    ("teams", "part", "p_team", "p_server"),
    [("all", "all", 0.35, 0.2), ("some", "some", 0.2, 0.4), ("all", "nobody", 0.2, 0.4), ("some", "all", 0, 0.4)],
)
def test_al2gd(teams, part, p_team, p_server):
    coins = {**COINS, "p_team": p_team, "p_server": p_server}
    agree(AL2GD(**coins), loopless, part, topology=Topology.build(NAMES, TEAMS), teams=teams, **coins)


@pytest.mark.parametrize("part", ["some", "nobody"])
def test_l2gd_on_a_flat_tree(part):
    coins = {**COINS, "p_team": 0.0, "p_server": 0.4}
    agree(AL2GD(**coins), loopless, part, **coins)


@pytest.mark.parametrize(("labels", "share"), [((), 1.0), ((), 0.5), ((TEAMS,), 1.0)])
def test_al2gd_without_pulls_is_local(labels, share):
    kwargs: dict[str, Any] = {"rounds": 4, "device_participation": share, "batch_size": 4, "batching": "eager"}
    one = train(
        AL2GD(0.1, p_team=0, p_server=0, steps=3), make(), "mclr", topology=Topology.build(NAMES, *labels), **kwargs
    )
    place = {name: k for k, name in enumerate(one.device_ids)}
    other = train(LocalTraining(0.1, 3), make(), "mclr", **kwargs)
    assert list(place) == list(other.device_ids)
    same(one, other)


@pytest.mark.parametrize("p_team", [0.0, 0.35])
def test_only_what_a_pull_needs_travels(p_team):
    """Per run of pulls a row up and the means down; between team and server only if it pulls to the server."""
    method, rounds = AL2GD(**COINS, p_team=p_team, p_server=0.2), 4
    expected = {"team-device": [0, 0], "server-team": [0, 0]}
    many = []
    for t in range(rounds):
        draws = [draw_uniform(key(3, "coin", t), k) for k in range(12)]
        text = "".join("t" if u < p_team else "s" if u < p_team + 0.2 else " " for u in draws)
        runs = text.split()
        many += runs
        calls = len(runs) + (text[-1] == " ")  # of which each tells its number, in 8 bytes
        for link, n, d in (("team-device", 9, 9 * 8), ("server-team", 3, 9 * 8)):
            pulled = [r for r in runs if link == "team-device" or "s" in r]
            rows = [("s" in r) + ("t" in r and link == "team-device") for r in pulled]
            expected[link][0] += n * d * len(pulled)
            expected[link][1] += n * (d * sum(rows) + 8 * (calls + len(pulled)))
    assert any(len(r) > 1 for r in many)
    run = train(method, make(), "mclr", rounds=rounds, topology=Topology.build(NAMES, TEAMS), **SETTINGS)
    found = {k: [run.ledger.read(link=k, direction=way) for way in ("up", "down")] for k in expected}
    assert found == expected


def test_al2gd_refuses_and_warns():
    wrongs: list[Any] = [{"p_team": -0.1}, {"p_server": 1.2}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="out of range; allowed: >= 0, <= 1"):
            AL2GD(**wrong)
    with pytest.raises(ValueError, match="p_team \\+ p_server = 1.2 leaves no local steps"):
        AL2GD(p_team=0.6, p_server=0.6)
    with pytest.raises(ValueError, match="form some, or use p_team = 0"):
        train(AL2GD(), make(), "mclr", rounds=1, **SETTINGS)
    deep = Topology.build(NAMES, TEAMS, np.array([0, 0, 1]))
    with pytest.raises(ValueError, match="got 2: use a tree of 2 or 3 tiers"):
        train(AL2GD(), make(), "mclr", rounds=1, topology=deep, **SETTINGS)
    with make_loop(AL2GD(0.1, 2.0, 0.5), make(), "mclr", topology=Topology.build(NAMES, TEAMS), **SETTINGS) as training:
        (told,) = training.algorithm.check(training_server(training))
    assert told.startswith("device_lr * device_pull / p_team = 2;")


# -- DemLearn -----------------------------------------------------------------------------------------


def dendrogram(points):
    """Average linkage by hand: a leaf is a name, a branch a pair."""
    trees = list(points)

    def leaves(tree):
        return [tree] if isinstance(tree, str) else [*leaves(tree[0]), *leaves(tree[1])]

    def apart(a, b):
        return np.mean([np.linalg.norm(points[i] - points[j]) for i in leaves(a) for j in leaves(b)])

    while len(trees) > 1:
        pairs = [(apart(a, b), k, m) for m, b in enumerate(trees) for k, a in enumerate(trees[:m])]
        _, k, m = min(pairs)
        trees = [t for j, t in enumerate(trees) if j not in (k, m)] + [(trees[k], trees[m])]
    return trees[0], leaves


def democratised(p, x0, rounds, device_steps, device_pull, levels, regroup_rounds, cluster_by, mix, mix_decay):
    w: dict[Any, Any] = dict.fromkeys(NAMES, x0)
    update = {c: np.zeros_like(x0) for c in NAMES}
    groups: list[list[list[str]]] = []
    mean: dict[Any, np.ndarray] = {}
    for t in range(rounds):
        present = p.present(0, "server", t, 0)
        beta = mix * mix_decay**t
        for i in present:
            mine = [tuple(g) for level in groups for g in level if i in g and len(g) > 1]
            start = w[i]
            if mine:
                total = sum(1 / len(g) for g in mine)
                start = (1 - beta) * w[i] + beta * sum(mean[g] / len(g) for g in mine) / total
            batches, theta = p.batches(i, t, 0), start
            for _ in range(device_steps):
                pull = sum(((theta - mean[g]) / len(g) for g in mine), np.zeros_like(x0))
                theta = theta - LR[i] * (p.grad(theta, i, next(batches)) + device_pull * pull)
            w[i], update[i] = theta, theta - start
        if present and (not groups or t % regroup_rounds == 0):
            tree, leaves = dendrogram(w if cluster_by == "models" else update)
            depth = [[tree]]
            while len(depth) < levels:
                depth.append([part for b in depth[-1] for part in ([b] if isinstance(b, str) else b)])
            groups = [[leaves(b) for b in level] for level in depth]
        mean = {tuple(g): np.mean([w[i] for i in g], 0) for level in groups for g in level} if present else mean
    everybody = next((v for g, v in mean.items() if len(g) == len(NAMES)), x0)
    weights = {i: dict.fromkeys(next(g for g in groups[-1] if i in g), 1.0) for i in NAMES} if groups else None
    return Models(everybody, w), weights


@pytest.mark.parametrize(
    ("part", "cluster_by", "levels", "pull"),
    [
        ("all", "models", 4, 0.5),
        ("all", "updates", 3, 0.0),
        ("some", "models", 1, 0.5),
        ("later", "models", 3, 0.5),
        ("later", "updates", 4, 0.5),
    ],
)
def test_demlearn(part, cluster_by, levels, pull):
    fields = {
        "device_steps": 3,
        "device_pull": pull,
        "levels": levels,
        "regroup_rounds": 2,
        "cluster_by": cluster_by,
        "mix": 0.8,
        "mix_decay": 0.9,
    }
    method = DemLearn(device_lr=tuple(LR.values()), **fields)
    run, _ = agree(method, democratised, part, rounds=6, **fields)
    groups = run.state["groups"].numpy()  # type: ignore[index, call-overload]
    assert groups.shape == (levels, len(NAMES))
    for lower, upper in pairwise(groups):  # nested
        assert all(len(np.unique(upper[lower == g])) == 1 for g in np.unique(lower))
    assert len(np.unique(groups[-1])) == 1


def test_groups_are_kept_between_regroupings():
    with make_loop(DemLearn(**STEPS, regroup_rounds=3), make(), "mclr", **SETTINGS) as training:
        groups = []
        for _ in range(7):
            training.step()
            groups.append(training.state["groups"].clone())  # type: ignore[index, call-overload]
    assert all(torch.equal(groups[k], groups[k + 1]) for k in (0, 1, 3, 4))
    assert not torch.equal(groups[2], groups[3]) or not torch.equal(groups[5], groups[6])


def test_demlearn_at_its_ends():
    """One level, all of it at the start and no pull: FedAvg. Nothing of it: LocalTraining."""
    kwargs: dict[str, Any] = {"rounds": 4, **SETTINGS}
    flat = train(DemLearn(**STEPS, device_pull=0, levels=1, mix_decay=1), make(), "mclr", **kwargs)
    other = train(FedAvg(**STEPS, weights="uniform"), make(), "mclr", **kwargs)
    assert other.global_ is not None
    close(flat.global_, other.global_.numpy())
    kwargs |= {"device_participation": 0.5}
    alone = train(DemLearn(**STEPS, device_pull=0, mix=0), make(), "mclr", **kwargs)
    same(alone, train(LocalTraining(**STEPS), make(), "mclr", **kwargs))


def test_demlearn_needs_two_devices():
    with pytest.raises(ValueError, match="needs 2 or more; got 1: add some, or use local"):
        train(DemLearn(), make(["d1"]), "mclr", rounds=1, **SETTINGS)


# -- all of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        FedAMP(0.1, 5, device_pull=0.1, attention_lr=0.5, sigma=5.0),
        HeurFedAMP(0.1, 5, self_weight=0.5, sigma=10.0),
        DemLearn(0.1, 5, levels=2, mix=0.3),
    ],
)
def test_true_groups_are_found(method):
    data = quadratic_clusters(8, 2, 6, seed=1, spread=2.0)
    run = train(method, data, "quadratic", rounds=15, dtype="float64", batching="eager")
    found = run.collaboration[15].match(np.repeat([0, 1], 4))
    assert found["adjusted_rand_index"] == 1
    assert found["contrast"] > 0


@pytest.mark.parametrize(
    "method",
    [
        FedAMP(device_steps=2, attention_lr=0.05, sigma=0.5),
        HeurFedAMP(device_steps=2),
        ValidationWeights(device_steps=2, candidates=2),
        AL2GD(p_team=0.3, p_server=0.2, steps=6),
        DemLearn(device_steps=2, cluster_by="updates"),
    ],
    ids=lambda method: type(method).__name__,
)
def test_contract(method):
    check_algorithm(method, federation=make() if isinstance(method, ValidationWeights) else None, batching="eager")
