"""Models by name. Every function takes the shape of one sample and the number of outputs, and returns a module.

Outputs are one score per class, or the numbers of a target that is not a class.

The gradient of a stack of devices is vmap(grad(...)), traced once per shape. A model here therefore has no in-place
operations, no branches that depend on data and no statistics over a batch. The last layer is always called `head`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from math import gcd, prod
from pathlib import Path

import torch
from torch import Tensor, nn

from polytier._text import bind
from polytier.models.language import gpt, lstm
from polytier.models.own_code import exists, load
from polytier.models.pretrained import from_transformers, load_weights


def chain(**layers: nn.Module) -> nn.Sequential:
    """Layers in sequence, with names, because methods choose parameters by name (`columns("head.*")`)."""
    return nn.Sequential(OrderedDict(layers))


def mclr(inputs: tuple[int, ...], num_outputs: int, *, outputs: int = 0) -> nn.Module:
    """Multinomial logistic regression: one linear layer. outputs: more outputs than classes, as in mclr:62."""
    if outputs and outputs < num_outputs:
        raise ValueError(f"mclr:{outputs} has fewer outputs than there are classes ({num_outputs}); leave it out")
    return chain(flat=nn.Flatten(), head=nn.Linear(prod(inputs), outputs or num_outputs))


def linear(inputs: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Linear regression: one linear layer, for targets that are numbers."""
    return mclr(inputs, num_outputs)


def dnn(inputs: tuple[int, ...], num_outputs: int, *, hidden: tuple[int, ...] = (100,)) -> nn.Module:
    """Fully connected layers with ReLU. hidden: the widths of the hidden layers, as in dnn:500x200."""
    if any(width < 1 for width in hidden):
        raise ValueError(f"hidden widths {hidden} must be 1 or more; try dnn:500x200")
    widths, body = (prod(inputs), *hidden), nn.Sequential(nn.Flatten())
    for before, after in pairwise(widths):
        body.extend([nn.Linear(before, after), nn.ReLU()])
    return chain(body=body, head=nn.Linear(widths[-1], num_outputs))


def cnn_mnist(inputs: tuple[int, ...], num_outputs: int) -> nn.Module:
    """PerMFL's CNN for MNIST and EMNIST: 2x2 convolutions, pools of stride 1: 28, 27, 26, 25, 24."""
    channels = image_channels("cnn-mnist", inputs, smallest=5)
    body = nn.Sequential(
        *(nn.Conv2d(channels, 16, 2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        nn.Flatten(),  # 32 * 24 * 24 = 18432 on 28x28
    )
    return with_dense(body, inputs, num_outputs)


def cnn_fmnist(inputs: tuple[int, ...], num_outputs: int) -> nn.Module:
    """PerMFL's CNN for FMNIST: 3x3 convolutions with padding, pools that halve the size."""
    channels = image_channels("cnn-fmnist", inputs, smallest=4)
    body = nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),  # 64 * 7 * 7 = 3136 on 28x28
    )
    return with_dense(body, inputs, num_outputs)


