"""Losses: functions of outputs and targets that give one value per sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [B, ...], targets [B, ...]) -> one loss a sample [B]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes; sequences ([B, T, C] with [B, T]) give the mean over their positions."""
    # log_softmax and gather instead of F.cross_entropy: its row-stable parts trace to the same bits in any stack;
    # classes first, which is how products with few of them come out (graphs.py), and what vector units like best
    chosen = torch.log_softmax(outputs.transpose(-1, -2), -2).gather(-2, targets.unsqueeze(-2)).squeeze(-2)
    return -chosen if chosen.ndim == 1 else -chosen.flatten(1).mean(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance."""
    difference = outputs.reshape(targets.shape) - targets
    return 0.5 * (difference * difference).reshape(len(targets), -1).sum(1)


def quadratic_loss(output: Tensor, target: Tensor) -> Tensor:
    """1/2 theta'A theta - b'theta of each sample, [B]."""
    theta, product = output[:, 0], output[:, 1]
    return (theta * (0.5 * product - target)).sum(-1)


def default_loss(model: nn.Module, classes: bool) -> Loss:
    if type(model).__name__ == "Quadratic":
        return quadratic_loss
    return cross_entropy if classes else squared_error
