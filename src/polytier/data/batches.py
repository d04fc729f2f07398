"""Mini-batches of many devices at once, each a pure function of device, round, call and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polytier._text import schedule
from polytier.data.federation import Federation
from polytier.tree import random

UNBOUNDED = 1 << 62
GROW = "grow:"  # a batch size that grows with the rounds
RESHUFFLE = 1024  # samples; a device with k times as many keeps an order for 1 + k rounds


@dataclass(frozen=True)
class Group:
    """Devices of a stack whose batches have the same padded width.

    rows | which rows of the stack; x [r, B, ...], y [r, B, ...]; weight [r, B]: 1 / size, 0 where padded;
    key [r, B]: a key a sample, only where a model draws dropout masks
    """

    rows: Tensor | slice
    x: Tensor
    y: Tensor
    weight: Tensor
    key: Tensor | None = None

    def to(self, device: str) -> Group:
        """On an accelerator; to CUDA from pinned memory, so that nothing waits for the copy."""
        data = [None if t is None else moved(t, device) for t in (self.x, self.y, self.weight, self.key)]
        return Group(self.rows, *data)  # type: ignore[arg-type]


def moved(values: Tensor, device: str) -> Tensor:
    values = values.pin_memory() if device.startswith("cuda") else values
    return values.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    groups: list[Group]
    num_rows: int

    def row(self, i: int) -> Batch:
        """The batch of one row alone, a copy."""
        for g in self.groups:
            rows = torch.arange(self.num_rows)[g.rows].tolist()
            if i in rows:
                k = slice(rows.index(i), rows.index(i) + 1)
                data = [None if t is None else t[k].clone() for t in (g.x, g.y, g.weight, g.key)]
                return Batch([Group(slice(None), *data)], 1)  # type: ignore[arg-type]
        raise IndexError(i)


def check_batch_size(rule: int | str) -> None:
    if isinstance(rule, str) and rule.startswith(GROW):
        schedule(rule.removeprefix(GROW))
    elif isinstance(rule, bool) or not isinstance(rule, int) or rule < 1:
        raise ValueError(f"batch size is a whole number of at least 1, or grow:A/(B+t); got {rule!r}")


def batch_sizes(rule: int | str, samples: Tensor, round_: int) -> Tensor:
    """[n] the batch size of each device: a number, or `grow:A/(B+t)`, at least the share 1 - A/(B+t) of its samples.

    Growing sizes are rounded up to 32, 64, 128, ..., because each size is a computation of its own.
    """
    if isinstance(rule, int):
        return torch.full_like(samples, rule)
    wanted = (1 - schedule(rule.removeprefix(GROW))(round_)) * samples.double()
    return 2 ** wanted.clamp(min=32).log2().ceil().long()


def padded_widths(samples: Tensor, size: Tensor) -> Tensor:
    """[n] what each device's batch is padded to: the batch size or, with fewer samples, 1, 64, 128, 256, ...

    Few widths, because each one present in a tile is a computation of its own.
    """
    least = torch.minimum(samples, size)
    power = 1 << torch.frexp((samples - 1).double()).exponent.long()  # the next one that is at least `samples`
    return torch.where((samples >= size) | (samples <= 1), least, torch.minimum(size, power.clamp(min=64)))


class Batches:
    """Reads batches of a federation; holds the current random order of each device's training samples.

    `keyed`: batches carry a key a sample, from which a model draws its dropout masks.
    """

    def __init__(
        self, federation: Federation, seed: int, dtype: torch.dtype, device: str = "cpu", keyed: bool = False
    ) -> None:
        self.federation, self.seed, self.dtype, self.device, self.keyed = (
            federation,
            seed,
            dtype,
            device,
            keyed,
        )
        self.order = torch.arange(len(federation.x))
        self.stamp = torch.full((len(federation),), -1)
        self.keys = random.name_keys(federation.ids)
        self.usual_steps: dict[str, int] = {}  # how far the last walk went: only saves work

    def over(self, federation: Federation) -> Batches:
        """The same for other data."""
        return Batches(federation, self.seed, self.dtype, self.device, self.keyed)

    def reshuffle(self, rows: Tensor, round_: int) -> None:
        """Bring the order of these devices up to date: it is keyed by device and epoch alone."""
        size = self.federation.samples[rows]
        epoch = round_ // (1 + size // RESHUFFLE)
        stale = self.stamp[rows] != epoch
        if not stale.any():
            return
        rows, size, epoch = rows[stale], size[stale], epoch[stale]
        base = random.node_keys(random.key(self.seed, "shuffle"), self.keys[rows])
        order = random.shuffled(random.mix(base ^ random.mix(epoch + 1)), size)
        start = self.federation.bounds[rows, 0].unsqueeze(1)
        place, order = start + torch.arange(order.shape[1]), start + order
        if bool((size != order.shape[1]).any()):
            inside = torch.arange(order.shape[1]) < size.unsqueeze(1)
            place, order = place[inside], order[inside]
        self.order.index_copy_(0, place.reshape(-1), order.reshape(-1))
        self.stamp[rows] = epoch

    def walk(self, rows: Tensor, round_: int, call: int, size: int | Tensor, stream: str = "") -> Walk:
        """The mini-batches of one call, one after the other; `size`: one for all, or one a device [n]."""
        self.reshuffle(rows, round_)
        drawn = random.node_keys(random.key(self.seed, "batch", stream, round_, call), self.keys[rows])
        sizes = torch.full_like(rows, size) if isinstance(size, int) else size
        return Walk(self, rows, drawn, sizes, stream)

    def whole(self, rows: Tensor, split: str = "train", chunk: int | None = None, part: int = 0) -> Batch:
        """All samples of a split; with `chunk`, at most that many: the part-th of them. Empty devices are left out."""
        begin, end = (b[rows] for b in self.federation.span(split))
        if chunk is not None:
            begin = begin + part * chunk
            end = torch.minimum(end, begin + chunk)
        samples = (end - begin).clamp(min=0)
        groups = []
        for which, width in groups_by_width(samples, torch.full_like(samples, chunk or UNBOUNDED)):
            if width:
                count = samples[which].unsqueeze(1)
                index = torch.minimum(torch.arange(width), count - 1) + begin[which].unsqueeze(1)
                weight = share_of_batch(count, width, self.dtype)
                key = random.bits(self.keys[rows[which]], width) if self.keyed else None
                groups.append(self.gather(which, index, weight, key))
        return Batch(groups, len(rows))

    def gather(self, which: Tensor | slice, index: Tensor, weight: Tensor, key: Tensor | None) -> Group:
        """The samples `index` [r, B] of the federation, as a model sees them."""
        return self.group(which, index.reshape(-1), self.targets(index), weight, key)

    def targets(self, index: Tensor) -> Tensor:
        """[*index.shape, ...] those of the samples `index`."""
        y = self.federation.y.index_select(0, index.reshape(-1))
        return (y.to(self.dtype) if y.is_floating_point() else y).view(*index.shape, *y.shape[1:])

    def group(self, which: Tensor | slice, flat: Tensor, y: Tensor, weight: Tensor, key: Tensor | None) -> Group:
        x = self.federation.inputs(self.federation.x.index_select(0, flat), self.dtype)
        group = Group(which, x.view(*weight.shape, *x.shape[1:]), y, weight, key)
        return group if self.device == "cpu" else group.to(self.device)


class Walk:
    """From a batch drawn at random through each device's order, and round again."""

    def __init__(self, batches: Batches, rows: Tensor, drawn: Tensor, size: Tensor, stream: str) -> None:
        self.batches, self.stream, self.num_rows = batches, stream, len(rows)
        samples = batches.federation.samples[rows]
        first = (random.uniform(drawn, 1).squeeze(1) * ((samples + size - 1) // size)).long()
        start = batches.federation.bounds[rows, 0]
        self.groups = [
            (which, width, *(v[which].unsqueeze(1) for v in (start, samples, size, first, drawn)))
            for which, width in groups_by_width(samples, size)
        ]
        self.step, self.prepared_from = 0, 0
        self.prepared: list[list[tuple[Any, ...]]] = []  # by group and step: samples, targets, weights, keys

    def next(self) -> Batch:
        k = self.step - self.prepared_from
        if not self.prepared or k == len(self.prepared[0]):
            usual = self.batches.usual_steps.get(self.stream, 0)
            self.prepare(max(usual - self.step, min(self.step, 32), 1))
            k = 0
        self.step += 1
        self.batches.usual_steps[self.stream] = self.step
        groups = [self.batches.group(g[0], *of[k]) for g, of in zip(self.groups, self.prepared, strict=True)]
        return Batch(groups, self.num_rows)

    def prepare(self, num_steps: int) -> None:
        """What the next steps take: by group and step, drawn all at once."""
        steps = torch.arange(self.step, self.step + num_steps).reshape(-1, 1, 1)
        self.prepared_from, self.prepared = self.step, []
        for _, width, start, samples, size, first, drawn in self.groups:
            begin = ((first + steps) % ((samples + size - 1) // size)) * size  # [steps, r, 1]
            place = torch.minimum(begin + torch.arange(width), samples - 1) + start
            index = self.batches.order[place]  # [steps, r, B]
            weight = share_of_batch(torch.minimum(samples - begin, size), width, self.batches.dtype)
            key = random.bits(drawn.squeeze(1) + steps.squeeze(2), width) if self.batches.keyed else None
            each = (index.flatten(1), self.batches.targets(index), weight)
            self.prepared.append(list(zip(*each, [None] * num_steps if key is None else key, strict=True)))


def share_of_batch(count: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[..., width] 1 / count for the first `count` samples, 0 for those that only pad the batch."""
    return (torch.arange(width) < count).to(dtype) / count.to(dtype)


def groups_by_width(samples: Tensor, size: Tensor) -> list[tuple[Tensor | slice, int]]:
    """Devices by the width that their batch is padded to, which depends on nothing but the device and its size."""
    widths = padded_widths(samples, size)
    present = widths.unique().tolist()
    if len(present) == 1:
        return [(slice(None), present[0])]
    return [((widths == w).nonzero().squeeze(1), w) for w in present]
