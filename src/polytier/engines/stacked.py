"""The embedded engine: nodes of a tier are computed in tiles of rows, on one machine.

Devices are grouped in runs of whole blocks; a run is computed tile by tile, each tile doing all its
local steps before the next one starts, and its answers are summed into the run's blocks. With
workers, runs go to processes that map the same data and the same memory. Neither the tile nor the
number of workers changes a bit, because blocks are fixed by the topology and folded in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from polytier.engines.workers import Workers
from polytier.messages.codec import Codec
from polytier.method.call import Call
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.stack.rows import Folded, Rows, as_dict, cat_rows, fold, map_rows, starts_of

RUN = 64  # devices that are summed before their blocks are handed on
TILE_BYTES = 16 << 20  # what a tile may touch in a step, so that it stays in cache


class Stacked:
    """Runs every node of a tree in this process, or its devices in `workers` processes."""

    def __init__(
        self,
        context: Context,
        codec: Codec,
        *,
        tile: int | None = None,
        inner_tile: int | None = None,
        workers: int = 1,
    ) -> None:
        self.context, self.codec = context, codec
        self.tiles = {part.name: tile or default_tile(part) for part in context.parts}
        self.inner_tile = inner_tile
        self.workers = 1
        self._processes: Workers | None = None
        self.use_workers(workers)

    def use_workers(self, workers: int) -> None:
        """From now on compute devices in this many processes; data and memory move into files they share."""
        if workers > 1 and self._processes is None:
            self._processes = Workers(self.context, workers, partial(work, tiles=self.tiles, codec=self.codec))
        self.workers = workers

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def deliver(self, call: Call) -> Iterator[Any]:
        ledger = self.context.scope(call.scope).ledger
        if not call.quiet and len(call.ids):
            call = replace(call, rows=map_rows(self.codec.through, call.rows))
            nbytes = message_bytes(self.codec, call.rows, int(call.sender.max()) + 1)
            ledger.add(call.tier, "down", call.ids, nbytes[call.sender])
        for start, end, first, answer, nbytes in self._runs(call):
            if not call.quiet:
                ledger.add(call.tier, "up", call.ids[start:end], nbytes)
            yield replace(answer, first=first) if isinstance(answer, Folded) else answer

    def _runs(self, call: Call) -> Iterator[tuple[int, int, int, Folded | Rows, Tensor]]:
        n, tile = len(call.ids), self.tiles[call.scope]
        if n == 0:
            return
        if call.tier < self.context.scope(call.scope).topology.leaf:
            answer = compute(self.context, call, self.inner_tile or n, self.codec)
            yield 0, n, 0, *answer
            return
        runs = cut(call, min(-(-n // self.workers), max(tile, RUN)))
        # a row for each receiver and an answer from each: moving them costs more than a second core gains
        each = call.blocks is None and not call.quiet and any(len(r) == n for r in as_dict(call.rows).values())
        if self.workers == 1 or len(runs) == 1 or each:
            for start, end, first in runs:
                yield start, end, first, *compute(self.context, call.part(start, end), tile, self.codec)
            return
        assert self._processes is not None
        answers = self._processes.run(call.part(start, end) for start, end, _ in runs)
        for (start, end, first), (answer, nbytes, steps) in zip(runs, answers, strict=True):
            self.context.scope(call.scope).device_steps += steps
            yield start, end, first, answer, nbytes


def work(context: Context, call: Call, tiles: dict[str, int], codec: Codec) -> tuple[Folded | Rows, Tensor, int]:
    """In a worker: what `compute` gives, and the gradients it took."""
    before = context.all_steps
    return *compute(context, call, tiles[call.scope], codec), context.all_steps - before


def message_bytes(codec: Codec, rows: Rows, n: int) -> Tensor:
    """[n] the bytes of each row's message."""
    return sum((codec.nbytes(r)[:n] for r in as_dict(rows).values()), torch.zeros(n, dtype=torch.int64))


def cut(call: Call, size: int) -> list[tuple[int, int, int]]:
    """Runs (start, end, first block) of whole blocks, as even as these allow, with about `size` receivers each."""
    n = len(call.ids)
    places = torch.arange(n + 1) if call.blocks is None else torch.cat([starts_of(call.blocks), torch.tensor([n])])
    wanted = torch.linspace(0, n, -(-n // size) + 1, dtype=torch.float64)
    after = torch.searchsorted(places.double(), wanted).clamp(max=len(places) - 1)
    before = (after - 1).clamp(min=0)
    nearest = torch.where(wanted - places[before] < places[after] - wanted, before, after).unique()
    firsts = [0] * len(nearest) if call.blocks is None else nearest.tolist()
    return list(zip(places[nearest[:-1]].tolist(), places[nearest[1:]].tolist(), firsts, strict=False))


def compute(context: Context, call: Call, tile: int, codec: Codec) -> tuple[Folded | Rows, Tensor]:
    """The answers (or the sums of their blocks) of all receivers, and the bytes each one sent."""
    n = len(call.ids)
    pieces, nbytes, total = [], [], None
    even = -(-n // -(-n // tile))  # tiles of about the same size, in fours as graphs are traced
    size = min(tile, -(-even // 4) * 4)
    for start in range(0, n, size):
        end = min(start + size, n)
        answer = execute(context, call, start, end)
        if not call.quiet:
            answer = map_rows(codec.through, answer)
            nbytes.append(message_bytes(codec, answer, end - start))
        if call.blocks is None:
            pieces.append(answer)
        else:
            assert call.shares is not None
            total = fold(answer, call.shares[start:end], call.blocks[start:end], int(call.blocks[-1]) + 1, total)
    sent = torch.cat(nbytes) if nbytes else torch.zeros(n, dtype=torch.int64)
    return (total if total is not None else cat_rows(pieces)), sent


def default_tile(context: Context) -> int:
    """Devices a tile: as many as keep their rows and batches in cache."""
    population, width = context.population, context.objective.dtype.itemsize
    samples = int(population.samples.max())
    if isinstance(context.batch_size, int):
        samples = min(context.batch_size, samples)
    inputs = prod(population.shape) * samples
    # a row in place, and frozen parameters, which some layers copy per row; a batch gathered, and read twice
    touched = width * (context.objective.dimension + context.objective.frozen_size + 3 * inputs)
    return max(1, min(16, round(TILE_BYTES / touched / 4))) * 4
