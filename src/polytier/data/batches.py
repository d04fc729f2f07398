"""Mini-batches of many devices at once. A batch depends on device, round, call and step, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier._errors import short
from polytier._text import schedule
from polytier.data.federation import Federation
from polytier.tree import random

UNBOUNDED = 1 << 62  # a batch size that is never reached
GROW = "grow:"  # how a batch size that grows with the rounds is written
FEW_SHAPES = 64  # of stacks of full batches, whose weights are kept
RESHUFFLE = 1024  # samples are shuffled every 1 + k rounds on a device with k times as many


@dataclass(frozen=True)
class Group:
    """The batches of those devices of a stack that are padded to the same width B.

    field  | shape           | meaning
    rows   | [r] or a slice  | which rows of the stack
    x, y   | [r, B, ...]     | inputs and targets
    weight | [r, B]          | 1 / the number of samples in the batch; 0 for padding
    key    | [r, B] or None  | one key per sample, from which dropout masks are drawn; None for models without dropout
    """

    rows: Tensor | slice
    x: Tensor
    y: Tensor
    weight: Tensor
    key: Tensor | None = None

    def to(self, device: str) -> Group:
        """The same on an accelerator. Copies to CUDA are made from pinned memory, so that nothing waits for them."""
        data = [None if t is None else moved(t, device) for t in (self.x, self.y, self.weight, self.key)]
        return Group(self.rows, *data)  # type: ignore[arg-type]

    def part(self, start: int, end: int) -> Group:
        """The samples start .. end - 1 of each device, with their weights in the whole."""
        data = [None if t is None else t[:, start:end] for t in (self.x, self.y, self.weight, self.key)]
        return Group(self.rows, *data)  # type: ignore[arg-type]


def moved(values: Tensor, device: str) -> Tensor:
    """The values on another device."""
    values = values.pin_memory() if device.startswith("cuda") else values
    return values.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """One mini-batch for each of `num_rows` devices, in groups of equal width."""

    groups: list[Group]
    num_rows: int

    def row(self, i: int) -> Batch:
        """A copy of the batch of one row."""
        for g in self.groups:
            rows = torch.arange(self.num_rows)[g.rows].tolist()
            if i in rows:
                k = slice(rows.index(i), rows.index(i) + 1)
                data = [None if t is None else t[k].clone() for t in (g.x, g.y, g.weight, g.key)]
                return Batch([Group(slice(None), *data)], 1)  # type: ignore[arg-type]
        raise IndexError(i)

    def pieces(self, size: int) -> Iterator[Batch]:
        """The samples of each device, at most `size` at a time; the gradient is the sum of those of the pieces."""
        for start in range(0, max(g.x.shape[1] for g in self.groups), size):
            groups = [g.part(start, start + size) for g in self.groups if g.x.shape[1] > start]
            yield Batch(groups, self.num_rows)


def check_batch_size(rule: int | str) -> None:
    """Raise a ValueError unless this is a number of at least 1, or grow:A/(B+t)."""
    if isinstance(rule, str) and rule.startswith(GROW):
        schedule(rule.removeprefix(GROW))
    elif isinstance(rule, bool) or not isinstance(rule, int) or not 1 <= rule < UNBOUNDED:
        raise ValueError(f"batch size is a whole number of at least 1, or grow:A/(B+t); got {short(rule)}")


def batch_sizes(rule: int | str, samples: Tensor, round_: int) -> int | Tensor:
    """The batch size: one for all devices, or one per device [n].

    Args:
        rule: one size for all, or "grow:A/(B+t)": at least the fraction 1 - A/(B+t) of the device's samples.
        samples: [n] the number of training samples per device.
        round_: t, counted from 0.

    Sizes that grow are rounded up to 32, 64, 128, ...: each size needs a traced graph of its own.
    """
    if isinstance(rule, int):
        return rule
    wanted = (1 - schedule(rule.removeprefix(GROW))(round_)) * samples.double()
    return 2 ** wanted.clamp(min=32).log2().ceil().long()


def padded_widths(samples: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[n] the width to which each device's batch is padded: the batch size or, with fewer samples, 1, 64, 128, 256, ...

    There are few different widths, because each one in a tile is computed by itself.
    """
    least, whole = np.minimum(samples, size), (samples >= size) | (samples <= 1)
    if whole.all():
        return least
    # the smallest power of 2 that is at least `samples`
    power = 1 << np.frexp((samples - 1).astype(np.float64))[1].astype(np.int64)
    return np.where(whole, least, np.minimum(size, np.maximum(power, 64)))


