"""Metrics against scikit-learn, and how a run's metrics are chosen."""

from __future__ import annotations

import doctest
import importlib
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from polytier.models.metrics import (
    ACCURACY,
    LOSS,
    METRICS,
    Metric,
    MetricInfo,
    check_metric,
    describe,
    find_metric,
    resolve_metrics,
    top,
)

SEEDS = range(5)


def classes(seed: int, size: int = 40, number: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and targets that have something to do with each other."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, number, size)
    outputs = rng.normal(size=(size, number)) + 1.5 * np.eye(number)[targets]
    return outputs.astype(np.float32), targets


def softmax(outputs: np.ndarray) -> np.ndarray:
    return torch.from_numpy(outputs).double().softmax(-1).numpy()


def mean_of(metric: Metric, outputs: np.ndarray, targets: np.ndarray) -> float:
    """What a device's value is of a metric per sample."""
    return float(metric(torch.from_numpy(outputs), torch.from_numpy(targets)).double().mean())


# -- per sample ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_accuracy_and_top_k_are_those_of_scikit_learn(seed):
    outputs, targets = classes(seed)
    assert mean_of(ACCURACY, outputs, targets) == pytest.approx(sklearn.accuracy_score(targets, outputs.argmax(1)))
    for k in (1, 2, 4):
        wanted = sklearn.top_k_accuracy_score(targets, outputs, k=k, labels=range(5))
        assert mean_of(top(k), outputs, targets) == pytest.approx(wanted, abs=1e-7)


def test_top_1_is_accuracy_also_where_outputs_are_equal():
    outputs, targets = torch.tensor([[1.0, 1.0, 0.0]]).expand(3, -1), torch.tensor([0, 1, 2])
    assert top(1)(outputs, targets).tolist() == ACCURACY(outputs, targets).tolist() == [1, 0, 0]
    assert top(2)(outputs, targets).tolist() == [1, 1, 0]
    assert top(9)(outputs, targets).tolist() == [1, 1, 1]  # more than there are classes
    nothing = torch.full((1, 3), torch.nan)
    assert top(2)(nothing, torch.tensor([1])).tolist() == [0]


def test_positions_of_a_sequence_are_averaged():
    outputs, targets = classes(0, 24)
    sequences = torch.from_numpy(outputs).reshape(6, 4, 5), torch.from_numpy(targets).reshape(6, 4)
    for metric in (ACCURACY, top(2)):
        each = metric(torch.from_numpy(outputs), torch.from_numpy(targets)).reshape(6, 4).mean(1)
        assert torch.equal(metric(*sequences), each)
    for name in ("macro_f1", "balanced_accuracy"):
        assert METRICS[name](*(part.numpy() for part in sequences)) == METRICS[name](outputs, targets)


@pytest.mark.parametrize("shape", [(30,), (30, 3)])
@pytest.mark.parametrize("seed", SEEDS)
def test_mae_and_r2_are_those_of_scikit_learn(shape, seed):
    rng = np.random.default_rng(seed)
    targets = rng.normal(size=shape)
    outputs = targets + rng.normal(size=shape)
    column = outputs.reshape(30, 1) if len(shape) == 1 else outputs  # as nn.Linear(d, 1) gives them
    assert mean_of(METRICS["mae"], column, targets) == pytest.approx(sklearn.mean_absolute_error(targets, outputs))
    assert METRICS["r2"](column, targets) == pytest.approx(sklearn.r2_score(targets, outputs), abs=1e-12)


# -- per device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 7])
@pytest.mark.parametrize("seed", SEEDS)
def test_f1_and_balanced_accuracy_are_those_of_scikit_learn(seed, number):
    outputs, targets = classes(seed, 25, number)
    targets[targets == number - 1] = 0  # a class that is predicted and never true
    found = outputs.argmax(1)
    assert METRICS["macro_f1"](outputs, targets) == pytest.approx(sklearn.f1_score(targets, found, average="macro"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about that class
        wanted = sklearn.balanced_accuracy_score(targets, found)
    assert METRICS["balanced_accuracy"](outputs, targets) == pytest.approx(wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_auc_of_two_classes_is_that_of_scikit_learn(seed):
    outputs, targets = classes(seed, 40, 2)
    wanted = sklearn.roc_auc_score(targets, softmax(outputs)[:, 1])
    assert METRICS["auc"](outputs, targets) == pytest.approx(wanted, abs=1e-12)
    tied = outputs.round()  # equal scores count half
    assert METRICS["auc"](tied, targets) == pytest.approx(sklearn.roc_auc_score(targets, tied[:, 1] - tied[:, 0]))
    one = outputs[:, 1:]  # a single score
    assert METRICS["auc"](one, targets) == pytest.approx(sklearn.roc_auc_score(targets, one[:, 0]))


@pytest.mark.parametrize("seed", SEEDS)
def test_auc_of_many_classes_is_that_of_each_against_all_others(seed):
    outputs, targets = classes(seed, 60, 4)
    wanted = sklearn.roc_auc_score(targets, softmax(outputs), multi_class="ovr", average="macro")
    assert METRICS["auc"](outputs, targets) == pytest.approx(wanted, abs=1e-12)
    few = targets < 2  # a device that holds two of the classes
    each = [sklearn.roc_auc_score(targets[few] == c, softmax(outputs[few])[:, c]) for c in (0, 1)]
    assert METRICS["auc"](outputs[few], targets[few]) == pytest.approx(np.mean(each), abs=1e-12)


def test_undefined_values_are_none():
    outputs, _ = classes(0, 5, 3)
    assert METRICS["auc"](outputs, np.full(5, 2)) is None
    assert METRICS["auc"](np.full_like(outputs, np.nan), np.array([0, 1, 2, 0, 1])) is None
    assert METRICS["r2"](np.zeros(1), np.ones(1)) is None
    assert METRICS["r2"](np.full(3, np.inf), np.arange(3.0)) is None
    # where all targets are equal, as scikit-learn has it
    for predicted in (np.ones(3), np.array([1.0, 1.0, 2.0])):
        assert METRICS["r2"](predicted, np.ones(3)) == sklearn.r2_score(np.ones(3), predicted)
    assert METRICS["macro_f1"](np.eye(3)[[1]], np.array([1])) == 1.0


# -- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "numbers", "names"),
    [
        (None, False, ["accuracy"]),
        (None, True, ["loss"]),
        ([], False, ["accuracy"]),
        ("macro-f1", False, ["macro_f1", "accuracy"]),
        (["auc", "accuracy", "top5"], False, ["auc", "accuracy", "top_5"]),
        (["top-3", "top:3", "top_3"], False, ["top_3", "accuracy"]),
        (["loss"], False, ["loss", "accuracy"]),
        ("r2, mae", True, ["r2", "mae", "loss"]),
        ({"own": ACCURACY.function}, False, ["own", "accuracy"]),
        ([Metric("own", np.dot), "loss"], True, ["own", "loss"]),
    ],
)
def test_the_first_metric_leads_and_the_default_is_beside_it(asked, numbers, names):
    assert [metric.name for metric in resolve_metrics(asked, classes=not numbers)] == names


def test_a_mapping_gives_metrics_per_sample_for_which_higher_is_better():
    own, _ = resolve_metrics({"my-own": len}, classes=True)
    assert (own.name, own.per, own.better, own.unit, own.function) == ("my_own", "sample", "higher", "", len)


@pytest.mark.parametrize(
    ("asked", "numbers", "advice"),
    [
        ("macro_f", False, "did you mean 'macro_f1'.*available: accuracy, top_K"),
        ("macro_f1", True, "macro_f1 needs classes and the targets are numbers; try mae, r2, loss"),
        (["r2"], False, "r2 needs numbers and the targets are classes; try accuracy, .*auc"),
        (["top-0"], False, "at least 1"),
        ([3], False, "3 is not a metric; give a name, a polytier.Metric"),
        ({"own": 3}, False, "own is 3; give a function"),
        ({"loss": len}, False, "the name of the training loss"),
        ({"a b": len}, False, "letters, digits and underscores"),
        ({"own_std": len}, False, "endings _std"),
        ([Metric("own", np.add), Metric("own", np.dot)], False, "another metric"),
    ],
)
def test_advice_on_metrics(asked, numbers, advice):
    with pytest.raises(ValueError, match=advice):
        resolve_metrics(asked, classes=not numbers)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"better": "more"}, "allowed: higher, lower"),
        ({"per": "team"}, "allowed: sample, device, loss"),
        ({"function": None}, "needs a function"),
        ({"per": "loss"}, "takes no function"),
    ],
)
def test_advice_on_own_metrics(fields, advice):
    with pytest.raises(ValueError, match=advice):
        Metric(**{"name": "own", "function": len, **fields})


