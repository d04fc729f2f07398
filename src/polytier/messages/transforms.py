"""Transforms of uploads: what a device does to the change of a model before it is encoded and sent.

A change is the model that a device answers minus the model that was sent down to it. A method states which rows of an
answer are models (`Algorithm.model_fields`, `Algorithm.reference`). Other rows, such as SCAFFOLD's controls and IFCA's
choice, are sent unchanged.

Only the answers of devices to `solve` are transformed, because privacy concerns what leaves a device. The models that
teams send to their parents, the answers to other programs of a method, and evaluation are not transformed. A method
that sends up models or gradients without such a reference (AL2GD, CoBo, DemLearn, FC, ValidationWeights) is refused;
local training sends nothing up and runs unchanged.

`parse_upload("clip:1.0,noise:0.5")` reads the text form:

clip:C  | scale a change down to Euclidean norm C if its norm is larger
noise:S | add Gaussian noise of standard deviation S * C to every value; without clip, of standard deviation S

In Python any callable of the form of `Transform` may be used instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from polytier._errors import unknown
from polytier._text import finite
from polytier.tree import random

if TYPE_CHECKING:
    from polytier.method.call import Clock

EXAMPLE = "clip:1.0,noise:0.5"
LARGEST = 1e18  # of a number of a transform: the product of two is a number of float32 too


class Transform(Protocol):
    """What is done to the changes of models before they are sent. See `polytier.messages.transforms`.

    A transform treats each row by itself, so that results do not depend on how devices are grouped. A random transform
    draws from `node_keys` and `clock` alone (see `Noise`), so that every engine computes the same values. With worker
    processes it has to be picklable.

    Examples:
        >>> def halve(change, node_keys, clock):
        ...     return change / 2
        >>> halve(torch.tensor([[2.0, 4.0]]), torch.tensor([7]), None)
        tensor([[1., 2.]])

        `polytier.train(..., upload=halve)` then averages models whose changes are halved.
    """

    def __call__(self, change: Tensor, node_keys: Tensor, clock: Clock) -> Tensor:
        """Return the changes to send.

        Args:
            change: [n, d] one change per device. If a method names several fields as models, they are one after
                another in a row, so that a norm is that of the whole upload.
            node_keys: [n] one random key per device, which depends on the seed of the run and the name of the device.
            clock: Round and call, so that each of them has different random numbers.

        Returns:
            [n, d] of the same dtype.
        """
        ...


@dataclass(frozen=True)
class Clip:
    """Scale each change down to Euclidean norm `norm` if its norm is larger.

    Examples:
        >>> Clip(1.0)(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([1, 2]), None)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    norm: float

    def __call__(self, change: Tensor, node_keys: Tensor, clock: Clock) -> Tensor:
        # one row at a time: the order of a sum over one row must not depend on the number of rows
        norms = [float(torch.linalg.vector_norm(row, dtype=torch.float64)) for row in change]
        scale = torch.tensor([min(1.0, self.norm / norm) if norm else 1.0 for norm in norms], dtype=torch.float64)
        return change * scale.to(change.dtype).unsqueeze(1)

    def __str__(self) -> str:
        return f"clip:{self.norm}"


@dataclass(frozen=True)
class Noise:
    """Add independent Gaussian noise of standard deviation `multiplier * clip` to every value of a change.

    `multiplier` is the noise multiplier of DP-FedAvg (McMahan et al. 2018) relative to the clip norm, with one
    difference: there the server adds noise once to the sum of n changes; here each of n devices adds its own, so that
    the sum has noise of standard deviation sqrt(n) * multiplier * clip.

    The draws are a pure function of the seed, the round, the call, the device and the position in the row: a run can be
    repeated. They are made for experiments; a deployment needs noise that nobody can predict.
    """

    multiplier: float
    clip: float = 1.0

    def __call__(self, change: Tensor, node_keys: Tensor, clock: Clock) -> Tensor:
        keys = random.node_keys(random.key(0, "noise of uploads", clock.round, clock.call), node_keys)
        deviation, noisy = self.multiplier * self.clip, torch.empty_like(change)
        for row, key, result in zip(
            change, keys.split(1), noisy, strict=True
        ):  # the draws of all would need much memory
            result.copy_(row + (deviation * random.normal(key, change.shape[1])[0]).to(change.dtype))
        return noisy

    def __str__(self) -> str:
        return f"noise:{self.multiplier}"


@dataclass(frozen=True)
class Upload:
    """Several transforms, applied one after another."""

    transforms: tuple[Transform, ...]

    def __call__(self, change: Tensor, node_keys: Tensor, clock: Clock) -> Tensor:
        for transform in self.transforms:
            change = transform(change, node_keys, clock)
        return change

    def __str__(self) -> str:
        return ",".join(map(str, self.transforms))


TRANSFORMS = {"clip": Clip, "noise": Noise}  # what `parse_upload` reads, in the allowed order


def parse_upload(text: str) -> Upload:
    """Read transforms from text.

    Args:
        text: `clip:C`, `noise:S` or `clip:C,noise:S`, with C above 0 and S at least 0.

    Returns:
        The transforms, applied from left to right; `str` of them is the text again.

    Raises:
        ValueError: If a name is unknown or given twice, a number is missing or out of range, or noise precedes clip.

    Examples:
        >>> parse_upload("clip:2.0,noise:0.5")
        Upload(transforms=(Clip(norm=2.0), Noise(multiplier=0.5, clip=2.0)))
        >>> str(parse_upload("noise:0.1"))
        'noise:0.1'
    """
    numbers: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition(":"))
        if name not in TRANSFORMS:
            raise unknown("transform of uploads", name, TRANSFORMS)
        if name in numbers or (name == "clip" and "noise" in numbers):
            raise ValueError(f"upload {text!r}: give clip once, then noise once; for example {EXAMPLE}")
        numbers[name] = number(text, name, value)
    transforms: list[Transform] = []
    if "clip" in numbers:
        transforms.append(Clip(numbers["clip"]))
    if "noise" in numbers:
        transforms.append(Noise(numbers["noise"], numbers.get("clip", 1.0)))
    return Upload(tuple(transforms))


def number(text: str, name: str, value: str) -> float:
    """The number of a transform, in its range."""
    try:
        found = finite(value)
    except ValueError:
        raise ValueError(f"upload {text!r}: {name} needs a number; for example {EXAMPLE}") from None
    if not 0 <= found <= LARGEST or (found == 0 and name == "clip"):
        least = f"up to {LARGEST:.0e}" if found > 0 else "above 0" if name == "clip" else "of at least 0"
        raise ValueError(f"upload {text!r}: {name} needs a number {least}; got {value}")
    return found


def make_upload(upload: str | Transform | None) -> Transform | None:
    """Return the transform of a run: text is parsed, a callable is returned as it is, None means no transform.

    Raises:
        ValueError: If the text cannot be parsed, or the object is not callable.
    """
    if isinstance(upload, str):
        return parse_upload(upload)
    if upload is not None and not callable(upload):
        raise ValueError(f"upload is text such as {EXAMPLE!r} or a function (change, node_keys, clock); got {upload!r}")
    return upload
