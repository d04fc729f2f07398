"""Dropout whose masks are drawn from keys instead of a generator, so that they are the same in any stack."""

from __future__ import annotations

import math

from torch import Tensor, nn

from polytier.tree import random


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
