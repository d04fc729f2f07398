"""Features of frozen layers that are kept in place of samples: the same models, for samples as they are in the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polytier import Ditto, FedAvg, Federation, MFARand, PerMFL, Run, RunFolder, build_federation, resume, train
from polytier.engines.loopback import Loopback
from polytier.runs.export import export
from polytier.runs.loop import make_loop
from polytier.stack.kept_features import BLOCK

QUICK: dict[str, Any] = {"device_steps": 2, "team_rounds": 2}


class Split(nn.Module):
    """A model that is no `nn.Sequential`: features, then a classifier."""

    def __init__(self, drop: float = 0.0, twice: bool = False, mixed: bool = False) -> None:
        super().__init__()
        self.body, self.drop = nn.Linear(64, 8), nn.Dropout(drop)
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
        self.twice, self.mixed = twice, mixed

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.body(x.flatten(1))))
        x = x - x.mean(0) if self.mixed else x
        return self.classifier(x) + self.classifier(x) if self.twice else self.classifier(x)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return build_federation(devices=6, teams=2)


@pytest.fixture(scope="module")
def text() -> Federation:
    """Four devices with 9 samples of 12 tokens."""
    ids = np.random.default_rng(0).integers(0, 20, (36, 13))
    return Federation.from_arrays(ids[:, :-1], ids[:, 1:], np.repeat(np.arange(4), 9), num_classes=20)


def both(method: Any, federation: Federation, model: Any, **settings: Any) -> tuple[Run, Run]:
    """The run on samples and the run on features."""
    return tuple(train(method, federation, model, cache_features=on, **settings) for on in (False, True))  # type: ignore


def shape_of_inputs(run: Run) -> tuple[int, ...]:
    return tuple(run.context.batches.federation.x.shape[1:])


@pytest.mark.parametrize(
    ("model", "which", "kept"),
    [
        ("dnn:20x6", "head", (6,)),
        ("dnn:20x6", "layers=head.*+body.3.bias", (20,)),
        ("dnn:20x6", "layers=body.3.*", (20,)),
        ("dnn:20x6", "lora:rank=2,targets=head", (6,)),
        ("cnn-mnist", "head", (128,)),
        ("resnet9:4,norm=batch", "head", (32,)),
        (Split(), "layers=classifier.*", (8,)),
        (Split(), "layers=classifier.3.*", (8,)),
        (Split(drop=0.0), "layers=classifier.1.*", (8,)),
    ],
)
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("float64", 1e-10)])
def test_models_are_those_of_a_run_on_samples(federation, model, which, kept, dtype, near):
    settings: dict[str, Any] = {"train": which, "dtype": dtype, "rounds": 2, "batch_size": 8}
    plain, cached = both(PerMFL(0.05, **QUICK), federation, model, **settings)
    assert shape_of_inputs(cached) == kept
    assert cached.context.objective.names == plain.context.objective.names
    assert cached.context.objective.frozen_digest == plain.context.objective.frozen_digest
    x = federation.device(0, "test")[0].to(getattr(torch, dtype))
    for who in ({"device": 0}, {"team": plain.team_ids[0]}, {}):
        found, expected = (run.model(**who)(x) for run in (cached, plain))
        torch.testing.assert_close(found, expected, rtol=near, atol=near)
    accuracies = [run.history[-1]["personal"]["test"]["accuracy"] for run in (plain, cached)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=1e-6)


@pytest.mark.parametrize("model", ["gpt:layers=2,width=8,heads=2,tied=false", "lstm:width=6"])
def test_tokens_become_features_and_perplexity_is_measured(text, model):
    plain, cached = both(FedAvg(0.1, 2), text, model, train="head", dtype="float64", rounds=2)
    assert shape_of_inputs(cached)[0] == 12
    assert len(shape_of_inputs(cached)) == 2
    torch.testing.assert_close(cached.row(), plain.row(), rtol=0, atol=1e-10)
    found = [run.history[-1]["global"]["test"]["perplexity"] for run in (plain, cached)]
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_dropout_after_the_boundary_draws_the_same_masks(federation):
    layers = [nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 10)]
    model = nn.Sequential(nn.Flatten(), *layers)
    plain, cached = both(FedAvg(0.1, 2), federation, model, train="layers=3.*", rounds=2, dtype="float64")
    assert shape_of_inputs(cached) == (12,)
    torch.testing.assert_close(cached.row(), plain.row(), rtol=0, atol=1e-10)


def test_layouts_give_the_same_bits(federation):
    settings: dict[str, Any] = {"train": "head", "cache_features": True, "batch_size": 8}
    first = train(PerMFL(**QUICK), federation, "dnn:6", rounds=2, **settings)
    for tile, workers in ((1, 1), (3, 2)):
        other = train(PerMFL(**QUICK), federation, "dnn:6", rounds=2, **settings, tile=tile, workers=workers)
        assert torch.equal(first.row(), other.row())
        assert torch.equal(first.personal, other.personal)  # type: ignore[arg-type]
    with make_loop(PerMFL(**QUICK), federation, "dnn:6", **settings) as training:
        training.use(Loopback(training.context, codec=training.codec))
        assert torch.equal(training.run(2).row(), first.row())


def test_features_of_a_device_do_not_depend_on_other_devices(federation):
    one = Federation.from_arrays(*federation.device(2), device=np.zeros(len(federation.device(2)[0])).astype(int))
    assert len(one.x) > BLOCK
    whole = Federation.from_arrays(
        torch.cat([federation.x[:5], one.x]),
        torch.cat([federation.y[:5], one.y]),
        [0] * 5 + [1] * len(one.x),
        split=[*["train"] * 5, *np.repeat(["train", "test"], [int(one.samples[0]), len(one.x) - int(one.samples[0])])],
    )
    both = [make_loop(FedAvg(), data, "dnn:6", train="head", cache_features=True) for data in (one, whole)]
    features = [loop.context.batches.federation.x for loop in both]
    for loop in both:
        loop.close()
    assert torch.equal(features[0], features[1][5:])


def test_a_folder_is_that_of_a_run_on_samples(federation, tmp_path):
    run = train(
        Ditto(), federation, "dnn:6", train="head", rounds=2, cache_features=True, callbacks=[RunFolder(tmp_path / "a")]
    )
    again = Run.load(tmp_path / "a")
    x, y = federation.device(0, "test")
    assert np.array_equal(again.predict(x, device=0), run.predict(x, device=0))
    export(again, again.whole_row(device=0), tmp_path / "one.pt2", "device 0")
    program = torch.export.load(str(tmp_path / "one.pt2")).module()
    torch.testing.assert_close(program(x[:3]), run.model(device=0)(x[:3]))
    for each in (run, again):
        assert each.adapt(x, y)(x).shape == (len(x), 10)
    longer = resume(tmp_path / "a", rounds=3, federation=federation)
    plain = train(Ditto(), federation, "dnn:6", train="head", rounds=3, cache_features=True)
    assert torch.equal(longer.row(), plain.row())


def test_a_new_device_adapts_on_its_features(federation):
    plain, cached = both(Ditto(), federation, "dnn:6", train="head", rounds=2, dtype="float64")
    x, y = federation.device(1)
    x = x.double()
    torch.testing.assert_close(cached.adapt(x, y)(x), plain.adapt(x, y)(x), rtol=0, atol=1e-10)


def test_several_models_share_features(federation):
    run = train(
        MFARand({"a": FedAvg(), "b": FedAvg()}), federation, "dnn:6", train="head", cache_features=True, rounds=1
    )
    first, second = (run.models[name].context.batches.federation for name in "ab")
    assert first is second
    assert first.origin is not None


@pytest.mark.parametrize(
    ("model", "which", "words"),
    [
        ("dnn:6", "all", "frozen parameters before them"),
        ("mclr", "head", "frozen parameters before them"),
        ("dnn:6", "layers=body.1.bias", "frozen parameters before them"),
        (Split(drop=0.2), "layers=classifier.*", r"dropout 'drop' \(p = 0.2\) is before classifier"),
        (Split(twice=True), "layers=classifier.*", "called once"),
        (Split(mixed=True), "layers=classifier.*", "depends on the other samples"),
        (Split(), "layers=body.*", "train fewer layers"),
    ],
)
def test_a_model_without_fixed_features_is_refused(federation, model, which, words):
    with pytest.raises(ValueError, match=words):
        train(FedAvg(), federation, model, train=which, rounds=1, cache_features=True)


def test_a_tied_head_is_refused(text):
    with pytest.raises(ValueError, match=r"tokens.weight and head.weight are one parameter.*gpt:tied=false"):
        train(FedAvg(), text, "gpt:layers=1,width=8", train="head", rounds=1, cache_features=True)


def test_features_that_do_not_fit_into_memory_are_refused(federation, monkeypatch):
    monkeypatch.setattr("polytier.stack.kept_features.physical_memory", lambda: 1000)
    with pytest.raises(ValueError, match="the features of .* samples need .* of memory"):
        train(FedAvg(), federation, "dnn:6", train="head", rounds=1, cache_features=True)