def with_dense(body: nn.Sequential, inputs: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The body, a dense layer of 128 and the head."""
    body.extend([nn.Linear(num_features(body, inputs), 128), nn.ReLU()])
    return chain(body=body, head=nn.Linear(128, num_outputs))


def cnn_celeba(inputs: tuple[int, ...], num_outputs: int) -> nn.Module:
    """LEAF's CNN for CelebA: four blocks of 3x3 convolution, norm, pool, ReLU; then one dense layer.

    LEAF uses batch norm. Here it is group norm, because a batch is padded and differs from device to device.
    """
    channels = image_channels("cnn-celeba", inputs, smallest=16)
    body = nn.Sequential()
    for before in (channels, 32, 32, 32):
        body.extend([nn.Conv2d(before, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.MaxPool2d(2), nn.ReLU()])
    body.append(nn.Flatten())  # 32 * 5 * 5 = 800 on 84x84
    return chain(body=body, head=nn.Linear(num_features(body, inputs), num_outputs))


def vgg(inputs: tuple[int, ...], num_outputs: int, *, cfg: str = "16-M-32-M-64-M-128-M-128-M") -> nn.Module:
    """sFedHP's VGG. cfg: a number is a 3x3 convolution with that many filters and ReLU, M is a 2x2 pool."""
    parts = cfg.upper().split("-")
    if not all(part == "M" or (part.isdecimal() and int(part) > 0) for part in parts):
        raise ValueError(f"cfg {cfg!r} must be numbers of filters and M for a pool; try vgg:16-M-32-M")
    width = image_channels("vgg", inputs, smallest=2 ** parts.count("M"))
    body = nn.Sequential()
    for part in parts:
        if part == "M":
            body.append(nn.MaxPool2d(2))
        else:
            body.extend([nn.Conv2d(width, int(part), 3, padding=1), nn.ReLU()])
            width = int(part)
    body.append(nn.Flatten())
    return chain(body=body, head=nn.Linear(num_features(body, inputs), num_outputs))


def resnet9(inputs: tuple[int, ...], num_outputs: int, *, width: int = 64, norm: str = "group") -> nn.Module:
    """ResNet-9: eight convolutions, four in residual blocks. width: filters of the first; norm: group or batch."""
    if norm not in ("group", "batch"):
        raise ValueError(f"norm {norm!r} of resnet9 is group or batch; try resnet9:norm=batch")
    if width < 2 and norm == "group":
        raise ValueError(f"width {width} must be 2 or more, or group norm erases its input; try resnet9:16")
    channels = image_channels("resnet9", inputs, smallest=8)
    body = nn.Sequential(
        conv_block(channels, width, norm),
        *(conv_block(width, 2 * width, norm), nn.MaxPool2d(2), Residual(2 * width, norm)),
        *(conv_block(2 * width, 4 * width, norm), nn.MaxPool2d(2)),
        *(conv_block(4 * width, 8 * width, norm), nn.MaxPool2d(2), Residual(8 * width, norm)),
        nn.MaxPool2d((inputs[1] // 8, inputs[2] // 8)),  # one value per channel is left
        nn.Flatten(),
    )
    return chain(body=body, head=nn.Linear(8 * width, num_outputs))


def conv_block(before: int, after: int, norm: str) -> nn.Sequential:
    """A 3x3 convolution, group norm or batch norm, and ReLU."""
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    if norm == "batch":  # its name is what FedBN looks for
        return chain(conv=convolution, bn=nn.BatchNorm2d(after), relu=nn.ReLU())
    return nn.Sequential(convolution, nn.GroupNorm(gcd(8, after), after), nn.ReLU())


class Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, width: int, norm: str):
        super().__init__()
        self.inner = nn.Sequential(conv_block(width, width, norm), conv_block(width, width, norm))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Quadratic(nn.Module):
    """The parameter theta [d] itself, zero at the start; a sample is a matrix A, its target a vector b."""

    def __init__(self, d: int):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(d))

    def forward(self, A: Tensor) -> Tensor:
        product = (A * self.theta).sum(-1)  # [B, d]; unlike A @ theta it has the same bits in any stack
        return torch.stack([self.theta.expand_as(product), product], dim=1)  # [B, 2, d]


def quadratic(inputs: tuple[int, ...], num_outputs: int) -> nn.Module:
    """1/2 theta'A theta - b'theta with `quadratic_loss`, whose optimum is known; for targets that are not classes."""
    if len(inputs) != 2 or inputs[0] != inputs[1]:
        raise ValueError(f"model quadratic takes samples of shape (d, d), not {tuple(inputs)}; try mclr")
    return Quadratic(inputs[0])


def image_channels(name: str, inputs: tuple[int, ...], smallest: int) -> int:
    """The number of channels; an error if the inputs are not images of at least `smallest` x `smallest`."""
    if len(inputs) != 3 or min(inputs[1:]) < smallest:
        raise ValueError(
            f"model {name} takes images (channels, height, width) of {smallest} x {smallest} or more, not "
            f"{tuple(inputs)}; try mclr or dnn, which take any shape, or reshape the data"
        )
    return inputs[0]


def num_features(body: nn.Module, inputs: tuple[int, ...]) -> int:
    """The number of outputs of the body for one sample."""
    with torch.no_grad():
        return body(torch.zeros(1, *inputs)).shape[1]


def hf(inputs: tuple[int, ...], num_outputs: int, *, path: str = "") -> nn.Module:
    """A causal language model of Transformers, for text. path: its folder (safetensors) or a .gguf file."""
    if not path:
        raise ValueError("model hf needs a path: hf:FOLDER or hf:FILE.gguf")
    return from_transformers(inputs, num_outputs, path)


# models of sequences of tokens: factories (inputs, num_outputs) with inputs (T,) and the number of tokens
LANGUAGE_MODELS: dict[str, Callable[..., nn.Module]] = {"gpt": gpt, "lstm": lstm, "hf": hf}

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mclr": mclr,
    "linear": linear,
    "dnn": dnn,
    "cnn-mnist": cnn_mnist,
    "cnn-fmnist": cnn_fmnist,
    "cnn-celeba": cnn_celeba,
    "vgg": vgg,
    "resnet9": resnet9,
    "quadratic": quadratic,
    **LANGUAGE_MODELS,
}


