"""Metrics: functions of outputs and targets by which a model is judged."""

from __future__ import annotations

from torch import Tensor


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 a sample whose largest output is the target; for sequences the share of the positions."""
    hits = (outputs.argmax(-1) == targets).to(outputs.dtype)
    return hits if hits.ndim == 1 else hits.flatten(1).mean(1)
