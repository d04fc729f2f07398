"""Models: the papers' sizes, gradients of a stack, the same start for the same seed, advice."""

import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from polytier.models.losses import quadratic_loss
from polytier.models.zoo import LANGUAGE_MODELS, MODELS, make_model

SMALL = {  # name: inputs and arguments that make the model tiny
    "mclr": ((7,), {}),
    "dnn": ((2, 3), {"hidden": (5, 4)}),
    "cnn-mnist": ((1, 6, 5), {}),
    "cnn-fmnist": ((2, 5, 4), {}),
    "cnn-celeba": ((3, 16, 17), {}),
    "vgg": ((3, 4, 5), {"cfg": "2-M-3-M"}),
    "resnet9": ((3, 9, 8), {"width": 2}),
    "quadratic": ((4, 4), {}),
    "linear": ((5,), {}),
}
IMAGE_MODELS = ("cnn-mnist", "cnn-fmnist", "cnn-celeba", "vgg", "resnet9")


def size(model):
    return sum(p.numel() for p in model.parameters())


def linears(model):
    return [layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)]


def small(name):
    inputs, arguments = SMALL[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name](inputs, 3, **arguments).double(), inputs


def loss(name, output, target):
    if name == "quadratic":
        return quadratic_loss(output, target).mean()
    return nn.functional.cross_entropy(output, target)


