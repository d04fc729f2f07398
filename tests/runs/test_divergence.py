"""A run that diverges is told during training, and stops where its models can no longer recover."""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from commands import call
from polytier import (
    MFARR,
    SCAFFOLD,
    Algorithm,
    Diverged,
    FedAvg,
    Federation,
    LocalTraining,
    Run,
    build_federation,
    train,
)
from polytier.runs import divergence
from polytier.runs.loop import make_loop

WILD = 1e30


@pytest.fixture(scope="module")
def digits() -> Federation:
    return build_federation("digits", devices=6, teams=2)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def growing(factor: float, **more: Any) -> dict[str, Any]:
    """Arguments of a run of FedAvg whose model grows by `factor` a round: an l2 term of 1 and a step of 1 + factor."""
    return {"algorithm": FedAvg(device_lr=1 + factor, device_steps=1), "model": "mclr", "l2": 1.0, **more}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "grew from" in record.getMessage()]


# -- runs that leave the range ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_step_of_1e30_stops_the_run(method, every, tmp_path):
    args = ("--devices", 6, "--set", f"device_lr={WILD}", "--rounds", 6, "--eval-every", every, "--out", "wild")
    said = call("run", method, *args, code=3).stderr
    for text in (f"diverged in round {every}: ", "parameters reach", "lower device_lr", "--set FIELD=VALUE"):
        assert text in said
    state = json.loads((tmp_path / "wild" / "state.json").read_text())
    assert state["state"] == "diverged"
    assert state["reason"].startswith(f"diverged in round {every}: ")
    assert not (tmp_path / "wild" / "summary.json").exists()


@pytest.mark.parametrize(
    ("method", "tier"), [(FedAvg(WILD), "server"), (SCAFFOLD(WILD), "server"), (LocalTraining(WILD), "device")]
)
def test_python_raises_diverged(method, tier, digits):
    with pytest.raises(Diverged, match="diverged in round 1: the loss of the") as caught:
        train(method, digits, "mclr", rounds=3)
    error = caught.value
    assert (error.round, error.tier) == (1, tier)
    assert error.nodes == (["server"] if tier == "server" else [str(k) for k in digits.ids])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_growth_is_told_then_the_run_stops_and_the_last_checkpoint_is_before_it(tmp_path):
    args = ("--devices", 6, "--l2", 1, "--set", "device_lr=9", "--set", "device_steps=1", "--rounds", 60)
    said = call("run", "fedavg", *args, "--out", "wild", code=3).stderr
    assert said.count("grew from") == 1
    lines = [json.loads(line) for line in (tmp_path / "wild" / "metrics.jsonl").read_text().splitlines()]
    last = int(max((tmp_path / "wild" / "checkpoints").iterdir()).name.removeprefix("round-"))
    assert 1 <= last <= lines[-1]["round"]
    assert f"diverged in round {lines[-1]['round'] + 1}: " in said
    call("resume", "wild", "--rounds", last, "--quiet")
    model = Run.load(tmp_path / "wild").global_
    assert model is not None
    assert float(model.abs().max()) <= divergence.range_of(model)


def test_float64_goes_further(digits):
    rounds = {}
    for dtype in ("float32", "float64"):
        with pytest.raises(Diverged) as caught:
            train(**growing(8.0), federation=digits, rounds=100, dtype=dtype)
        rounds[dtype] = caught.value.round
    assert rounds["float32"] + 5 < rounds["float64"] < 40  # 2^24 and 2^53, by 8 a round


def test_every_engine_stops_in_the_same_round_with_the_same_words(digits):
    said, settings = set(), [{"workers": 1}, {"workers": 2}, {"engine": "loopback"}]
    more: Any
    for more in settings:
        for method in (LocalTraining(WILD, 2), FedAvg(WILD, 2)):
            with pytest.raises(Diverged) as caught:
                train(method, digits, "mclr", rounds=3, **more)
            said.add(str(caught.value))
    assert len(said) == 2


