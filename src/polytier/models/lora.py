"""LoRA: layers whose weight stays frozen and that learn a product of two small matrices.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
https://arxiv.org/abs/2106.09685

layer                 | W          | A                 | B           | output
Linear                | [out, in]  | [r, in]           | [out, r]    | W x + b + alpha / r * B A x
Conv1D (Transformers) | [in, out]  | [r, in]           | [out, r]    | the same
Conv2d                | [out, in, h, w] | [r, in, h, w] | [out, r, 1, 1] | W * x + b + alpha / r * B * (A * x)

With dropout, A is applied to x of which some numbers are set to 0, in training only; W to x itself.

A is drawn uniformly as `torch.nn.Linear` draws its weight, B is zero: a model starts as the base.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytier._text import listed
from polytier.tree import random

KNOWN = "Linear, Conv1D of Transformers and Conv2d"
# these use the weights of their layers without calling them
CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class LoRA(nn.Module):
    """A frozen layer and what is added to its output.

    Args:
        base: The layer: Linear, Conv1D or Conv2d.
        rank: The rank r of the product B A.
        alpha: The product is multiplied by alpha / r.
        key: Determines A.
        dropout: The probability with which a number of the input of A is set to 0 in training.
    """

    def __init__(self, base: nn.Module, rank: int, alpha: float, key: int, dropout: float = 0.0) -> None:
        super().__init__()
        weight: Any = base.weight
        self.base, self.scale, self.drop = base, alpha / rank, nn.Dropout(dropout) if dropout else nn.Identity()
        inner, outer = ((rank, *weight.shape[1:]), (weight.shape[0], rank))
        if is_conv1d(base):
            inner, outer = (rank, weight.shape[0]), (weight.shape[1], rank)
        if isinstance(base, nn.Conv2d):
            outer = (*outer, 1, 1)
        bound = torch.Size(inner[1:]).numel() ** -0.5
        draws = random.uniform(torch.tensor([random.signed(key)]), torch.Size(inner).numel())
        self.lora_A = nn.Parameter(((2 * draws - 1) * bound).reshape(inner).to(weight))
        self.lora_B = nn.Parameter(weight.new_zeros(outer))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base
        if isinstance(base, nn.Conv2d):
            inner = functional.conv2d(self.drop(x), self.lora_A, None, base.stride, base.padding, base.dilation)
            return base(x) + functional.conv2d(inner * self.scale, self.lora_B)
        # the scale is multiplied where there are the fewest numbers
        return base(x) + functional.linear(functional.linear(self.drop(x), self.lora_A) * self.scale, self.lora_B)

    def merged_weight(self) -> Tensor:
        """The weight of the layer W + alpha / r * B A."""
        product = (self.lora_B.flatten(1) @ self.lora_A.flatten(1)) * self.scale
        weight: Any = self.base.weight
        return weight + (product.T if is_conv1d(self.base) else product.reshape(weight.shape))


def is_conv1d(layer: nn.Module) -> bool:
    """Whether this is Conv1D of Transformers, a linear layer with weight [in, out]; that package is not imported."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers") and hasattr(layer, "nf")


def is_known(layer: nn.Module) -> bool:
    """Whether LoRA is defined for this layer."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return isinstance(layer, nn.Linear) or is_conv1d(layer)


def open_layers(module: nn.Module) -> dict[str, nn.Module]:
    """All layers with parameters of their own, by name, except those inside of `CLOSED` modules."""
    closed = [name for name, part in module.named_modules() if isinstance(part, CLOSED)]
    return {
        name: part
        for name, part in module.named_modules()
        if name
        and any(True for _ in part.parameters(recurse=False))
        and not any(name == outer or name.startswith(f"{outer}." if outer else "") for outer in closed)
    }


def find_targets(module: nn.Module, patterns: Iterable[str], head: nn.Module) -> list[str]:
    """The names of the layers that get LoRA.

    Args:
        module: The model.
        patterns: As in :mod:`fnmatch`, on the names of layers; none: every known layer but the last one.
        head: The last layer.

    Raises:
        ValueError: A pattern fits no layer, or only layers that LoRA does not know.
    """
    layers = open_layers(module)
    known = [name for name, layer in layers.items() if is_known(layer)]
    patterns = tuple(patterns)
    if not patterns:
        inside = {id(part) for part in head.modules()}
        found = [name for name in known if id(layers[name]) not in inside]
        if not found:
            raise ValueError(f"no layer besides the last one is {KNOWN}, which LoRA is for; use targets=PATTERN")
        return found
    chosen, there = set(), listed(known) or "no layer of this model"
    for pattern in patterns:
        fitting = [name for name, _ in module.named_modules() if name and fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(f"no layer fits the pattern {pattern!r} of targets; LoRA can be on {there}")
        fits = set(fitting) & set(known)
        if not fits:
            kinds = dict.fromkeys(type(module.get_submodule(name)).__name__ for name in fitting)
            raise ValueError(
                f"targets {pattern!r} fits {listed(fitting)} ({', '.join(kinds)}), and LoRA knows {KNOWN} that are "
                f"called by their model, without groups; available: {there}"
            )
        chosen |= fits
    return [name for name in known if name in chosen]


def add_lora(
    module: nn.Module, targets: Iterable[str], rank: int, alpha: float, seed: int, dropout: float = 0.0
) -> None:
    """Replace the layers of these names by `LoRA` around them, in place; all other parameters are frozen."""
    module.requires_grad_(False)
    for name in targets:
        parent, _, last = name.rpartition(".")
        layer = LoRA(module.get_submodule(name), rank, alpha, random.key(seed, "lora", name), dropout)
        setattr(module.get_submodule(parent), last, layer)


def merged(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by the names they have without LoRA, with the products added to the weights."""
    found = dict(module.state_dict())
    for name, layer in module.named_modules():
        if isinstance(layer, LoRA):
            del found[f"{name}.lora_A"], found[f"{name}.lora_B"]
            for last in [key for key, _ in layer.base.named_parameters()]:
                found[f"{name}.{last}"] = found.pop(f"{name}.base.{last}")
            found[f"{name}.weight"] = layer.merged_weight().detach()
    return found
