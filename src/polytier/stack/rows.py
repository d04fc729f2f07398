"""Rows of many nodes, and their sums in an order that neither tiles nor workers change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LINE = 64  # bytes of a line of the cache
LARGE = 1 << 15  # numbers of a row that is better handled alone
Rows = Tensor | dict[str, Tensor]  # [nodes, ...], any trailing shape and dtype


def as_dict(rows: Rows) -> dict[str, Tensor]:
    """A plain tensor is the field ""."""
    return rows if isinstance(rows, dict) else {"": rows}


def map_rows(function: Callable[[Tensor], Tensor], rows: Rows) -> Rows:
    return {k: function(v) for k, v in rows.items()} if isinstance(rows, dict) else function(rows)


def aligned_copy(rows: Tensor) -> Tensor:
    """A copy [n, d] in which every row starts at a line of the cache."""
    n, d = rows.shape
    line = LINE // rows.element_size()
    return rows.new_empty(n, -(-d // line) * line)[:, :d].copy_(rows)


def aligned(rows: Tensor) -> Tensor:
    """The rows, copied if need be. A product depends in its last bits, and in its speed, on where its factors start."""
    starts = rows.data_ptr() | (rows.stride(0) * rows.element_size() if len(rows) > 1 else 0)
    return aligned_copy(rows) if starts % LINE or rows.stride(1) != 1 else rows


def pack(prefix: str, rows: Rows) -> dict[str, Tensor]:
    """Rows as named tensors of a larger dict; a plain tensor is `prefix` itself."""
    return {f"{prefix}:{k}": v for k, v in rows.items()} if isinstance(rows, dict) else {prefix: rows}


def unpack(prefix: str, tensors: Mapping[str, Tensor]) -> Rows:
    if prefix in tensors:
        return tensors[prefix]
    return {k.removeprefix(f"{prefix}:"): v for k, v in tensors.items() if k.startswith(f"{prefix}:")}


def cat_rows(pieces: Sequence[Rows]) -> Rows:
    first = pieces[0]
    if isinstance(first, dict):
        return {k: torch.cat([as_dict(p)[k] for p in pieces]) for k in first}
    return torch.cat([p for p in pieces if isinstance(p, Tensor)])


@dataclass
class Answered:
    """The answers of some receivers of a call: rows [k, ...], and which receivers [k] they are, in increasing order."""

    rows: Rows
    which: Tensor


@dataclass
class Folded:
    """Sums of blocks first .. first + count: by weight, the weighted sum of the answers and of the weights."""

    first: int
    count: int
    sums: dict[str, Rows]
    totals: dict[str, Tensor]


@dataclass
class Sums:
    """Answers summed by parent. `mean(weight)`: "samples", a field [n] of the answers, or None: all alike."""

    sent: Rows
    num: int
    sums: dict[str, Rows]
    totals: dict[str, Tensor]

    @classmethod
    def zeros(cls, sent: Rows, num: int):
        return cls(sent, num, {}, {})

    def add(self, folded: Folded, parent: Tensor) -> None:
        """Add blocks, in order, to their parents' sums."""
        for weight, rows in folded.sums.items():
            if weight not in self.sums:
                self.sums[weight] = map_rows(lambda r: r.new_zeros((self.num, *r.shape[1:])), rows)
                self.totals[weight] = folded.totals[weight].new_zeros(self.num)
            for field, value in as_dict(rows).items():
                add_rows(as_dict(self.sums[weight])[field], parent, value)
            self.totals[weight].index_add_(0, parent, folded.totals[weight])

    def __getitem__(self, field: str) -> Sums:
        """The sums of one field of the answers."""
        sums: dict[str, Rows] = {w: rows[field] for w, rows in self.sums.items() if isinstance(rows, dict)}
        sent = self.sent[field] if isinstance(self.sent, dict) and field in self.sent else {}
        return Sums(sent, self.num, sums, self.totals)

    @property
    def count(self) -> Tensor:
        """[m] how many answered."""
        return self.totals[""].long() if self.totals else torch.zeros(self.num, dtype=torch.int64)

    def sum(self) -> Rows:
        return self.sums[""]

    def mean(self, weight: str | None = None, empty: Rows | None = None) -> Any:
        """[m, ...] means, rows like the answers; where nobody answered, `empty` (by default the rows sent)."""
        empty = self.sent if empty is None else empty
        weight = "" if weight in (None, "uniform") else weight
        if not self.sums:
            return empty
        if weight not in self.sums:
            raise ValueError(f"the answers have no weight {weight!r}; there are {', '.join(filter(None, self.sums))}")
        total = self.totals[weight]
        some = total > 0

        def divide(rows: Tensor, instead: Tensor | None) -> Tensor:
            shape = (-1, *[1] * (rows.ndim - 1))
            if some.all():
                return rows / total.reshape(shape).to(rows.dtype)
            if instead is None:
                raise ValueError("nobody answered some parent and the answers are not like the rows sent: give empty=")
            return torch.where(
                some.reshape(shape), rows / total.clamp(min=1e-300).reshape(shape).to(rows.dtype), instead
            )

        sums = self.sums[weight]
        if isinstance(sums, dict):
            fallback = empty if isinstance(empty, dict) else {}
            return {k: divide(r, fallback.get(k)) for k, r in sums.items()}
        return divide(sums, empty if isinstance(empty, Tensor) else None)


