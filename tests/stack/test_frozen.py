"""Stacks of models that share frozen parameters: gradients, bits, memory, and copies in other processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polytier.data.batches import Batch, Group, share_of_batch
from polytier.models import zoo as models
from polytier.models.trainable import Trainable
from polytier.stack.dropout import KeyedDropout
from polytier.stack.objective import BATCHINGS, Objective, choose_batching, columns

DOUBLE = torch.float64
HEAD = Trainable.parse("head")


class Words(nn.Module):
    """Tokens [B, T]: the table of the embedding is the last layer too."""

    def __init__(self, vocabulary: int = 7, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.table(x))).mean(1)


def module_of(name: str) -> tuple[nn.Module, str, tuple[int, ...], torch.dtype]:
    """A module, what trains of it, the shape of a sample and its type."""
    torch.manual_seed(3)
    dropout = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    return {
        "head": (models.dnn((5,), 3, hidden=(6,)), "head", (5,), DOUBLE),
        "wide": (models.dnn((50,), 3, hidden=(70,)), "head", (50,), DOUBLE),
        "body": (models.dnn((5,), 3, hidden=(6, 4)), "layers=body.1.*", (5,), DOUBLE),
        "biases": (models.dnn((5,), 3, hidden=(6,)), "layers=*.bias", (5,), DOUBLE),
        "images": (models.cnn_fmnist((1, 6, 6), 3), "head", (1, 6, 6), DOUBLE),
        "words": (Words(), "layers=mix.*", (5,), torch.int64),
        "dropout": (dropout, "head", (5,), DOUBLE),
        "lora": (models.dnn((5,), 3, hidden=(6, 4)), "lora:rank=2,alpha=3", (5,), DOUBLE),
        "lora-wide": (models.dnn((50,), 3, hidden=(70,)), "lora:rank=3,targets=*", (50,), DOUBLE),
        "lora-images": (models.cnn_fmnist((1, 6, 6), 3), "lora:rank=2,targets=body.*+head", (1, 6, 6), DOUBLE),
        "lora-words": (Words(), "lora:rank=2,targets=mix.0+head", (5,), torch.int64),
    }[name]


LORA = ("lora", "lora-wide", "lora-images", "lora-words")
NAMES = ("head", "wide", "body", "biases", "images", "words", "dropout", *LORA)


def objective_of(name: str, batching: str = "stacked", dtype: torch.dtype = DOUBLE) -> Objective:
    module, train, _, _ = module_of(name)
    return Objective(module, dtype=dtype, batching=batching, trainable=Trainable.parse(train))


def batch_of(name: str, n: int, width: int = 4, dtype: torch.dtype = DOUBLE) -> Batch:
    _, _, shape, kind = module_of(name)
    generator = torch.Generator().manual_seed(5)
    if kind == DOUBLE:
        x = torch.randn(n, width, *shape, generator=generator, dtype=DOUBLE).to(dtype)
    else:
        x = torch.randint(7, (n, width, *shape), generator=generator)
    y = torch.randint(3, (n, width), generator=generator)
    count = width - torch.arange(n).unsqueeze(1) % 2
    key = torch.arange(n * width).reshape(n, width) if name == "dropout" else None
    return Batch([Group(slice(None), x, y, share_of_batch(count, width, dtype), key)], n)


def rows_for(objective: Objective, n: int) -> Tensor:
    noise = torch.randn(n, objective.dimension, generator=torch.Generator().manual_seed(7), dtype=DOUBLE)
    return objective.initial + (0.1 * noise).to(objective.dtype)


def most_memory(work: Callable[[], object], kind: str = "") -> int:
    """The most bytes that one operation whose name contains `kind` takes."""
    profile: Any = torch.autograd.profiler.profile(profile_memory=True)
    with profile:
        work()
    return max(event.cpu_memory_usage for event in profile.function_events if kind in event.name)


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_model_at_what_trains(name, batching):
    frozen, everything = objective_of(name, batching), Trainable.parse(module_of(name)[1]).apply(module_of(name)[0])
    whole = Objective(everything.requires_grad_(True), dtype=DOUBLE, batching="eager")
    n, kept = 5, torch.tensor([each in frozen.names for each in whole.names])
    batch, theta = batch_of(name, n), rows_for(frozen, n)
    columns_kept = torch.repeat_interleave(kept, torch.tensor(whole.sizes))
    full = whole.initial.repeat(n, 1)
    full[:, columns_kept] = theta
    assert frozen.dimension == int(columns_kept.sum()) < whole.dimension
    torch.testing.assert_close(frozen.grad(theta, batch), whole.grad(full, batch)[:, columns_kept])
    torch.testing.assert_close(frozen.loss(theta, batch), whole.loss(full, batch))
    x = batch.groups[0].x
    torch.testing.assert_close(frozen.outputs(theta, x), whole.outputs(full, x))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if "images" not in n])
def test_a_row_has_the_same_bits_in_any_stack(name, dtype):
    objective = objective_of(name, dtype=dtype)
    batch = batch_of(name, 64, dtype=dtype)
    theta = rows_for(objective, 64)
    whole = objective.grad(theta, batch)
    for i in (0, 1, 17, 63):
        assert torch.equal(objective.grad(theta[i : i + 1].clone(), batch.row(i)), whole[i : i + 1])


@pytest.mark.parametrize("name", NAMES)
def test_pieces_can_be_written_over_and_leave_the_frozen_ones_alone(name):
    objective = objective_of(name)
    batch, theta = batch_of(name, 4), rows_for(objective, 4)
    before, whole = copy.deepcopy(objective.module.state_dict()), objective.grad(theta, batch)
    for _, pieces in objective.grad_pieces(theta, batch):
        for piece in pieces:
            (columns(piece) if isinstance(piece, tuple) else piece).mul_(3)
    assert all(torch.equal(value, before[key]) for key, value in objective.module.state_dict().items())
    assert torch.equal(objective.grad(theta, batch), whole)


def test_graphs_hold_the_frozen_parameters_themselves():
    objective = objective_of("wide")
    for n in (1, 2, 4, 8):
        objective.grad(rows_for(objective, n), batch_of("wide", n))
    addresses = {p.data_ptr() for p in objective.frozen.values()}
    graphs = [graph.__self__ for graph in objective._compiled.values()]  # type: ignore[attr-defined]
    held = [[v for v in vars(graph).values() if isinstance(v, Tensor)] for graph in graphs]
    assert len(graphs) == 4
    assert all({v.data_ptr() for v in of_graph} == addresses for of_graph in held)


def test_a_frozen_table_is_not_copied_per_row():
    torch.manual_seed(0)
    objective = Objective(Words(20_000, 8), trainable=Trainable.parse("layers=mix.*"))
    table, n = objective.frozen["table.weight"], 64
    x = torch.randint(7, (n, 2, 5))
    theta = rows_for(objective, n)
    assert most_memory(lambda: objective.outputs(theta, x), "embedding") < table.nbytes


def test_values_that_a_module_draws_by_key_survive_a_pickle(tmp_path):
    objective = objective_of("dropout")
    batch, theta = batch_of("dropout", 4), rows_for(objective, 4)
    expected = objective.grad(theta, batch)
    objective.share_frozen(tmp_path)
    again = pickle.loads(pickle.dumps(objective))
    assert [m for m in again.module.modules() if isinstance(m, KeyedDropout)] == again.dropouts
    assert torch.equal(again.grad(theta, batch), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_names_the_files_of_shared_parameters(name, tmp_path):
    objective = objective_of(name)
    frozen = {key: value.clone() for key, value in objective.frozen.items()}
    batch, theta = batch_of(name, 4), rows_for(objective, 4)
    expected, alone = objective.grad(theta, batch), pickle.dumps(objective)
    objective.share_frozen(tmp_path)
    objective.share_frozen(tmp_path / "of a model alike")  # which there is no need of
    assert torch.equal(objective.grad(theta, batch), expected)
    shared = pickle.dumps(objective)
    if name == "wide":
        assert len(shared) < len(alone) - sum(p.nbytes for p in frozen.values()) + 2000
    for message in (alone, shared):
        again = pickle.loads(message)
        assert all(torch.equal(value, frozen[key]) for key, value in again.frozen.items())
        assert torch.equal(again.grad(theta, batch), expected)
    for path in tmp_path.iterdir():
        path.unlink()
    assert torch.equal(pickle.loads(pickle.dumps(objective)).grad(theta, batch), expected)  # without them it goes too


def test_an_objective_has_one_copy_of_the_frozen_part():
    module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 2))
    nbytes = sum(p.nbytes for p in module[0].parameters())
    objective = Objective(module, trainable=HEAD)
    theta, x = objective.initial.repeat(8, 1), torch.randn(8, 2, 1000)
    assert most_memory(lambda: objective.outputs(theta, x)) < nbytes


def test_all_parameters_are_those_of_the_row_and_the_frozen():
    module = models.dnn((5,), 3, hidden=(6,))
    objective = Objective(module, trainable=HEAD)
    row = torch.arange(float(objective.dimension))
    found = objective.all_parameters(row)
    assert list(found) == [name for name, _ in module.named_parameters()]
    assert torch.equal(found["body.1.weight"], module.state_dict()["body.1.weight"])
    assert torch.equal(torch.cat([found[name].flatten() for name in objective.names]), row)


def test_parameters_that_lie_otherwise_in_memory_are_put_in_order():
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    own = module.get_parameter("0.weight")
    own.data = torch.randn(31)[1:].reshape(6, 5).t()
    objective = Objective(module, trainable=HEAD)
    weight = objective.frozen["0.weight"]
    assert torch.equal(weight, own)
    assert weight.is_contiguous()
    assert weight.data_ptr() % 64 == 0


def test_a_module_that_changes_frozen_parameters_is_refused():
    class Restless(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.add_(1)
            return super().forward(x)

    module = nn.Sequential(Restless(5, 4), nn.Linear(4, 3))
    objective = Objective(module, dtype=DOUBLE, trainable=HEAD)
    with pytest.raises(ValueError, match="changes frozen parameters in place"):
        choose_batching(objective, batch_of("head", 4))


@pytest.mark.parametrize("name", NAMES)
def test_the_choice_of_batching_runs_with_frozen_parameters(name):
    objective = objective_of(name)
    assert choose_batching(objective, batch_of(name, 8)) in ("stacked", "single")
