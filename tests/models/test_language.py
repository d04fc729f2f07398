"""Language models against torch's own layers; stacks; the loss of tokens; advice."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from polytier import FedAvg, train
from polytier.data import IGNORED
from polytier.data.batches import Batches
from polytier.data.build import build_federation
from polytier.models.losses import cross_entropy
from polytier.models.metrics import METRICS
from polytier.models.zoo import make_model
from polytier.runs.export import export
from polytier.runs.sample_check import check_kinds, check_tokens
from polytier.stack.objective import Objective, choose_batching

T, V = 7, 11
NAMES = ("gpt:layers=2,width=8,heads=2", "gpt:layers=1,width=8,heads=2,tied=false", "lstm:layers=2,width=8")


@pytest.fixture(scope="module")
def federation():
    return build_federation("sentences:context=12", devices=5)


def ids(*shape, seed=0):
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def spread(model):
    """The model with parameters that are far from zero."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def test_a_gpt_equals_torchs_transformer():
    model: Any = spread(make_model("gpt:layers=2,width=8,heads=2,tied=false", (T,), V, 0).double())
    x = model.tokens.weight[ids(3, T)] + model.positions.weight[:T]
    mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True).double()
        own = block.attention
        layer.self_attn.in_proj_weight.data, layer.self_attn.in_proj_bias.data = own.qkv.weight, own.qkv.bias
        layer.self_attn.out_proj, layer.norm1, layer.norm2 = own.out, block.norm1, block.norm2
        layer.linear1, layer.linear2 = block.mlp[0], block.mlp[2]
        x = layer.train()(x, src_mask=mask)
    wanted = functional.layer_norm(x, (8,), model.norm.weight, model.norm.bias) @ model.head.weight.T
    torch.testing.assert_close(model(ids(3, T)), wanted, rtol=1e-10, atol=1e-10)


