"""The same bits for any tile, any number of workers, and with every node a process of its own."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipes_engine import Processes
from polytier import IFCA, FedAvg, Federation, HierFedAvg, PerMFL, PFedMe, Topology, train
from polytier.data.synthetic import quadratics
from polytier.runs.loop import make_loop
from polytier.runs.run import Run

PERMFL = PerMFL(0.1, 0.1, device_steps=3, team_rounds=2)
EVERY = 1000  # a tile of all devices


def ragged(num_devices: int, shape: tuple[int, ...] = (2,), seed: int = 0) -> Federation:
    """3 or 9 training samples a device, so a batch of 4 is padded, full or short; three classes."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([4, 11], num_devices)  # few shapes: each costs a trace
    device = np.repeat(np.arange(num_devices), sizes)
    x, y = rng.normal(size=(len(device), *shape)), rng.integers(0, 3, len(device))
    return Federation.from_arrays(x, y, device, num_classes=3)


def measured(run: Run, *without: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in ("seconds", *without)} for r in run.history]


def same(a: Run, b: Run, *without: str) -> None:
    for one, two in ((a.global_, b.global_), (a.team, b.team), (a.personal, b.personal)):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)  # type: ignore[arg-type]
    assert measured(a, *without) == measured(b, *without)


# -- tiles and workers ---------------------------------------------------------------------------------


def permfl_of(tile: int, workers: int = 1) -> Run:
    federation = ragged(13)
    topology = Topology.build(federation.ids, np.arange(13) % 3)
    return train(
        PERMFL,
        federation,
        "mclr",
        rounds=2,
        topology=topology,
        batch_size=4,
        team_participation=0.7,
        device_participation=0.8,
        tile=tile,
        workers=workers,
        batching="stacked",
    )


def fedavg_of(tile: int, workers: int = 1) -> Run:
    return train(FedAvg(0.1, 3), ragged(13), "dnn:5", rounds=2, batch_size=4, tile=tile, workers=workers)


@pytest.mark.parametrize(("run", "with_two"), [(permfl_of, (1, EVERY)), (fedavg_of, (7,))])
def test_tiles_and_workers(run, with_two):
    first = run(1)
    assert first.context.objective.batching == "stacked"
    same(first, run(7))
    same(first, run(EVERY))
    for tile in with_two:
        other = run(tile, workers=2)
        same(first, other)
        assert first.context.device_steps == other.context.device_steps


def test_more_devices_than_a_run_of_blocks():
    """The sums of more than 64 devices are handed on in parts."""
    federation = quadratics(140, 2, seed=2)
    run = {
        tile: train(FedAvg(0.1, 2), federation, "quadratic", rounds=2, dtype="float64", tile=tile)
        for tile in (1, 8, 64)
    }
    same(run[1], run[8])
    same(run[1], run[64])


# -- models whose rows depend on their stack -----------------------------------------------------------


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))


def sigmoid() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 7), nn.Sigmoid(), nn.Linear(7, 3))


class Branches(nn.Module):
    """What it does depends on the data, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x).tanh()


@pytest.mark.parametrize(
    ("build", "shape", "batchings"),
    [(conv, (1, 5, 5), {"stacked", "single"}), (sigmoid, (2,), {"stacked", "single"}), (Branches, (2,), {"eager"})],
)
def test_models_that_need_care(build, shape, batchings):
    torch.manual_seed(0)
    model, federation = build(), ragged(5, shape)
    topology = Topology.build(federation.ids, np.arange(5) % 2)
    settings = {"rounds": 2, "batch_size": 4, "topology": topology}
    first = train(PERMFL, federation, model, tile=1, **settings)
    assert first.context.objective.batching in batchings
    same(first, train(PERMFL, federation, model, tile=EVERY, **settings))
    assert first.personal is not None
    assert len(first.personal.unique(dim=0)) == 5  # all have trained


def test_the_self_check_finds_rows_that_depend_on_their_stack():
    """Whatever the module, what the check calls stacked is stacked for any number of rows."""
    torch.manual_seed(0)
    federation = ragged(16)
    with make_loop(PERMFL, federation, sigmoid(), tile=16, batch_size=4) as training:
        objective, batches = training.context.objective, training.context.batches
        rows = torch.arange(16)
        theta = objective.initial + torch.linspace(-1, 1, 16).unsqueeze(1)
        together = objective.grad(theta, batches.whole(rows))
        alone = [objective.grad(theta[i : i + 1], batches.whole(rows[i : i + 1])) for i in range(16)]
    assert torch.equal(together, torch.cat(alone))


# -- every node a process ------------------------------------------------------------------------------


def test_every_node_a_process():
    """One server, two teams, four devices; flat methods with the devices right below the server."""
    federation = ragged(4, seed=5)
    topology = Topology.build(federation.ids, ["a", "b", "a", "b"])
    processes = Processes(topology)
    try:
        normed = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        for algorithm, codec, upload, *module in (
            (PERMFL, None, None),
            (PERMFL, "float16", None),
            (PERMFL, "int8", "clip:0.1,noise:0.5"),
            (HierFedAvg(0.1, 3, team_rounds=2), None, "noise:0.1"),
            (FedAvg(0.1, 3), "top:0.3", "clip:0.1"),
            (PFedMe(0.1, 0.1, device_steps=2, local_rounds=2), None, None),
            (IFCA(0.1, 2), "int8", "clip:0.1,noise:1.0"),
            (PERMFL, None, None, normed),
            (FedAvg(0.1, 2), "int8", "clip:0.1", normed),
        ):
            settings: dict[str, Any] = {
                "topology": topology,
                "batch_size": 4,
                "device_participation": 0.5,
                "codec": codec,
                "upload": upload,
                "local_layers": "1.*" if module and isinstance(algorithm, FedAvg) else None,
            }
            model = module[0] if module else "mclr"
            expected = train(algorithm, federation, model, rounds=2, **settings)
            with make_loop(algorithm, federation, model, **settings) as training:
                processes.attach(training)
                found = training.run(2)
            assert all(torch.equal(rows, expected.statistics[kind]) for kind, rows in found.statistics.items())
            assert bool(found.statistics) == bool(module)
            same(found, expected, "bytes", "participants")  # a team counts its own
            link = training.context.topology.link(1)
            assert found.ledger.total()[link] == expected.ledger.total()[link]
    finally:
        processes.close()
