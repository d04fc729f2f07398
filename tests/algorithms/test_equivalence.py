"""Where two methods are the same one, they give the same models."""

from typing import Any

import numpy as np
import pytest
import torch

from polytier import FedAvg, FedBN, Federation, FedProx, HierFedAvg, PerMFL, PFedMe, PFedMT, Topology, train
from polytier.runs.run import Run


def federation(sizes, seed=0) -> Federation:
    """Devices of these sizes, two features and three classes, a fourth of the samples for tests."""
    rng = np.random.default_rng(seed)
    device = np.repeat(np.arange(len(sizes)), sizes)
    x, y = rng.normal(size=(len(device), 2)), rng.integers(0, 3, len(device))
    return Federation.from_arrays(x, y, device, num_classes=3)


RAGGED = federation([4, 9, 13, 5, 8, 6])
FULL = {"dtype": "float64", "batch_size": 99, "batching": "stacked", "l2": 0.1}  # all samples in a batch
SMALL = {"dtype": "float32", "batch_size": 3, "batching": "stacked"}


def same(a: Run, b: Run) -> None:
    """To the bit: models and measures."""
    assert a.global_ is not None
    assert b.global_ is not None
    assert torch.equal(a.global_, b.global_)
    if a.personal is not None and b.personal is not None:
        assert torch.equal(a.personal, b.personal)
    for one, other in zip(a.history, b.history, strict=True):
        assert one["global"] == other["global"]