def stack_of(name, model, inputs, devices=3, batch=2):
    """Parameters, inputs and targets of a few devices, all different."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    parameters = {key: p.detach() + 0.1 * draw(devices, *p.shape) for key, p in model.named_parameters()}
    x = draw(devices, batch, *inputs)
    if name == "quadratic":
        return parameters, x + x.mT, draw(devices, batch, inputs[0])
    return parameters, x, torch.arange(devices * batch).reshape(devices, batch) % 3


def test_every_model_is_tested():
    assert SMALL.keys() | LANGUAGE_MODELS.keys() == MODELS.keys()  # those are in test_language.py


def test_sizes_of_the_papers():
    assert size(MODELS["mclr"]((784,), 10)) == 7850
    assert size(MODELS["mclr"]((1, 28, 28), 10)) == 7850
    assert size(MODELS["mclr"]((1, 28, 28), 10, outputs=62)) == 785 * 62
    with pytest.raises(ValueError, match="fewer outputs than there are classes"):
        MODELS["mclr"]((784,), 10, outputs=9)
    assert size(MODELS["dnn"]((784,), 10)) == 79510  # sFedHP's Remark 1
    assert linears(MODELS["dnn"]((1, 28, 28), 10, hidden=(500, 200))) == [784, 500, 200]
    assert linears(MODELS["cnn-mnist"]((1, 28, 28), 62)) == [18432, 128]
    assert linears(MODELS["cnn-fmnist"]((1, 28, 28), 10)) == [3136, 128]
    assert linears(MODELS["cnn-celeba"]((3, 84, 84), 2)) == [800]
    assert linears(MODELS["vgg"]((3, 32, 32), 10)) == [128]


def test_resnet9_has_the_usual_size():
    pairs = [(3, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
    convolutions = sum(9 * before * after for before, after in pairs)
    norms = sum(2 * after for _, after in pairs)
    assert size(MODELS["resnet9"]((3, 32, 32), 100)) == convolutions + norms + 512 * 100 + 100


@pytest.mark.parametrize("name", SMALL)
def test_output_shapes(name):
    model, inputs = small(name)
    x = torch.zeros(2, *inputs, dtype=torch.float64)
    assert model(x).shape == ((2, 2, 4) if name == "quadratic" else (2, 3))


@pytest.mark.parametrize("name", [name for name in SMALL if name != "quadratic"])
def test_the_last_layer_is_called_head(name):
    names = [key for key, _ in small(name)[0].named_parameters()]
    assert names[-2:] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("name", SMALL)
def test_gradient_of_a_stack_is_that_of_each_device(name):
    model, inputs = small(name)
    parameters, x, y = stack_of(name, model, inputs)

    def device_loss(parameters, x, y):
        return loss(name, functional_call(model, parameters, (x,)), y)

    stacked = vmap(grad(device_loss))
    traced = make_fx(stacked)(parameters, x, y)(parameters, x, y)  # as the stacked engine runs it
    together = stacked(parameters, x, y)
    for device in range(3):
        model.load_state_dict({key: rows[device] for key, rows in parameters.items()})
        model.zero_grad()
        loss(name, model(x[device]), y[device]).backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(together[key][device], parameter.grad, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(traced[key][device], parameter.grad, rtol=1e-10, atol=1e-10)


def test_quadratic_is_the_quadratic():
    model, inputs = small("quadratic")
    parameters, A, b = stack_of("quadratic", model, inputs, devices=1)
    assert not model.get_parameter("theta").any()  # starts at zero
    theta = parameters["theta"][0]
    output = functional_call(model, {"theta": theta}, (A[0],))
    expected = [theta @ A[0, k] @ theta / 2 - b[0, k] @ theta for k in range(2)]
    torch.testing.assert_close(quadratic_loss(output, b[0]), torch.stack(expected))


def test_the_seed_decides_the_start():
    state = torch.get_rng_state()
    first = make_model("dnn", (6,), 3, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(1)
    again, other = make_model("dnn", (6,), 3, seed=1), make_model("dnn", (6,), 3, seed=2)
    torch.set_rng_state(state)
    for p, q, r in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, r)


def test_arguments_in_the_name():
    assert linears(make_model("dnn:500x200", (784,), 10, seed=0)) == [784, 500, 200]
    assert linears(make_model("dnn:20", (60,), 10, seed=0)) == [60, 20]
    assert linears(make_model("vgg:4-M-8-M", (3, 8, 8), 10, seed=0)) == [32]
    assert linears(make_model("resnet9:4", (3, 8, 8), 10, seed=0)) == [32]
    assert size(make_model("quadratic", (5, 5), None, seed=0)) == 5
    numbers = {text: make_model(text, (5,), None, seed=0, targets=(2,)) for text in ("linear", "dnn:7")}
    assert [tuple(model(torch.zeros(3, 5)).shape) for model in numbers.values()] == [(3, 2), (3, 2)]


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A user's file in the current directory."""
    (tmp_path / "own_models.py").write_text(
        "import torch\n"
        "def tiny(inputs, num_classes):\n"
        "    return torch.nn.Linear(inputs[0], num_classes)\n"
        "def normed(inputs, num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(inputs[0], 4), torch.nn.SyncBatchNorm(4))\n"
        "def stateless(inputs, num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(inputs[0], 4),\n"
        "                               torch.nn.BatchNorm1d(4, track_running_stats=False))\n"
        "def empty(inputs, num_classes):\n"
        "    return torch.nn.ReLU()\n"
        "def nothing(inputs, num_classes):\n"
        "    return None\n"
        "def three(inputs, num_classes, depth):\n"
        "    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.usefixtures("own_module")
def test_own_factory():
    first, again = (make_model("own_models:tiny", (5,), 3, seed=7) for _ in range(2))
    assert torch.equal(first.get_parameter("weight"), again.get_parameter("weight"))
    with pytest.raises(ValueError, match="mclr"):  # a module without a factory is no model either
        make_model("own_models", (5,), 3, seed=7)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("own_models:missing", "no attribute 'missing'.*package.module:factory.*mclr"),
        ("no_such.module:factory", "No module named.*package.module:factory"),
        ("own_models:three", r"called as factory\(\(5,\), 3\).*depth"),
        ("own_models:torch", "'module' object is not callable"),
        ("own_models:nothing", "gave NoneType; return a Module"),
        ("own_models:empty", "ReLU; return a Module that has parameters"),
        ("own_models:normed", "SyncBatchNorm '1'.*GroupNorm"),
        ("own_models:stateless", "BatchNorm1d '1'.*GroupNorm"),
    ],
)
def test_advice_on_own_factories(text, advice):
    with pytest.raises(ValueError, match=advice):
        make_model(text, (5,), 3, seed=0)


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("inputs", [(60,), (28, 28), (3, 3, 28), (3, 28, 3)])
def test_advice_on_shapes(name, inputs):
    with pytest.raises(ValueError, match=f"model {name} takes images.*try mclr"):
        make_model(name, inputs, 10, seed=0)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_smallest_images(name):
    smallest = {"cnn-mnist": 5, "cnn-fmnist": 4, "cnn-celeba": 16, "vgg": 32, "resnet9": 8}[name]
    model = MODELS[name]((1, smallest, smallest), 2)
    assert model(torch.zeros(1, 1, smallest, smallest)).shape == (1, 2)
    with pytest.raises(ValueError, match=f"{smallest} x {smallest}"):
        MODELS[name]((1, smallest, smallest - 1), 2)


@pytest.mark.parametrize(
    ("text", "inputs", "num_classes", "advice"),
    [
        ("mclrr", (5,), 3, "mclr"),
        ("no-such-model:3", (5,), 3, "mclr"),
        ("mclr", (5,), None, "numbers; use linear"),
        ("linear", (5,), 3, "classes; use mclr"),
        ("dnn:5x0", (5,), 3, "1 or more"),
        ("vgg:16-P", (3, 8, 8), 3, "M for a pool"),
        ("resnet9:1", (3, 8, 8), 3, "2 or more"),
        ("quadratic", (5,), None, r"\(d, d\)"),
    ],
)
def test_advice_on_names_and_arguments(text, inputs, num_classes, advice):
    with pytest.raises(ValueError, match=advice):
        make_model(text, inputs, num_classes, seed=0)