class Answers(Sums):
    """The answers themselves: rows [k, ...] of the children `ids` [k]; `parent` [k] is their parent's position.

    They are summed, by `blocks` [k], when a sum or mean is first asked for.
    """

    def __init__(
        self, sent: Rows, num: int, rows: Rows, ids: Tensor, parent: Tensor, samples: Tensor, blocks: Tensor
    ) -> None:
        self.sent, self.num = sent, num
        self.rows, self.ids, self.parent, self.samples, self._blocks = rows, ids, parent, samples, blocks

    @cached_property
    def _summed(self) -> Sums:
        summed = Sums.zeros(self.sent, self.num)
        if len(self.ids):
            folded = fold(self.rows, share_of_samples(self.samples, self.parent), self._blocks)
            summed.add(folded, self.parent[starts_of(self._blocks)])
        return summed

    @property
    def sums(self) -> dict[str, Rows]:  # type: ignore[override]
        return self._summed.sums

    @property
    def totals(self) -> dict[str, Tensor]:  # type: ignore[override]
        return self._summed.totals

    def grouped(self, by: Tensor, groups: int, empty: Rows) -> Sums:
        """Summed by another grouping than the parent: `by` [k] in 0 .. groups-1; one group is the plain sum."""
        order = torch.argsort(by, stable=True)
        by, sums = by[order], Sums.zeros(empty, groups)
        if len(by):
            blocks = torch.unique_consecutive(torch.stack([by, self._blocks[order]]), dim=1, return_inverse=True)[1]
            rows = map_rows(lambda r: r[order], self.rows)
            sums.add(fold(rows, share_of_samples(self.samples[order], by), blocks), by[starts_of(blocks)])
        return sums


def starts_of(blocks: Tensor) -> Tensor:
    """Where each block starts; blocks [k] are numbered 0, 0, .., 1, 1, .."""
    return torch.searchsorted(blocks, torch.arange(int(blocks[-1]) + 1 if len(blocks) else 0))


def share_of_samples(samples: Tensor, position: Tensor) -> Tensor:
    """[k] each answer's share of the samples of its parent's answers: a single answer weighs exactly 1."""
    total = torch.zeros(int(position.max()) + 1 if len(position) else 0, dtype=torch.int64)
    total.index_add_(0, position, samples)
    return samples.double() / total[position].double()


def fold(rows: Rows, shares: Tensor, blocks: Tensor, num: int | None = None, total: Folded | None = None) -> Folded:
    """Sum rows [k, ...] into blocks, in order: plainly, by samples, and by every field that is one number a node.

    Goes on with `total` if there is one, so that tiles may end anywhere.
    """
    size = int(blocks[-1]) + 1 if num is None else num
    fields = {k: v for k, v in as_dict(rows).items() if k and v.ndim == 1 and v.is_floating_point()}
    weights = {"": None, "samples": shares, **fields}
    if total is None:
        zeros = {w: map_rows(lambda r: r.new_zeros((size, *r.shape[1:])), rows) for w in weights}
        total = Folded(0, size, zeros, {w: torch.zeros(size, dtype=torch.float64) for w in weights})
    for name, weight in weights.items():
        sums = as_dict(total.sums[name])
        for field, value in as_dict(rows).items():
            add_rows(sums[field], blocks, value, weight if value.is_floating_point() else None)
        ones = torch.ones(len(blocks), dtype=torch.float64) if weight is None else weight.double()
        total.totals[name].index_add_(0, blocks, ones)
    return total


def add_rows(sums: Tensor, places: Tensor, rows: Tensor, weight: Tensor | None = None) -> None:
    """Add each row, in order, by its weight, to the sum at its place."""
    if rows[:1].numel() >= LARGE:  # one by one needs no copy of them, and costs less than half
        weights = [1] * len(rows) if weight is None else weight.tolist()
        for place, row, alpha in zip(places.tolist(), rows, weights, strict=True):
            sums[place].add_(row, alpha=alpha)
        return
    if weight is not None:
        rows = rows * weight.to(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
    sums.index_add_(0, places, rows)
