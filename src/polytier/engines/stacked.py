"""The engine for one machine: the nodes of a tier are computed in tiles of rows.

Devices are grouped in runs of whole blocks. A run is computed tile by tile: a tile takes all its local steps before the
next one starts, and its answers are added to the sums of the run's blocks. With workers, runs are computed by processes
that map the same data and the same memory. Neither the size of a tile nor the number of workers changes a bit of the
result, because blocks are fixed by the topology and added in order.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.engines.exchange import Exchange
from polytier.engines.workers import Workers
from polytier.messages.codec import Codec
from polytier.messages.transforms import Transform
from polytier.method.call import Call, used_rows
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.stack.rows import Folded, Rows, as_dict, cat_rows, fold, map_rows
from polytier.tree.topology import starts_of

TRIED = 4  # how often a call is measured before it is settled who computes it
AGAIN = 500  # calls after which it is measured again
SHORT = 0.05  # seconds; longer calls are always shared with the workers
RUN = 64  # devices that are summed before their blocks are yielded
LARGEST_TILE = 128  # devices; with small models the calls of torch cost more than misses in the cache
TILE_BYTES = 16 << 20  # memory that a tile may touch in a step, so that it stays in the cache of the processor


class Stacked:
    """Runs all nodes of a tree in this process, or its devices in several processes.

    Args:
        context: What the programs share.
        codec: How rows are encoded.
        upload: What is done to the changes of models before devices send them.
        tile: Devices to compute at once; None: as many as fit into the cache of the processor.
        inner_tile: Teams to compute at once; None: all of them.
        workers: Processes that compute devices; None: one, this process.
    """

    remote = False

    def __init__(
        self,
        context: Context,
        *,
        codec: Codec,
        upload: Transform | None = None,
        tile: int | None = None,
        inner_tile: int | None = None,
        workers: int | None = None,
    ) -> None:
        self.context, self.exchange = context, Exchange(codec, upload)
        self.tiles = {part.name: tile or default_tile(part) for part in context.parts}
        self.inner_tile = inner_tile
        self.workers = 1
        self._processes: Workers | None = None
        self._times: dict[tuple[Any, ...], Times] = {}
        self._pieces: dict[str, Pieces] = {}
        self.use_workers(workers or 1)

    def use_workers(self, workers: int) -> None:
        """Compute devices in this many processes from now on. Data and memory move into files that they share.

        Raises:
            ValueError: If the codec or the transform of uploads cannot be pickled, which other processes need.
        """
        if workers > 1 and self._processes is None:
            check_picklable(self.exchange)
            program = partial(compute_and_count, tiles=self.tiles, exchange=self.exchange)
            self._processes = Workers(self.context, workers, program)
        self.workers = workers

    def close(self) -> None:
        """End the worker processes."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def deliver(self, call: Call) -> Iterator[Folded | Rows]:
        """Run the program of a call at its receivers; see `Engine.deliver`."""
        ledger = self.context.scope(call.scope).ledger
        if not call.quiet and len(call.ids):
            rows = self.exchange.down(call.rows)
            call = call if rows is call.rows else replace(call, rows=rows)
        for start, end, first, answer, nbytes in self._runs(call):
            if start == 0 and not call.quiet:  # counted once workers are busy
                sent = self.exchange.down_bytes(call.rows, int(call.sender.numpy().max()) + 1)
                ledger.add(call.tier, "down", call.ids, sent[call.sender])
            if not call.quiet:
                ledger.add(call.tier, "up", call.ids[start:end], nbytes)
            yield replace(answer, first=first) if first and isinstance(answer, Folded) else answer

    def _runs(self, call: Call) -> Iterator[tuple[int, int, int, Folded | Rows, Tensor]]:
        """For each run of receivers: start, end, number of the first block, answers or sums, bytes of each answer."""
        n, tile = len(call.ids), self.tiles[call.scope]
        if n == 0:
            return
        if call.tier < self.context.scope(call.scope).topology.leaf:
            answer = compute(self.context, call, self.inner_tile or n, self.exchange)
            yield 0, n, 0, *answer
            return
        size = min(-(-n // self.workers), max(tile, RUN))
        if n <= size:
            yield 0, n, 0, *compute(self.context, call, tile, self.exchange)
            return
        pieces = self._cut(call, size)
        runs = pieces.runs
        # one row for each receiver and one answer from each: moving these costs more than a second process saves
        each = call.blocks is None and not call.quiet and any(len(r) == n for r in as_dict(call.rows).values())
        if self.workers == 1 or len(runs) == 1 or each:
            for start, end, first in runs:
                yield start, end, first, *compute(self.context, call.part(start, end), tile, self.exchange)
            return
        times = self._times.setdefault((call.scope, call.method, n), Times())
        started = time.perf_counter()
        if times.alone_is_faster():
            for start, end, first in cut(call, max(tile, RUN)):
                yield start, end, first, *compute(self.context, call.part(start, end), tile, self.exchange)
            times.note(times.alone, time.perf_counter() - started)
            return
        assert self._processes is not None
        # sums are added to those of the parents at once, before the next call, so they need not be copied
        answers = self._processes.run(pieces.parts(call), copied=call.blocks is None or len(runs) > self.workers)
        for (start, end, first), (answer, nbytes, steps) in zip(runs, answers, strict=True):
            self.context.scope(call.scope).device_steps += steps
            yield start, end, first, answer, nbytes
        times.note(times.shared, time.perf_counter() - started)

    def _cut(self, call: Call, size: int) -> Pieces:
        """The runs of a call. The last ones are kept: if all devices take part, they are the same in each call."""
        known = self._pieces.get(call.scope)
        if known is None or known.size != size or not known.fits(call):
            known = self._pieces[call.scope] = Pieces(replace(call, rows={}), size, cut(call, size))
        return known


@dataclass
class Pieces:
    """A call in runs of whole blocks.

    field | meaning
    call  | the call, without its rows
    size  | about how many receivers a run has
    runs  | (start, end, number of the first block) of each run
    """

    call: Call
    size: int
    runs: list[tuple[int, int, int]]

    def fits(self, call: Call) -> bool:
        """Whether another call has the same receivers: those that depend on the tree alone are the same tensors."""
        same = (getattr(call, name) is getattr(self.call, name) for name in ("ids", "sender", "blocks", "shares"))
        return all(same)

    @cached_property
    def _parts(self) -> list[tuple[Tensor | slice, Call]]:
        """For each run: which rows it needs, and its call without them."""
        runs = [slice(start, end) for start, end, _ in self.runs]
        return [(used_rows(self.call.sender[run])[0], self.call.take(run)) for run in runs]

    def parts(self, call: Call) -> Iterator[Call]:
        """The call to the receivers of each run, for a call that fits."""
        for used, part in self._parts:
            rows = map_rows(lambda r, used=used: r[used], call.rows)
            yield replace(call, ids=part.ids, rows=rows, sender=part.sender, blocks=part.blocks, shares=part.shares)


@dataclass
class Times:
    """How long the same call took the workers and this process alone. It decides who computes it, and no bit of it.

    A call that takes the workers less than `SHORT` seconds is also tried alone; the first time of each is left out,
    because graphs are traced then. Both are measured again after `AGAIN` calls: other load may have changed.
    """

    shared: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    calls: int = 0

    def note(self, times: list[float], seconds: float) -> None:
        """Add a measurement to `shared` or `alone`, unless there are enough."""
        if len(times) < TRIED:
            times.append(seconds)

    def alone_is_faster(self) -> bool:
        """Whether this process computes the next call."""
        self.calls += 1
        if self.calls % AGAIN == 0:
            self.shared.clear()
            self.alone.clear()
        if len(self.shared) < TRIED or min(self.shared[1:]) > SHORT:
            return False
        return len(self.alone) < TRIED or min(self.alone[1:]) < min(self.shared[1:])


def check_picklable(exchange: Exchange) -> None:
    """Stop with advice if a user's codec or transform cannot be sent to another process."""
    for name, value in (("codec", exchange.codec), ("upload", exchange.upload)):
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{name} cannot be sent to worker processes ({error}); define it at the top level of a module, or use "
                "workers=1"
            ) from None


def compute_and_count(
    context: Context, call: Call, tiles: dict[str, int], exchange: Exchange
) -> tuple[Folded | Rows, Tensor, int]:
    """What a process does with a call: `compute`, and the number of device steps that it took, not yet counted."""
    part = context.scope(call.scope)
    before = part.device_steps
    answer, nbytes = compute(context, call, tiles[call.scope], exchange)
    steps, part.device_steps = part.device_steps - before, before
    return answer, nbytes, steps


def cut(call: Call, size: int) -> list[tuple[int, int, int]]:
    """Cut the receivers into runs of whole blocks, of about `size` receivers each and as even as blocks allow.

    Returns:
        (start, end, number of the first block) of each run.
    """
    n = len(call.ids)
    if n <= size:
        return [(0, n, 0)]
    places = np.arange(n + 1) if call.blocks is None else np.append(starts_of(call.blocks).numpy(), n)
    wanted = np.linspace(0, n, -(-n // size) + 1)
    after = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.unique(np.where(wanted - places[before] < places[after] - wanted, before, after))
    firsts = [0] * len(nearest) if call.blocks is None else nearest.tolist()
    return list(zip(places[nearest[:-1]].tolist(), places[nearest[1:]].tolist(), firsts, strict=False))


def compute(context: Context, call: Call, tile: int, exchange: Exchange) -> tuple[Folded | Rows, Tensor]:
    """Run a call at all its receivers, tile by tile.

    Returns:
        The answers as they arrive, or the sums of their blocks; and the bytes [n] that each receiver sent.
    """
    n = len(call.ids)
    pieces, nbytes, total = [], [], None
    even = -(-n // -(-n // tile))  # tiles of about the same size, a multiple of four as graphs are traced for fours
    size = min(tile, -(-even // 4) * 4)
    for start in range(0, n, size):
        end = min(start + size, n)
        answer = execute(context, call, start, end)
        if not call.quiet:
            answer, sent = exchange.up(context, call, start, end, answer)
            nbytes.append(sent)
        if call.blocks is None:
            pieces.append(answer)
        else:
            assert call.shares is not None
            total = fold(answer, call.shares[start:end], call.blocks[start:end], int(call.blocks[-1]) + 1, total)
    sent = torch.cat(nbytes) if nbytes else torch.zeros(n, dtype=torch.int64)
    return (total if total is not None else cat_rows(pieces)), sent


def default_tile(context: Context) -> int:
    """The number of devices whose rows and batches stay in the cache of the processor together."""
    population, width = context.population, context.objective.dtype.itemsize
    samples = int(population.samples.max())
    if isinstance(context.batch_size, int):
        samples = min(context.batch_size, samples)
    inputs = prod(population.shape) * samples
    # a row in place, and frozen parameters, which some layers copy per row; a batch is written once and read twice
    touched = width * (context.objective.dimension + context.objective.frozen_size + 3 * inputs)
    return min(LARGEST_TILE, ceil(TILE_BYTES / touched / 4) * 4)
