"""Units of the core: the tree, memory, checkpoints, fields, answers, settings."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polytier import Algorithm, Children, FedAvg, Federation, HierFedAvg, LocalProblem, PerMFL, Rows, Topology, train
from polytier.messages.ledger import Ledger
from polytier.method.memory import Memory
from polytier.method.parameters import describe_range
from polytier.runs import checkpoint as checkpoints
from polytier.runs.loop import make_loop
from polytier.stack.rows import Answers, fold, pack, unpack
from polytier.tree.participation import Participation
from polytier.tree.topology import nested, starts_of


def small(num_devices: int = 4, seed: int = 0) -> Federation:
    rng = np.random.default_rng(seed)
    device = np.repeat(np.arange(num_devices), 4)
    x, y = rng.normal(size=(len(device), 2)), rng.integers(0, 3, len(device))
    return Federation.from_arrays(x, y, device, num_classes=3)


QUICK: dict[str, Any] = {"rounds": 2, "dtype": "float64", "batching": "eager", "batch_size": 3}


# -- the tree -----------------------------------------------------------------------------------------


def test_siblings_are_neighbours_and_names_follow():
    tree = Topology.build(["p", "q", "r", "s", "t"], ["y", "x", "z", "x", "y"], [1, 0, 0])  # x in 1, y and z in 0
    assert [names.tolist() for names in tree.names] == [["server"], [0, 1], ["y", "z", "x"], ["p", "t", "r", "q", "s"]]
    assert [parents.tolist() for parents in tree.parents] == [[0], [0, 0], [0, 0, 1], [0, 0, 1, 2, 2]]
    assert tree.order.tolist() == [0, 4, 2, 1, 3]
    assert tree.tier_names == ["server", "team1", "team2", "device"]
    assert (tree.link(1), tree.link(3)) == ("server-team1", "team2-device")
    kids, position = tree.kids(2, torch.tensor([2, 0]))
    assert (kids.tolist(), position.tolist()) == ([3, 4, 0, 1], [0, 0, 1, 1])
    assert tree.ancestor(1).tolist() == [0, 0, 0, 1, 1]
    assert [s.tolist() for s in tree.summed(torch.tensor([1, 2, 4, 8, 16]))] == [
        [31],
        [7, 24],
        [3, 4, 24],
        [1, 2, 4, 8, 16],
    ]
    flat = tree.flat()
    assert flat.names[1].tolist() == ["p", "q", "r", "s", "t"]
    assert (flat.tier_names, flat.link(1)) == (["server", "device"], "server-device")


def test_a_tier_names_one_parent_a_node():
    with pytest.raises(ValueError, match="got 2 for 3 nodes"):
        Topology.build([1, 2, 3], [0, 1])


def test_nested_teams():
    tiers = nested(np.array([0, 3, 1, 2]), [2, 2])
    tree = Topology.build([0, 1, 2, 3], *tiers)
    assert tree.names[1].tolist() == [0, 1]
    assert tree.parents[2].tolist() == [0, 0, 1, 1]


def test_a_node_draws_by_its_name():
    a, b = Topology.build([5, 3, 9]), Topology.build([9, 5, 3])
    assert a.keys[1].tolist() == [5, 3, 9]
    assert b.keys[1].tolist() == [9, 5, 3]
    assert len(set(Topology.build(["a", "b", "c"]).keys[1].tolist())) == 3


# -- memory, checkpoints, ledger ------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_memory(tmp_path, on_disk):
    tree = Topology.build(np.arange(5))
    memory = Memory(tree, tmp_path if on_disk else None)
    ids, default = torch.tensor([3, 1]), torch.full((2, 3), 7.0)
    assert torch.equal(memory.read(1, "model", ids, default), default)
    memory.write(1, "model", torch.tensor([1]), torch.ones(1, 3))
    assert memory.read(1, "model", ids, default).tolist() == [[7.0] * 3, [1.0] * 3]
    assert torch.equal(memory.read(1, "other", ids, default), default)
    memory.write(1, "count", torch.tensor([0]), torch.tensor([4]))
    assert (memory.names(1), memory.names(0)) == (["count", "model"], [])
    with pytest.raises(ValueError, match=r"shape \(3,\) and now come with \(2,\)"):
        memory.write(1, "model", torch.tensor([1]), torch.ones(1, 2))
    again = Memory(tree, tmp_path if on_disk else None)
    if not on_disk:
        again.load(memory.state())
    assert torch.equal(again.read(1, "model", ids, default), memory.read(1, "model", ids, default))
    assert again.names(1) == ["count", "model"]


def test_reading_gives_a_copy():
    memory = Memory(Topology.build(np.arange(2)))
    rows = torch.ones(2, 3)
    memory.write(1, "model", torch.arange(2), rows)
    memory.read(1, "model", torch.arange(2), rows).add_(1)
    rows.add_(1)
    assert memory.read(1, "model", torch.arange(2), rows).tolist() == [[1.0] * 3] * 2


def test_checkpoints_keep_the_newest_complete_one(tmp_path):
    assert checkpoints.latest(tmp_path) is None
    for number in (1, 2, 12):
        checkpoints.save(tmp_path, number, {"a": torch.full((2,), number)}, {"round": number})
    (tmp_path / ".round-0000013.partial").mkdir()  # a kill in the middle of writing
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert (found[0], found[1]["a"].tolist(), found[2]) == (12, [12, 12], {"round": 12})
    assert sorted(path.name for path in tmp_path.glob("round-*")) == ["round-0000002", "round-0000012"]
    for state in (torch.ones(1, 2), {"model": torch.ones(1, 2), "n": torch.tensor([3])}):
        packed = pack("state", state)
        back = unpack("state", packed)
        assert type(back) is type(state)
        assert pack("state", back).keys() == packed.keys()


def test_a_snapshot_is_json_and_tensors(tmp_path):
    with make_loop(PerMFL(device_steps=1, team_rounds=1), small(), "mclr", batching="eager") as training:
        training.run(2)
        tensors, facts = training.snapshot()
    assert all(isinstance(v, Tensor) for v in tensors.values())
    assert json.loads(json.dumps(facts)) == facts


def test_ledger():
    ledger = Ledger(Topology.build(np.arange(3), [0, 0, 1]))
    ledger.start_round()
    ledger.add(2, "up", torch.tensor([0, 2]), torch.tensor([10, 5]))
    ledger.start_round()
    ledger.add(2, "up", torch.tensor([0]), torch.tensor([1]))
    assert ledger.total() == {"server-team": {"down": 0, "up": 0}, "team-device": {"down": 0, "up": 16}}
    assert ledger.nodes["team-device"]["up"].tolist() == [11, 0, 5]
    assert (ledger.took_part[2].tolist(), ledger.ever[2].tolist()) == ([True, False, False], [True, False, True])
    assert (1, "team-device", "up", 15) in list(ledger.entries())
    other = Ledger(ledger.topology)
    other.load(ledger.state(), ledger.rounds)
    assert other.total() == ledger.total()


# -- fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"device_lr": 0}, "device_lr = 0.* out of range; allowed: > 0"),
        ({"device_lr": "fast"}, "device_lr = 'fast' is not a number; allowed: > 0, or a schedule such as"),
        ({"device_lr": float("nan")}, "is not a number"),
        ({"device_steps": 2.5}, "device_steps = 2.5 is not a whole number"),
        ({"device_steps": 0}, "allowed: >= 1"),
        ({"device_steps": True}, "is not a whole number"),
        ({"device_steps": [1, 2]}, "device_steps is one value; got 2 values"),
        ({"server_lr": {"team": 1}}, "server_lr is one value for the whole run"),
        ({"team_rounds": [1, 2]}, "team_rounds is one value per tier; got 2 values"),
        ({"team_rounds": {"team": 0}}, "team_rounds.team = 0 is out of range"),
        ({"weights": "equal"}, "weights = 'equal'; allowed: uniform | samples"),
        ({"team_lr": [0.1, -0.1]}, "team_lr = -0.1 is out of range"),
    ],
)
def test_a_field_says_what_is_allowed(fields, advice):
    with pytest.raises(ValueError, match=advice.replace("|", r"\|")):
        PerMFL(**fields)


def test_fields_take_their_type():
    method = PerMFL(device_lr=1, device_steps=np.int64(3), team_lr=np.array([0.1, 0.2]), team_rounds={"team1": 2.0})  # type: ignore[arg-type]
    assert (method.device_lr, method.device_steps) == (1.0, 3)
    assert isinstance(method.device_lr, float)
    assert method.team_lr == (0.1, 0.2)
    assert method.team_rounds == {"team1": 2}
    meta = PerMFL.__dataclass_fields__["device_pull"].metadata
    assert (meta["letter"], describe_range(meta)) == ("lambda", ">= 0")


def test_a_field_by_tier_needs_every_tier():
    federation = small()
    with pytest.raises(ValueError, match="no tier for team_rounds 'team1'; did you mean 'team'"):
        train(
            PerMFL(team_rounds={"team1": 2}),
            federation,
            "mclr",
            topology=Topology.build(federation.ids, [0, 0, 1, 1]),
            **QUICK,
        )


# -- answers ------------------------------------------------------------------------------------------


def test_blocks_do_not_depend_on_where_tiles_end():
    rng = np.random.default_rng(0)
    rows = {"w": torch.from_numpy(rng.normal(size=(20, 3))), "n": torch.from_numpy(rng.uniform(size=20))}
    blocks, shares = torch.arange(20) // 8, torch.full((20,), 1 / 20, dtype=torch.float64)
    whole, total = fold(rows, shares, blocks), None
    for start in range(0, 20, 3):
        part = {k: v[start : start + 3] for k, v in rows.items()}
        total = fold(part, shares[start : start + 3], blocks[start : start + 3], 3, total)
    assert total is not None
    for weight in ("", "samples", "n"):
        assert torch.equal(whole.sums[weight]["w"], total.sums[weight]["w"])  # type: ignore[index]
        assert torch.equal(whole.totals[weight], total.totals[weight])


def test_means_of_answers():
    sent = torch.zeros(2, 1)
    rows, parent = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2])
    samples, blocks = torch.tensor([1, 3, 9]), torch.tensor([0, 0, 1])
    assert starts_of(blocks).tolist() == [0, 2]
    answers = Answers(sent, 3, rows, torch.tensor([4, 5, 6]), parent, samples, blocks)
    empty = torch.tensor([[7.0], [8.0], [9.0]])
    assert answers.mean(empty=empty).tolist() == [[2.0], [8.0], [5.0]]
    assert answers.mean("samples", empty=empty).tolist() == [[2.5], [8.0], [5.0]]
    assert answers.count.tolist() == [2, 0, 1]
    assert answers.grouped(torch.tensor([1, 0, 1]), 2, sent).mean().tolist() == [[3.0], [3.0]]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="no weight 'size'"):
        answers.mean("size")


@dataclass(frozen=True)
class Asks(Algorithm):
    """Calls another method at chosen children, each with a row of its own, and weighs answers by a field."""

    def server(self, x: Any, devices: Children) -> Rows:
        kids, position = devices.draw()
        assert position.tolist() == [0] * len(kids)
        chosen = torch.tensor([2, 0])
        mine = torch.stack([x[0] + 1, x[0] + 2])
        answers = devices.call("score", {"w": mine}, to=chosen, each=True)
        assert answers.ids.tolist() == [2, 0]
        assert torch.equal(answers.rows["w"], mine)  # type: ignore[index]
        assert answers.rows["id"].tolist() == [2, 0]  # type: ignore[index]
        answers = devices.call("score", {"w": x})
        first = answers["w"].mean("weight")
        assert torch.equal(answers["w"].mean(), x)
        return x + 0 * first

    def score(self, rows: Any, local: LocalProblem) -> Rows:
        weight = local.samples.to(rows["w"].dtype)
        assert local.columns("head.bias").sum() == 3
        return {"w": rows["w"], "id": local.ids, "weight": weight}

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor | None:
        return None


def test_another_method_at_named_children():
    run = train(Asks(), small(), "mclr", **QUICK)
    assert torch.equal(run.row(), run.context.objective.initial)


@dataclass(frozen=True)
class Shares(FedAvg):
    """Draws a coin that all share, and one of its own."""

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        coin, own = local.shared("coin", 2), local.uniform("own", 2)
        assert own.shape == (len(local.ids), 2)
        assert len(own.unique()) == own.numel()
        return torch.cat([coin, torch.zeros(7)]).to(x).expand_as(x)


def test_shared_draws_are_shared():
    run = train(Shares(), small(), "mclr", tile=1, **QUICK)
    coin = run.row()[:2]
    assert torch.equal(coin, train(Shares(), small(), "mclr", **QUICK).row()[:2])
    assert coin[0] != coin[1]


@dataclass(frozen=True)
class TooMany(FedAvg):
    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        return torch.cat([x, x])


def test_a_program_answers_one_row_a_node():
    with pytest.raises(ValueError, match=r"TooMany.device was given 4 rows and answered 8"):
        train(TooMany(), small(), "mclr", **QUICK)


def test_nobody_to_ask_at_an_inner_tier():
    """No team takes part: answers are empty rows, and the server stays where it is."""

    federation = small()
    options = {
        **QUICK,
        "topology": Topology.build(federation.ids, [0, 0, 1, 1]),
        "team_participation": np.zeros((1, 2)),
    }
    for absent in ("skip", "stale"):
        run = train(HierFedAvg(0.1, 1, team_rounds=1), federation, "mclr", absent=absent, **options)
        assert torch.equal(run.row(), run.context.objective.initial)
    run = train(CallsTeams(), federation, "mclr", **options)
    assert torch.equal(run.row(), run.context.objective.initial)


@dataclass(frozen=True)
class CallsTeams(HierFedAvg):
    def server(self, x: Tensor, devices: Children) -> Rows:
        answers = devices.call("team", x)
        assert isinstance(answers.rows, Tensor)
        assert tuple(answers.rows.shape) == (0, x.shape[1])
        return answers.mean()


# -- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"batch_size": 0}, "batch size is a whole number of at least 1"),
        ({"workers": 0}, "workers"),
        ({"tile": 0}, "tile"),
        ({"dtype": "float8"}, "should be 'float32' or 'float64'"),
        ({"absent": "late"}, "should be 'skip' or 'stale'"),
        ({"codec": "zip"}, "no codec 'zip'; .*available: float64, float32"),
        ({"codec": "top"}, "needs the fraction of values to send"),
        ({"upload": "clip"}, "clip needs a number"),
        ({"engine": "stack"}, "no engine 'stack'; did you mean 'stacked'"),
        ({"engine": 3}, "engine is a name or a class"),
        ({"on": "abacus"}, "'abacus' is not available"),
        ({"device_participation": 0}, r"fraction in \(0, 1\]"),
        ({"device_participation": "count:0"}, "at least 1"),
        ({"device_participation": "most"}, "not understood; give a fraction"),
        ({"device_participation": np.ones((2, 3))}, "3 columns; there are 4 nodes in tier device"),
        ({"device_participation": np.full((1, 4), 2)}, "0 or 1"),
    ],
)
def test_settings_say_what_is_allowed(settings, advice):
    with pytest.raises(ValueError, match=advice):
        make_loop(FedAvg(), small(), "mclr", **settings)


def test_participation_tables_from_files(tmp_path):
    table = np.array([[1, 0, 1], [0, 1, 1]])
    np.save(tmp_path / "t.npy", table)
    np.savetxt(tmp_path / "t.csv", table, delimiter=",")
    for name in ("t.npy", "t.csv"):
        found = Participation.parse(f"table:{tmp_path / name}").table
        assert found is not None
        assert found.int().tolist() == table.tolist()
    with pytest.raises(ValueError, match="cannot read the participation table"):
        Participation.parse(f"table:{tmp_path / 'missing.npy'}")


def test_a_table_goes_round():
    kids = torch.arange(3)
    rule = Participation.parse(np.array([[1, 0, 1], [0, 1, 1]]))
    zero = torch.zeros(3, dtype=torch.int64)
    rows = [rule.draw(0, t, kids, kids, zero, 1).tolist() for t in range(3)]
    assert rows == [[True, False, True], [False, True, True], [True, False, True]]
