"""Mini-batches of many devices at once, each a pure function of device, round, call and step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from polytier import random
from polytier.data.federation import Federation

UNBOUNDED = 1 << 62
RESHUFFLE = 1024  # samples; a device with k times as many keeps an order for 1 + k rounds


@dataclass(frozen=True)
class Group:
    """Devices of a stack whose batches have the same padded width.

    rows | which rows of the stack; x [r, B, ...], y [r, B, ...]; weight [r, B]: 1 / size, 0 where padded;
    key [r, B]: a key a sample, for dropout
    """

    rows: Tensor | slice
    x: Tensor
    y: Tensor
    weight: Tensor
    key: Tensor


@dataclass(frozen=True)
class Batch:
    groups: list[Group]
    num_rows: int

    def row(self, i: int) -> Batch:
        """The batch of one row alone."""
        for g in self.groups:
            rows = torch.arange(self.num_rows)[g.rows].tolist()
            if i in rows:
                k = slice(rows.index(i), rows.index(i) + 1)
                return Batch([Group(slice(None), g.x[k], g.y[k], g.weight[k], g.key[k])], 1)
        raise IndexError(i)


@dataclass
class Plan:
    """What stays the same from step to step of one call: by group, where its devices' samples are."""

    groups: list[tuple[Tensor | slice, Tensor, Tensor, Tensor, Tensor, int]] = field(default_factory=list)
    step: int = 0


def padded_width(samples: int, size: int) -> int:
    """What a device's batch is padded to: the batch size, or 1, 2, 3, 4, 6, 8, 12, ... if it has fewer samples."""
    if samples >= size:
        return size
    if samples == 0:
        return 0
    power = 1 << (samples - 1).bit_length()
    return min(size, 3 * power // 4 if samples <= 3 * power // 4 and power >= 4 else power)


class Batches:
    """Reads batches of a federation; holds the current random order of each device's training samples."""

    def __init__(self, federation: Federation, dtype: torch.dtype, seed: int, device: str = "cpu") -> None:
        self.federation, self.dtype, self.seed, self.device = federation, dtype, seed, device
        self.order = torch.arange(len(federation.x))
        self.stamp = torch.full((len(federation),), -1)
        self.keys = torch.tensor([random.signed(random.name_key(i)) for i in federation.ids.tolist()])

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
        inside = torch.arange(order.shape[1]) < size.unsqueeze(1)
        place = start + torch.arange(order.shape[1])
        self.order[place[inside]] = (start + order)[inside]
        self.stamp[rows] = epoch

    def plan(self, rows: Tensor, round_: int, call: int, size: int, stream: str) -> Plan:
        """A call's walk: from a batch drawn at random through the device's order, and round again."""
        self.reshuffle(rows, round_)
        samples = self.federation.samples[rows]
        drawn = random.node_keys(random.key(self.seed, "batch", stream, round_, call), self.keys[rows])
        num_batches = (samples + size - 1) // size
        first = (random.uniform(drawn, 1).squeeze(1) * num_batches).long()
        plan = Plan()
        for which, width in groups_by_width(samples, size):
            start = self.federation.bounds[rows[which], 0]
            plan.groups.append((which, start, samples[which], first[which], drawn[which], width))
        return plan

    def next(self, plan: Plan, size: int) -> Batch:
        groups = []
        for which, start, samples, first, drawn, width in plan.groups:
            number = (first + plan.step) % ((samples + size - 1) // size)
            offset = (number * size).unsqueeze(1) + torch.arange(width)
            count = (samples - number * size).clamp(max=size).unsqueeze(1)
            place = torch.minimum(offset, samples.unsqueeze(1) - 1) + start.unsqueeze(1)
            index = self.order[place]
            weight = (torch.arange(width) < count).to(self.dtype) / count.to(self.dtype)
            key = random.bits(drawn + plan.step, width)
            groups.append(self.gather(which, index, weight, key))
        plan.step += 1
        return Batch(groups, sum(len(g.weight) for g in groups))

    def whole(self, rows: Tensor, split: str = "train", chunk: int | None = None, part: int = 0) -> Batch:
        """All samples of a split; with `chunk`, at most that many: the part-th of them. Empty devices are left out."""
        begin, end = (b[rows] for b in self.federation.span(split))
        if chunk is not None:
            begin = begin + part * chunk
            end = torch.minimum(end, begin + chunk)
        samples = (end - begin).clamp(min=0)
        groups = []
        for which, width in groups_by_width(samples, chunk or UNBOUNDED):
            if width == 0:
                continue
            count = samples[which].unsqueeze(1)
            index = torch.minimum(torch.arange(width).expand(len(count), width), count - 1) + begin[which].unsqueeze(1)
            weight = (torch.arange(width) < count).to(self.dtype) / count.to(self.dtype)
            groups.append(self.gather(which, index, weight, index))
        return Batch(groups, len(rows))

    def gather(self, which: Tensor | slice, index: Tensor, weight: Tensor, key: Tensor) -> Group:
        fed, flat = self.federation, index.reshape(-1)
        x = fed.inputs(fed.x.index_select(0, flat), self.dtype)
        y = fed.y.index_select(0, flat)
        if y.is_floating_point():
            y = y.to(self.dtype)
        to = {"device": self.device, "non_blocking": True}
        shape = tuple(index.shape)
        return Group(
            which,
            x.reshape(*shape, *x.shape[1:]).to(**to),
            y.reshape(*shape, *y.shape[1:]).to(**to),
            weight.to(**to),
            key.to(**to),
        )


def groups_by_width(samples: Tensor, size: int) -> list[tuple[Tensor | slice, int]]:
    """Devices by the width that their batch is padded to, which depends on nothing but the device."""
    widths = torch.tensor([padded_width(s, size) for s in samples.tolist()])
    present = widths.unique().tolist()
    if len(present) == 1:
        return [(slice(None), present[0])]
    return [((widths == w).nonzero().squeeze(1), w) for w in present]
