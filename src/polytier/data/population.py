"""What a server may know about its devices: names, sizes and the form of a sample, but no samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Population:
    """The devices of a federation without their samples.

    Whoever needs no samples takes a `Population` instead of a `Federation`: a server, a run that is read back without
    its data, an estimate of what a run will take. `Federation.population` makes one.

    Args:
        ids: [n] the names of the devices, integers or strings.
        counts: [n, 3] the number of training, validation and test samples per device.
        shape: the shape of one sample's input.
        dtype: the type of the inputs as they are in the data (uint8 for images).
        target_shape: the shape of one sample's target; () for one label or number.
        num_classes: the number of classes, or None for targets that are not classes.
        team: [n] the name of each device's team, or None if the data name no teams.
        cluster: [n] the true group of each device, or None; for methods that may know it, and for tests.
        scale: with `shift`, how inputs are scaled: a model sees `x * scale + shift`. None: not at all.
        shift: see `scale`.
        label_counts: [n, classes] samples of each label per device, where devices tell; or None.

    Raises:
        ValueError: fields do not have one row per device, or a count is negative.

    Examples:
        >>> from polytier import build_federation
        >>> population = build_federation("digits", devices=10, teams=2).population
        >>> len(population), population.shape, population.num_classes
        (10, (1, 8, 8), 10)
        >>> int(population.samples.sum() + population.count("test").sum())
        1797
        >>> population.splits
        ['train', 'test']
    """

    ids: np.ndarray
    counts: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    target_shape: tuple[int, ...] = ()
    num_classes: int | None = None
    team: np.ndarray | None = None
    cluster: np.ndarray | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    label_counts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if tuple(self.counts.shape) != (len(self), len(SPLITS)) or bool((self.counts < 0).any()):
            raise ValueError(
                f"counts need one row per device with the number of {', '.join(SPLITS)} samples, 0 or more; got shape "
                f"{tuple(self.counts.shape)} for {len(self)} devices"
            )
        for name in ("team", "cluster", "label_counts"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self):
                raise ValueError(f"{name} needs one row per device; got {len(values)} for {len(self)} devices")

    def __len__(self) -> int:
        return len(self.ids)

    def inputs(self, x: Tensor, what: str = "x") -> Tensor:
        """Samples in the form that models of these data take, after a check.

        Args:
            x: [N, ...] one row per sample, as in the data. Axes of length 1 may be left out or added: images of shape
                [8, 8] are taken where the data have [1, 8, 8], and numbers where they have [1].
            what: the name of the samples in messages.

        Returns:
            [N, *shape] the samples.

        Raises:
            ValueError: a sample has another shape, the values are of another kind, or some are NaN or infinite.

        Examples:
            >>> from polytier import build_federation
            >>> build_federation("digits").population.inputs(torch.zeros(5, 8, 8)).shape
            torch.Size([5, 1, 8, 8])
        """
        shape = tuple(x.shape[1:])
        if [n for n in shape if n != 1] != [n for n in self.shape if n != 1]:
            raise ValueError(f"{what}: a sample has the shape {shape}; the model was trained on {self.shape}")
        if kind_of(x.dtype) != kind_of(self.dtype):
            # inputs in another scale would give wrong predictions without an error
            raise ValueError(
                f"{what}: the values are {kind_of(x.dtype)} ({x.dtype}); the model was trained on "
                f"{kind_of(self.dtype)} ({self.dtype}), scaled as those were"
            )
        x = x.reshape(len(x), *self.shape)
        bad = ~torch.isfinite(x).flatten(1).all(1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise ValueError(f"{what}: NaN or infinity in {int(bad.sum())} rows, the first is row {first}")
        return x

    def count(self, split: str) -> Tensor:
        """[n] the number of samples of a split per device."""
        return self.counts[:, SPLITS.index(split)]

    @cached_property
    def samples(self) -> Tensor:
        """[n] the number of training samples per device."""
        return self.count("train")

    @property
    def splits(self) -> list[str]:
        """The splits of which some device has samples."""
        return [split for split in SPLITS if bool((self.count(split) > 0).any())]


def kind_of(dtype: torch.dtype) -> str:
    """What values of a dtype are, in words."""
    return "floats" if dtype.is_floating_point else "bytes, as in images" if dtype == torch.uint8 else "integers"