class Batches:
    """Makes batches of a federation, and holds the current random order of each device's training samples.

    Args:
        federation: the data.
        seed: of the orders and of the first batch of each call.
        dtype: of the inputs, and of targets that are floats.
        device: where batches are put, such as "cpu" or "cuda".
        keyed: whether batches have one key per sample, from which a model draws its dropout masks.

    Examples:
        >>> import torch
        >>> from polytier import build_federation
        >>> batches = Batches(build_federation("digits", devices=4), seed=0, dtype=torch.float32)
        >>> walk = batches.walk(torch.tensor([0, 2]), round_=0, call=0, size=16)
        >>> walk.next().groups[0].x.shape  # two devices, 16 samples each
        torch.Size([2, 16, 1, 8, 8])
    """

    def __init__(
        self, federation: Federation, seed: int, dtype: torch.dtype, device: str = "cpu", keyed: bool = False
    ) -> None:
        self.federation, self.seed, self.dtype = federation, seed, dtype
        self.device, self.keyed = device, keyed
        self.order = np.arange(len(federation.x), dtype=np.int64)
        self.stamp = np.full(len(federation), -1, dtype=np.int64)
        self.keys = random.name_keys(federation.ids)
        self.usual_steps: dict[str, int] = {}  # by stream, the steps of the last walk: so many are prepared at once
        self._equal_shares: dict[tuple[int, int], Tensor] = {}

    def over(self, federation: Federation) -> Batches:
        """The same settings for other data."""
        return Batches(federation, self.seed, self.dtype, self.device, self.keyed)

    def reshuffle(self, rows: np.ndarray, layout: Layout, round_: int) -> None:
        """Update the order of these devices' training samples. It depends on the device and the epoch only."""
        if layout.rounds is None:
            return  # one sample has one order
        epoch = round_ // layout.rounds
        stale = self.stamp[rows] != epoch
        if not stale.any():
            return
        rows, epoch, stems = rows[stale], epoch[stale], layout.stems[stale]
        starts, samples = self.federation.training
        size = samples[rows]
        base = random.drawn_keys(random.key(self.seed, "shuffle"), stems)
        order = random.shuffled(random.mix(base ^ random.mix(epoch + 1)), size)
        start, slots = starts[rows, None], np.arange(order.shape[1])
        place = start + slots
        order += start
        if int(size.min()) != order.shape[1]:
            inside = slots < size[:, None]
            place, order = place[inside], order[inside]
        self.order[place] = order
        self.stamp[rows] = epoch

    def walk(
        self, rows: Tensor, round_: int, call: int, size: int | Tensor, stream: str = "", shuffle: bool = True
    ) -> Walk:
        """The mini-batches of one call, one after the other.

        Args:
            rows: [n] the devices, as positions in the federation.
            round_: the round.
            call: the number of the call in its round.
            size: the batch size, one for all devices or one per device [n].
            stream: calls with another stream draw other batches.
            shuffle: whether batches are made anew in every epoch; otherwise they follow the order of the data.
        """
        devices = rows.numpy()
        layout = self.layout(devices, size)
        if shuffle:
            self.reshuffle(devices, layout, round_)
        if layout.same and not self.keyed:
            return Walk(self, layout, None, stream)
        drawn = random.drawn_keys(random.key(self.seed, "batch", stream, round_, call), layout.stems)
        return Walk(self, layout, drawn, stream)

    def layout(self, devices: np.ndarray, size: int | Tensor) -> Layout:
        """What the walks of these devices have in common. The last ones are kept: in each round they are the same."""
        known = self.federation.layouts
        key = (devices.tobytes(), size if isinstance(size, int) else size.numpy().tobytes())
        if key not in known:
            sizes = np.full_like(devices, size) if isinstance(size, int) else size.numpy()
            if len(known) >= FEW_SHAPES:
                known.clear()
            known[key] = Layout.of(self.federation, devices, sizes, self.keys.numpy())
        return known[key]

    def example(self) -> Tensor:
        """[1, ...] the inputs of one training sample, as models get them."""
        most = self.federation.samples.argmax().reshape(1)
        return self.whole(most, "train", 1).groups[0].x[0]

    def whole(self, rows: Tensor, split: str = "train", chunk: int | None = None, part: int = 0) -> Batch:
        """All samples of a split as one batch; devices without any are left out.

        Args:
            rows: [n] the devices, as positions in the federation.
            split: "train", "validation" or "test".
            chunk: at most so many samples per device.
            part: which chunk, counted from 0.
        """
        begin, end = (b[rows] for b in self.federation.span(split))
        if chunk is not None:
            begin = begin + part * chunk
            end = torch.minimum(end, begin + chunk)
        samples = (end - begin).clamp(min=0)
        groups = []
        for which, width in groups_by_width(samples.numpy(), np.full(len(rows), chunk or UNBOUNDED, dtype=np.int64)):
            if width:
                count = samples[which].unsqueeze(1)
                index = torch.minimum(torch.arange(width), count - 1) + begin[which].unsqueeze(1)
                weight = share_of_batch(count, width, self.dtype)
                key = random.bits(self.keys[rows[which]], width) if self.keyed else None
                groups.append(self.gather(which, index, weight, key))
        return Batch(groups, len(rows))

    def shares(self, count: np.ndarray, width: int) -> Tensor:
        """[steps, r, width] `share_of_batch` of counts [steps, r, 1]; [1, r, width] if all batches are full."""
        r = count.shape[1]
        if int(count.min()) < width:
            return share_of_batch(torch.from_numpy(count), width, self.dtype)
        if (r, width) not in self._equal_shares:
            if len(self._equal_shares) == FEW_SHAPES:
                self._equal_shares.clear()
            self._equal_shares[r, width] = share_of_batch(torch.full((r, 1), width), width, self.dtype)
        return self._equal_shares[r, width].unsqueeze(0)

    def gather(self, which: Tensor | slice, index: Tensor, weight: Tensor, key: Tensor | None) -> Group:
        """The samples `index` [r, B] of the federation, scaled as a model sees them."""
        return self.group(which, index.reshape(-1), self.targets(index), weight, key)

    def targets(self, index: Tensor) -> Tensor:
        """[*index.shape, ...] the targets of the samples `index`."""
        y = self.federation.y.index_select(0, index.reshape(-1))
        return (y.to(self.dtype) if y.is_floating_point() else y).view(*index.shape, *y.shape[1:])

    def group(self, which: Tensor | slice, flat: Tensor, y: Tensor, weight: Tensor, key: Tensor | None) -> Group:
        """The samples `flat` [r * B] of the federation with their targets, weights and keys."""
        x = self.federation.inputs(self.federation.x.index_select(0, flat), self.dtype)
        group = Group(which, x.view(*weight.shape, *x.shape[1:]), y, weight, key)
        return group if self.device == "cpu" else group.to(self.device)


