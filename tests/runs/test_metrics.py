"""Runs that are judged by other metrics than the default: what is measured, recorded and read back."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch import nn

import polytier
from polytier import FedAvg, Federation, Metric, PerMFL, build_federation, train
from polytier.algorithms import MFARR, LocalTraining
from polytier.engines.loopback import Loopback
from polytier.models.metrics import ACCURACY, LOSS, METRICS, MetricInfo
from polytier.runs import evaluate
from polytier.runs.callbacks import RunFolder
from polytier.runs.loop import make_loop
from polytier.runs.read import RunRecord, bytes_until, shared_metrics
from polytier.runs.summary import best_of
from polytier.studies.gain import measure_gain

QUICK: Any = {"device_steps": 2, "team_rounds": 2}
ALL = ["macro_f1", "auc", "balanced_accuracy", "top-3", "perplexity"]


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, teams=2, split=(3, 1, 1))


@pytest.fixture(scope="module")
def unequal():
    """Two classes, one of them rare."""
    rng = np.random.default_rng(0)
    y = (rng.random(600) < 0.15).astype(int)
    x = rng.normal(size=(600, 3)).astype(np.float32)
    x[:, 0] += 1.2 * y
    return Federation.from_arrays(x, y, np.arange(600) % 4, shares=(2, 1, 1))


@pytest.fixture(scope="module")
def numbers():
    """A regression with devices of 1, 2 and many test samples."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 3)).astype(np.float32)
    device = np.repeat([0, 1, 2], [20, 20, 40])
    split = np.zeros(80, dtype=int)
    split[[0, 20, 21]] = 2
    split[40::3] = 2
    return Federation.from_arrays(x, x @ np.array([1, -2, 3], dtype=np.float32), device, split=split)


def figures(run, kind: str = "global", split: str = "test") -> dict[str, Any]:
    return run.history[-1][kind][split]


def device_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "devices.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# -- what is measured ---------------------------------------------------------------------------------


def test_values_are_those_of_the_models_outputs_on_each_device(unequal, tmp_path):
    run = train(FedAvg(device_lr=0.3, device_steps=3), unequal, "mclr", rounds=2, seed=1, metrics=ALL[:3])
    run.save(tmp_path / "run")
    rows, model = device_rows(tmp_path / "run"), run.model()
    for k, row in enumerate(rows):
        x, y = unequal.device(k, "test")
        with torch.no_grad():
            outputs = model(x)
        found, true = outputs.argmax(1), y.numpy()
        assert float(row["global_macro_f1"]) == pytest.approx(sklearn.f1_score(true, found, average="macro"))
        assert float(row["global_balanced_accuracy"]) == pytest.approx(sklearn.balanced_accuracy_score(true, found))
        assert float(row["global_auc"]) == pytest.approx(
            sklearn.roc_auc_score(true, outputs.softmax(1)[:, 1]), abs=1e-6
        )
    values = [float(row["global_macro_f1"]) for row in rows]
    test = figures(run)
    assert test["macro_f1"] == pytest.approx(np.mean(values))
    assert test["macro_f1_std"] == pytest.approx(np.std(values))
    assert test["macro_f1_worst_decile"] == pytest.approx(min(values))
    assert "macro_f1_pooled" not in test  # one number per device does not tell
    assert list(test)[:2] == ["loss", "macro_f1"]


@pytest.mark.parametrize("layout", [{"tile": 1}, {"workers": 2, "tile": 4}, "loopback", "small memory"])
def test_metrics_per_device_have_the_same_bits_in_any_layout(federation, layout, monkeypatch):
    wanted = train(PerMFL(**QUICK), federation, "mclr", rounds=2, metrics=ALL)
    if layout == "small memory":
        monkeypatch.setattr(evaluate, "HELD", 1)  # one device at a time
        layout = {}
    with make_loop(
        PerMFL(**QUICK), federation, "mclr", metrics=ALL, **(layout if isinstance(layout, dict) else {})
    ) as training:
        if layout == "loopback":
            training.use(Loopback(training.context, codec=training.codec))
        run = training.run(2)
    for one, other in zip(run.history, wanted.history, strict=True):
        assert {k: one[k] for k in ("personal", "team", "global")} == {
            k: other[k] for k in ("personal", "team", "global")
        }
    assert run.evaluation is not None
    assert wanted.evaluation is not None
    for kind in ("personal", "team", "global"):
        for metric in ("macro_f1", "auc"):
            a, b = (each.by_device(kind, "test", metric) for each in (run.evaluation, wanted.evaluation))
            assert np.array_equal(a, b, equal_nan=True)


