"""Gradients of a mini-batch as the sum of those of its pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from commands import call
from polytier import Federation, Trainable, train
from polytier.algorithms.fedavg import FedAvg
from polytier.data.batches import Batch, Group, share_of_batch
from polytier.runs.estimate import memory_of
from polytier.runs.loop import make_loop
from polytier.stack.objective import BATCHINGS, Objective

SAMPLES = [[7, 4, 1], [2]]  # of the devices of two groups, padded to 7 and to 2
SIZES = (1, 3, 7, 100)


def batch(keyed: bool) -> Batch:
    """Batches of four devices, some shorter than others."""
    generator, groups, first = torch.Generator().manual_seed(5), [], 0
    for counts in SAMPLES:
        width, n = max(counts), len(counts)
        x = torch.randn(n, width, 5, dtype=torch.float64, generator=generator)
        y = torch.randint(3, (n, width), generator=generator)
        weight = share_of_batch(torch.tensor(counts)[:, None], width, torch.float64)
        key = torch.arange(n * width).reshape(n, width) if keyed else None
        groups.append(Group(torch.arange(first, first + n), x, y, weight, key))
        first += n
    return Batch(groups, first)


def objective(batching: str, size: int | None, dropout: bool = False) -> Objective:
    torch.manual_seed(1)
    layers = [nn.Linear(5, 6), nn.ReLU(), *([nn.Dropout(0.5)] if dropout else []), nn.Linear(6, 3)]
    return Objective(nn.Sequential(*layers), l2=0.1, dtype=torch.float64, batching=batching, micro_batch=size)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_gradient_is_the_sum_of_those_of_the_pieces(batching, dropout):
    whole = objective(batching, None, dropout)
    theta = whole.initial + torch.arange(4.0, dtype=torch.float64)[:, None] / 10
    expected = whole.grad(theta, batch(dropout))
    for size in SIZES:
        found = objective(batching, size, dropout).grad(theta, batch(dropout))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_row_has_the_bits_that_it_has_alone():
    some, theta = objective("stacked", 3), torch.linspace(-1, 1, 228, dtype=torch.float64).reshape(4, 57)
    together = some.grad(theta, batch(False))
    for i in range(4):
        assert torch.equal(some.grad(theta[i : i + 1], batch(False).row(i))[0], together[i])


def test_a_run_differs_by_rounding_alone_and_needs_less_memory():
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(60, 5, generator=generator), torch.randint(3, (60,), generator=generator)
    federation = Federation.from_arrays(x.numpy(), y.numpy(), device=[k % 4 for k in range(60)])
    settings = {"rounds": 3, "batch_size": 10, "dtype": "float64"}
    expected = train(FedAvg(0.1, 3), federation, "dnn:8", **settings)
    found = train(FedAvg(0.1, 3), federation, "dnn:8", micro_batch=4, **settings)
    torch.testing.assert_close(found.global_, expected.global_, rtol=1e-10, atol=1e-10)
    needs = []
    for size in (None, 4):
        with make_loop(FedAvg(0.1, 3), federation, "dnn:8", micro_batch=size, batch_size=10) as loop:
            needs.append(memory_of(loop, loop.context)["tiles"])
    assert needs[1] < needs[0]


def test_on_the_command_line_workers_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ("run", "fedavg", "--devices", 8, "--rounds", 2, "--micro-batch", 7, "--quiet")
    call(*common, "--workers", 1, "--out", "one")
    call(*common, "--workers", 2, "--tile", 4, "--out", "two")
    one, two = (Path(name, "models", "global.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_batch_norm_that_trains_needs_whole_batches():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="BatchNorm layers of this model need whole mini-batches"):
        Objective(module, micro_batch=2)
    Objective(module, trainable=Trainable("head"), micro_batch=2)


def test_a_loss_of_a_method_is_computed_on_whole_batches():
    """It need not be a sum over samples."""
    some, x = objective("stacked", 1), torch.zeros(4, 57, dtype=torch.float64)

    def largest(apply, row, x, y, weight):
        return apply(row, x).sum() ** 2 + row.sum()

    found, expected = (each.grad(x, batch(False), largest) for each in (some, objective("stacked", None)))
    assert torch.equal(found, expected)
