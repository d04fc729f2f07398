"""The common work of `polytier bench`, for packages that are installed where Polytier is not.

40 devices, 640 samples of 784 features each, logistic regression, batch 32, 20 local steps, FedAvg, all take part.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

DEVICES, SAMPLES, FEATURES, CLASSES, BATCH, STEPS, LR = 40, 640, 784, 10, 32, 20, 0.01
WARM, ROUNDS = 3, 12  # rounds that are left out, and rounds that are measured


def data() -> tuple[np.ndarray, np.ndarray]:
    """x [devices, samples, features] and y [devices, samples]."""
    rng = np.random.default_rng(0)
    x = rng.random((DEVICES, SAMPLES, FEATURES), dtype=np.float32)
    return x, rng.integers(0, CLASSES, (DEVICES, SAMPLES))


def speed_of(ends: Sequence[float]) -> float:
    """Device steps a second from the times at which the rounds ended; the first ones only warm up."""
    return DEVICES * STEPS / statistics.median(np.diff(ends[WARM - 1 :]))