@dataclass(frozen=True)
class Layout:
    """Where the mini-batches of some devices are; it is the same for all walks of these devices.

    batches | [n] number of mini-batches of each device
    same    | whether each device has one mini-batch only, so that all batches of a walk are the same
    stems   | [n] of the keys of each device's draws
    rounds  | [n] number of rounds for which an order of a device's samples lasts; None if no device has two samples
    groups  | the devices of each padded width: which rows, the width, and [r, 1] each: the first training sample, the
              number of samples, the batch size, the number of batches; and whether all batches are full
    """

    batches: np.ndarray
    same: bool
    stems: np.ndarray
    rounds: np.ndarray | None
    groups: list[tuple[Tensor | slice, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool]]

    @classmethod
    def of(cls, federation: Federation, devices: np.ndarray, size: np.ndarray, keys: np.ndarray) -> Layout:
        """The layout of `devices` [n] with batches of `size` [n]; `keys` are those of all devices' names."""
        starts, samples = (values[devices] for values in federation.training)
        batches, groups = (samples + size - 1) // size, []
        for which, width in groups_by_width(samples, size):
            some = which if isinstance(which, slice) else which.numpy()
            start, own, its, number = (values[some, None] for values in (starts, samples, size, batches))
            full = bool((own % its == 0).all() and (its == width).all())
            groups.append((which, width, start, own, its, number, full))
        rounds = 1 + samples // RESHUFFLE if samples.max(initial=0) > 1 else None
        return cls(batches, bool((batches <= 1).all()), random.stems(keys[devices]), rounds, groups)


