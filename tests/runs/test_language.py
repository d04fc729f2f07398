"""Runs on text: the same bits in any layout, perplexity per token, reports that do not mix tokenizers."""

import math
from typing import Any

import pytest
import torch

from commands import call
from polytier import Loop, Run, assemble
from polytier.data import IGNORED
from polytier.data.build import build_federation
from polytier.report.grouping import studies
from polytier.runs.spec import RunSpec
from polytier.stack.objective import choose_batching

SMALL: dict[str, Any] = {
    "algorithm": "ditto",
    "data": "sentences:context=24",
    "devices": 6,
    "model": "gpt:layers=1,width=8,heads=2",
    "rounds": 2,
    "batch_size": 4,
    "split": "8:1:1",
    "set": {"device_steps": 2, "personal_steps": 2, "device_lr": 0.3, "personal_lr": 0.3},
}


def personal(**changes: Any) -> Run:
    with Loop(assemble(RunSpec(**{**SMALL, **changes}))) as loop:
        return loop.run(loop.spec.rounds)


@pytest.mark.parametrize("model", [SMALL["model"], "lstm:width=6"])
def test_the_same_bits_in_any_layout(model):
    wanted = personal(model=model).personal
    assert wanted is not None
    for layout in ({"tile": 1}, {"tile": 4}, {"workers": 2}):
        found = personal(model=model, **layout).personal
        assert found is not None
        assert torch.equal(found, wanted)


def test_perplexity_is_the_exponential_of_the_mean_loss_per_token():
    run = personal()
    data = build_federation(SMALL["data"], devices=6, split=(8, 1, 1))
    by_device, total, number = [], 0.0, 0
    for k, name in enumerate(data.ids):
        x, y = data.device(k, "test")
        with torch.no_grad():
            logs = torch.log_softmax(run.model(device=name)(x).double(), -1)
        losses = -logs.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)[y != IGNORED]
        by_device.append(math.exp(float(losses.mean())))
        total, number = total + float(losses.sum()), number + len(losses)
    test = run.summary()["personal"]
    assert test["perplexity"] == pytest.approx(sum(by_device) / 6, rel=1e-5)
    assert test["perplexity_pooled"] == pytest.approx(math.exp(total / number), rel=1e-5)
    assert test["perplexity_tokens"] == number
    assert test["perplexity"] != pytest.approx(math.exp(test["loss"]), rel=1e-4)  # the last sample is short
    assert [metric["name"] for metric in run.summary()["metrics"]] == ["perplexity", "accuracy"]


def test_runs_with_different_tokenizers_are_not_compared(tmp_path):
    for tokenizer in ("bytes", "bpe:300"):
        for algorithm, fields in (("local", {"device_lr": 0.1, "device_steps": 1}), ("fedavg", {"device_lr": 0.1})):
            data = f"sentences:context=24,tokenizer={tokenizer}"
            run = personal(algorithm=algorithm, data=data, set=fields, rounds=1)
            run.save(tmp_path / f"{algorithm}-{tokenizer.replace(':', '-')}")
    found = studies([tmp_path])
    assert len(found) == 2
    assert [sorted(variant.name for variant in study.variants) for study in found] == [["fedavg", "local"]] * 2
    assert {study.metric.name for study in found} == {"perplexity"}


def test_text_takes_a_language_model_by_default(caplog):
    with caplog.at_level("INFO", "polytier"):
        assembly = assemble(RunSpec(algorithm="local", data="sentences:context=8"))
    assembly.close()
    assert assembly.spec.model == "gpt"
    assert "the data are tokens: model gpt instead of mclr" in caplog.text


def test_the_check_of_stacks_of_a_large_model_stays_within_the_memory(monkeypatch):
    """It happens before the memory of a run is checked."""
    seen = []

    def chosen(objective: Any, batch: Any, key: int) -> str:
        seen.append(batch.groups[0].x.shape[:2])
        return choose_batching(objective, batch, key)

    monkeypatch.setattr("polytier.runs.assemble.choose_batching", chosen)
    spec = RunSpec(algorithm="local", data="sentences:context=8", model="gpt:layers=1,width=8", batch_size=16)
    assemble(spec).close()
    monkeypatch.setattr("polytier.runs.assemble.LARGE", 1)
    assemble(spec).close()
    monkeypatch.setattr("polytier.runs.assemble.physical_memory", lambda: 1 << 20)
    assemble(spec).close()
    assert seen[:2] == [(8, 16), (4, 16)]
    assert seen[2][0] == 4
    assert 1 <= seen[2][1] < 16


def test_a_run_that_does_not_fit_into_memory_is_refused_before_steps_are_timed(monkeypatch):
    monkeypatch.setattr("polytier.runs.estimate.physical_memory", lambda: 1 << 20)
    monkeypatch.setattr("polytier.runs.estimate.seconds_a_step", lambda context: pytest.fail("timed"))
    said = call("run", "local", "--data", "sentences:context=8", "--model", "gpt:layers=1,width=8", code=2).stderr
    assert "this needs about" in said
