"""Dropout whose masks are drawn from keys instead of a generator, so that they are the same in any stack."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polytier.tree import random

# functions that drop by a number: its name and its place among the arguments
LAYERS = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.dropout)
OTHERS = (functional.alpha_dropout, functional.feature_alpha_dropout, torch.alpha_dropout, torch.feature_dropout)
BY_NUMBER: dict[Any, tuple[str, int]] = dict.fromkeys((*LAYERS, *OTHERS), ("p", 1))
BY_NUMBER[functional.scaled_dot_product_attention] = ("dropout_p", 4)


class KeyedDropout(nn.Module):
    """Dropout whose mask is drawn from one key per sample, so that it is the same in any stack.

    Args:
        p: the probability of zero.
        layer: the number of the layer; each layer draws other numbers.
        channels: whether whole channels are dropped, as in `nn.Dropout2d`.
    """

    def __init__(self, p: float, layer: int, channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels
        self.key: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.key is None or self.p == 0:
            return x
        shape = x.shape[1:2] if self.channels else x.shape[1:]
        draws = random.uniform(random.node_keys(self.layer, self.key), math.prod(shape))
        mask = (draws >= self.p).to(x.dtype) / (1 - self.p)
        return x * mask.reshape(len(x), *shape, *[1] * (x.ndim - 1 - len(shape)))


def key_dropouts(module: nn.Module) -> list[KeyedDropout]:
    """Replace every dropout layer inside `module` by a `KeyedDropout`, and return these."""
    found: list[KeyedDropout] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                found.append(KeyedDropout(child.p, len(found), not isinstance(child, nn.Dropout)))
                setattr(parent, name, found[-1])
    return found


class Watch(TorchFunctionMode):
    """Notes the functions that are called with a probability of dropout above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BY_NUMBER:
            name, place = BY_NUMBER[func]
            p = kwargs.get(name, args[place] if len(args) > place else 0.0 if name == "dropout_p" else 0.5)
            on = name == "dropout_p" or kwargs.get("training", args[2] if len(args) > 2 else True)
            if isinstance(p, int | float) and p > 0 and on:
                self.found.add(f"{func.__name__} with {name} = {p:g}")
        return func(*args, **kwargs)


def check_dropout(module: nn.Module, inputs: Tensor) -> None:
    """Raise an error if the module would draw dropout masks from torch's generator in training.

    Args:
        module: A module in evaluation mode whose dropout layers have been replaced by `key_dropouts`.
        inputs: [B, ...] some inputs.

    Raises:
        ValueError: It gives a probability to a function, or to a recurrent layer, which cannot be keyed.
    """
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase) and part.dropout > 0]
    watch = Watch()
    watch.found |= {f"{type(part).__name__} with dropout = {part.dropout:g}" for part in recurrent}
    if not recurrent:
        normal = [part for part in module.modules() if not isinstance(part, nn.modules.batchnorm._BatchNorm)]
        try:
            for part in normal:
                part.training = True
            with torch.no_grad(), watch:
                module(inputs)
        finally:
            for part in normal:
                part.training = False
    if watch.found:
        raise ValueError(
            f"the model uses {', '.join(sorted(watch.found))}: masks that are drawn from torch's generator depend on "
            "what else is computed; use torch.nn.Dropout layers, which are drawn per sample, or a probability of 0"
        )
