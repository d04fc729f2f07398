"""Mean and spread of inputs that are not in one place: each device computes its own, and they are merged pairwise."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from polytier.data.federation import Federation, spread_of


class Moments(NamedTuple):
    """What some training samples say about the scale of inputs: per channel of images, or per feature of a table.

    Args:
        count: Number of values of each feature.
        mean: [c] their mean.
        squares: [c] the sum of squared deviations from the mean.
    """

    count: int
    mean: Tensor
    squares: Tensor


def moments_of(federation: Federation) -> Moments:
    """The moments of all training samples of a federation.

    Raises:
        ValueError: The inputs are integers other than uint8.
    """
    values = federation.training_inputs()
    by_feature = values.movedim(1, 0).flatten(1)
    mean = by_feature.mean(1)
    return Moments(by_feature.shape[1], mean, (by_feature - mean.unsqueeze(1)).square().sum(1))


def merged(found: Iterable[Moments]) -> Moments:
    """The moments of all samples together, added one after the other.

    The difference of two means enters, not the square of a mean, so that features with a large mean lose no digits.
    """

    def add(one: Moments, other: Moments) -> Moments:
        count, apart = one.count + other.count, other.mean - one.mean
        mean = one.mean + apart * (other.count / count)
        return Moments(count, mean, one.squares + other.squares + apart.square() * (one.count * other.count / count))

    return reduce(add, found)


def mean_and_spread(moments: Moments, axes: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as `Federation.rescaled` takes them, for samples with `axes` axes."""
    shape = (-1, *[1] * (axes - 1))
    deviation = (moments.squares / moments.count).sqrt()
    return moments.mean.reshape(shape), spread_of(deviation.reshape(shape))


def read_moments(rows: Tensor, count: int) -> Moments:
    """The moments in a tensor [2, c] with mean and squares.

    Raises:
        ValueError: They are not possible.
    """
    mean, squares = rows
    if not bool(torch.isfinite(rows).all()) or bool((squares < 0).any()):
        raise ValueError("mean and spread of its samples are not possible")
    return Moments(count, mean, squares)
