"""One of each kind from outside the package, by public names alone: each is run."""

from pathlib import Path

import numpy as np
import pytest
import torch

import outside
import polytier
from polytier import Assignment, FedAvg, Metric, Participation, build_federation, train

QUICK = {"rounds": 2, "batching": "eager", "batch_size": 8}


@pytest.fixture(scope="module")
def federation():
    return build_federation("digits", devices=8, teams=2)


def far_off(outputs, targets):
    return ((outputs.argmax(-1) - targets).abs() > 1).float()


class Alternating(Participation):
    """Every second device takes part, the others in the next round."""

    def draw(self, base, round_, keys, kids, position, m):
        return (kids + round_) % 2 == 0


def halves(y, num_devices, rng, allowed=None):
    """A partition: device k holds every num_devices-th sample."""
    index = np.arange(len(y))
    return Assignment(index, index % num_devices)


def test_only_public_names():
    for file in (outside.__file__, __file__):
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("from polytier.", "import polytier."))]


def test_metric(federation):
    metric = Metric("far_off", far_off, better="lower", unit="%")
    run = train(FedAvg(device_steps=1), federation, "mclr", metrics=[metric, "macro_f1"], **QUICK)
    assert {"far_off", "macro_f1", "accuracy"} <= set(run.history[-1]["global"]["test"])


def test_codec_transform_and_engine(federation):
    parts = {"codec": outside.Whole(), "upload": outside.Halved(), "engine": outside.Counting}
    run = train(outside.Averaging(), federation, "mclr", **parts, **QUICK)
    assert run.ledger.read(direction="up") < run.ledger.read(direction="down")
    plain = train(outside.Averaging(), federation, "mclr", **QUICK)
    assert not torch.equal(run.row(), plain.row())


def test_participation_rule(federation):
    run = train(FedAvg(device_steps=1), federation, "mclr", device_participation=Alternating(), **QUICK)
    assert [record["participants"]["device"] for record in run.history] == [4, 4]
    assert run.ledger.read(tier="device", direction="up", round=1, node=0) > 0
    assert run.ledger.read(tier="device", direction="up", round=2, node=0) == 0


def test_partition_and_model():
    federation = build_federation("digits", devices=6, teams=2, partition=halves)
    assert np.ptp(federation.population.samples.numpy()) <= 2
    run = train(polytier.PerMFL(device_steps=2, team_rounds=2), federation, outside.small_net((1, 8, 8), 10), **QUICK)
    assert run.personal is not None
    named = train(FedAvg(device_steps=2), federation, "outside:small_net", **QUICK)
    assert named.model()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_method(federation):
    polytier.check_algorithm(outside.Averaging())