def make_model(
    text: str, inputs: tuple[int, ...], num_classes: int | None, seed: int, targets: tuple[int, ...] = ()
) -> nn.Module:
    """The model of a name, with its first parameters.

    Args:
        text: "name", "name:arguments" (see `MODELS`) or "package.module:factory", which may be followed by
            ",weights=FILE.safetensors".
        inputs: The shape of one sample.
        num_classes: None if the targets are not classes.
        seed: Determines the first parameters; torch's global generator is not changed.
        targets: The shape of one target, if it is not a class. A built-in model has one output for each of its numbers.

    Raises:
        ValueError: There is no such model, or it does not fit the data.

    Examples:
        >>> make_model("dnn:20", (8, 8), 10, seed=0).head
        Linear(in_features=20, out_features=10, bias=True)
        >>> make_model("linear", (8,), None, seed=0, targets=(2,)).head
        Linear(in_features=8, out_features=2, bias=True)
    """
    head, colon, _ = text.partition(":")
    weights = None
    if colon and head not in MODELS and exists(head):
        name, _, weights = text.partition(",weights=")
        factory, arguments = user_factory(name), {}
    else:
        name, factory, arguments = bind(text, MODELS, "model")
        if name == ("mclr" if num_classes is None else "linear"):
            there, other = ("numbers", "linear or dnn") if num_classes is None else ("classes", "mclr or dnn")
            raise ValueError(f"model {name} does not fit targets that are {there}; use {other}")
        num_classes = prod(targets) if num_classes is None else num_classes
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            made = checked(text, factory(tuple(inputs), num_classes, **arguments))
            if weights:
                load_weights(made, weights)
            return made
        except (TypeError, RuntimeError, LookupError, AttributeError) as error:
            call = f"factory({tuple(inputs)}, {num_classes})"
            raise ValueError(
                f"model {text} failed when called as {call}: {error}; check that this call works"
            ) from error


def user_factory(name: str) -> Callable[..., nn.Module]:
    """The function package.module:factory."""
    try:
        return load(name)
    except ValueError as error:
        raise ValueError(
            f"model {name} does not load ({error}); give package.module:factory, importable "
            f"from {Path.cwd()}, or one of {', '.join(MODELS)}"
        ) from error


def checked(text: str, model: object) -> nn.Module:
    """The model, if it can be trained here; otherwise an error with advice."""
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise ValueError(f"model {text} gave {type(model).__name__}; return a Module that has parameters")
    for name, part in model.named_modules():
        batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
        if getattr(part, "track_running_stats", batch_norm) != batch_norm:
            raise ValueError(
                f"{type(part).__name__} {name!r} of model {text} mixes the samples of a batch, which is padded and "
                "differs from device to device; try torch.nn.GroupNorm, or BatchNorm with track_running_stats=True"
            )
    return model
