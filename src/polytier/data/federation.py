"""The data of all devices: one tensor, and where the samples of each device are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier._text import counted
from polytier.data import IGNORED
from polytier.data.population import SPLITS, Population

SPREAD = 1000  # samples that are part of a fingerprint
ROWS = 1 << 16  # samples that are checked at a time
MOST_CLASSES = 1 << 20


@dataclass(frozen=True)
class Origin:
    """What the inputs of a federation were computed from, if they are features (see `polytier.stack.features`).

    Args:
        shape: the shape of one sample.
        dtype: the type of samples.
        scale: how samples were scaled, see `Federation`.
        shift: see `scale`.
        tokens: whether samples are token ids.
        fingerprint: that of the samples.
        boundary: where the model was cut, a `polytier.stack.features.Boundary`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: Tensor | None
    shift: Tensor | None
    tokens: bool
    fingerprint: str
    boundary: Any


@dataclass(frozen=True)
class Federation:
    """The samples of all devices, sorted by device and, within a device, by split.

    Use `from_arrays` to make one of your own arrays or columns, `from_datasets` for data sets of torch, or
    `build_federation` for public data sets.

    Args:
        x: [N, ...] inputs; images stay uint8 and are scaled when a batch is made.
        y: [N, ...] targets.
        bounds: [n, 4] the index of each device's first training, validation and test sample, and the index after its
            last sample.
        ids: [n] the names of the devices, integers or strings.
        team: [n] the name of each device's team, or None if the data name no teams.
        cluster: [n] the true group of each device, or None if the data have none.
        num_classes: the number of classes, or None for targets that are not classes.
        scale: with `shift`, how inputs are scaled: a model sees `x * scale + shift`. None: not at all.
        shift: see `scale`.
        origin: for inputs that are features, what they were computed from.

    Examples:
        >>> import numpy as np
        >>> x, y = np.random.rand(40, 5), np.arange(40) % 2
        >>> federation = Federation.from_arrays(x, y, device=np.arange(40) // 10)
        >>> len(federation), federation.num_classes
        (4, 2)
        >>> federation.samples  # training samples per device; the others are for testing
        tensor([8, 8, 8, 8])
        >>> inputs, targets = federation.device(0, "test")
        >>> inputs.shape
        torch.Size([2, 5])
    """

    x: Tensor
    y: Tensor
    bounds: Tensor
    ids: np.ndarray
    team: np.ndarray | None = None
    cluster: np.ndarray | None = None
    num_classes: int | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    origin: Origin | None = None

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        device: Sequence | np.ndarray,
        team: Sequence | np.ndarray | None = None,
        split: Sequence | np.ndarray | None = None,
        shares: tuple[float, float, float] = (3, 0, 1),
        seed: int = 0,
        cluster: Sequence | np.ndarray | None = None,
        num_classes: int | None = None,
    ) -> Federation:
        """Make a federation of arrays with one row per sample.

        Args:
            x: [N, ...] inputs. uint8 is taken for images, which a model sees as numbers from 0 to 1; floats become
                float32; other integers (tokens) stay as they are.
            y: [N, ...] targets. Integers are classes 0, 1, ...; floats are not classes. The targets of tokens [N, T]
                are the next tokens, or -100 at positions that do not count.
            device: [N] the name of each sample's device, integers or strings.
            team: the name of each sample's team [N], or of each device's team [n] in the sorted order of the devices.
            split: [N] "train", "validation" or "test" (or 0, 1, 2) for each sample. If it is not given, the samples of
                each device are shuffled and split in the proportions of `shares`.
            shares: how much is for training, validation and test, such as (3, 0, 1).
            seed: of the shuffle.
            cluster: the true group of each sample's device [N], or of each device [n].
            num_classes: by default the largest label + 1; for tokens, the largest id + 1.

        Returns:
            The federation; devices are in the sorted order of their names.

        Raises:
            ValueError: arrays have different lengths, numbers that are not finite or labels below 0; a device has no
                training samples or belongs to more than one team.
        """
        x, y = as_tensor(x, "x"), as_tensor(y, "y")
        device = as_names(device, "device")
        check_arrays(x, y, device)
        ids, owner = np.unique(device, return_inverse=True)
        part = split_by_shares(owner, shares, seed) if split is None else split_numbers(split, len(owner))
        order = np.lexsort((part, owner))
        counts = np.zeros((len(ids), 3), dtype=np.int64)
        np.add.at(counts, (owner, part), 1)
        if not counts[:, 0].all():
            empty = ids[np.flatnonzero(counts[:, 0] == 0)[0]]
            raise ValueError(f"device {empty} has no training samples; give it some or leave it out")
        ends = np.cumsum(counts.reshape(-1)).reshape(-1, 3)
        bounds = np.concatenate([(ends[:, :1] - counts[:, :1]), ends], axis=1)
        index = torch.from_numpy(order)
        x, y = x[index], y[index]
        if num_classes is None and not y.is_floating_point() and y.numel():
            num_classes = int(max(y.max(), x.max()) if are_tokens(x, y) else y.max()) + 1
        return cls(
            x=x if x.dtype == torch.uint8 or not x.is_floating_point() else x.float(),
            y=y.long() if not y.is_floating_point() else y.float(),
            bounds=torch.from_numpy(bounds),
            ids=ids,
            team=None if team is None else one_per_device(as_names(team, "team"), owner, ids, "team"),
            cluster=None if cluster is None else one_per_device(as_names(cluster, "cluster"), owner, ids, "cluster"),
            num_classes=num_classes,
            scale=torch.tensor(1 / 255) if x.dtype == torch.uint8 else None,
        )

    @classmethod
    def from_datasets(
        cls,
        datasets: Iterable[Any] | Mapping[Any, Any],
        team: Sequence | Mapping[Any, Any] | None = None,
        shares: tuple[float, float, float] = (3, 0, 1),
        seed: int = 0,
        num_classes: int | None = None,
    ) -> Federation:
        """Make a federation of data sets of torch, one per device. All samples are read once, into memory.

        Args:
            datasets: One `Dataset` or `DataLoader` per device, whose samples are pairs (input, target); the keys of a
                mapping are the names of the devices. A device may have several, by split: a mapping
                `{"train": ..., "validation": ..., "test": ...}`, or a tuple (train, test) or (train, validation, test).
                Of a loader the samples are used, in the order of its data set; its batches and its order are not.
            team: The name of each device's team: a mapping from names, or a sequence in the order of `datasets`.
            shares: How the samples of a device without splits are divided, as in `from_arrays`.
            seed: Of the shuffle before that.
            num_classes: By default the largest label + 1.

        Returns:
            The federation; devices are in the sorted order of their names.

        Raises:
            ValueError: A data set cannot be read, samples have different shapes, or `team` does not fit the devices.

        Examples:
            >>> from torch.utils.data import TensorDataset
            >>> def samples(n):
            ...     return TensorDataset(torch.rand(n, 5), torch.arange(n) % 2)
            >>> Federation.from_datasets([samples(20), samples(30)])
            <Federation: 2 devices, 50 samples of shape (5,), 2 classes>
            >>> named = {"anna": (samples(20), samples(8)), "bert": (samples(30), samples(8))}
            >>> Federation.from_datasets(named, team={"anna": "north", "bert": "south"}).samples
            tensor([20, 30])
        """
        from polytier.data.torch_datasets import read_datasets

        return cls.from_arrays(**read_datasets(datasets, team), shares=shares, seed=seed, num_classes=num_classes)

    def save(self, folder: Path | str) -> None:
        """Write the federation to a new folder, for populations that are larger than memory: `open` maps the files.

        Raises:
            ValueError: the folder holds a federation already.
        """
        from polytier.data import pack

        pack.save(self, folder)

    @classmethod
    def open(cls, folder: Path | str) -> Federation:
        """A federation that was saved. Its samples are read from the disk when they are used.

        Raises:
            ValueError: the folder holds no federation, or files of it are broken.
        """
        from polytier.data import pack

        return pack.load(folder)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        teams = "" if self.team is None else f" in {counted(len(np.unique(self.team)), 'team')}"
        targets = "no classes" if self.num_classes is None else f"{self.num_classes} classes"
        samples = f"{counted(len(self.y), 'sample')} of shape {tuple(self.x.shape[1:])}"
        return f"<Federation: {counted(len(self), 'device')}{teams}, {samples}, {targets}>"

    def _repr_html_(self) -> str:
        counts = self.population.counts.sum(0).tolist()
        cells = "".join(f"<tr><td>{split}</td><td>{n}</td></tr>" for split, n in zip(SPLITS, counts, strict=True))
        return f"<p>{escape(repr(self)[1:-1])}</p><table><tr><th>split</th><th>samples</th></tr>{cells}</table>"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the devices and of samples spread evenly over the data, to notice that data have changed."""
        if self.origin is not None:
            return self.origin.fingerprint
        digest = sha256()
        for values in (self.ids, self.bounds.numpy()):
            digest.update(f"{values.dtype.kind}{values.shape}".encode() + np.ascontiguousarray(values).tobytes())
        for values in (self.x, self.y):
            spread = torch.linspace(0, len(values) - 1, min(len(values), SPREAD), dtype=torch.float64).long()
            digest.update(f"{values.dtype}{tuple(values.shape)}".encode() + values[spread].numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def population(self) -> Population:
        """What a server may know about these devices: everything but their samples."""
        samples = self.origin or self
        return Population(
            ids=self.ids,
            counts=self.bounds.diff(dim=1),
            shape=tuple(self.x.shape[1:]) if self.origin is None else self.origin.shape,
            dtype=self.x.dtype if self.origin is None else self.origin.dtype,
            target_shape=tuple(self.y.shape[1:]),
            num_classes=self.num_classes,
            team=self.team,
            cluster=self.cluster,
            scale=samples.scale,
            shift=samples.shift,
        )

    @cached_property
    def samples(self) -> Tensor:
        """[n] the number of training samples per device."""
        return self.bounds[:, 1] - self.bounds[:, 0]

    @cached_property
    def training(self) -> tuple[np.ndarray, np.ndarray]:
        """The index of each device's first training sample [n] and the number of them [n], for mini-batches."""
        # a copy: the bounds may move to shared memory, for worker processes, while others use this federation
        return self.bounds[:, 0].numpy().copy(), self.samples.numpy()

    @cached_property
    def layouts(self) -> dict[tuple[bytes, int | bytes], Any]:
        """What the mini-batches of the same devices have in common, kept here by `polytier.data.batches`."""
        return {}

    @property
    def is_tokens(self) -> bool:
        """Whether inputs are sequences of token ids [N, T], each of which has a target."""
        return are_tokens(self.x, self.y) if self.origin is None else self.origin.tokens

    def span(self, split: str) -> tuple[Tensor, Tensor]:
        """Where the samples of a split start and end, [n] each."""
        k = SPLITS.index(split)
        return self.bounds[:, k], self.bounds[:, k + 1]

    def device(self, index: int, split: str = "train") -> tuple[Tensor, Tensor]:
        """Inputs and targets of one device's split, as they are in the data; `index` is its position in `ids`."""
        start, end = (int(b[index]) for b in self.span(split))
        return self.x[start:end], self.y[start:end]

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Inputs as a model sees them: scaled, and of this type. Integers other than uint8 stay as they are."""
        if x.dtype != torch.uint8 and not x.is_floating_point():
            return x
        if self.scale is None and self.shift is None:
            return x.to(dtype)
        x = x.to(dtype, copy=True)  # a batch is large, so the copy is scaled in place
        if self.scale is not None:
            x.mul_(self.scale.to(dtype))
        if self.shift is not None:
            x.add_(self.shift.to(dtype))
        return x

    def label_counts(self) -> np.ndarray:
        """[n, classes] the number of samples of each label per device, in all splits; [n, 0] without one label."""
        if self.num_classes is None or self.y.ndim != 1 or not len(self.y):  # a server has no samples
            return np.zeros((len(self), 0), dtype=np.int64)
        owner = np.repeat(np.arange(len(self)), (self.bounds[:, 3] - self.bounds[:, 0]).numpy())
        counts = np.zeros((len(self), self.num_classes), dtype=np.int64)
        np.add.at(counts, (owner, self.y.numpy()), 1)
        return counts

    def from_black(self, low: float) -> Federation:
        """The same images with pixels from `low` to 1 instead of from 0 to 1.

        Raises:
            ValueError: the inputs are not uint8, or `low` is not below 1.
        """
        if self.scale is None or not low < 1:
            raise ValueError(f"pixels of images (uint8) go from low to 1; got low {low:g} for {self.x.dtype}")
        return replace(self, scale=self.scale * (1 - low), shift=torch.tensor(low))

    def standardized(self) -> Federation:
        """The same data, scaled to mean 0 and standard deviation 1 over all training samples.

        Each channel of images, or each feature of a table, is scaled by itself.

        Raises:
            ValueError: the inputs are integers other than uint8.
        """
        values = self.training_inputs()
        axes = [0, *range(2, values.ndim)] if values.ndim > 2 else [0]
        mean = values.mean(axes, keepdim=True)[0]
        return self.rescaled(mean, spread_of(values.std(axes, keepdim=True, correction=0)[0]))

    def training_inputs(self) -> Tensor:
        """[N, ...] the inputs of all training samples as a model sees them, as float64.

        Raises:
            ValueError: the inputs are integers other than uint8.
        """
        start, end = self.span("train")
        train = torch.cat([self.x[s:e] for s, e in zip(start.tolist(), end.tolist(), strict=True)])
        values = self.inputs(train, torch.float64)
        if not values.is_floating_point():
            raise ValueError("only images and floats can be standardised; these inputs are integers")
        return values

    def rescaled(self, mean: Tensor, spread: Tensor) -> Federation:
        """The same data; a model sees inputs minus `mean`, divided by `spread`."""
        scale = torch.ones(()) if self.scale is None else self.scale
        shift = torch.zeros(()) if self.shift is None else self.shift
        return replace(self, scale=scale / spread, shift=(shift - mean) / spread)

    def task(self, k: int) -> Federation:
        """A federation whose targets are column `k` of the targets; the inputs are not copied."""
        classes = None if self.num_classes is None else int(self.y[:, k].max()) + 1
        return replace(self, y=self.y[:, k].contiguous(), num_classes=classes)


def spread_of(deviation: Tensor) -> Tensor:
    """What inputs are divided by, given their standard deviation; a constant feature is not scaled, and becomes 0."""
    return torch.where(deviation > 1e-8, deviation, torch.ones_like(deviation))


def as_tensor(values: Any, what: str) -> Tensor:
    """A tensor of an array, a list, or a frame or column of pandas; `what` names it in messages."""
    values = values.to_numpy() if hasattr(values, "to_numpy") else values
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()  # torch does not take arrays that must not be changed
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        classes = "; numpy.unique(names, return_inverse=True)[1] makes classes of names" if what == "y" else ""
        raise ValueError(f"{what} must hold numbers, in rows of the same length ({error}){classes}") from error


def as_names(values: Any, what: str) -> np.ndarray:
    """An array of integers or strings; columns of pandas are arrays of objects."""
    names = np.asarray(values)
    if names.dtype.kind != "O":
        return names
    kinds = {type(name) for name in names.tolist()}
    if len(kinds) != 1 or not kinds <= {str, int}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{what} has values of type {found}; give integers or strings, one kind, and none missing")
    return np.array(names.tolist())


def check_arrays(x: Tensor, y: Tensor, device: np.ndarray) -> None:
    """Raise a ValueError for lengths that differ, numbers that are not finite and labels below 0."""
    if not (len(x) == len(y) == len(device)):
        raise ValueError(f"x, y and device need one row per sample; got {len(x)}, {len(y)} and {len(device)} rows")
    if not len(x):
        raise ValueError("the data are empty")
    check_samples(x, y, lambda row: device[row])


def check_samples(x: Tensor, y: Tensor, device_of: Callable[[int], Any]) -> None:
    """Raise a ValueError for samples without numbers, numbers that are not finite and labels that are none.

    The rows are read some at a time: they may be larger than memory.
    """
    for name, values in (("x", x), ("y", y)):
        if not values[:1].numel():
            raise ValueError(f"{name} has shape {tuple(values.shape)}: its rows hold no numbers; give it at least one")
        if not values.is_floating_point():
            continue
        bad = [~torch.isfinite(part.reshape(len(part), -1)).all(1) for part in values.split(ROWS)]
        if any(part.any() for part in bad):
            rows = torch.cat(bad).nonzero().squeeze(1)
            raise ValueError(
                f"{name} has {len(rows)} rows with NaN or infinity, the first in row {int(rows[0])} "
                f"(device {device_of(int(rows[0]))}); remove or fill them"
            )
    tokens = are_tokens(x, y)
    if tokens:
        check_labels(x, "token ids")
    if not y.is_floating_point():
        check_labels(y[y != IGNORED] if tokens else y, "labels")


def check_labels(y: Tensor, what: str) -> None:
    """Raise a ValueError unless all numbers can be classes; `what` names them in the message."""
    lowest, highest = (int(y.min()), int(y.max())) if y.numel() else (0, 0)
    if not 0 <= lowest <= highest < MOST_CLASSES:
        raise ValueError(
            f"{what} must be 0, 1, 2, ... and below {MOST_CLASSES:,}; got {lowest if lowest < 0 else highest}"
        )


def are_tokens(x: Tensor, y: Tensor) -> bool:
    """Whether inputs are sequences of token ids [N, T], each of which has a target."""
    whole = not x.is_floating_point() and x.dtype != torch.uint8 and not y.is_floating_point()
    return whole and x.ndim == 2 and x.shape == y.shape


def split_numbers(split: Sequence | np.ndarray, num_samples: int) -> np.ndarray:
    """[N] 0, 1 or 2 for train, validation or test, from these words or numbers."""
    split = np.asarray(split)
    if len(split) != num_samples:
        raise ValueError(f"split needs one value per sample; got {len(split)} for {num_samples} samples")
    if split.dtype.kind in "iu" and np.isin(split, (0, 1, 2)).all():
        return split.astype(np.int64)
    names = {"train": 0, "validation": 1, "val": 1, "valid": 1, "test": 2}
    unknown = sorted(set(map(str, np.unique(split))) - set(names))
    if unknown:
        raise ValueError(f"split has {unknown[0]!r}; allowed are train, validation, test or 0, 1, 2")
    return np.array([names[str(s)] for s in split], dtype=np.int64)


def split_by_shares(owner: np.ndarray, shares: tuple[float, float, float], seed: int) -> np.ndarray:
    """[N] 0, 1 or 2: the samples of each device, shuffled and split by `shares`; at least one is for training."""
    if len(shares) != 3 or min(shares) < 0 or shares[0] <= 0 or not np.isfinite(sum(shares)):
        raise ValueError(f"the split is train:validation:test, e.g. 3:0:1, with train above 0; got {shares}")
    rng = np.random.default_rng([seed, 0x5917])
    order = np.lexsort((rng.random(len(owner)), owner))  # sorted by device, shuffled within a device
    size = np.bincount(owner)
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)
    total = sum(shares)
    size = size[owner]
    test = np.floor(size * shares[2] / total + 1e-9).astype(np.int64)
    validation = np.floor(size * shares[1] / total + 1e-9).astype(np.int64)
    if shares[2] > 0:  # a device with two samples or more has at least one test sample
        test = np.maximum(test, np.minimum(1, size - 1))
    test = np.minimum(test, size - 1)
    validation = np.minimum(validation, size - 1 - test)
    return np.where(rank < test, 2, np.where(rank < test + validation, 1, 0))


def one_per_device(values: np.ndarray, owner: np.ndarray, ids: np.ndarray, what: str) -> np.ndarray:
    """[n] the value that all samples of a device have in common."""
    if len(values) == len(ids) and len(ids) != len(owner):
        return values
    if len(values) != len(owner):
        raise ValueError(f"{what} needs one value per sample or per device; got {len(values)}")
    first = np.full(len(ids), -1, dtype=np.int64)
    first[owner[::-1]] = np.arange(len(owner))[::-1]
    result = values[first]
    wrong = np.flatnonzero(result[owner] != values)
    if len(wrong):
        name = ids[owner[wrong[0]]]
        raise ValueError(f"device {name} is in more than one {what}; a device belongs to one {what}")
    return result