def close(a, b, atol=1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_permfl_with_a_device_a_team_is_pfedme():
    """gamma -> 0, beta gamma fixed, on full gradients: K team rounds are pFedMe's R local rounds."""
    gamma, beta = 1e-9, 0.7
    shared = {"device_lr": 0.1, "device_pull": 0.8, "device_steps": 4, "weights": "uniform"}
    multi = PerMFL(team_lr=0.3, team_rounds=3, team_pull=gamma, server_lr=beta / gamma, **shared)
    flat = PFedMe(local_lr=0.3, local_rounds=3, server_lr=beta, **shared)
    alone = Topology.build(RAGGED.ids, np.arange(len(RAGGED)))
    a = train(multi, RAGGED, "mclr", rounds=4, topology=alone, **FULL)
    b = train(flat, RAGGED, "mclr", rounds=4, **FULL)
    close(a.global_, b.global_, 1e-7)
    close(a.personal, b.personal, 1e-7)
    moved = (b.row() - b.context.objective.initial).abs().max()
    assert moved > 1e-3  # not two runs that stand still


def test_fedbn_without_such_layers_is_fedavg(caplog):
    a = train(FedBN(0.1, 5), RAGGED, "mclr", rounds=3, device_participation=0.5, **SMALL)
    b = train(FedAvg(0.1, 5), RAGGED, "mclr", rounds=3, device_participation=0.5, **SMALL)
    assert torch.equal(a.personal, b.row().expand(len(RAGGED), -1))  # type: ignore[arg-type]
    assert "FedBN is FedAvg here" in caplog.text


def test_fedprox_without_pull_is_fedavg_to_the_bit():
    a = train(FedProx(0.1, 5, device_pull=0.0), RAGGED, "mclr", rounds=3, device_participation=0.5, **SMALL)
    b = train(FedAvg(0.1, 5), RAGGED, "mclr", rounds=3, device_participation=0.5, **SMALL)
    same(a, b)
    c = train(FedProx(0.1, 5, device_pull=0.5), RAGGED, "mclr", rounds=3, device_participation=0.5, **SMALL)
    assert not torch.equal(a.row(), c.row())


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_one_team_of_all_devices_and_one_team_round_is_fedavg_to_the_bit(weights):
    devices = federation([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])  # more than a block
    one = Topology.build(devices.ids, ["all"] * len(devices))
    a = train(
        HierFedAvg(0.1, 5, weights, team_rounds=1),
        devices,
        "mclr",
        rounds=3,
        topology=one,
        device_participation=0.6,
        **SMALL,
    )
    b = train(FedAvg(0.1, 5, weights), devices, "mclr", rounds=3, device_participation=0.6, **SMALL)
    same(a, b)


def test_pfedmt_with_equal_samples_is_permfl():
    """Teams of one size, too: PerMFL's means are uniform over teams, whatever their devices."""
    equal = federation([8] * 6)
    two = Topology.build(equal.ids, [0, 1, 0, 1, 0, 1])
    fields = {
        "device_lr": 0.1,
        "team_lr": 0.1,
        "server_lr": 0.5,
        "device_pull": 0.5,
        "team_pull": 1.5,
        "device_steps": 3,
        "team_rounds": 2,
    }
    settings = {**FULL, "batch_size": 4, "device_participation": "count:2"}
    a = train(PFedMT(**fields), equal, "mclr", rounds=3, topology=two, **settings)
    b = train(PerMFL(**fields), equal, "mclr", rounds=3, topology=two, **settings)
    for found, expected in ((a.global_, b.global_), (a.team, b.team), (a.personal, b.personal)):
        close(found, expected)
    unequal = Topology.build(RAGGED.ids, [0, 1, 0, 1, 0, 1])
    c = train(PFedMT(**fields), RAGGED, "mclr", rounds=3, topology=unequal, **settings)
    d = train(PerMFL(**fields), RAGGED, "mclr", rounds=3, topology=unequal, **settings)
    assert (c.row() - d.row()).abs().max() > 1e-6


@pytest.mark.parametrize("algorithm", [PerMFL(0.1, 0.1, device_steps=2, team_rounds=2), FedAvg(0.1, 2)])
def test_stale_answers_of_the_absent_change_nothing_if_nobody_is(algorithm):
    teams = Topology.build(RAGGED.ids, [0, 0, 1, 1, 1, 2])
    shared = {**FULL, "topology": teams, "rounds": 3, "batch_size": 3}
    a = train(algorithm, RAGGED, "mclr", absent="skip", **shared)
    b = train(algorithm, RAGGED, "mclr", absent="stale", **shared)
    # a table of ones is read as partial participation: the path of remembered answers, with nobody absent
    tables: dict[str, Any] = {"team_participation": np.ones((1, 3)), "device_participation": np.ones((1, 6))}
    c = train(algorithm, RAGGED, "mclr", absent="stale", **shared, **tables)
    same(a, b)
    same(a, c)
    d = train(algorithm, RAGGED, "mclr", absent="stale", device_participation=0.3, **shared)
    e = train(algorithm, RAGGED, "mclr", absent="skip", device_participation=0.3, **shared)
    assert not torch.equal(d.row(), e.row())


def test_a_tier_that_passes_on_changes_nothing():
    """PerMFL over four tiers, the upper teams with one child each, one round, eta * pull_below = 1 and no pull up.

    Such a node answers its child's model: w - eta pull (w - child) = child.
    """
    gamma = 1.5
    teams = [0, 0, 1, 1, 2, 2]
    shared = {"device_lr": 0.1, "server_lr": 0.4, "device_pull": 0.5, "device_steps": 3}
    three = PerMFL(team_lr=0.2, team_pull=gamma, team_rounds=2, **shared)
    four = PerMFL(
        team_lr={"team1": 1 / gamma, "team2": 0.2},
        team_pull={"team1": 0.0, "team2": gamma},
        team_rounds={"team1": 1, "team2": 2},
        **shared,
    )
    flat, deep = Topology.build(RAGGED.ids, teams), Topology.build(RAGGED.ids, teams, ["a", "b", "c"])
    a = train(three, RAGGED, "mclr", rounds=1, topology=flat, **FULL)
    b = train(four, RAGGED, "mclr", rounds=1, topology=deep, **FULL)
    close(a.team, b.team)
    close(a.personal, b.personal)
    above = b.context.memory.read(1, "model", torch.arange(3), torch.zeros(3, 9).double())
    close(above, a.team)
    # the server pulls with the gamma of its children, 0 here: it stays; with team1's own pull it would move
    assert torch.equal(b.row(), b.context.objective.initial.double())
