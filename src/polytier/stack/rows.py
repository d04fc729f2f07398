"""Rows of many nodes, and sums of rows in an order that depends on neither tiles nor workers.

Programs exchange `Rows`: a tensor, or a dict of tensors, whose first axis are the nodes.

>>> import torch
>>> from polytier import Rows
>>> models: Rows = torch.zeros(3, 10)  # 3 nodes, one model of 10 parameters each
>>> named: Rows = {"model": torch.zeros(3, 10), "choice": torch.tensor([0, 1, 1])}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.tree.topology import starts_of

LINE = 64  # bytes of a cache line
LARGE = 1 << 15  # numbers per row from which rows are added one by one
Rows = Tensor | dict[str, Tensor]
"""What programs send, answer and keep: a tensor [nodes, ...] of any dtype, or several by name."""


def as_dict(rows: Rows) -> dict[str, Tensor]:
    """The rows as a dict; a plain tensor is the field ``""``."""
    return rows if isinstance(rows, dict) else {"": rows}


def map_rows(function: Callable[[Tensor], Tensor], rows: Rows) -> Rows:
    """Apply a function to every tensor of the rows."""
    return {k: function(v) for k, v in rows.items()} if isinstance(rows, dict) else function(rows)


def aligned_copy(rows: Tensor) -> Tensor:
    """A copy [n, d] in which every row starts at a cache line."""
    n, d = rows.shape
    line = LINE // rows.element_size()
    return rows.new_empty(n, -(-d // line) * line)[:, :d].copy_(rows)


def aligned(rows: Tensor) -> Tensor:
    """The rows [n, d], copied if they do not start at cache lines.

    The last bits of a matrix product, and its speed, depend on the alignment of its factors.
    """
    starts = rows.data_ptr() | (rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0)
    return aligned_copy(rows) if starts % LINE or rows.stride(1) != 1 else rows


def pack(prefix: str, rows: Rows) -> dict[str, Tensor]:
    """The rows as tensors of a larger dict, named `prefix:field`; a plain tensor is named `prefix`."""
    return {f"{prefix}:{k}": v for k, v in rows.items()} if isinstance(rows, dict) else {prefix: rows}


def unpack(prefix: str, tensors: Mapping[str, Tensor]) -> Rows:
    """The rows that `pack` has put into a dict under this prefix."""
    if prefix in tensors:
        return tensors[prefix]
    return {k.removeprefix(f"{prefix}:"): v for k, v in tensors.items() if k.startswith(f"{prefix}:")}


def cat_rows(pieces: Sequence[Rows]) -> Rows:
    """Concatenate rows with the same fields along the first axis; a single piece is copied only if it has gaps."""
    first = pieces[0]
    if len(pieces) == 1:
        return map_rows(Tensor.contiguous, first)
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
    """The sums of some consecutive blocks of answers.

    field  | meaning
    first  | the first block
    count  | number of blocks
    sums   | by name of the weight: the weighted sum of the answers [count, ...]
    totals | by name of the weight: the sum of the weights [count]
    """

    first: int
    count: int
    sums: dict[str, Rows]
    totals: dict[str, Tensor]


@dataclass
class Sums:
    """The answers of the children, summed by parent.

    field  | meaning
    sent   | what was sent to the children, [m, ...]
    num    | number of parents, m
    sums   | by name of the weight: the weighted sum of the answers [m, ...]; the name "" is the plain sum
    totals | by name of the weight: the sum of the weights [m]
    """

    sent: Rows
    num: int
    sums: dict[str, Rows]
    totals: dict[str, Tensor]

    @classmethod
    def zeros(cls, sent: Rows, num: int):
        """Sums without any answers yet."""
        return cls(sent, num, {}, {})

    def add(self, folded: Folded, parent: Tensor) -> None:
        """Add blocks, in their order, to the sums of their parents `parent` [count]."""
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
        """[m] number of children that answered."""
        return self.totals[""].long() if self.totals else torch.zeros(self.num, dtype=torch.int64)

    def sum(self) -> Rows:
        """[m, ...] the plain sum of the answers."""
        return self.sums[""]

    def mean(self, weight: str | None = None, empty: Rows | None = None) -> Any:
        """The mean of the answers by parent.

        Args:
            weight: ``"samples"``: by number of samples; the name of a field of the answers that has one number per
                child; None or ``"uniform"``: all equally.
            empty: [m, ...] the result for parents whose children did not answer; by default the rows sent.

        Returns:
            [m, ...] with the fields of the answers.

        Raises:
            ValueError: if the answers have no such weight, or if nobody answered and there is no `empty`.
        """
        empty = self.sent if empty is None else empty
        weight = "" if weight in (None, "uniform") else weight
        if not self.sums:
            return empty
        if weight not in self.sums:
            there = ", ".join(["uniform", *filter(None, self.sums)])
            raise ValueError(f"the answers have no weight {weight!r}; there are {there}; answer it as a field [n]")
        total = self.totals[weight]
        some = total > 0
        everyone = bool(some.numpy().all())

        def divide(rows: Tensor, instead: Tensor | None) -> Tensor:
            shape = (-1, *[1] * (rows.ndim - 1))
            if everyone:
                return rows / total.reshape(shape).to(rows.dtype)
            if instead is None:
                raise ValueError(
                    "no child of some parent answered and the rows sent have no such field; give mean(empty=rows)"
                )
            return torch.where(
                some.reshape(shape), rows / total.clamp(min=1e-300).reshape(shape).to(rows.dtype), instead
            )

        sums = self.sums[weight]
        if isinstance(sums, dict):
            fallback = empty if isinstance(empty, dict) else {}
            return {k: divide(r, fallback.get(k)) for k, r in sums.items()}
        return divide(sums, empty if isinstance(empty, Tensor) else None)


class Answers(Sums):
    """The answers of all children. Sums and means of them are computed when they are first used.

    Args:
        sent: what was sent.
        num: number of parents, m.
        rows: [k, ...] the answers.
        ids: [k] the children, by number in their tier.
        parent: [k] the parent of each, 0 .. m - 1.
        samples: [k] number of training samples of each child.
        blocks: [k] the block in which each answer is summed.
    """

    def __init__(
        self, sent: Rows, num: int, rows: Rows, ids: Tensor, parent: Tensor, samples: Tensor, blocks: Tensor
    ) -> None:
        self.sent, self.num = sent, num
        self.rows, self.ids, self.parent, self.samples, self._blocks = rows, ids, parent, samples, blocks

    @cached_property
    def _summed(self) -> Sums:
        """The sums of all answers by parent."""
        summed = Sums.zeros(self.sent, self.num)
        if len(self.ids):
            folded = fold(self.rows, share_of_samples(self.samples, self.parent), self._blocks)
            summed.add(folded, self.parent[starts_of(self._blocks)])
        return summed

    @property
    def sums(self) -> dict[str, Rows]:  # type: ignore[override]
        """By name of the weight: the weighted sum of the answers."""
        return self._summed.sums

    @property
    def totals(self) -> dict[str, Tensor]:  # type: ignore[override]
        """By name of the weight: the sum of the weights."""
        return self._summed.totals

    def grouped(self, by: Tensor, groups: int, empty: Rows) -> Sums:
        """The answers summed by groups instead of by parent.

        Args:
            by: [k] the group of each answer, 0 .. groups - 1.
            groups: number of groups.
            empty: [groups, ...] the mean of groups without answers.
        """
        order = torch.argsort(by, stable=True)
        by, sums = by[order], Sums.zeros(empty, groups)
        if len(by):
            blocks = torch.unique_consecutive(torch.stack([by, self._blocks[order]]), dim=1, return_inverse=True)[1]
            rows = map_rows(lambda r: r[order], self.rows)
            sums.add(fold(rows, share_of_samples(self.samples[order], by), blocks), by[starts_of(blocks)])
        return sums


def share_of_samples(samples: Tensor, position: Tensor) -> Tensor:
    """[k] the share of each answer in the samples of all answers to its parent; a single answer has exactly 1."""
    own, parent = samples.numpy(), position.numpy()
    total = np.zeros(int(parent.max()) + 1 if len(parent) else 0, dtype=np.int64)
    np.add.at(total, parent, own)
    return torch.from_numpy(own.astype(np.float64) / total[parent])


def fold(rows: Rows, shares: Tensor, blocks: Tensor, num: int | None = None, total: Folded | None = None) -> Folded:
    """Sum rows into blocks, in their order: plainly, by samples, and by every float field with one number per node.

    Args:
        rows: [k, ...]
        shares: [k] the weights by samples.
        blocks: [k] the block of each row, ascending.
        num: number of blocks; by default those in `blocks`.
        total: sums of earlier rows to which these are added, so that tiles may end inside of a block.
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
    """Add rows [k, ...], in order and multiplied by their weights [k], to `sums` at `places` [k], in place."""
    if rows.numel() >= LARGE * len(places):  # needs no copy of the rows and takes less than half the time
        weights = [1] * len(rows) if weight is None else weight.tolist()
        for place, row, alpha in zip(places.tolist(), rows, weights, strict=True):
            sums[place].add_(row, alpha=alpha)
        return
    if weight is not None:
        rows = rows * weight.to(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
    sums.index_add_(0, places, rows.contiguous())  # rows with gaps between them would be added number by number
