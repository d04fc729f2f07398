"""Data that are generated for a number of devices and a seed; each device has its own samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polytier._errors import unknown
from polytier.data.federation import Federation
from polytier.data.sources.source import Source
from polytier.data.synthetic import quadratic_clusters, quadratics, synthetic, synthetic_of_pfedme, tridiagonal

RECIPES = ("fedprox", "pfedme")


def synthetic_devices(
    data_dir: Path | None = None,
    num_devices: int = 40,
    seed: int = 0,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    num_features: int = 60,
    num_classes: int = 10,
    min_samples: int = 50,
    max_samples: int = 1000,
    iid: bool = False,
    recipe: str = "fedprox",
) -> Source:
    """synthetic(alpha, beta) of FedProx, generated; devices have fewer samples than in the papers, to run fast.

    With recipe = "pfedme" the data of PerMFL's and pFedMT's experiments, the same for every seed.
    """
    if recipe not in RECIPES:
        raise unknown("recipe of synthetic", recipe, RECIPES)
    if recipe == "pfedme":
        if (num_features, num_classes, min_samples, max_samples, iid) != (60, 10, 50, 1000, False):
            raise ValueError(
                "synthetic:recipe=pfedme takes alpha and beta; its other numbers are fixed: leave them out"
            )
        x, y, device = synthetic_of_pfedme(num_devices, alpha, beta)
    else:
        sizes = min_samples, max_samples
        x, y, device = synthetic(num_devices, alpha, beta, num_features, num_classes, seed, *sizes, iid)
    return Source(x, y, num_classes, device)


def quadratic_devices(
    data_dir: Path | None = None,
    num_devices: int = 40,
    seed: int = 0,
    *,
    dimension: int = 10,
    mu: float = 0.1,
    smoothness: float = 1.0,
    spread: float = 1.0,
) -> Source:
    """One strongly convex quadratic per device, generated, for the model quadratic; the optimum is known."""
    return one_sample_per_device(quadratics(num_devices, dimension, seed, mu, smoothness, spread))


def tridiagonal_devices(
    data_dir: Path | None = None, num_devices: int = 24, seed: int = 0, *, p: int = 4, mu: float = 2e-4
) -> Source:
    """The strongly convex problem of MFA's paper, generated, for the model quadratic."""
    return one_sample_per_device(tridiagonal(num_devices, p, mu))


def clustered_quadratics(
    data_dir: Path | None = None,
    num_devices: int = 40,
    seed: int = 0,
    *,
    num_clusters: int = 4,
    dimension: int = 10,
    spread: float = 1.0,
) -> Source:
    """Quadratics in clusters (CoBo, Example 2), generated, for the model quadratic."""
    return one_sample_per_device(quadratic_clusters(num_devices, num_clusters, dimension, seed, spread))


def one_sample_per_device(data: Federation) -> Source:
    """The only sample of each device is its problem; it is a training sample."""
    split = np.zeros(len(data), dtype=np.int64)
    return Source(data.x.numpy(), data.y.numpy(), None, data.ids, split=split, cluster=data.cluster)