def test_the_default_is_the_same_to_the_bit_beside_others(federation):
    alone = train(PerMFL(**QUICK), federation, "mclr", rounds=2)
    beside = train(PerMFL(**QUICK), federation, "mclr", rounds=2, metrics=ALL)
    assert torch.equal(alone.personal, beside.personal)  # type: ignore[arg-type]
    own = figures(alone, "personal")
    assert list(own) == ["loss", "accuracy", "accuracy_std", "accuracy_worst_decile", "accuracy_pooled"]
    assert {name: figures(beside, "personal")[name] for name in own} == own


def test_what_is_undefined_is_counted_and_left_empty(tmp_path):
    rng = np.random.default_rng(2)
    x, device = rng.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 3
    y = np.where(device == 0, 0, rng.integers(0, 2, 60))  # device 0 has one class
    federation = Federation.from_arrays(x, y, device)
    run = train(FedAvg(device_steps=1), federation, "mclr", rounds=1, metrics=["auc", "macro_f1"])
    run.save(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["global"]["auc_undefined"] == 1
    assert "macro_f1_undefined" not in summary["global"]
    rows = device_rows(tmp_path / "run")
    assert [row["global_auc"] == "" for row in rows] == [True, False, False]
    assert summary["global"]["auc"] == pytest.approx(np.mean([float(row["global_auc"]) for row in rows[1:]]))
    assert list(RunRecord(tmp_path / "run").by_device("global")) == ["1", "2"]
    # on no device: null, and there is no best round
    alone = Federation.from_arrays(x[device == 0], y[device == 0], device[device == 0], num_classes=2)
    run = train(FedAvg(device_steps=1), alone, "mclr", rounds=1, metrics="auc")
    run.save(tmp_path / "none")
    summary = json.loads((tmp_path / "none" / "summary.json").read_text())
    assert (summary["global"]["auc"], summary["global"]["auc_undefined"]) == (None, 1)
    assert summary["best"] is None


def test_a_regression_with_r2_and_mae(numbers, tmp_path):
    method, model = FedAvg(device_lr=0.1, device_steps=3), nn.Linear(3, 1)
    run = train(method, numbers, model, rounds=3, metrics=["r2", "mae"])
    run.save(tmp_path / "run")
    rows, net, errors = device_rows(tmp_path / "run"), run.model(), []
    for k, row in enumerate(rows):
        x, y = numbers.device(k, "test")
        with torch.no_grad():
            found = net(x)[:, 0].numpy()
        errors.append(np.abs(found - y.numpy()))
        assert float(row["global_mae"]) == pytest.approx(sklearn.mean_absolute_error(y, found), rel=1e-5)
        if len(y) > 1:
            assert float(row["global_r2"]) == pytest.approx(sklearn.r2_score(y, found), abs=1e-5)
        else:
            assert row["global_r2"] == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [metric["name"] for metric in summary["metrics"]] == ["r2", "mae", "loss"]
    assert summary["global"]["r2_undefined"] == 1
    assert summary["global"]["mae_pooled"] == pytest.approx(np.concatenate(errors).mean(), rel=1e-5)
    # the worst tenth has the largest errors
    assert summary["global"]["mae_worst_decile"] == pytest.approx(max(e.mean() for e in errors), rel=1e-5)
    assert summary["best"]["global"]["r2"] == max(r["global"]["test"]["r2"] for r in run.history)
    default = train(method, numbers, model, rounds=3)
    assert list(figures(default)) == ["loss"]


class Bigrams(nn.Module):
    """The next token from the present one, [B, T] -> [B, T, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x)


def test_perplexity_of_sequences():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 5, (30, 7))
    x, y = np.eye(5, dtype=np.float32)[tokens[:, :-1]], tokens[:, 1:]
    federation = Federation.from_arrays(x, y, np.repeat([0, 1, 2], [5, 10, 15]), num_classes=5)
    run = train(FedAvg(device_lr=0.5, device_steps=2), federation, Bigrams(), rounds=2, metrics=["perplexity"])
    assert run.evaluation is not None
    loss = run.evaluation.by_device("global", "test", "loss")
    found = run.evaluation.by_device("global", "test", "perplexity")
    for k in range(3):
        x, y = federation.device(k, "test")
        with torch.no_grad():
            each = nn.functional.cross_entropy(run.model()(x).flatten(0, 1), y.flatten())  # mean over tokens
        assert found[k] == pytest.approx(math.exp(each), rel=1e-5)
    assert np.array_equal(found, np.exp(loss))
    counts, test = run.evaluation.counts["test"], figures(run)
    assert test["perplexity"] == pytest.approx(found.mean())
    assert test["perplexity_pooled"] == pytest.approx(math.exp((loss * counts).sum() / counts.sum()))
    assert test["perplexity_worst_decile"] == pytest.approx(found.max())


def test_own_metrics_per_sample_and_per_device(unequal):
    def margin(outputs, targets):
        return outputs.gather(1, targets.unsqueeze(1)).squeeze(1)

    def share_of_ones(outputs, targets):
        return (outputs.argmax(1) == 1).mean()

    own = Metric("share_of_ones", share_of_ones, per="device", better="lower")
    run = train(FedAvg(device_steps=1), unequal, "mclr", rounds=1, metrics=[own, Metric("margin", margin)])
    assert [m.name for m in run.context.metrics] == ["share_of_ones", "margin", "accuracy"]
    old = train(FedAvg(device_steps=1), unequal, "mclr", rounds=1, metrics={"margin": margin})
    assert figures(old)["margin"] == figures(run)["margin"]
    rms = Metric("rms", lambda o, t: margin(o, t) ** 2, finish=np.sqrt)
    root = train(FedAvg(device_steps=1), unequal, "mclr", rounds=1, metrics=[rms])
    assert root.evaluation is not None
    squares = root.evaluation.sums["global", "test"]["rms"] / root.evaluation.counts["test"]
    assert np.array_equal(root.evaluation.by_device("global", "test", "rms"), np.sqrt(squares))


def test_bad_metrics_stop_training_before_it_starts(unequal, numbers):
    with pytest.raises(ValueError, match="one value per sample"):
        train(FedAvg(), unequal, "mclr", rounds=1, metrics={"own": lambda o, t: o})
    with pytest.raises(ValueError, match="macro_f1 needs classes"):
        train(FedAvg(), numbers, nn.Linear(3, 1), rounds=1, metrics=["macro_f1"])
    with pytest.raises(ValueError, match=r"failed on outputs \[4, 2\] and targets \[4\]"):
        train(FedAvg(), numbers, nn.Linear(3, 2), rounds=1, metrics=["mae"])


# -- what leads ---------------------------------------------------------------------------------------


def test_the_leading_metric_chooses_the_round(unequal, tmp_path):
    """Predicting the frequent class alone has the best accuracy on validation, and a low F1."""
    chosen = {}
    for name in ("macro_f1", "accuracy"):
        run = train(FedAvg(device_lr=0.3, device_steps=3), unequal, "mclr", rounds=8, seed=1, metrics=[name])
        run.save(tmp_path / name)
        chosen[name] = json.loads((tmp_path / name / "summary.json").read_text())["chosen"]["global"]["round"]
        values = [record["global"]["validation"][name] for record in run.history]
        assert chosen[name] == 1 + values.index(max(values))
    assert chosen["macro_f1"] != chosen["accuracy"]


def test_best_follows_the_direction_of_the_metric():
    tests = [
        {"accuracy": 0.9, "macro_f1": 0.3},
        {"accuracy": 0.8, "macro_f1": 0.5},
        {"accuracy": 0.7, "macro_f1": None},
    ]
    judged = [{"round": k, "global": {"test": test}} for k, test in enumerate(tests, 1)]

    def best(metric: MetricInfo) -> int | None:
        return (best_of(judged, ["global"], "test", metric) or {"round": None})["round"]

    assert best(ACCURACY) == 1
    assert best(METRICS["macro_f1"]) == 2  # undefined in round 3
    assert best(MetricInfo("accuracy", better="lower")) == 3
    assert best(METRICS["auc"]) is None


def test_bytes_until_a_level_from_above_and_below():
    history: Any = [
        {"round": k, "bytes": {"a": {"up": 10}}, "global": {"test": {"loss": 1 / k, "r2": 1 - 1 / k}}}
        for k in range(1, 6)
    ]
    assert bytes_until(history, 0.25, "global", metric=LOSS) == (4, 40)
    assert bytes_until(history, 0.25, "global") == (4, 40)  # without accuracies the loss counts
    assert bytes_until(history, 0.5, "global", metric=METRICS["r2"]) == (2, 20)
    assert bytes_until(history, 90, "global", metric=METRICS["r2"]) is None
    with pytest.raises(ValueError, match="accuracy is a fraction such as 0.9; got 90"):
        bytes_until(history, 90, "global", metric=ACCURACY)


def test_a_gain_goes_by_the_leading_metric(unequal):
    methods = {"a": FedAvg(0.3, 3), "b": FedAvg(0.3, 3)}
    gain = measure_gain(
        lambda seed: polytier.make_loop(MFARR(methods), unequal, "mclr", seed=seed, metrics=["macro_f1"]),
        2,
        [1],
        "test",
        6,
    )
    alone = train(methods["a"], unequal, "mclr", rounds=2, seed=1, metrics=["macro_f1"])
    assert gain.targets[1]["a"] == figures(alone)["macro_f1"]


def test_models_of_different_kinds_share_the_loss(unequal, numbers, tmp_path):
    devices = np.array([0, 1, 2])
    rng = np.random.default_rng(4)
    x, device = rng.normal(size=(90, 3)).astype(np.float32), np.tile(devices, 30)
    data = {
        "classes": Federation.from_arrays(x, rng.integers(0, 2, 90), device),
        "numbers": Federation.from_arrays(x, x.sum(1), device),
    }
    models = {"classes": nn.Linear(3, 2), "numbers": nn.Linear(3, 1)}
    run = train(MFARR({k: FedAvg(device_steps=1) for k in data}), data, models, rounds=2)
    run.save(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"] == [LOSS.as_dict()]
    assert [m["name"] for m in summary["models"]["classes"]["metrics"]] == ["accuracy"]
    assert [m["name"] for m in summary["models"]["numbers"]["metrics"]] == ["loss"]


# -- read back ----------------------------------------------------------------------------------------


def test_a_record_knows_the_metrics_before_and_after_the_end(unequal, tmp_path):
    class Stop(Exception):
        pass

    def own(outputs, targets):
        return outputs[:, 0]

    class Cut(RunFolder):
        def on_end(self, training, run):
            raise Stop

    metrics = [Metric("own", own, better="lower", unit="kWh"), "macro_f1"]
    with pytest.raises(Stop):
        train(FedAvg(device_steps=1), unequal, "mclr", rounds=2, metrics=metrics, callbacks=[Cut(tmp_path / "run")])
    going = RunRecord(tmp_path / "run")
    assert going.summary is None
    train(FedAvg(device_steps=1), unequal, "mclr", rounds=2, metrics=metrics, callbacks=[RunFolder(tmp_path / "done")])
    done = RunRecord(tmp_path / "done")
    for record in (going, done):
        assert [metric.name for metric in record.metrics] == ["own", "macro_f1", "accuracy"]
        assert (record.metric.better, record.metric.unit) == ("lower", "kWh")
        assert record.rounds == 2
    assert done.value((done.summary or {})["global"]) == done.history[-1]["global"]["test"]["own"]
    assert (done.finished, going.finished, done.judge) == (True, False, "global")


def test_the_configuration_may_name_metrics(tmp_path):
    for text in ('metric = "macro-f1,auc"', 'metric = ["macro_f1", "auc"]'):
        (tmp_path / "config.toml").write_text(f'algorithm = "fedavg"\n{text}')
        assert [metric.name for metric in RunRecord(tmp_path).metrics] == ["macro_f1", "auc"]
        assert RunRecord(tmp_path).metric == METRICS["macro_f1"]


@pytest.mark.parametrize(("test", "name"), [({"loss": 1.0, "accuracy": 0.5}, "accuracy"), ({"loss": 1.0}, "loss")])
def test_folders_of_version_0_1_are_judged_by_accuracy_or_the_loss(tmp_path, test, name):
    record = {"round": 1, "bytes": {}, "personal": {"test": test}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    assert RunRecord(tmp_path).metric.name == name
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "summary.json").write_text(json.dumps({"rounds": 1, "personal": test, "team": None, "best": None}))
    assert RunRecord(tmp_path).metric.name == name
    assert RunRecord(tmp_path).metric.better == ("higher" if name == "accuracy" else "lower")


def test_runs_are_compared_by_a_metric_that_all_have(unequal, tmp_path):
    asked = {"a": ["macro_f1", "auc"], "b": ["auc", "macro_f1"], "c": None, "d": ["loss"]}
    for name, metrics in asked.items():
        run = train(LocalTraining(device_steps=1), unequal, "mclr", rounds=1, metrics=metrics)
        run.save(tmp_path / name)

    def shared(*names: str) -> str:
        return shared_metrics([RunRecord(tmp_path / name) for name in names])[0].name

    assert shared("a", "b") == "macro_f1"
    assert shared("b", "a") == "auc"
    assert shared("a", "c") == shared("c", "d") == "accuracy"
    assert shared("d") == "loss"
