"""Losses given in Python: one value per sample, a mean that is understood, and what is refused with advice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polytier import FedAvg, Federation, build_federation, train
from polytier.data.batches import Batch, Group
from polytier.models.losses import cross_entropy, per_sample, squared_error
from polytier.stack.objective import Objective

torch.manual_seed(5)
OUTPUTS, LABELS = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 1])
COLUMN, VALUES = torch.randn(6, 1), torch.randn(6)
SEQUENCES, TOKENS = torch.randn(5, 4, 3), torch.randint(3, (5, 4))
WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def smooth(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, split=(3, 0, 1))


# -- understood ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        cross_entropy,
        nn.CrossEntropyLoss(reduction="none"),
        nn.CrossEntropyLoss(weight=WEIGHT, reduction="none"),
        lambda o, t: -o.log_softmax(1)[torch.arange(len(t)), t],
    ],
)
def test_one_value_per_sample_is_taken_as_it_is(loss):
    assert per_sample(loss, OUTPUTS, LABELS) is loss


@pytest.mark.parametrize(
    ("mean", "each", "outputs", "targets"),
    [
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none"), OUTPUTS, LABELS),
        (smooth, nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1), OUTPUTS, LABELS),
        (nn.MultiMarginLoss(), nn.MultiMarginLoss(reduction="none"), OUTPUTS, LABELS),  # has no rule for vmap
        (lambda o, t: F.cross_entropy(o.transpose(1, 2), t), cross_entropy, SEQUENCES, TOKENS),
        (nn.MSELoss(), lambda o, t: (o[:, 0] - t) ** 2, COLUMN, VALUES),  # [B, 1] and [B]
        (nn.MSELoss(reduction="none"), lambda o, t: (o[:, 0] - t) ** 2, COLUMN, VALUES),
        (nn.SoftMarginLoss(), lambda o, t: F.softplus(-o[:, 0] * t), COLUMN, VALUES.sign()),
        (nn.MSELoss(), lambda o, t: ((o - t) ** 2).mean(1), OUTPUTS, torch.randn(6, 3)),
    ],
)
def test_a_mean_is_applied_to_single_samples(mean, each, outputs, targets):
    found = per_sample(mean, outputs, targets)(outputs, targets)
    assert found.shape == (len(targets),)
    assert torch.allclose(found, each(outputs, targets), atol=1e-6)


@pytest.mark.parametrize("batching", ["stacked", "single", "eager"])
def test_gradients_of_a_mean_are_those_of_one_value_per_sample(batching):
    x, y = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    weight = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    batch = Batch([Group(slice(None), x, y, weight / weight.sum(1, keepdim=True))], 4)
    model = nn.Linear(3, 3)
    outputs = model(x[0]).detach()
    pairs: list[tuple[Any, Any]] = [
        (nn.CrossEntropyLoss(), cross_entropy),
        (smooth, nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)),
    ]
    for mean, each in pairs:
        objectives = [Objective(model, loss, batching=batching) for loss in (per_sample(mean, outputs, y[0]), each)]
        theta = objectives[0].initial + 0.1 * torch.randn(4, objectives[0].dimension)
        one, other = (objective.grad(theta, batch) for objective in objectives)
        assert torch.allclose(one, other, atol=1e-6, rtol=0)
        one, other = (objective.loss(theta, batch) for objective in objectives)
        assert torch.allclose(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("mean", "each"),
    [(nn.CrossEntropyLoss(), None), (smooth, nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1))],
)
def test_a_mean_trains_as_one_value_per_sample_does(federation, mean, each):
    runs = [train(FedAvg(device_steps=3), federation, "mclr", rounds=3, loss=loss) for loss in (mean, each)]
    assert [run.context.objective.batching for run in runs] == ["stacked"] * 2  # as fast as any other loss
    first, second = (run.row() for run in runs)
    assert torch.allclose(first, second, atol=1e-6)
    figures = [run.history[-1]["global"]["test"] for run in runs]
    assert figures[0] == pytest.approx(figures[1], abs=1e-6)


def test_mean_squared_error_of_a_column_of_outputs_trains():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    federation = Federation.from_arrays(x, x @ np.arange(4.0, dtype=np.float32), np.arange(90) % 3)
    model = nn.Linear(4, 1)
    method = FedAvg(device_lr=0.1, device_steps=5)
    run = train(method, federation, model, rounds=5, loss=nn.MSELoss())
    same = train(method, federation, model, rounds=5, loss=lambda o, t: 2 * squared_error(o, t))
    assert torch.allclose(run.row(), same.row(), atol=1e-6)
    assert run.history[-1]["global"]["test"]["loss"] < run.history[0]["global"]["test"]["loss"] / 2


# -- refused ------------------------------------------------------------------------------------------

BAD: list[Any] = [
    (nn.CrossEntropyLoss(reduction="sum"), 'sums over samples.*reduction="none"'),
    (nn.CrossEntropyLoss(weight=WEIGHT), "divides by weights"),
    (lambda o, t: o.std() + 0 * t.sum(), "compares samples"),
    (nn.MSELoss(), "failed on outputs"),
    (lambda o, t: (o - F.one_hot(t, o.shape[1])) ** 2, r"gave shape \[6, 3\].*\.flatten\(1\)\.mean\(1\)"),
    (lambda o, t: o.mean(0), r"gave shape \[3\].*keep the first axis"),
    (lambda o, t: 0.5, "returned float, not a tensor"),
    (lambda o: o.mean(), "takes 1 positional argument"),
]


@pytest.mark.parametrize(("loss", "advice"), BAD)
def test_bad_losses_get_advice(loss, advice):
    with pytest.raises(ValueError, match=advice) as refused:
        per_sample(loss, OUTPUTS, LABELS)
    assert "allowed: a tensor [B] with one value per sample, or the mean" in str(refused.value)


def test_class_weights_are_found_also_where_a_new_model_gives_all_zeros():
    with pytest.raises(ValueError, match="divides by weights"):
        per_sample(nn.CrossEntropyLoss(weight=WEIGHT), torch.zeros(6, 3), LABELS)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(), lambda o, t: o])
def test_a_bad_loss_stops_training_before_it_starts(federation, loss):
    with pytest.raises(ValueError, match="the loss .* allowed: a tensor"):
        train(FedAvg(), federation, "mclr", rounds=1, loss=loss)
