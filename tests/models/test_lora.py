"""LoRA: what trains, what is frozen, and that the base is one copy that never changes or travels."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from polytier import FedAvg, PerMFL, Run, RunFolder, build_federation, check_algorithm, train
from polytier.models.lora import LoRA, merged
from polytier.models.trainable import Trainable, digest
from polytier.models.zoo import make_model
from polytier.runs.loop import make_loop
from polytier.stack.objective import Objective

CHOICE = "lora:rank=2,alpha=4,targets=body.*"
DROPPED = "lora:rank=2,alpha=4,dropout=0.5,targets=body.*"


@pytest.fixture(scope="module")
def federation():
    return build_federation("digits", devices=6, teams=2)


def base() -> nn.Module:
    return make_model("dnn:12", (8, 8), 10, seed=0)


def test_a_model_starts_as_its_base_and_a_row_holds_what_is_new():
    model, x = base(), torch.randn(5, 8, 8)
    trainable = Trainable.parse(CHOICE)
    adapted = trainable.apply(model)
    assert torch.equal(adapted(x), model(x))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == 2 * 64 + 12 * 2
    assert Trainable.parse(str(trainable)) == trainable


MAKE = {
    "linear": lambda: nn.Linear(5, 7),
    "conv1d": lambda: Conv1D(7, 5),  # its weight is [in, out]
    "conv2d": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_the_merged_weight_gives_the_same_outputs(make):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(2)).double()
    x = torch.randn(4, 3, 6, 6) if isinstance(model[0], nn.Conv2d) else torch.randn(4, 5)
    model(x.double())
    adapted = Trainable.parse("lora:rank=3,alpha=2,targets=0").apply(model)
    layer = adapted[0]  # type: ignore[index]
    assert isinstance(layer, LoRA)
    layer.lora_B.data.normal_()
    assert not torch.allclose(adapted(x.double()), model(x.double()))
    expected = adapted(x.double())
    model.load_state_dict(merged(adapted))
    torch.testing.assert_close(model(x.double()), expected, rtol=0, atol=1e-12)


def test_first_values_follow_from_the_seed_and_the_name():
    trainable = Trainable.parse("lora:rank=2,targets=*")
    one, again, other = (dict(trainable.apply(base(), seed).named_parameters()) for seed in (0, 0, 1))
    assert torch.equal(one["head.lora_A"], again["head.lora_A"])
    assert not torch.equal(one["head.lora_A"], other["head.lora_A"])
    assert float(one["head.lora_A"].detach().abs().max()) <= 12**-0.5
    assert not one["head.lora_B"].any()


def test_a_shared_base_is_not_copied():
    model = base()
    adapted = Trainable.parse(CHOICE).apply(model, share=True)
    assert adapted.body[1].base.weight.data_ptr() == model.body[1].weight.data_ptr()  # type: ignore[union-attr, index]
    assert model.body[1].weight.requires_grad  # type: ignore[union-attr, index]


def test_with_workers_the_base_is_still_one_copy(federation):
    with make_loop(FedAvg(0.1, 1), federation, "dnn:12", train=CHOICE, workers=2) as training:
        module, objective = training.context.module, training.context.objective
        assert module is not None
        weight = module.get_parameter("body.1.weight")
        assert weight.data_ptr() == objective.frozen["body.1.base.weight"].data_ptr()
        assert torch.equal(weight, base().get_parameter("body.1.weight"))


@pytest.mark.parametrize("choice", [CHOICE, DROPPED])
@pytest.mark.parametrize("batching", ["stacked", "single", "eager"])
def test_every_layout_has_the_same_bits(federation, batching, choice):
    settings: dict[str, Any] = {"rounds": 2, "train": choice, "batching": batching}
    method = PerMFL(device_lr=0.1, device_steps=2, team_rounds=2)
    first = train(method, federation, "dnn:12", **settings)
    for more in ({"tile": 1}, {"tile": 4}, {"engine": "loopback"}, {"workers": 2}):
        other = train(method, federation, "dnn:12", **{**settings, **more})
        assert torch.equal(first.personal, other.personal), more  # type: ignore[arg-type]


def test_dropout_is_on_what_the_product_sees_and_off_in_evaluation(federation):
    assert str(Trainable.parse(DROPPED)) == DROPPED
    objective = Objective(base(), trainable=Trainable.parse(DROPPED))
    x, key = torch.rand(4, 8, 8), torch.arange(4)
    start, moved = objective.initial, objective.initial + 0.1
    assert torch.equal(objective.apply(start, x, key), objective.apply(start, x))  # B is zero, and W sees all of x
    assert not torch.equal(objective.apply(moved, x, key), objective.apply(moved, x))
    assert not torch.equal(objective.apply(moved, x, key), objective.apply(moved, x, key + 4))
    plain = Objective(base(), trainable=Trainable.parse(CHOICE))
    assert torch.equal(objective.apply(moved, x), plain.apply(moved, x))
    run = train(FedAvg(0.1, 2), federation, "dnn:12", rounds=1, train=DROPPED)
    model = run.model()
    assert torch.equal(model(federation.x[:4]), model(federation.x[:4]))
    assert not torch.equal(run.row(), train(FedAvg(0.1, 2), federation, "dnn:12", rounds=1, train=CHOICE).row())


def test_the_contract_holds():
    check_algorithm(FedAvg(device_steps=2), model="dnn:4", train="lora:rank=1", rounds=2)


def test_the_base_never_changes_and_is_in_no_message_or_file(federation, tmp_path):
    model = base()
    before, weight = digest(dict(model.named_parameters())), model.body[1].weight.detach().numpy()  # type: ignore
    with make_loop(FedAvg(device_lr=0.1, device_steps=2), federation, model, train=CHOICE) as training:
        objective = training.context.objective
        run = training.run(2, [RunFolder(tmp_path / "run")])
    assert objective.dimension == len(run.global_) == 2 * 64 + 12 * 2  # type: ignore[arg-type]
    assert digest(dict(model.named_parameters())) == before
    assert digest({k.replace(".base", ""): p for k, p in objective.frozen.items()}) == before
    needle = np.ascontiguousarray(weight[3]).tobytes()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if needle in path.read_bytes()]


def test_messages_count_what_trains(federation):
    run = train(FedAvg(device_steps=1), federation, "dnn:12", rounds=1, train=CHOICE)
    assert run.history[-1]["bytes"]["server-device"]["up"] == 6 * 4 * (2 * 64 + 12 * 2)


def test_a_folder_is_read_back_and_the_export_is_a_model_of_the_base(federation, tmp_path):
    run = train("fedavg", federation, "dnn:12", rounds=1, train=CHOICE, set={"device_lr": 0.5, "device_steps": 3})
    run.save(tmp_path / "run")
    x = federation.device(0, "test")[0]
    again = Run.load(tmp_path / "run")
    assert np.array_equal(run.predict(x), again.predict(x))
    from polytier.runs.export import export

    export(again, again.row(), tmp_path / "model.safetensors", "all")
    model = base()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(model(x), again.model()(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(x), base()(x))


@pytest.mark.parametrize(
    ("choice", "advice"),
    [
        ("lora:targets=nothing*", "no layer fits the pattern 'nothing\\*'.*body.1, head"),
        ("lora:targets=body.2", "ReLU.*LoRA knows Linear"),
        ("lora:rank=0", "rank is 1 or more"),
        ("lora:width=3", "it takes rank, alpha, targets, dropout"),
        ("lora:dropout=1", "dropout is a probability below 1"),
    ],
)
def test_bad_choices_give_advice(federation, choice, advice):
    with pytest.raises(ValueError, match=advice):
        train("fedavg", federation, "dnn:12", rounds=1, train=choice)


def test_layers_that_a_model_does_not_call_are_refused():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.raises(ValueError, match="called by their model"):
        Trainable.parse("lora:targets=*linear1").names(nn.Sequential(model, nn.Linear(8, 2)))
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="without groups"):
        Trainable.parse("lora:targets=0").names(grouped)