class Walk:
    """The mini-batches of some devices in one call.

    The first batch is drawn at random among those of the device's order; the following ones come next in that order,
    and after the last one comes the first. `drawn` [n] are the keys of this draw; None if every device has one batch
    only and the batches have no keys, so that they are all the same.
    """

    def __init__(self, batches: Batches, layout: Layout, drawn: np.ndarray | None, stream: str) -> None:
        self.batches, self.layout, self.drawn, self.stream = batches, layout, drawn, stream
        self.num_rows = len(layout.batches)
        self.first = np.zeros_like(layout.batches)
        if drawn is not None:
            self.first = (random.uniform(drawn, 1)[:, 0] * layout.batches).astype(np.int64)
        self.step, self.prepared_from = 0, 0
        self.last: Batch | None = None  # if all batches are the same
        self.prepared: list[list[tuple[Any, ...]]] = []  # by group and step: indices, targets, weights, keys

    def next(self) -> Batch:
        """The next mini-batch of each device."""
        if self.last is not None:
            return self.last
        k = self.step - self.prepared_from
        if not self.prepared or k == len(self.prepared[0]):
            usual = self.batches.usual_steps.get(self.stream, 0)
            self.prepare(max(usual - self.step, min(self.step, 32), 1))
            k = 0
        self.step += 1
        self.batches.usual_steps[self.stream] = self.step
        groups = [self.batches.group(g[0], *of[k]) for g, of in zip(self.layout.groups, self.prepared, strict=True)]
        found = Batch(groups, self.num_rows)
        self.last = found if self.drawn is None else None
        return found

    def prepare(self, num_steps: int) -> None:
        """Compute indices, targets, weights and keys of the next steps at once."""
        steps = np.arange(self.step, self.step + num_steps).reshape(-1, 1, 1)
        self.prepared_from, self.prepared = self.step, []
        for which, width, start, samples, size, number, full in self.layout.groups:
            some = which if isinstance(which, slice) else which.numpy()
            begin = ((self.first[some, None] + steps) % number) * size  # [steps, r, 1]
            place = begin + np.arange(width)
            if not full:
                np.minimum(place, samples - 1, out=place)
            place += start
            index = torch.from_numpy(self.batches.order[place])  # [steps, r, B]
            count = size[None] if full else np.minimum(samples - begin, size)
            weight = self.batches.shares(count, width).expand(num_steps, -1, -1)
            key = [None] * num_steps
            if self.drawn is not None and self.batches.keyed:
                key = torch.from_numpy(random.bits(self.drawn[some] + steps[:, :, 0], width))
            each = (index.flatten(1), self.batches.targets(index), weight, key)
            self.prepared.append(list(zip(*each, strict=True)))


def share_of_batch(count: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[..., width] 1 / count for the first `count` samples, 0 for padding."""
    return (torch.arange(width) < count).to(dtype) / count.to(dtype)


def groups_by_width(samples: np.ndarray, size: np.ndarray) -> list[tuple[Tensor | slice, int]]:
    """The devices of each padded width, which depends only on the device's number of samples and batch size."""
    widths = padded_widths(samples, size)
    if (widths == widths[:1]).all():
        return [(slice(None), int(width)) for width in widths[:1]]
    return [(torch.from_numpy((widths == w).nonzero()[0]), int(w)) for w in np.unique(widths)]