def test_several_models_are_judged_one_by_one(digits):
    methods = MFARR({"calm": FedAvg(0.01, 2), "wild": FedAvg(WILD, 2)})
    with pytest.raises(Diverged, match="model of wild is"):
        train(methods, digits, "mclr", rounds=3)


# -- runs that are told -------------------------------------------------------------------------------


def test_a_loss_that_goes_on_growing_is_told_once(digits, caplog):
    with caplog.at_level(logging.WARNING, "polytier"):
        run = train(**growing(2.0), federation=digits, rounds=14)
    assert run.rounds == 14
    (text,) = warned(caplog)
    assert "the training loss of the global model grew from" in text
    assert text.endswith("try a smaller step, for example device_lr=0.3")


def test_a_resumed_run_remembers_what_was_smallest(digits, caplog):
    with make_loop(**growing(2.0), federation=digits) as loop:
        loop.run(4)
        saved = loop.snapshot()
    with make_loop(**growing(2.0), federation=digits) as loop, caplog.at_level(logging.WARNING, "polytier"):
        loop.restore(*saved)
        loop.run(14)
    whole = caplog.records.copy()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "polytier"):
        train(**growing(2.0), federation=digits, rounds=14)
    assert [r.getMessage() for r in whole] == [r.getMessage() for r in caplog.records]
    assert len(whole) == 1


# -- healthy runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgets(FedAvg):
    """After ten rounds the server hands out the opposite of what was learned."""

    def server(self, x, devices):
        x = super().server(x, devices)
        return -x if devices.round == 10 else x


def test_a_global_model_at_12_percent_is_no_divergence(digits, caplog):
    run = train(Forgets(0.1, 20), digits, "mclr", rounds=12)
    accuracy = [record["global"]["train"]["accuracy"] for record in run.history]
    assert accuracy[9] > 0.9
    assert accuracy[10] < 0.12
    assert not warned(caplog)


def regression(scale: float) -> Federation:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    y = x @ np.array([1.0, -2.0, 3.0]) / scale + rng.normal(size=80) * 0.01 / scale
    return Federation.from_arrays((scale * x).astype(np.float32), y.astype(np.float32), np.arange(80) % 4)


def test_a_regression_with_large_weights_is_not_stopped(caplog):
    run = train(FedAvg(1e7, 20), regression(1e-4), torch.nn.Linear(3, 1, bias=False), rounds=20)
    assert run.global_ is not None
    assert float(run.global_.abs().max()) > 2**24
    losses = [record["global"]["train"]["loss"] for record in run.history]
    assert losses[-1] < 0.1 * losses[0]
    assert not warned(caplog)


def test_a_loss_near_zero_may_rise(digits, caplog):
    """A hundred times almost nothing is still better than the initial model."""
    watch = divergence.DivergenceWatch()
    with make_loop(FedAvg(0.1, 2), digits, "mclr") as loop:
        for loss in (1e-6, 1e-4, 1e-3, 1e-2, 1e-1):
            watch.look(loop, {"round": 1, "global": {"train": {"loss": loss}}})
    assert not warned(caplog)


def test_a_healthy_run_pays_nothing(digits, monkeypatch):
    monkeypatch.setattr(divergence, "initial_loss", None)
    monkeypatch.setattr(divergence, "largest_values", None)
    run = train(FedAvg(0.1, 5), digits, "mclr", rounds=5)
    assert run.rounds == 5


def test_losses_below_zero():
    """Quadratics: the loss of the initial model is 0, that of a good one is below."""
    from polytier.data.synthetic import quadratics

    data = quadratics(4, 3, seed=1, mu=0.5, smoothness=2.0)
    run = train(FedAvg(0.3, 3), data, "quadratic", rounds=30)
    assert run.history[-1]["global"]["train"]["loss"] < 0
    with pytest.raises(Diverged, match="parameters reach"):
        train(FedAvg(3.0, 3), data, "quadratic", rounds=30)
    assert torch.isfinite(torch.as_tensor(run.global_)).all()


def test_a_method_without_step_fields_gets_general_advice():
    @dataclass(frozen=True)
    class Bare(Algorithm):
        pass

    assert divergence.smaller_steps(Bare()) == "try smaller steps"
