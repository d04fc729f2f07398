"""Mean and spread of inputs that are not in one place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polytier import Federation
from polytier.data.moments import mean_and_spread, merged, moments_of, read_moments
from polytier.engines.network.world import only_devices


def federation(shape: tuple[int, ...], dtype: type) -> Federation:
    rng = np.random.default_rng(0)
    device = np.repeat(np.arange(6), [3, 20, 7, 11, 4, 30])
    x = (
        rng.normal(1000, 3, size=(len(device), *shape))
        if dtype is float
        else rng.integers(0, 256, (len(device), *shape))
    )
    return Federation.from_arrays(x.astype(np.float32 if dtype is float else np.uint8), device % 2, device)


@pytest.mark.parametrize(("shape", "dtype"), [((5,), float), ((3, 4, 4), float), ((1, 4, 4), int)])
def test_merged_moments_are_those_of_all_samples(shape, dtype):
    """With a mean of 1000 and a spread of 3, sums of squares would lose six digits."""
    pooled = federation(shape, dtype)
    each = [moments_of(only_devices(pooled, torch.tensor([k]))) for k in range(6)]
    tree = merged([merged(each[:2]), merged(each[2:5]), each[5]])
    found = pooled.rescaled(*mean_and_spread(tree, len(shape)))
    wanted = pooled.standardized()
    for one, other in ((found.scale, wanted.scale), (found.shift, wanted.shift)):
        assert one is not None
        assert other is not None
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_constant_feature_becomes_zero():
    constant = Federation.from_arrays(np.full((8, 2), 3.0), np.arange(8) % 2, np.arange(8) % 2)
    found = constant.rescaled(*mean_and_spread(moments_of(constant), 1))
    assert not found.inputs(found.x, torch.float32).any()


@pytest.mark.parametrize("values", [[[0.0], [-1.0]], [[float("nan")], [1.0]], [[0.0], [float("inf")]]])
def test_impossible_moments_are_refused(values):
    with pytest.raises(ValueError, match="not possible"):
        read_moments(torch.tensor(values, dtype=torch.float64), 4)
