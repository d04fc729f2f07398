"""What must hold for any federation, tree and draw."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from polytier import ALGORITHMS, Diverged, FedAvg, Federation, HierFedAvg, PerMFL, PFedMe, Topology, train
from polytier.messages.codec import CODECS
from polytier.models.losses import cross_entropy
from polytier.runs.loop import Callback, make_loop
from polytier.stack.objective import key_dropouts
from polytier.tree import random
from polytier.tree.participation import Participation

PLAIN = sorted(name for name, codec in CODECS.items() if not codec.change)  # the others: test_change_codecs.py
MANY = settings(deadline=None, max_examples=40, derandomize=True, database=None)
FEW = settings(
    deadline=None, max_examples=6, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
PERMFL = PerMFL(0.1, 0.1, device_steps=2, team_rounds=3)


def make(sizes, seed=0, ids=None, order=None) -> Federation:
    """Devices of these training sizes and one test sample each; `order` lists them in another order."""
    rng = np.random.default_rng(seed)
    names = list(range(len(sizes))) if ids is None else list(ids)
    data = [(rng.normal(size=(s + 1, 2)), rng.integers(0, 3, s + 1)) for s in sizes]
    order = range(len(sizes)) if order is None else order
    ends = np.cumsum([len(data[k][1]) for k in order])
    starts = ends - [len(data[k][1]) for k in order]
    return Federation(
        torch.from_numpy(np.concatenate([data[k][0] for k in order])),
        torch.from_numpy(np.concatenate([data[k][1] for k in order])),
        torch.from_numpy(np.stack([starts, ends - 1, ends - 1, ends], 1)),
        np.array([names[k] for k in order]),
        num_classes=3,
    )


def quick(algorithm, federation, **more):
    """Without traces: what is tested here is not the objective."""
    options = {"rounds": 2, "dtype": "float64", "batching": "eager", "batch_size": 3, **more}
    return train(algorithm, federation, "mclr", **options)


class Watch(Callback):
    """The ledger's and the memory's story, round by round."""

    def __init__(self) -> None:
        self.took_part, self.memory, self.calls = [], [], []

    def on_start(self, training) -> None:
        deliver = training.context.engine.deliver

        def watched(call):
            if not call.quiet:
                self.calls.append((call.clock.round, call.tier, call.ids.tolist()))
            return deliver(call)

        training.context.engine.deliver = watched

    def on_round(self, training, record) -> None:
        self.took_part.append({t: m.clone() for t, m in training.ledger.took_part.items()})
        self.memory.append({k: v.clone() for k, v in training.context.memory.state().items()})


# -- draws -----------------------------------------------------------------------------------------------


def test_uniform_draws_look_uniform():
    nodes = random.node_keys(random.key(0, "test"), torch.arange(400))
    draws = random.uniform(nodes, 250).flatten()  # 100,000
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    counts = torch.histc(draws, 100, 0, 1)
    chi2 = float(((counts - 1000) ** 2 / 1000).sum())
    assert 50 < chi2 < 160  # 99 degrees of freedom
    grid = random.uniform(nodes, 2)
    for other in (
        random.uniform(random.node_keys(random.key(1, "test"), torch.arange(400)), 2),
        grid.roll(1, 0),
        grid.flip(1),
    ):
        correlation = np.corrcoef(grid[:, 0], other[:, 0])[0, 1]
        assert abs(correlation) < 0.15


@MANY
@given(st.integers(0, 2**63), st.lists(st.one_of(st.integers(0, 99), st.text(max_size=3)), max_size=3))
def test_torch_and_python_draw_the_same(seed, parts):
    base = random.key(seed, *parts)
    z = torch.tensor([random.signed(base)])
    assert int(random.mix(z)) == random.signed(random.mix_int(base))
    assert base != random.key(seed + 1, *parts)
    assert base != random.key(seed, *parts, 0)


@MANY
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**32))
def test_shuffles_are_permutations(sizes, seed):
    keys = random.node_keys(seed, torch.arange(len(sizes)))
    orders = random.shuffled(keys, torch.tensor(sizes))
    for order, size in zip(orders, sizes, strict=True):
        assert sorted(order[:size].tolist()) == list(range(size))


def test_shuffles_are_even():
    """Every order of three comes about equally often."""
    orders = random.shuffled(random.node_keys(7, torch.arange(6000)), torch.full((6000,), 3))
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert ((counts - 1000).abs() < 120).all()


@MANY
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.one_of(st.floats(0.01, 1).map(lambda f: {"fraction": f}), st.integers(1, 9).map(lambda c: {"count": c})),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_how_many_take_part(children, rule, base, limited):
    position = torch.repeat_interleave(torch.arange(len(children)), torch.tensor(children))
    kids = torch.arange(len(position))
    table = None
    if limited:
        table = random.uniform(random.node_keys(base + 1, kids), 1).T < 0.6
    mask = Participation(**rule, table=table).draw(base, 0, kids, kids, position, len(children))
    for k, n in enumerate(children):
        quota = max(1, round(rule["fraction"] * n)) if "fraction" in rule else min(n, rule["count"])
        there = n if table is None else int(table[0][position == k].sum())
        assert int(mask[position == k].sum()) == min(quota, there)
    if table is not None:
        assert not (mask & ~table[0]).any()


def test_everybody_is_drawn_equally_often():
    kids = torch.arange(10)
    rule = Participation(fraction=0.3)
    zero = torch.zeros(10, dtype=torch.int64)
    drawn = [rule.draw(random.key(0, "participation", t, 0), t, kids, kids, zero, 1) for t in range(2000)]
    share = torch.stack(drawn).double().mean(0)
    assert ((share - 0.3).abs() < 0.04).all()


def test_every_untargeted_call_draws_anew():
    """PerMFL's team rounds see different devices, and so do its rounds and its teams."""
    watch = Watch()
    federation = make([3] * 20)
    topology = Topology.build(federation.ids, np.arange(20) % 2)
    quick(PERMFL, federation, topology=topology, device_participation=0.5, callbacks=[watch])
    devices = [tuple(ids) for _, tier, ids in watch.calls if tier == 2]
    assert len(devices) == 6  # 2 rounds of 3 team rounds
    assert len(set(devices)) == 6
    assert {len(ids) for ids in devices} == {10}
    first = [{i - 10 * k for i in devices[0] if i // 10 == k} for k in (0, 1)]
    assert first[0] != first[1]


@FEW
@given(st.permutations(range(6)), st.sampled_from(["permfl", "pfedme", "fedavg-ft"]))
def test_the_order_of_devices_does_not_matter(order, name):
    kind: type = ALGORITHMS[name]
    algorithm = kind(
        **{k: 2 for k in ("device_steps", "team_rounds", "local_rounds") if k in kind.__dataclass_fields__}
    )
    sizes, team = [3, 5, 2, 7, 4, 1], np.array([0, 1, 0, 1, 1, 0])
    a, b = make(sizes), make(sizes, order=order)
    shared = {"device_participation": 0.5}
    one = quick(algorithm, a, topology=Topology.build(a.ids, team), **shared)
    two = quick(algorithm, b, topology=Topology.build(b.ids, team[list(order)]), **shared)
    torch.testing.assert_close(one.global_, two.global_, rtol=0, atol=1e-10)
    assert one.personal is not None
    torch.testing.assert_close(one.personal[list(order)], two.personal, rtol=0, atol=1e-10)


# -- who keeps what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PERMFL, HierFedAvg(0.1, 2, team_rounds=2), PFedMe(0.1, 0.1, local_rounds=2)])
def test_the_absent_keep_their_models(algorithm):
    watch = Watch()
    federation = make([3, 5, 2, 7, 4, 6, 2, 3])
    topology = Topology.build(federation.ids, [0, 0, 1, 1, 2, 2, 3, 3])
    options = {"team_participation": 0.5, "device_participation": 0.5, "rounds": 6, "topology": topology}
    run = quick(algorithm, federation, callbacks=[watch], **options)
    changed = 0
    for before, after, took_part in zip(watch.memory, watch.memory[1:], watch.took_part[1:], strict=False):
        for key in before:
            if key.endswith("own/model/rows"):
                there = took_part[int(key[0])]
                assert torch.equal(before[key][~there], after[key][~there])
                changed += int((before[key][there] != after[key][there]).any())
    assert changed > 0
    assert run.evaluation is not None
    assert len(run.evaluation.by_device("global", "test", "loss")) == len(federation)  # not only those who took part


def test_evaluation_covers_all_devices():
    """Those who never took part are judged with the model that all started from."""
    federation = make([3, 5, 2, 7])
    table = np.array([[1, 0, 1, 0]])
    run = quick(PERMFL, federation, topology=Topology.build(federation.ids, [0, 0, 1, 1]), device_participation=table)
    assert run.personal is not None
    moved = (run.personal != run.context.objective.initial).any(1)
    assert moved.tolist() == [True, False, True, False]
    assert run.evaluation is not None
    values = run.evaluation.by_device("personal", "test", "loss")
    for k in range(4):
        x, y = federation.device(k, "test")
        with torch.no_grad():
            loss = float(cross_entropy(run.as_module(run.personal[k])(x), y).mean())
        assert values[k] == pytest.approx(loss, abs=1e-12)


def test_a_team_that_nobody_answers_keeps_the_model_it_got():
    """A table leaves team 1 without devices: its steps pull to its parent alone, from where it already is."""
    federation = make([3, 5, 2, 7])
    topology = Topology.build(federation.ids, [0, 0, 1, 1])
    table = np.array([[1, 1, 0, 0]])
    for algorithm in (PERMFL, HierFedAvg(0.1, 2, team_rounds=2)):
        run = quick(algorithm, federation, topology=topology, device_participation=table, rounds=1)
        assert run.team is not None
        assert torch.equal(run.team[1], run.context.objective.initial)
        assert not torch.equal(run.team[0], run.context.objective.initial)
    nobody = quick(FedAvg(0.1, 2), federation, device_participation=np.zeros((1, 4)), rounds=2)
    assert torch.equal(nobody.row(), nobody.context.objective.initial)
    absent = np.array([[1, 0]])
    run = quick(PERMFL, federation, topology=topology, team_participation=absent, rounds=2)
    assert run.ledger.ever[1].tolist() == [True, False]


def test_pfedmes_personal_model_is_theta_not_w():
    """What a device sends up is w, which goes only eta lambda of the way to theta."""
    federation = make([6, 6])
    algorithm = PFedMe(0.1, 0.01, 1.0, 2.0, device_steps=30, local_rounds=1)
    run = quick(algorithm, federation, batch_size=99, rounds=1)
    start = run.context.objective.initial
    assert run.personal is not None
    theta = run.personal.mean(0)
    # w_i = x - eta lambda (x - theta_i), averaged with beta 1: x1 - x = eta lambda (mean theta - x)
    torch.testing.assert_close(run.row() - start, 0.01 * 2.0 * (theta - start), rtol=1e-9, atol=1e-12)
    assert (theta - start).norm() > 10 * (run.row() - start).norm()


def test_the_anchor_is_not_the_live_model():
    """With a strong pull a device stays near its team's model; were the anchor theta itself, nothing would hold it."""
    federation = make([6, 6])
    free = quick(PerMFL(0.05, 0.1, device_pull=0.0, device_steps=40, team_rounds=1), federation, rounds=1)
    held = quick(PerMFL(0.05, 0.1, device_pull=10.0, device_steps=40, team_rounds=1), federation, rounds=1)
    start = held.context.objective.initial
    assert held.personal is not None
    assert free.personal is not None
    assert (held.personal - start).norm() < 0.3 * (free.personal - start).norm()


def test_steps_one_a_node():
    """A device that may not move (a step of 1e-300) stays; the field follows the federation's order, not the tree's."""
    federation = make([3, 5, 2, 7], ids=["p", "q", "r", "s"])
    topology = Topology.build(federation.ids, ["b", "a", "b", "a"])  # the tree has q, s, p, r
    run = quick(
        PerMFL((0.1, 1e-300, 0.1, 0.1), (0.1, 0.2), device_steps=2, team_rounds=1),
        federation,
        topology=topology,
        rounds=1,
    )
    assert run.personal is not None
    stays = (run.personal == run.context.objective.initial).all(1)
    assert stays.tolist() == [False, True, False, False]
    with pytest.raises(ValueError, match="device_lr has 3 numbers; give 4, one per node, or one number for all"):
        quick(FedAvg((0.1, 0.1, 0.1), 1), federation)


def test_the_federation_is_left_as_it_was():
    federation = make([3, 5, 2, 7])
    before = copy.deepcopy(federation)
    for name in ("permfl", "pfedme", "local", "fedavg-ft"):
        kind: type = ALGORITHMS[name]
        quick(kind(device_steps=2), federation, rounds=1)
    for field in ("x", "y", "bounds"):
        assert torch.equal(getattr(federation, field), getattr(before, field))


# -- messages --------------------------------------------------------------------------------------------


@MANY
@given(st.sampled_from(PLAIN), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99))
def test_codecs_bring_back_what_they_promise(name, shape, seed):
    codec, rng = CODECS[name], np.random.default_rng(seed)
    for rows in (
        torch.from_numpy(rng.normal(size=(2, *shape))),
        torch.from_numpy(rng.normal(size=(2, *shape)).astype(np.float32)),
        torch.from_numpy(rng.integers(-9, 9, (2, *shape))),
    ):
        through = codec.through(rows)
        for k in range(2):
            message = codec.encode(rows[k])
            back = codec.decode(message, rows[k])
            assert len(message) == int(codec.nbytes(rows)[k])
            assert torch.equal(back, through[k])
            assert back.dtype == rows.dtype
        if not rows.is_floating_point() or rows.dtype.itemsize <= codec.dtype.itemsize:
            assert torch.equal(through, rows)
    with pytest.raises(ValueError, match="got a message of .* bytes, expected"):
        codec.decode(b"abc", torch.zeros(7))


def test_float16_halves_the_bytes_and_changes_the_models():
    federation = make([3, 5, 2, 7])
    topology = Topology.build(federation.ids, [0, 0, 1, 1])
    exact = quick(PERMFL, federation, topology=topology, dtype="float32")
    half = quick(PERMFL, federation, topology=topology, dtype="float32", codec="float16")
    for link, ways in exact.ledger.total().items():
        for way, amount in ways.items():
            assert half.ledger.total()[link][way] * 2 == amount
    assert not torch.equal(exact.row(), half.row())
    torch.testing.assert_close(exact.row(), half.row(), rtol=0, atol=5e-3)


def test_the_ledger_equals_a_count_by_hand():
    """Two rounds of 2 of 4 teams, each with 2 of its 3 devices in 3 team rounds; a model is 9 numbers of 4 bytes."""
    federation = make([3] * 12)
    topology = Topology.build(federation.ids, np.arange(12) // 3)
    run = quick(
        PERMFL, federation, topology=topology, dtype="float32", team_participation=0.5, device_participation=0.7
    )
    model = 9 * 4
    up_and_down = {"server-team": 2 * 2 * model, "team-device": 2 * 2 * 3 * 2 * model}
    assert run.ledger.total() == {link: {"down": b, "up": b} for link, b in up_and_down.items()}
    assert [r["bytes"]["team-device"]["up"] for r in run.history] == [2 * 3 * 2 * model] * 2
    assert all(r["participants"]["team"] == 2 for r in run.history)
    assert run.context.device_steps == 2 * 2 * 3 * 2 * 2
    local = quick(ALGORITHMS["local"](device_steps=1), federation)  # type: ignore[call-arg]
    assert local.ledger.total() == {"server-device": {"down": 0, "up": 0}}


# -- batches, dropout, divergence ------------------------------------------------------------------------


def test_padded_batches_equal_the_plain_mean_over_own_samples():
    federation = make([1, 3, 5, 8])
    with make_loop(FedAvg(), federation, nn.Linear(2, 3), dtype="float64", batching="stacked") as training:
        objective, batches = training.context.objective, training.context.batches
        theta = objective.initial + torch.linspace(-1, 1, 4).unsqueeze(1)
        found = objective.grad(theta, batches.whole(torch.arange(4)))
    for k in range(4):
        row = theta[k].clone().requires_grad_()
        x, y = federation.device(k)
        loss = nn.functional.cross_entropy(x @ row[:6].reshape(3, 2).T + row[6:], y)
        torch.testing.assert_close(found[k], torch.autograd.grad(loss, row)[0], rtol=0, atol=1e-12)


def dropped() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


def test_dropout_is_the_same_in_any_tile_and_off_in_evaluation():
    federation = make([3, 5, 2, 7])
    settings = {"rounds": 2, "dtype": "float64", "batch_size": 3}
    runs = [train(FedAvg(0.5, 3), federation, dropped(), tile=tile, **settings) for tile in (1, 4)]
    assert torch.equal(runs[0].row(), runs[1].row())
    plain = dropped()
    plain[2] = nn.Identity()
    without = train(FedAvg(0.5, 3), federation, plain, **settings)
    assert not torch.equal(runs[0].row(), without.row())  # it was on in training
    module = runs[0].model()
    assert runs[0].evaluation is not None
    values = runs[0].evaluation.by_device("global", "test", "loss")
    for k in range(4):
        x, y = federation.device(k, "test")
        with torch.no_grad():
            loss = float(cross_entropy(module(x), y).mean())
        assert values[k] == pytest.approx(loss, abs=1e-12)


def test_a_diverging_run_names_round_tier_and_nodes():
    federation = make([3, 5, 2, 7], ids=["p", "q", "r", "s"])
    steps = (0.1, 1e200, 0.1, 0.1)
    with pytest.raises(Diverged, match="round 1: the model of device q is no longer finite; lower device_lr") as caught:
        quick(FedAvg(steps, 3), federation, l2=1.0)
    assert (caught.value.round, caught.value.tier, caught.value.nodes) == (1, "device", ["q"])
    topology = Topology.build(federation.ids, ["a", "b", "a", "b"])
    with pytest.raises(Diverged, match="lower team_lr") as caught:
        quick(PerMFL(100.0, (0.1, 1.7e308), device_steps=1, team_rounds=1), federation, topology=topology)
    assert (caught.value.tier, caught.value.nodes) == ("team", ["b"])
    with pytest.raises(Diverged, match="model of server is no longer finite; lower server_lr") as caught:
        quick(PerMFL(100.0, 0.1, 1.7e308, device_steps=1), make([3, 4]))
    assert (caught.value.round, caught.value.tier) == (1, "server")


def test_a_run_is_repeated_by_its_seed():
    federation = make([3, 5, 2, 7])
    a, b, c = (quick(FedAvg(0.1, 2), federation, seed=seed, device_participation=0.5) for seed in (1, 1, 2))
    assert torch.equal(a.row(), b.row())
    assert not torch.equal(a.row(), c.row())
    torch.rand(3)  # no generator of torch's own is used
    d = quick(FedAvg(0.1, 2), federation, seed=1, device_participation=0.5)
    assert torch.equal(a.row(), d.row())


def test_training_goes_on_where_it_stopped():
    federation = make([3, 5, 2, 7])
    options = {"dtype": "float64", "batching": "eager", "batch_size": 3, "device_participation": 0.5}
    whole = train(PERMFL, federation, "mclr", rounds=4, **options)
    with make_loop(PERMFL, federation, "mclr", **options) as training:
        training.run(2)
        part = training.run(4)
    assert torch.equal(whole.row(), part.row())
    assert [r["global"] for r in whole.history] == [r["global"] for r in part.history]


@pytest.mark.parametrize(("kind", "shape"), [(torch.nn.Dropout1d, (2, 4, 5)), (torch.nn.Dropout2d, (2, 4, 3, 3))])
def test_channel_dropout_drops_whole_channels(kind, shape):
    module = torch.nn.Sequential(torch.nn.Identity(), kind(0.5))
    (layer,) = key_dropouts(module)
    layer.key = torch.arange(shape[0])
    kept = module(torch.ones(shape)).flatten(2)
    assert ((kept == 0).all(2) | (kept == 2).all(2)).all()
    assert (kept == 0).any()
    assert (kept == 2).any()