@pytest.mark.parametrize(
    ("metric", "advice"),
    [
        (Metric("own", lambda o, t: o), r"gave shape \[3, 2\].*one value per sample, shape \[3\]"),
        (Metric("own", lambda o, t: 1.0), 'gave float.*per="device"'),
        (Metric("own", lambda o, t: o @ t), "failed on outputs of shape"),
        (Metric("own", lambda o, t: o, per="device"), "gave ndarray.*one number or None"),
        (METRICS["mae"], r"metric mae failed on outputs of shape \[3, 2\] and targets of shape \[3\]"),
    ],
)
def test_advice_on_what_a_metric_gives(metric, advice):
    with pytest.raises(ValueError, match=advice):
        check_metric(metric, torch.zeros(3, 2), torch.zeros(3))


def test_every_metric_is_accepted_and_can_be_sent_to_a_worker():
    for metric in METRICS.values():
        numbers = metric.targets == "numbers"
        check_metric(metric, torch.rand(4, 1 if numbers else 3), torch.rand(4) if numbers else torch.arange(4) % 3)
        sent: Any = pickle.loads(pickle.dumps(metric))
        assert (sent.name, sent.per, sent.better) == (metric.name, metric.per, metric.better)


# -- for people ---------------------------------------------------------------------------------------


