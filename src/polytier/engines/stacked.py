"""The embedded engine: nodes of a tier are computed in tiles of rows, on one machine.

Devices are grouped in runs of whole blocks; a run is computed tile by tile, each tile doing all its
local steps before the next one starts, and its answers are summed into the run's blocks. With
workers, runs go to processes that map the same data and the same memory. Neither the tile nor the
number of workers changes a bit, because blocks are fixed by the topology and folded in order.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polytier.algorithm import execute
from polytier.codec import Codec
from polytier.data.batches import Batches
from polytier.memory import Memory, map_file, map_tensor
from polytier.rows import Folded, Rows, as_dict, cat_rows, fold, map_rows, starts_of
from polytier.world import Call, NodesLost, World

RUN = 64  # devices that are summed before their blocks are handed on
TILE_BYTES = 16 << 20  # what a tile may touch in a step, so that it stays in cache


class WorkerLost(NodesLost):
    """A worker process ended in the middle of a round."""


class Stacked:
    """Runs every node of a tree in this process, or its devices in `workers` processes."""

    def __init__(
        self, world: World, codec: Codec, *, tile: int | None = None, inner_tile: int | None = None, workers: int = 1
    ) -> None:
        self.world, self.codec = world, codec
        self.tiles = {part.name: tile or default_tile(part) for part in world.parts}
        self.inner_tile = inner_tile
        self.workers = 1
        self._pool: ProcessPoolExecutor | None = None
        self._folder: Path | None = None
        self.use_workers(workers)

    def use_workers(self, workers: int) -> None:
        """From now on compute devices in this many processes; data and memory move into files they share."""
        if workers > 1 and self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="polytier-"))
            for k, part in enumerate(self.world.parts):
                share(part, subfolder(self._folder, k))
        self.workers = workers

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def deliver(self, call: Call) -> Iterator[Any]:
        ledger = self.world.scope(call.scope).ledger
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
        if call.tier < self.world.scope(call.scope).topology.leaf:
            answer = compute(self.world, call, self.inner_tile or n, self.codec)
            yield 0, n, 0, *answer
            return
        runs = cut(call, min(-(-n // self.workers), max(tile, RUN)))
        # a row for each receiver and an answer from each: moving them costs more than a second core gains
        each = call.blocks is None and not call.quiet and any(len(r) == n for r in as_dict(call.rows).values())
        if self.workers == 1 or len(runs) == 1 or each:
            for start, end, first in runs:
                yield start, end, first, *compute(self.world, call.part(start, end), tile, self.codec)
            return
        pending: deque = deque()
        try:
            for start, end, first in runs:
                future = self._workers().submit(work, dumps(call.part(start, end)))
                pending.append((call.scope, start, end, first, future))
                if len(pending) > 2 * self.workers:
                    yield self._result(*pending.popleft())
            while pending:
                yield self._result(*pending.popleft())
        except BrokenProcessPool:
            self._pool = None
            raise WorkerLost(
                "a worker process ended in the middle of a round (killed, or out of memory); "
                "resume the run, with fewer --workers or a smaller --tile if memory was short"
            ) from None

    def _result(self, scope: str, start: int, end: int, first: int, future: Any):
        answer, nbytes, steps = pickle.loads(future.result())
        self.world.scope(scope).device_steps += steps
        return start, end, first, answer, nbytes

    def _workers(self) -> ProcessPoolExecutor:
        if self._pool is None:
            assert self._folder is not None
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=multiprocessing.get_context("spawn"),  # fork is not to be had everywhere
                initializer=start_worker,
                initargs=(
                    bare(self.world),
                    [spec(part) for part in self.world.parts],
                    self._folder,
                    self.tiles,
                    self.codec,
                ),
            )
        return self._pool


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


def compute(world: World, call: Call, tile: int, codec: Codec) -> tuple[Folded | Rows, Tensor]:
    """The answers (or the sums of their blocks) of all receivers, and the bytes each one sent."""
    n = len(call.ids)
    pieces, nbytes, total = [], [], None
    even = -(-n // -(-n // tile))  # tiles of about the same size, in fours as graphs are traced
    size = min(tile, -(-even // 4) * 4)
    for start in range(0, n, size):
        end = min(start + size, n)
        answer = execute(world, call, start, end)
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


def default_tile(world: World) -> int:
    """Devices a tile: as many as keep their rows and batches in cache."""
    federation, width = world.batches.federation, world.objective.dtype.itemsize
    samples = int(federation.samples.max())
    if isinstance(world.batch_size, int):
        samples = min(world.batch_size, samples)
    inputs = federation.x[0].numel() * samples
    touched = width * (4 * world.objective.dimension + 2 * inputs)
    return max(4, min(64, TILE_BYTES // max(touched, 1)) // 4 * 4)


# -- worker processes ---------------------------------------------------------------------------------

_worker: tuple[World, dict[str, int], Codec] | None = None


def bare(world: World) -> World:
    """Without what a worker opens anew or has no need of."""
    scopes = {name: bare(part) for name, part in world.scopes.items()}
    return replace(world, engine=None, batches=None, memory=None, ledger=None, module=None, scopes=scopes)  # type: ignore[arg-type]


def subfolder(folder: Path, number: int) -> Path:
    """Where the data and memory of one of several models are."""
    path = folder / str(number)
    path.mkdir(exist_ok=True)
    return path


def share(world: World, folder: Path) -> None:
    """Move data and memory into files that worker processes map."""
    federation = world.batches.federation
    federation = replace(federation, x=map_tensor(folder / "x", federation.x), y=map_tensor(folder / "y", federation.y))
    world.batches.federation = federation
    if world.memory.folder is None:
        memory = Memory(world.topology, folder)
        memory.load(world.memory.state())
        world.memory = memory


def spec(world: World) -> dict[str, Any]:
    """What a worker needs to open the shared data."""
    federation = world.batches.federation
    return {
        "federation": replace(federation, x=torch.zeros(0), y=torch.zeros(0)),
        "x": (federation.x.dtype, tuple(federation.x.shape)),
        "y": (federation.y.dtype, tuple(federation.y.shape)),
        "memory": (type(world.memory), world.memory.folder),
        "batches": {name: getattr(world.batches, name) for name in ("seed", "dtype", "device", "keyed")},
    }


def start_worker(world: World, shared: list[dict[str, Any]], folder: Path, tiles: dict[str, int], codec: Codec) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent lets the round end
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    torch.set_num_threads(1)  # more threads would change the order of sums inside a product
    for k, (part, its) in enumerate(zip(world.parts, shared, strict=True)):
        place = subfolder(folder, k)
        x, y = (map_file(place / name, *its[name]) for name in ("x", "y"))
        part.batches = Batches(replace(its["federation"], x=x, y=y), **its["batches"])
        kind, rows = its["memory"]
        part.memory = kind(part.topology, rows)
    _worker = world, tiles, codec


def end_with_parent(folder: Path) -> None:
    """A parent that was killed can neither stop its workers, which would wait for ever, nor tidy up."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def work(message: bytes) -> bytes:
    assert _worker is not None
    world, tiles, codec = _worker
    call, before = pickle.loads(message), world.all_steps
    answer, nbytes = compute(world, call, tiles[call.scope], codec)
    return dumps((answer, nbytes, world.all_steps - before))


class Pickler(pickle.Pickler):
    """Tensors as plain arrays: torch would pass each one as a shared file, which costs milliseconds."""

    def reducer_override(self, obj: Any) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, Tensor) else NotImplemented


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
