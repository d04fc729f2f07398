"""Callbacks: what they are told, how they end a run, what other programs get."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from polytier import (
    Callback,
    EarlyStopping,
    FedAvg,
    MLflow,
    PerMFL,
    Run,
    RunFolder,
    TensorBoard,
    WandB,
    build_federation,
    make_loop,
    train,
)
from polytier.models.metrics import ACCURACY
from polytier.runs.read import RunRecord

QUICK: Any = {"device_steps": 2, "team_rounds": 2}


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, teams=2, split=(3, 1, 1))


class StopAfter(Callback):
    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_round(self, loop, record):
        if loop.round == self.round:
            loop.stop("enough")


# -- how a run is ended -------------------------------------------------------------------------------


def test_a_stopped_run_has_results_and_its_reason_and_can_be_loaded(federation, tmp_path):
    folder = tmp_path / "run"
    run = train(FedAvg(), federation, "mclr", rounds=9, eval_every=4, callbacks=[StopAfter(3), RunFolder(folder)])
    assert run.rounds == 3
    record = RunRecord(folder)
    assert (record.state["state"], record.state["reason"], record.wanted) == ("stopped", "enough", 9)
    assert record.summary is not None
    assert record.summary["rounds"] == 3
    loaded = Run.load(folder)
    assert run.global_ is not None
    assert loaded.global_ is not None
    assert torch.equal(loaded.global_, run.global_)


def test_the_last_round_of_a_stopped_run_is_evaluated(federation, tmp_path):
    folder = tmp_path / "run"
    settings: Any = {"eval_every": 4, "seed": 1}
    run = train(FedAvg(), federation, "mclr", rounds=9, callbacks=[StopAfter(3), RunFolder(folder)], **settings)
    short = train(FedAvg(), federation, "mclr", rounds=3, **settings)
    assert run.history[-1]["global"] == short.history[-1]["global"]
    assert RunRecord(folder).history[-1]["global"] == short.history[-1]["global"]
    assert "global" not in run.history[-2]


def test_a_loop_that_was_stopped_can_go_on(federation):
    with make_loop(FedAvg(), federation, "mclr") as loop:
        loop.run(5, [StopAfter(2)])
        assert loop.run(5).rounds == 5
        assert loop.stop_reason == ""
        with pytest.raises(ValueError, match="reason is empty"):
            loop.stop("")


def rounds_until_stop(method, federation, callbacks, **settings):
    return train(method, federation, "mclr", rounds=60, callbacks=callbacks, **settings)


def test_early_stopping_waits_as_long_as_it_says(federation):
    method, stopping = FedAvg(device_lr=0.5), EarlyStopping(patience=3, metric="accuracy", tier="global")
    run = rounds_until_stop(method, federation, [stopping])
    values = [record["global"]["validation"]["accuracy"] for record in run.history]
    assert len(values) < 60
    waited = [k - values.index(max(values[: k + 1])) for k in range(len(values))]
    assert waited[-1] == 3
    assert max(waited[:-1]) < 3


def test_early_stopping_of_a_resumed_run_ends_in_the_same_round(federation):
    def stopping():
        return EarlyStopping(patience=3, metric="accuracy", tier="global")

    whole = rounds_until_stop(FedAvg(device_lr=0.5), federation, [stopping()])
    with make_loop(FedAvg(device_lr=0.5), federation, "mclr") as loop:
        loop.run(whole.rounds - 1)
        assert loop.run(60, [stopping()]).rounds == whole.rounds
        assert loop.run(60, [stopping()]).rounds == whole.rounds


def test_early_stopping_counts_from_the_best_round_of_the_history():
    """A plateau that the run has left behind does not stop it."""
    values = [0.5, 0.4, 0.4, 0.4, 0.6]
    history = [{"round": k, "global": {"validation": {"accuracy": value}}} for k, value in enumerate(values, 1)]
    stopped: list[str] = []
    context = types.SimpleNamespace(parts=[types.SimpleNamespace(metrics=(ACCURACY,))])
    loop: Any = types.SimpleNamespace(history=history, context=context, stop=stopped.append)
    stopping = EarlyStopping(patience=2)
    stopping.on_start(loop)
    assert stopped == []
    loop.history += [dict(history[1], round=6), dict(history[1], round=7)]
    stopping.on_start(loop)
    assert stopped == ["global accuracy on validation samples has not improved on 60.00 % for 2 evaluations"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "team"}, "no model of tier 'team'; .*available: global"),
        ({"metric": "acuracy"}, "did you mean 'accuracy'"),
        ({"split": "valdation"}, "the data have no 'valdation' samples; available: train, validation, test"),
    ],
)
def test_early_stopping_says_what_there_is(federation, options, message):
    with pytest.raises(ValueError, match=message):
        train(FedAvg(), federation, "mclr", rounds=1, callbacks=[EarlyStopping(**options)])


def test_patience_is_at_least_one():
    with pytest.raises(ValueError, match="patience 0 is too small"):
        EarlyStopping(patience=0)


# -- other programs -----------------------------------------------------------------------------------


def test_tensorboard_and_mlflow_get_every_round(federation, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    board, flow = TensorBoard(tmp_path / "board"), MLflow((tmp_path / "flow").as_uri(), "digits")
    train(PerMFL(**QUICK), federation, "mclr", rounds=2, callbacks=[board, flow])
    events = b"".join(p.read_bytes() for p in (tmp_path / "board").iterdir())
    assert b"personal/test/accuracy" in events
    metrics = next((tmp_path / "flow").rglob("metrics/global/test/loss")).read_text()
    assert len(metrics.splitlines()) == 2
    assert next((tmp_path / "flow").rglob("params/device_lr")).read_text() == "0.01"


@pytest.mark.parametrize(
    ("name", "make"), [("tensorboard", lambda: TensorBoard("x")), ("mlflow", MLflow), ("wandb", WandB)]
)
def test_a_missing_extra_is_named(name, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=rf'pip install "polytier\[{name}\]"'):
        make()


class StandIn:
    """What a run uses of wandb, and what it was told."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.ends: list[int] = []

    def init(self, **options):
        self.started = options
        log = lambda values, step: self.lines.append((step, values))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda exit_code=0: self.ends.append(exit_code))


@pytest.fixture
def wandb(monkeypatch):
    made = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_wandb_gets_settings_and_every_round(federation, wandb):
    train(PerMFL(**QUICK), federation, "mclr", rounds=2, callbacks=[WandB("digits", group="first")])
    assert (wandb.started["project"], wandb.started["group"]) == ("digits", "first")
    assert (wandb.started["config"]["device_steps"], wandb.started["config"]["rounds"]) == (2, 2)
    assert [step for step, _ in wandb.lines] == [1, 2]
    assert "personal/test/accuracy" in wandb.lines[0][1]
    assert wandb.ends == [0]


def test_wandb_hears_of_a_run_that_failed(federation, wandb):
    class Fails(Callback):
        def on_round(self, loop, record):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        train(PerMFL(**QUICK), federation, "mclr", rounds=2, callbacks=[WandB(), Fails()])
    assert wandb.ends == [1]
