"""Runs in which a part of the model is frozen: what is sent, kept, saved, read back and exported."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from polytier import (
    FedAvg,
    FedRep,
    MFARand,
    PerMFL,
    Run,
    RunFolder,
    build_federation,
    check_algorithm,
    make_loop,
    train,
)
from polytier.engines.loopback import Loopback
from polytier.models.trainable import Trainable
from polytier.models.zoo import make_model
from polytier.runs.checkpoint import latest
from polytier.runs.export import export

QUICK: dict[str, Any] = {"device_steps": 2, "team_rounds": 2}
HEAD = 10 * 6 + 10  # numbers in the head of dnn:6 on digits


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, teams=2)


def own_module() -> nn.Module:
    """The body is frozen by the user."""
    torch.manual_seed(4)
    module = make_model("dnn:6", (1, 8, 8), 10, seed=3)
    module.get_submodule("body").requires_grad_(False)
    return module


def start() -> dict[str, torch.Tensor]:
    return make_model("dnn:6", (1, 8, 8), 10, seed=0).state_dict()


def same_body(module: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    body = {k: v for k, v in module.state_dict().items() if "body" in k}
    return bool(body) and all(torch.equal(v, expected[k.removeprefix("model.")]) for k, v in body.items())


def test_the_body_is_untouched_and_the_ledger_counts_the_head_alone(federation):
    run = train(PerMFL(**QUICK), federation, "dnn:6", rounds=2, train="head")
    assert run.personal is not None
    assert run.personal.shape == (6, HEAD)
    assert run.ledger.total()["team-device"]["up"] == 2 * 2 * 6 * HEAD * 4
    for who in ({"device": 1}, {"team": run.team_ids[0]}, {}):
        module = run.model(**who)
        assert same_body(module, start())
        assert not torch.equal(module.state_dict()["head.weight"], start()["head.weight"])
    assert set(run.context.memory.names(2)) == {"model"}
    assert all(v.shape[1] == HEAD for k, v in run.context.memory.state().items() if k.endswith("rows"))


def test_what_the_module_has_frozen_is_frozen(federation):
    module = own_module()
    before = copy.deepcopy(module.state_dict())
    run = train(FedAvg(device_steps=2), federation, module, rounds=1)
    assert run.context.objective.names == ["head.weight", "head.bias"]
    assert run.spec.train == "all"
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    module.get_parameter("body.1.weight").data.zero_()  # what the user does later changes nothing here
    assert same_body(run.model(), before)


@pytest.mark.parametrize("batching", ["stacked", "single", "eager"])
def test_layouts_give_the_same_bits(federation, batching):
    settings: dict[str, Any] = {"train": "head", "batching": batching, "batch_size": 8}
    first = train(PerMFL(**QUICK), federation, "dnn:6", rounds=2, **settings)
    for tile, workers in ((1, 1), (3, 2)):
        other = train(PerMFL(**QUICK), federation, "dnn:6", rounds=2, **settings, tile=tile, workers=workers)
        assert torch.equal(first.row(), other.row())
        assert torch.equal(first.personal, other.personal)  # type: ignore[arg-type]
    with make_loop(PerMFL(**QUICK), federation, "dnn:6", **settings) as training:
        training.use(Loopback(training.context, codec=training.codec))
        assert torch.equal(training.run(2).row(), first.row())


def test_a_method_keeps_its_contract_with_a_frozen_body():
    check_algorithm(PerMFL(**QUICK), model="dnn:5", train="head")


def test_training_the_head_equals_training_a_model_of_features(federation):
    """The frozen body is a function of the inputs: its outputs, as data, give the same models."""
    run = train(FedAvg(0.1, 2), federation, "dnn:6", rounds=2, train="head", dtype="float64")
    body: Any = make_model("dnn:6", (1, 8, 8), 10, seed=0).double()
    with torch.no_grad():
        features = body.body(federation.x.double())
    plain = copy.copy(federation)
    object.__setattr__(plain, "x", features)
    head = nn.Linear(6, 10).double()
    head.load_state_dict(body.head.state_dict())
    other = train(FedAvg(0.1, 2), plain, head, rounds=2, dtype="float64")
    torch.testing.assert_close(run.row(), other.row(), rtol=0, atol=1e-12)


def test_a_folder_holds_what_trains_and_is_read_back_whole(federation, tmp_path):
    run = train(PerMFL(**QUICK), federation, "dnn:6", rounds=2, train="layers=head.*", callbacks=[RunFolder(tmp_path)])
    files = list((tmp_path / "models").iterdir())
    assert len(files) == 3
    assert all(set(load_file(path)) == {"head.weight", "head.bias"} for path in files)
    found = latest(tmp_path / "checkpoints")
    assert found is not None
    assert all(v.shape[1:] == (HEAD,) for k, v in found[1].items() if k.endswith("rows") or k == "state")
    again = Run.load(tmp_path)
    assert same_body(again.model(device=1), start())
    x, _ = federation.device(1)
    assert torch.equal(again.model(device=1)(x), run.model(device=1)(x))
    again_y = again.adapt(*federation.device(2), team=run.team_ids[0])(x)
    assert torch.equal(again_y, run.adapt(*federation.device(2), team=run.team_ids[0])(x))


def test_a_run_goes_on_from_its_checkpoint(federation, tmp_path):
    whole = train(PerMFL(**QUICK), federation, "dnn:6", rounds=3, train="head")
    train(PerMFL(**QUICK), federation, "dnn:6", rounds=1, train="head", callbacks=[RunFolder(tmp_path)])
    found = latest(tmp_path / "checkpoints")
    assert found is not None
    with make_loop(PerMFL(**QUICK), federation, "dnn:6", train="head") as training:
        training.restore(*found[1:])
        assert torch.equal(training.run(3).row(), whole.row())


def test_a_module_from_python_is_given_again_and_checked(federation, tmp_path):
    run = train(FedAvg(device_steps=2), federation, own_module(), rounds=1)
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run", own_module())
    assert same_body(again.model(), own_module().state_dict())
    assert torch.equal(again.row(), run.row())
    other = own_module()
    other.get_parameter("body.1.weight").data[0, 0] += 1e-6
    with pytest.raises(ValueError, match="frozen parameters of this model are not those of the run"):
        Run.load(tmp_path / "run", other)
    with pytest.raises(ValueError, match="with the same parameters frozen"):
        Run.load(tmp_path / "run", own_module().requires_grad_(True))
    train(FedAvg(device_steps=2), federation, own_module().requires_grad_(True), rounds=1).save(tmp_path / "all")
    with pytest.raises(ValueError, match="with the same parameters frozen"):
        Run.load(tmp_path / "all", own_module())


def test_an_export_is_usable_alone(federation, tmp_path):
    run = train(FedAvg(device_steps=2), federation, "dnn:6", rounds=1, train="head")
    export(run, run.row(), tmp_path / "model.safetensors", "global")
    module = make_model("dnn:6", (1, 8, 8), 10, seed=99)
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same_body(module, start())
    x, _ = federation.device(0)
    assert torch.equal(module(x), run.model()(x))
    export(run, run.row(), tmp_path / "model.pt2", "global")


def test_methods_that_choose_columns_see_what_trains(federation):
    deep = {"rounds": 1, "train": "layers=head.*+body.3.*"}
    run = train(FedRep(head_steps=1, body_steps=1), federation, "dnn:8x6", **deep)
    assert run.context.objective.names == ["body.3.weight", "body.3.bias", "head.weight", "head.bias"]
    assert run.ledger.total()["server-device"]["up"] == 6 * 4 * (6 * 8 + 6)  # it sends no head
    with pytest.raises(ValueError, match="head"):
        train(FedRep(), federation, "dnn:6", rounds=1, train="layers=body.*")


def test_several_models_train_what_each_is_told(federation, tmp_path):
    methods = MFARand({"a": FedAvg(device_steps=1), "b": FedAvg(device_steps=1)})
    choices = {"a": "head", "b": Trainable()}
    run = train(methods, federation, "dnn:6", rounds=1, train=choices, callbacks=[RunFolder(tmp_path / "run")])
    assert run.models["a"].row().shape == (HEAD,)
    assert run.models["b"].row().shape == (65 * 6 + HEAD,)
    again = Run.load(tmp_path / "run")
    assert same_body(again.models["a"].model(), start())
    assert torch.equal(again.models["b"].row(), run.models["b"].row())
    alike = train(methods, federation, "dnn:6", rounds=1, train="head", workers=2)
    assert alike.models["a"].context.objective is alike.models["b"].context.objective


@pytest.mark.parametrize(
    ("choice", "advice"), [("hed", "did you mean 'head'"), ("layers=x.*", "available: body.1.weight")]
)
def test_a_choice_that_cannot_be_brings_advice(federation, choice, advice):
    with pytest.raises(ValueError, match=advice):
        train(FedAvg(), federation, "dnn:6", rounds=1, train=choice)
