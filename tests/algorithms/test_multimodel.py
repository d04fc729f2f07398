"""MFA-Rand and MFA-RR equal plain NumPy loops, share out the devices as they must, and leave each method as it is."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import oracles
from oracles import draw_bits, draw_uniform, node_key
from polytier import FedAvg, Federation, PerMFL, Run, Topology, check_algorithm, train
from polytier.algorithms import LocalTraining
from polytier.algorithms.multimodel import MFARR, MFARand, MultiModel
from polytier.data.synthetic import quadratics, tridiagonal
from polytier.engines.stacked import Stacked
from polytier.method.call import Clock
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.runs.assemble import assemble
from polytier.runs.loop import Loop, make_loop
from polytier.runs.spec import read_spec
from polytier.studies.gain import Gain, measure_gain
from polytier.tree.participation import Participation
from polytier.tree.random import key, signed

FEATURES, CLASSES = 2, 3
KINDS: list[type[MultiModel]] = [MFARand, MFARR]


def ragged(sizes: list[int], seed: int = 0, shares: tuple = (1, 0, 0)) -> Federation:
    rng = np.random.default_rng(seed)
    device = np.repeat(np.arange(len(sizes)), sizes)
    x, y = rng.normal(size=(len(device), FEATURES)), rng.integers(0, CLASSES, len(device))
    return Federation.from_arrays(x, y, device, num_classes=CLASSES, shares=shares)


def alike(method: Any, num_models: int) -> dict[str, Any]:
    return {f"model{m}": method for m in range(num_models)}


# -- the oracle ---------------------------------------------------------------------------------------


def train_model(problem: oracles.Problem, kind: type, num_models: int, t: int) -> dict[Any, int]:
    """trainModel[c] of Algorithms 2 and 3 for those that take part, from the definition of the draws.

    The devices that take part are sorted by 64 signed random bits, key "groups", round (of the frame's start), device;
    the i-th one is in group i mod M. MFA-Rand sorts the groups by draws of key "match", round: the m-th trains model m.
    """
    start = t - t % num_models if kind is MFARR else t
    base = key(problem.seed, "groups", start)
    order = sorted(problem.present(0, "server", start, 0), key=lambda c: signed(draw_bits(node_key(base, c), 0)))
    if kind is MFARR:
        u = t % num_models  # counted from 0: ((j + u - 2) mod M) + 1 loses its ones
        model_of = [(j + u) % num_models for j in range(num_models)]
    else:
        drawn = sorted(range(num_models), key=lambda j: draw_uniform(key(problem.seed, "match", t), j))
        model_of = [drawn.index(j) for j in range(num_models)]
    return {c: model_of[i % num_models] for i, c in enumerate(order)}


def mfa(p, x0, rounds, kind, num_models, lr, steps, weights, step):
    """Algorithm 1 with FedAvg for every model; `lr` is a function of the round."""
    models = [x0.copy() for _ in range(num_models)]
    for t in range(rounds):
        trained = train_model(p, kind, num_models, t)
        alpha = lr(t - t % num_models if kind is MFARR else t)
        for m in range(num_models):
            clients = [c for c in trained if trained[c] == m]
            update = {c: models[m] - oracles.sgd(p, c, models[m], t, 0, alpha, steps) for c in clients}
            if step == "proof" and weights == "uniform":
                models[m] = models[m] - sum(update.values()) / len(trained)  # Eq. 19
                continue
            weight = {c: p.samples(1, c) if weights == "samples" else 1 for c in clients}
            mean = sum(weight[c] * update[c] for c in clients) / sum(weight.values())
            models[m] = models[m] - mean * (len(clients) / len(trained) if step == "proof" else 1)
    return models


class Growing(oracles.Problem):
    """The batch size "grow:A/(B+t//M)", held for a frame."""

    rule: Any = None
    hold = 1
    seen: Any = None

    def batches(self, device, t, call, stream=""):
        held = t - t % self.hold
        wanted = max(32.0, (1 - self.rule(held)) * len(self.data[device][1]))
        self.batch_size = 2 ** int(np.ceil(np.log2(wanted)))
        self.seen.add(self.batch_size)
        yield from super().batches(device, t, call, stream)


def as_problem(federation: Federation, rule: dict, of: type = oracles.Problem, **more: Any) -> Any:
    names = federation.ids.tolist()
    data = {
        c: tuple(v.double().numpy() if v.is_floating_point() else v.numpy() for v in federation.device(k))
        for k, c in enumerate(names)
    }
    return of(data, [{"server": names}], CLASSES, participation=[{}, rule], **more)


PARTS: list[tuple[Any, dict]] = [(1.0, {}), (0.7, {"fraction": 0.7}), ("count:5", {"count": 5})]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_models", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("weights", "step", "lr"),
    [("samples", "average", 0.2), ("uniform", "proof", "2/(9+t)"), ("samples", "proof", "3/(11+t//2)")],
)
def test_oracle(kind, num_models, weights, step, lr):
    federation = ragged([3, 7, 1, 5, 2, 9, 4])  # 7 devices: no M above 1 divides them
    part, rule = PARTS[(num_models + len(weights) + len(step)) % 3]
    rates = {0.2: lambda t: 0.2, "2/(9+t)": lambda t: 2 / (9 + t), "3/(11+t//2)": lambda t: 3 / (11 + t // 2)}
    method = FedAvg(device_lr=lr, device_steps=3, weights=weights)
    compare(
        federation,
        kind(alike(method, num_models), step=step),
        as_problem(federation, rule, seed=5, batch_size=3),
        (kind, num_models, rates[lr], 3, weights, step),
        device_participation=part,
        seed=5,
        batch_size=3,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_of_growing_batches(kind):
    """N_s(t) of Theorem 2: at least 0.3 of the samples, then 0.53, 0.65, 0.72; it keeps its value for a frame."""
    federation = ragged([100, 40, 70, 90, 33], seed=1)
    problem = as_problem(federation, {}, Growing, seed=2)
    problem.rule, problem.hold, problem.seen = lambda t: 1.4 / (2 + t // 2), 3 if kind is MFARR else 1, set()
    compare(
        federation,
        kind(alike(FedAvg(0.3, 2), 3)),
        problem,
        (kind, 3, lambda t: 0.3, 2, "samples", "average"),
        rounds=8,
        seed=2,
        batch_size="grow:1.4/(2+t//2)",
    )
    assert problem.seen == {32, 64, 128}


def compare(federation: Federation, algorithm: Any, problem: Any, fields: tuple, rounds: int = 7, **more: Any) -> None:
    run = train(
        algorithm, federation, "mclr", rounds=rounds, dtype="float64", batching="eager", eval_every=1000, **more
    )
    x0 = run.context.objective.initial.numpy()
    expected = mfa(problem, x0, rounds, *fields)
    assert len(run.models) == len(expected)
    for part, row in zip(run.models.values(), expected, strict=True):
        assert part.global_ is not None
        assert np.abs(part.global_.numpy() - row).max() < 1e-10
        assert np.abs(row - x0).max() > 1e-3  # it did learn something


# -- one model alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_one_model_is_its_method(kind, part):
    method, federation = FedAvg(device_lr="1/(4+t)", device_steps=2), ragged([3, 5, 2, 6, 4], shares=(3, 0, 1))
    shared = {"rounds": 4, "device_participation": part, "batch_size": 2, "batching": "eager", "seed": 3}
    alone, wrapped = (
        train(method, federation, "mclr", **shared),
        train(kind({"a": method}), federation, "mclr", **shared),
    )
    assert torch.equal(alone.row(), wrapped.models["a"].row())
    for one, two in zip(alone.history, wrapped.models["a"].history, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in two.items() if k != "seconds"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_several_is_itself_alone_where_its_devices_take_part(kind):
    """PerMFL over teams beside FedAvg, which is flat: each is what it is alone, with the same devices each round."""
    federation = ragged([3, 5, 2, 6, 4, 3, 5, 2, 4])
    topology = Topology.build(federation.ids, np.arange(9) % 3)  # teams are not neighbours in the data
    methods = {"flat": FedAvg("1/(5+t)", 2), "tree": PerMFL(0.2, 0.1, device_steps=2, team_rounds=2)}
    shared = {"rounds": 5, "batch_size": 2, "seed": 7, "dtype": "float64", "batching": "eager", "eval_every": 1000}
    run = train(kind(methods), federation, "mclr", topology=topology, **shared)
    problem = as_problem(federation, {}, seed=7)
    trained = [train_model(problem, kind, 2, t) for t in range(5)]
    for m, (name, method) in enumerate(methods.items()):
        tree = topology if name == "tree" else topology.flat()
        leaves = tree.names[tree.leaf].tolist()
        devices = np.array([[t[c] == m for c in leaves] for t in trained])
        teams: Any = 1.0
        if name == "tree":
            parents = topology.parents[topology.leaf].numpy()
            teams = np.array([[row[parents == i].any() for i in range(topology.size(1))] for row in devices])
        assert 0 < devices.mean() < 1
        with make_loop(
            method,
            federation,
            "mclr",
            topology=tree,
            device_participation=devices,
            team_participation=teams,
            **{k: v for k, v in shared.items() if k != "rounds"},
        ) as training:
            training.context.hold = kind(methods).frame
            alone, part = training.run(5), run.models[name]
            assert torch.equal(alone.row(), part.row())
            if name == "tree":
                assert torch.equal(alone.team, part.team)  # type: ignore[arg-type]
                assert torch.equal(alone.personal, part.personal)  # type: ignore[arg-type]
            assert training.ledger.rounds == run.context.scopes[name].ledger.rounds


# -- who trains what ----------------------------------------------------------------------------------


@st.composite
def pools(draw):
    """A context with nothing in it but devices, and a wrapper of some models."""
    n = draw(st.integers(1, 40))
    part = draw(st.sampled_from([1.0, 1.0, 0.5, "count:7"]))
    taking = {1.0: n, 0.5: max(1, round(n / 2)), "count:7": min(7, n)}[part]
    num_models = draw(st.integers(1, taking))
    algorithm = draw(st.sampled_from(KINDS))(alike(FedAvg(), num_models))
    names = np.array(draw(st.permutations([f"d{k}" for k in range(n)])))
    rules = (Participation(), Participation.parse(part))
    nothing: Any = None
    context = Context(algorithm, Topology.build(names), nothing, nothing, nothing, rules, draw(st.integers(0, 2**32)))
    return algorithm, context, taking, draw(st.integers(0, 4)) * num_models


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(pools())
def test_groups(pool):
    algorithm, context, taking, first = pool
    num_models, trained, present = len(algorithm.models), Counter(), []
    for t in range(first, first + num_models):
        group, match = algorithm.groups(Children(context, 0, torch.zeros(1, dtype=torch.int64), Clock(t)))
        assert len(group) == context.topology.size(1)
        assert sorted(match.tolist()) == list(range(num_models))  # every group one model, every model one group
        sizes = torch.bincount(group[group >= 0], minlength=num_models)
        assert sizes.sum() == taking
        assert sizes.max() - sizes.min() <= 1
        present.append((group >= 0).tolist())
        trained.update((c, m) for m in range(num_models) for c in (group == match[m]).nonzero().flatten().tolist())
    if isinstance(algorithm, MFARR):  # the same devices all along, and each pair once a frame
        assert all(row == present[0] for row in present)
        devices = [c for c, there in enumerate(present[0]) if there]
        assert trained == Counter({(c, m): 1 for c in devices for m in range(num_models)})


def test_a_frame_in_the_ledgers():
    """What is drawn is what is done: by the bytes of three frames, every device trains each of four models once."""
    with make_loop(
        MFARR(alike(FedAvg(0.1, 1), 4)), ragged([2] * 10), "mclr", batching="eager", eval_every=1000
    ) as training:
        training.run(12)
        for part in training.context.parts:
            seen = torch.stack(part.ledger.by_round["server-device"]["down"]) > 0  # [rounds, devices]
            assert (seen.reshape(3, 4, 10).sum(1) == 1).all()


def test_partitions_are_fresh():
    """A new one every round in MFA-Rand, every frame in MFA-RR; in MFA-Rand the match is random too."""
    nothing: Any = None

    def of(kind: type[MultiModel], rounds: int) -> list[tuple]:
        algorithm = kind(alike(FedAvg(), 3))
        context = Context(algorithm, Topology.build(range(12)), nothing, nothing, nothing, (Participation(),) * 2, 1)
        nodes = [Children(context, 0, torch.zeros(1, dtype=torch.int64), Clock(t)) for t in range(rounds)]
        return [tuple(tuple(v.tolist()) for v in algorithm.groups(node)) for node in nodes]

    rand, turns = of(MFARand, 60), of(MFARR, 6)
    assert len({group for group, _ in rand}) == 60
    assert len({match for _, match in rand}) == 6  # all orders of three
    assert [group for group, _ in turns] == [turns[0][0]] * 3 + [turns[3][0]] * 3
    assert turns[0][0] != turns[3][0]
    # Table 3: S1 S2 S3, then S3 S1 S2, then S2 S3 S1
    assert [match for _, match in turns] == [(0, 1, 2), (2, 0, 1), (1, 2, 0)] * 2


# -- models that have nothing to do with each other ---------------------------------------------------


def unrelated(num_devices: int = 13) -> tuple[dict[str, Federation], dict[str, Any]]:
    """Three classes from four features; a linear target of two. Both can be learned."""
    rng = np.random.default_rng(8)
    device = np.repeat(np.arange(num_devices), 12)
    x, z = rng.normal(size=(len(device), 4)), rng.normal(size=(len(device), 2))
    classes = Federation.from_arrays(x, (x @ rng.normal(size=(4, 3))).argmax(1), device)
    numbers = Federation.from_arrays(z, (z @ [1.0, -2.0] + 0.5)[:, None], device)
    torch.manual_seed(0)
    return {"classes": classes, "numbers": numbers}, {"classes": "mclr", "numbers": nn.Linear(2, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_other_data_and_other_losses(kind):
    federations, models = unrelated()
    methods = {"classes": FedAvg(0.3, 5), "numbers": FedAvg(0.1, 3)}
    run = train(
        kind(methods), federations, models, rounds=12, batch_size={"classes": 8, "numbers": 4}, batching="eager"
    )
    first, last = (run.history[k]["models"] for k in (0, -1))
    assert last["classes"]["global"]["test"]["accuracy"] > first["classes"]["global"]["test"]["accuracy"] + 0.1
    assert last["numbers"]["global"]["test"]["loss"] < 0.1 * first["numbers"]["global"]["test"]["loss"]
    assert "accuracy" not in last["numbers"]["global"]["test"]
    mean = sum(figures["global"]["test"]["loss"] for figures in last.values()) / 2
    assert run.history[-1]["global"]["test"]["loss"] == pytest.approx(mean, rel=1e-12)


OBJECTIVES: dict[str, Any] = {}  # graphs are traced once for all


def mixed(method: Any, **settings: Any) -> Loop:
    """A logistic regression and a network, without teams and with them."""
    training = make_loop(
        method,
        unrelated()[0]["classes"],
        {"small": "mclr", "large": "dnn:5"},
        batch_size=4,
        batching="stacked",
        topology=Topology.build(np.arange(13), np.arange(13) % 3),
        device_participation=0.8,
        **settings,
    )
    for part in training.context.parts:
        part.objective = OBJECTIVES.setdefault(part.name, part.objective)
    return training


MIXED = MFARR({"small": FedAvg("2/(9+t)", 2), "large": PerMFL(0.2, 0.1, device_steps=2, team_rounds=2)})


def left(training: Loop) -> tuple[Any, list[Any], int]:
    """All that training has come to, but for the time it took."""
    tensors, _ = deepcopy(training.snapshot())
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in training.history]
    return tensors, history, training.context.all_steps


def same(one: tuple, two: tuple) -> None:
    assert one[0].keys() == two[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, two[0][name]), name
    assert one[1:] == two[1:]


def test_the_same_bits():
    """For any tile, with workers, and stopped in the middle of a frame and gone on with."""
    with mixed(MIXED, tile=1) as training:
        training.run(3)
        expected = left(training)
        half_way = expected[1][0]["models"]["small"]["global"]
        assert expected[1][-1]["models"]["small"]["global"]["train"]["loss"] < half_way["train"]["loss"]
    with mixed(MIXED, tile=1000) as training:
        training.run(1)
        stopped = deepcopy(training.snapshot())
        training.run(3)
        same(left(training), expected)
    with mixed(MIXED, tile=1000) as training:
        training.restore(*stopped)
        training.run(3)
        same(left(training), expected)
    with mixed(MIXED, tile=1, workers=2) as training:
        training.run(3)
        engine = training.context.engine
        assert isinstance(engine, Stacked)
        assert engine._processes is not None
        same(left(training), expected)


def test_saved_and_loaded(tmp_path):
    with mixed(MIXED) as training:
        run = training.run(2)
    run.save(tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    assert loaded.algorithm == run.algorithm
    assert loaded.rounds == 2
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for name, part in run.models.items():
        again = loaded.models[name]
        assert torch.equal(again.row(), part.row())
        assert torch.equal(again.model()(inputs), part.model()(inputs))
        assert [r["global"] for r in again.history] == [r["global"] for r in part.history]
        assert again.context.ledger.total() == part.context.ledger.total()
    tree, again = run.models["large"], loaded.models["large"]
    assert torch.equal(again.row(team=1), tree.row(team=1))
    assert torch.equal(again.row(device=4), tree.row(device=4))
    for each in (run, loaded):
        with pytest.raises(ValueError, match="several models, small, large; use run.models"):
            each.model()


def test_the_contract():
    check_algorithm(MFARR({"flat": FedAvg(0.1, 2), "tree": PerMFL(0.1, 0.1, device_steps=2, team_rounds=2)}))


# -- bad input ----------------------------------------------------------------------------------------


def start(algorithm: Any, federation: Any = None, model: Any = "mclr", **settings: Any) -> None:
    make_loop(algorithm, federation or ragged([2, 2, 2]), model, batching="eager", **settings).close()


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_models(kind):
    with pytest.raises(ValueError, match="4 models need at least as many devices per round, one each; there are 3"):
        start(kind(alike(FedAvg(), 4)))
    start(kind(alike(FedAvg(), 3)))
    with pytest.raises(ValueError, match="there are 2"):
        start(kind(alike(FedAvg(), 3)), device_participation="count:2")


def test_what_the_models_need():
    two = MFARR(alike(FedAvg(), 2))
    data = ragged([2, 2, 2])
    with pytest.raises(ValueError, match="the data of model0 and model1 have different devices"):
        start(two, {"model0": data, "model1": ragged([2, 2])})
    teams = [replace(data, team=np.array(team)) for team in ([0, 0, 1], [0, 1, 1])]
    both = MFARR({"model0": PerMFL(), "model1": PerMFL()})
    with pytest.raises(ValueError, match="the data of model0 and model1 have different teams"):
        start(both, {"model0": teams[0], "model1": teams[1]})
    with pytest.raises(ValueError, match="federation is given for model0, other; the models are model0, model1"):
        start(two, {"model0": data, "other": data})
    with pytest.raises(ValueError, match="model is given for model0; the models are model0, model1"):
        start(two, data, {"model0": "mclr"})
    with pytest.raises(ValueError, match="l2 is given for a; there is one model"):
        start(FedAvg(), l2={"a": 0.1})


def test_what_can_be_wrapped():
    with pytest.raises(ValueError, match="model 'a' needs a method of one model; got MFARand"):
        MFARR({"a": MFARand(alike(FedAvg(), 2))})
    with pytest.raises(ValueError, match="got str"):
        MFARR({"a": "fedavg"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="name at least one"):
        MFARR({})
    with pytest.raises(ValueError, match="letters, digits, - and _"):
        MFARR({"a b": FedAvg()})
    with pytest.raises(ValueError, match="step = 'sum'; allowed: average | proof"):
        MFARR(alike(FedAvg(), 2), step="sum")


TABLES = """
algorithm = "mfa-rr"
devices = 6
rounds = 1
[models.one]
data = "synthetic"
[models.two]
algorithm = "permfl"
{more}
"""


def test_tables_of_models(tmp_path):
    def prepared(more: str, **flags: Any) -> dict[str, Any]:
        (tmp_path / "run.toml").write_text(TABLES.format(more=more))
        with Loop.of(read_spec(str(tmp_path / "run.toml"), {"batching": "eager", **flags})) as loop:
            methods = {name: type(method).__name__ for name, method in loop.algorithm.parts().items()}
        return {**methods, "set": loop.spec.models["two"]["set"]["device_steps"]}  # type: ignore[index]

    assert prepared("set = {device_steps = 3}") == {"one": "FedAvg", "two": "PerMFL", "set": 3}
    for more, advice in {
        "rounds = 3": "no setting of the model two 'rounds'",
        "bach_size = 3": "no setting of the model two 'bach_size'; did you mean 'batch_size'",
        "set = {device_step = 3}": "no field of permfl 'device_step'; did you mean 'device_steps'",
        "set = {device_lr = -1.0}": "device_lr = -1.0 is out of range",
        "[models.two.set.team_lr]\nclub = 0.1": "no tier for team_lr 'club'",
    }.items():
        with pytest.raises(ValueError, match=advice):
            prepared(more, teams="2")
    with pytest.raises(ValueError, match="7 models need at least as many devices"):
        assemble(read_spec("mfa-rand", {"models": 7, "devices": 6, "batching": "eager"}))
    with pytest.raises(ValueError, match="models = 0; at least one model is trained"):
        assemble(read_spec("mfa-rand", {"models": 0}))
    with pytest.raises(ValueError, match="fedavg trains one model"):
        assemble(read_spec("fedavg", {"models": 2}))


# -- the strongly convex problem, and the gain --------------------------------------------------------


def test_tridiagonal():
    n, p, mu = 5, 3, 0.01
    federation = tridiagonal(n, p, mu)
    x, b = federation.x.numpy(), federation.y.numpy()
    d = n * p + 1
    assert x.shape == (n, d, d)
    for k in range(1, n + 1):  # Eq. 7 and 8, in the paper's numbers
        expected = mu * np.eye(d)
        for i in range((k - 1) * p + 1, k * p + 1):  # B_k: (w_i - w_{i+1})^2 for the links of the chain
            link = np.zeros(d)
            link[i - 1], link[i] = 1, -1
            expected += np.outer(link, link)
        if k == 1:
            expected[0, 0] += 1
        if k == n:
            expected[-1, -1] += 1
        assert np.array_equal(x[k - 1], expected)
        assert np.array_equal(b[k - 1], np.eye(d)[0] * (k == 1))
    a = 2 * np.eye(d) - np.eye(d, k=1) - np.eye(d, k=-1)
    assert np.abs(x.sum(0) - n * mu * np.eye(d) - a).max() < 1e-12
    best = np.linalg.solve(x.mean(0), b.mean(0))
    assert np.abs(a @ best + n * mu * best - np.eye(d)[0]).max() < 1e-12
    w = np.zeros(d)
    for _ in range(5):
        w = w - 0.3 * ((a / n + mu * np.eye(d)) @ w - np.eye(d)[0] / n)
    value = 0.5 * (w @ a @ w - 2 * w[0]) / n + 0.5 * mu * w @ w  # Eq. 4
    run = train(FedAvg(0.3, 1), federation, "quadratic", rounds=5, dtype="float64", eval_every=5, batching="eager")
    assert np.abs(run.row().numpy() - w).max() < 1e-12
    assert run.history[-1]["global"]["train"]["loss"] == pytest.approx(value, rel=1e-12)
    for bad in ((1, 4, 0.1), (2, 0, 0.1), (2, 4, 0.0)):
        with pytest.raises(ValueError, match="at least 2 devices|mu above 0"):
            tridiagonal(*bad)


QUAD: dict[str, Any] = {"dtype": "float64", "batching": "eager"}


def test_gain_by_hand():
    """T_1 and T_M found by hand in runs of their own; the models are other problems with other steps."""
    data = {"a": quadratics(6, 2, seed=0), "b": quadratics(6, 3, seed=1)}
    methods = {"a": FedAvg(0.2, 1), "b": FedAvg(0.3, 2)}
    seen: list[str] = []
    gain = measure_gain(
        lambda seed: make_loop(MFARR(methods), data, "quadratic", seed=seed, **QUAD),
        4,
        [3, 4],
        "train",
        progress=seen.append,
    )
    assert len(seen) == 4
    for seed in (3, 4):
        alone = {k: train(m, data[k], "quadratic", rounds=4, **QUAD).history[-1] for k, m in methods.items()}
        targets = {k: record["global"]["train"]["loss"] for k, record in alone.items()}
        assert gain.targets[seed] == targets
        history = train(MFARR(methods), data, "quadratic", rounds=20, seed=seed, **QUAD).history
        good = [all(r["models"][k]["global"]["train"]["loss"] <= targets[k] for k in data) for r in history]
        assert gain.rounds[seed] == good.index(True) + 1
        assert gain.gains[seed] == 2 * 4 / (good.index(True) + 1)


def test_gain_of_models_alike(monkeypatch):
    """One run alone serves all that are alike; accuracy counts where there is some."""
    singles = []
    real = Loop.run

    def run(self: Loop, rounds: int, *args: Any, **more: Any) -> Run:
        singles.append(rounds) if not self.context.scopes else None
        return real(self, rounds, *args, **more)

    monkeypatch.setattr(Loop, "run", run)
    federations, _ = unrelated(6)
    other = {"a": FedAvg(0.3, 2), "b": FedAvg(0.3, 2), "c": FedAvg(0.2, 2)}
    gain = measure_gain(
        lambda seed: make_loop(MFARand(other), federations["classes"], "mclr", batching="eager"), 4, [0], "train"
    )
    assert singles == [4, 4]
    assert gain.targets[0]["a"] == gain.targets[0]["b"]
    assert 0 < gain.targets[0]["c"] <= 1
    assert gain.rounds[0] is not None
    assert gain.mean == 12 / gain.rounds[0]
    assert gain.interval is None


def test_gain_is_one_for_one_model_and_not_reached_if_given_up():
    one = MFARR({"a": FedAvg(0.1, 2)})
    gain = measure_gain(
        lambda seed: make_loop(one, quadratics(4, 2), "quadratic", seed=seed, **QUAD), 5, [0, 1], "train"
    )
    assert gain.rounds == {0: 5, 1: 5}
    assert (gain.mean, gain.deviation, gain.interval) == (1, 0, (1, 1))
    two = MFARR(alike(FedAvg(0.1, 2), 2))
    lost = measure_gain(
        lambda seed: make_loop(two, quadratics(4, 2), "quadratic", **QUAD), 5, [0], "train", most_rounds=2
    )
    assert lost.rounds == {0: None}
    assert (lost.gains, lost.mean, lost.interval) == ({}, None, None)
    assert str(lost) == "not reached in 2 rounds by 1 of 1 seeds"


def test_gain_of_a_configuration():
    """As the command line has it: the seed is a setting like any other, and settles the data too."""
    given = {"models": 2, "devices": 6, "batching": "eager", "set": {"device_steps": 2, "device_lr": 0.1}}
    gain = measure_gain(lambda seed: Loop.of(read_spec("mfa-rr", {**given, "seed": seed})), 2, [1, 2])
    assert gain.targets[1] != gain.targets[2]
    spec = read_spec("fedavg", {k: v for k, v in given.items() if k != "models"} | {"seed": 2})
    with Loop.of(spec) as alone:
        found = alone.run(2).history[-1]["global"]["test"]["accuracy"]
    assert gain.targets[2] == {"model1": found, "model2": found}


def test_interval_of_gains():
    """Student's t with 3 degrees of freedom: 3.182446."""
    gain = Gain(2, 30, 600, {}, {0: 20, 1: 30, 2: 60, 3: 15, 4: None})
    assert gain.gains == {0: 3, 1: 2, 2: 1, 3: 4}
    assert gain.mean == 2.5
    assert gain.deviation == pytest.approx(np.sqrt(5 / 3))
    half = 3.182446305284263 * np.sqrt(5 / 3) / 2
    assert gain.interval == pytest.approx((2.5 - half, 2.5 + half), rel=1e-9)
    assert str(gain) == "2.50 (0.45 .. 4.55); not reached in 600 rounds by 1 of 5 seeds"


def test_what_a_gain_needs():
    def measure(algorithm: Any, rounds: int = 2, seeds: Any = (0,), **more: Any) -> None:
        measure_gain(
            lambda seed: make_loop(algorithm, ragged([3, 3, 3]), "mclr", batching="eager"), rounds, seeds, **more
        )

    two = MFARR(alike(FedAvg(), 2))
    with pytest.raises(ValueError, match="no samples in the split test; try train"):
        measure(two)
    with pytest.raises(ValueError, match="the method of b has no global model"):
        measure(MFARR({"a": FedAvg(), "b": LocalTraining()}), split="train")
    with pytest.raises(ValueError, match="FedAvg trains one model"):
        measure(FedAvg(), split="train")
    with pytest.raises(ValueError, match="at least 1 round; got 0"):
        measure(two, 0)
    with pytest.raises(ValueError, match="at least one seed"):
        measure(two, seeds=())
