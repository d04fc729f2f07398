"""The seam between methods and the rest: a method uses the named parts of a node and nothing behind them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polytier.algorithms
from polytier import Children, FedAvg, Federation, LocalProblem, PerMFL
from polytier.method.call import Clock
from polytier.runs.loop import Loop, make_loop

FILES = sorted(Path(polytier.algorithms.__file__).parent.glob("*.py"))
SAMPLES = [3, 1, 4, 2, 5, 6]  # of each device, as in the federation
TEAM = ["b", "a", "b", "a", "b", "a"]
ORDER = [1, 3, 5, 0, 2, 4]  # the tree has the devices of a team together


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_methods_do_not_reach_into_the_context(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{path.name}:{k}: {line.strip()}" for k, line in enumerate(lines, 1) if re.search("context", line, re.I)]
    assert not found, "give the node a documented name for what is needed: " + "; ".join(found)


def make(cluster=None, y=None) -> Federation:
    device = np.repeat(np.arange(6), SAMPLES)
    x = np.arange(len(device), dtype=np.float32)[:, None]
    y = device % 3 if y is None else y
    cluster = None if cluster is None else np.asarray(cluster)[device]
    return Federation.from_arrays(x, y, device, np.asarray(TEAM)[device], shares=(1, 0, 0), cluster=cluster)


def server(training: Loop, round_: int = 0) -> Children:
    return Children(training.context, 0, torch.zeros(1, dtype=torch.int64), Clock(round_))


def devices(training: Loop, ids: list[int]) -> LocalProblem:
    return LocalProblem(training.context, training.context.topology.leaf, torch.tensor(ids), Clock(0))


def test_a_node_hides_its_context():
    with make_loop(FedAvg(), make(), "mclr") as training:
        for node in (server(training), devices(training, [0])):
            assert not hasattr(node, "context")


def test_what_the_server_knows_of_devices_is_in_the_order_of_the_tree():
    with make_loop(PerMFL(), make(), "mclr") as training:
        node = server(training)
        assert training.context.topology.order.tolist() == ORDER
        assert node.num_tiers == 3
        assert node.device_samples().tolist() == [SAMPLES[k] for k in ORDER]
        assert node.device_samples("test").tolist() == [0] * 6
        assert node.device_values([float(k) for k in range(6)]).tolist() == ORDER
        assert node.device_values({"team": 9.0, "device": 0.5}).tolist() == [0.5] * 6
        assert node.device_values("3/(60+t)").tolist() == [0.05] * 6
        with pytest.raises(ValueError, match="no split 'tset'; did you mean 'test'"):
            node.device_samples("tset")
        with pytest.raises(ValueError, match="needs 6; got 2; give one number for each device"):
            node.device_values([1.0, 2.0])


def test_participants_are_the_same_for_every_node_and_call():
    rules: Any = {"team_participation": "count:1", "device_participation": "count:2"}
    with make_loop(PerMFL(), make(), "mclr", **rules) as training:
        found = set()
        for t in range(6):
            (teams, _), (some, parent) = server(training, t).participants()
            later = server(training, t)
            later._calls["solve"] = 3
            for mine, other in zip(later.participants(), [(teams, _), (some, parent)], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
            assert torch.equal(server(training).participants(t)[0][0], teams)
            team = Children(training.context, 1, teams, Clock(t, 7))  # in a later call of the server
            assert torch.equal(team.participants()[0][0], some)
            assert training.context.topology.parents[2][some].unique().tolist() == teams.tolist()
            assert parent.tolist() == [0, 0]
            found.add(tuple(some.tolist()))
        assert len(found) > 2  # drawn anew in every round


def test_true_groups_are_numbered_from_0():
    of_device = ["red", "blue", "red", "blue", "red", "blue"]
    with make_loop(PerMFL(), make(of_device), "mclr") as training:
        groups = server(training).true_groups
        assert groups is not None
        assert groups.tolist() == [0, 1]  # team a is blue, team b is red
        below = Children(training.context, 1, torch.tensor([1]), Clock(0)).true_groups
        assert below is not None
        assert below.tolist() == [1, 1, 1]
    for cluster in (None, list("xxyyzz")):  # none at all; several in a team
        with make_loop(PerMFL(), make(cluster), "mclr") as training:
            assert server(training).true_groups is None


def test_classes_are_one_per_sample():
    with make_loop(FedAvg(), make(), "mclr") as training:
        assert server(training).num_classes == 3
    values = np.linspace(0, 1, sum(SAMPLES))
    model = torch.nn.Linear(1, 1)
    with make_loop(FedAvg(), make(y=values[:, None]), model) as training:
        assert server(training).num_classes is None


def test_a_subset_is_spread_over_the_training_samples():
    with make_loop(PerMFL(), make(), "mclr") as training:
        (group,) = devices(training, [2, 0]).subset(3, width=4).groups  # devices 5 and 1: 6 samples and 1
        assert group.weight.tolist() == [[pytest.approx(1 / 3)] * 3 + [0], [1, 0, 0, 0]]
        assert group.x[0, :3, 0].tolist() == [15, 17, 19]
        assert group.x[1, :1, 0].tolist() == [3]
        assert group.y[0].tolist() == [2] * 4
