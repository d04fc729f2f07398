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

    Example:
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