def test_an_lstm_equals_torchs_lstm():
    model: Any = spread(make_model("lstm:layers=2,width=6", (T,), V, 0).double())
    reference = nn.LSTM(6, 6, 2, batch_first=True).double()
    for k, cell in enumerate(model.cells):
        for name, value in (("weight_ih", cell.input.weight), ("weight_hh", cell.state.weight)):
            getattr(reference, f"{name}_l{k}").data = value.data
        getattr(reference, f"bias_ih_l{k}").data = cell.input.bias.data
        getattr(reference, f"bias_hh_l{k}").data.zero_()
    wanted = model.head(reference(model.tokens(ids(3, T)))[0])
    torch.testing.assert_close(model(ids(3, T)), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_position_sees_only_what_comes_before(name):
    model = spread(make_model(name, (T,), V, 0))
    first = ids(2, T)
    second = first.clone()
    second[:, 4:] = (second[:, 4:] + 1) % V
    a, b = model(first), model(second)
    assert torch.equal(a[:, :4], b[:, :4])
    assert not torch.equal(a[:, 4:], b[:, 4:])
    assert a.shape == (2, T, V)


@pytest.mark.parametrize("name", NAMES)
def test_stacks_have_the_bits_of_single_rows_and_the_gradients_of_autograd(name, federation):
    torch.set_num_threads(1)
    module = spread(make_model(name, (12,), federation.num_classes, 0))
    objective = Objective(module, cross_entropy)
    batch = Batches(federation, 0, torch.float32).walk(torch.arange(5), 0, 0, 3).next()
    choose_batching(objective, batch, 0)
    assert objective.batching == "stacked"
    theta = objective.initial + 0.01 * torch.randn(5, objective.dimension, generator=torch.Generator().manual_seed(1))
    together = objective.grad(theta, batch)
    for i in range(5):
        assert torch.equal(objective.grad(theta[i : i + 1], batch.row(i))[0], together[i])
    eager = Objective(module, cross_entropy, batching="eager").grad(theta, batch)
    torch.testing.assert_close(together, eager, rtol=1e-5, atol=1e-5)
    assert float(together.abs().max()) > 1e-3


def test_a_tied_head_is_one_parameter():
    tied: Any
    free: Any
    tied, free = (make_model(f"gpt:layers=1,width=8,tied={tied}", (T,), V, 0) for tied in ("true", "false"))
    size = [sum(p.numel() for p in model.parameters()) for model in (tied, free)]
    assert size[1] - size[0] == V * 8
    assert tied.head.weight is tied.tokens.weight


def test_an_export_of_a_model_with_a_tied_head_is_loaded(federation, tmp_path):
    run = train(FedAvg(0.1, 1), federation, "gpt:layers=1,width=8", rounds=1)
    export(run, run.row(), tmp_path / "model.safetensors", "all")
    model = make_model("gpt:layers=1,width=8", (federation.x.shape[1],), federation.num_classes, seed=1)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = federation.device(0)[0]
    assert torch.equal(model.eval()(x), run.model()(x))


def test_the_loss_of_tokens_is_torchs_without_those_ignored():
    outputs, targets = torch.randn(3, T, V, dtype=torch.float64, requires_grad=True), ids(3, T)
    targets[0, 5:] = IGNORED
    targets[2] = IGNORED
    found = cross_entropy(outputs, targets)
    for k in range(2):
        wanted = functional.cross_entropy(outputs[k], targets[k], ignore_index=IGNORED)
        torch.testing.assert_close(found[k], wanted, rtol=1e-12, atol=1e-12)
    assert float(found[2].detach()) == 0
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    assert bool((gradient[0, 5:] == 0).all())
    assert bool((gradient[2] == 0).all())
    assert bool((gradient[0, :5] != 0).all())


def test_metrics_of_tokens_leave_out_those_ignored():
    targets = torch.tensor([[1, 2, IGNORED], [0, IGNORED, IGNORED]])
    outputs = functional.one_hot(torch.tensor([[1, 0, 0], [0, 0, 0]]), 4).float()
    assert METRICS["accuracy"](outputs, targets).tolist() == [0.5, 1.0]
    assert METRICS["top_5"](outputs, targets).tolist() == [1.0, 1.0]
    arrays = outputs.numpy(), targets.numpy()
    assert METRICS["balanced_accuracy"](*arrays) == pytest.approx(2 / 3)  # classes 0 and 1 are right, 2 is not
    assert METRICS["macro_f1"](*arrays) == pytest.approx((2 / 3 + 1 + 0) / 3)
    kept = targets[targets != IGNORED].numpy()
    wanted = METRICS["auc"](outputs[targets != IGNORED].numpy(), kept)
    assert METRICS["auc"](*arrays) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gpt:width=10,heads=4", "heads = 4 does not divide width = 10"),
        ("gpt:layers=0", "layers of gpt must be 1 or more; got 0"),
        ("gpt:dropout=1", "dropout of gpt is a probability below 1; got 1"),
        ("lstm:width=0", "width of lstm must be 1 or more; got 0"),
    ],
)
def test_advice(name, advice):
    with pytest.raises(ValueError, match=advice):
        make_model(name, (T,), V, 0)


def test_advice_where_model_and_data_do_not_fit(federation):
    with pytest.raises(ValueError, match="samples have 12 tokens, the model takes at most 8; write"):
        check_tokens(make_model("gpt:context=8,width=8", (12,), 257, 0), federation)
    with pytest.raises(ValueError, match="the tokenizer has 257 tokens, the model knows 100; use the tokenizer"):
        check_tokens(make_model("gpt:width=8", (12,), 100, 0), federation)
    check_tokens(make_model("gpt:width=8,context=20", (12,), 300, 0), federation)
    with pytest.raises(ValueError, match="takes numbers or images, but x holds tokens; try gpt or lstm"):
        check_kinds("dnn", federation, default=True)
    with pytest.raises(ValueError, match="model gpt takes token ids"):
        check_kinds("gpt", build_federation("digits", devices=4), default=True)
    with pytest.raises(ValueError, match="model lstm takes samples of token ids"):
        make_model("lstm", (1, 8, 8), 10, 0)