def test_values_as_people_read_them():
    assert ACCURACY.text(0.91527) == "91.53 %"
    assert ACCURACY.with_unit(f"{ACCURACY.number(0.9)} ± {ACCURACY.number(0.0123)}") == "90.00 ± 1.23 %"
    assert METRICS["auc"].text(0.912345) == "0.9123"
    assert METRICS["perplexity"].text(12345.678) == "1.235e+04"
    assert MetricInfo("mae", better="lower", unit="kWh").text(1.23456) == "1.235 kWh"
    assert ACCURACY.text(None) == "-"
    assert (ACCURACY.short(0.9), LOSS.short(0.25)) == ("90 %", "0.25")
    assert (ACCURACY.axis, LOSS.axis) == ("accuracy, %", "loss")


def test_a_record_tells_direction_and_unit():
    for metric in METRICS.values():
        told = describe(metric.as_dict())
        assert (told.name, told.better, told.unit) == (metric.name, metric.better, metric.unit)
        assert describe(metric.name) == find_metric(metric.name)
    assert describe("of_somebody") == MetricInfo("of_somebody")


def test_metrics_need_no_torch():
    code = "import sys, polytier.models.metrics; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "module",
    [
        "polytier.models.metrics",
        "polytier.models.losses",
        "polytier.models.zoo",
        "polytier.runs.read",
        "polytier.report.intervals",
        "polytier.report.blocks",
        "polytier.papers.plan",
    ],
)
def test_examples_in_docstrings(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0
