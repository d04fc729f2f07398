"""BatchNorm layers that train: their statistics are rows beside the model, and padded samples do not count.

In training a layer normalises with the mean and the variance over the samples of the batch whose weight is above 0, and
moves its running statistics as `torch.nn.BatchNorm2d` does. Otherwise it normalises with its running statistics. A
layer that is frozen is left as it is: in evaluation mode it uses the statistics of the model it came with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polytier.models.trainable import Trainable

BatchNorm = nn.modules.batchnorm._BatchNorm


class MaskedBatchNorm(nn.Module):
    """BatchNorm over some of the samples of a batch.

    Args:
        layer: The layer that it replaces; parameters and buffers keep their names.

    Attributes:
        mask: [B] bool, the samples that count, while a gradient is computed; None: running statistics are used.
        running: The running statistics after the last batch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = layer.weight, layer.bias, layer.eps, layer.momentum
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.mask: Tensor | None = None
        self.running: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.ndim - 2))
        mean, variance = self.running_mean, self.running_var
        if self.mask is not None:
            inside = x[self.mask].transpose(0, 1).flatten(1)  # [channels, samples that count * places]
            number, mean = inside.shape[1], inside.mean(1)
            variance = inside.var(1, correction=0)
            unbiased = variance.detach() * (number / max(1, number - 1))
            self.running = (
                torch.lerp(self.running_mean, mean.detach(), self.momentum),
                torch.lerp(self.running_var, unbiased, self.momentum),
            )
        x = (x - mean.reshape(shape)) * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.weight is not None:
            x = x * self.weight.reshape(shape) + self.bias.reshape(shape)
        return x


def replace_batch_norms(module: nn.Module, trainable: Trainable) -> dict[str, MaskedBatchNorm]:
    """Replace every BatchNorm that trains by a `MaskedBatchNorm`, in place; returns these by name.

    Raises:
        ValueError: A layer that trains has no running statistics, or averages them without a momentum.
    """
    found: dict[str, MaskedBatchNorm] = {}
    for path, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            full = f"{path}.{name}" if path else name
            if not isinstance(child, BatchNorm) or not trains(child, trainable):
                continue
            if child.running_mean is None or child.momentum is None:
                raise ValueError(
                    f"{type(child).__name__} {full!r} has no running statistics with a momentum, as a model that is "
                    "trained on many devices needs; use track_running_stats=True and a momentum, or torch.nn.GroupNorm"
                )
            found[full] = MaskedBatchNorm(child)
            setattr(parent, name, found[full])
    return found


def trains(layer: nn.Module, trainable: Trainable) -> bool:
    """Whether a BatchNorm trains: some of its parameters do, or it has none and the whole model trains."""
    parameters = list(layer.parameters(recurse=False))
    return any(p.requires_grad for p in parameters) if parameters else trainable.kind == "all"
