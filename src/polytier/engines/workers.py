"""Worker processes of the stacked engine. They map the data and the memory of a run from files, and receive calls.

The process of the run is one of them: it computes calls too while the others are at work. A message is a pickle sent
through a pipe; the rows in it are passed through a file that both sides map.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import traceback
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import cycle
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polytier.data.batches import Batches
from polytier.data.pack import as_file, from_file
from polytier.engines.process_settings import configure_process, release_memory
from polytier.engines.process_start import start_process
from polytier.method.call import NodesLost
from polytier.method.context import Context
from polytier.method.memory import Memory

ALIGNED = 64  # bytes at whose multiples rows start in a file that both sides map
AHEAD = 2  # calls per process that are made before the first of them has its result
QUEUED = 2  # calls that another process is asked at a time, so that it does not wait for the next one
Compute = Callable[[Context, Any], Any]  # what a worker does: the result of a call


class WorkerLost(NodesLost):
    """A worker process ended in the middle of a round."""

    def __init__(self) -> None:
        super().__init__(
            "a worker process ended in the middle of a round (killed, or out of memory); "
            "resume the run, with fewer --workers or a smaller --tile if memory was short"
        )


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, shown as the cause of the error."""


class Workers:
    """Processes that compute calls with the same data and memory: this one, and others that share those of `context`.

    The others start with the first call.

    Args:
        context: What the programs share. Its data and memory move into files.
        number: Number of processes, with this one.
        compute: What a process does with a call; picklable.
    """

    def __init__(self, context: Context, number: int, compute: Compute) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="polytier-"))
        for k, part in enumerate(context.parts):
            share(part, subfolder(self.folder, k))
        self.context, self.number, self.compute = context, number, compute
        self._channels: list[Channel] = []

    def run(self, calls: Iterable[Any], copied: bool = True) -> Iterator[Any]:
        """Yield the result of each call, in the order of the calls.

        The first one is computed here, the next ones by the other processes, and so on with all that is left.

        Args:
            calls: The calls.
            copied: Whether the tensors of the results are copied. Otherwise they are in the file through which they
                came, and the next result of the same process overwrites them: only for at most one call per process,
                and for results that are not used any more when `run` is next called.

        Raises:
            WorkerLost: If a process ended. The next call starts new ones.
            Exception: What a call raised, if in another process with the traceback of that one as its cause.
        """
        ahead, found, number = enumerate(calls), {}, 0
        channels, following = self._started(), next(ahead, None)
        try:
            while following or number in found or any(channel.asked for channel in channels):
                mine, limit = None, number + AHEAD * self.number  # what waits to be yielded is in memory
                if following and following[0] <= limit:
                    mine, following = following, next(ahead, None)
                while following and following[0] <= limit and (free := least_asked(channels)):
                    free.ask(*following)
                    following = next(ahead, None)
                if mine:
                    found[mine[0]] = self.compute(self.context, mine[1])
                if following or number not in found:
                    for channel in answering(channels, block=not mine):
                        found |= channel.answer(copied)
                while number in found:
                    yield found.pop(number)
                    number += 1
        except WorkerLost:
            self._stop(kill=True)
            raise
        finally:  # the caller may have stopped early: answers that are still to come must not be taken for later ones
            for channel in channels:
                channel.discard()

    def close(self) -> None:
        """End the processes and delete the files."""
        self._stop()
        for part in self.context.parts:
            part.memory.state()  # maps all rows, so that they can be read when their files are gone
        shutil.rmtree(self.folder, ignore_errors=True)

    def _started(self) -> list[Channel]:
        if not self._channels:
            shared_parts = [
                describe_shared(part, subfolder(self.folder, k)) for k, part in enumerate(self.context.parts)
            ]
            shared = (without_data(self.context), shared_parts, self.folder, self.compute)
            for k in range(1, self.number):
                ours, theirs = multiprocessing.Pipe()
                process = start_process(serve, theirs, k, *shared, daemon=True)
                theirs.close()
                self._channels.append(Channel(ours, self.folder / f"to-{k}", self.folder / f"from-{k}", process))
        return self._channels

    def _stop(self, kill: bool = False) -> None:
        for channel in self._channels:
            channel.pipe.close()  # the worker ends when it next tries to receive
            if kill:
                channel.process.kill()
            channel.process.join()
        self._channels = []


class Channel:
    """Messages to another process and back, at most `QUEUED` at a time.

    Args:
        pipe: The connection.
        sent: Name of the files through which rows are passed to the other process; they are used in turns.
        received: Name of the files through which rows come from it.
        process: The other process, if this one started it.

    Attributes:
        asked: The numbers of the calls that it has not answered yet.
    """

    def __init__(self, pipe: Connection, sent: Path, received: Path, process: Any = None) -> None:
        self.pipe, self.process = pipe, process
        self.asked: deque[int] = deque()
        self._sent, self._received = ([Area(Path(f"{p}-{k}")) for k in range(QUEUED)] for p in (sent, received))
        self._turns = cycle(range(QUEUED))

    def ask(self, number: int, call: Any) -> None:
        """Send a call.

        Raises:
            WorkerLost: If the other process has ended.
        """
        self.send(call)
        self.asked.append(number)

    def answer(self, copied: bool = True) -> dict[int, Any]:
        """Wait for the next result, and return it by the number of its call.

        Raises:
            WorkerLost: If the other process has ended.
            Exception: What the call raised.
        """
        found, error, where = self.receive(copied)
        number = self.asked.popleft()
        if error is not None:
            raise error from WorkerTraceback("\n" + where)
        return {number: found}

    def discard(self) -> None:
        """Wait for all results that are still to come."""
        with suppress(WorkerLost):
            while self.asked:
                self.receive()
                self.asked.popleft()

    def send(self, message: Any) -> None:
        """Send any picklable object; tensors in it are copied into the file.

        Raises:
            WorkerLost: If the other process has ended.
        """
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(message)
        turn = next(self._turns)
        sizes = self._sent[turn].write([b.raw() for b in buffers])
        with self._connection():
            self.pipe.send_bytes(pickle.dumps((turn, sizes, stream.getvalue())))

    def receive(self, copied: bool = True) -> Any:
        """Wait for the next object.

        Args:
            copied: Whether its tensors are copied; otherwise objects to come overwrite them.

        Raises:
            WorkerLost: If the other process has ended.
        """
        with self._connection():
            head = self.pipe.recv_bytes()
        turn, sizes, message = pickle.loads(head)
        return pickle.loads(message, buffers=self._received[turn].read(sizes, copied))

    @contextmanager
    def _connection(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            raise WorkerLost from None


class Area:
    """A file that two processes map. It is as long as the longest message so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.map = path, None

    def write(self, buffers: list[memoryview]) -> list[int]:
        """Copy buffers into the file, one after another, and return their sizes."""
        sizes = [len(b) for b in buffers]
        place, area = 0, self._mapped(sum(sizes), len(sizes), grow=True)
        for buffer, size in zip(buffers, sizes, strict=True) if any(sizes) else ():
            area[place : place + size] = buffer
            place += -(-size // ALIGNED) * ALIGNED
        return sizes

    def read(self, sizes: list[int], copied: bool) -> Iterator[bytearray | memoryview]:
        """Yield the buffers that the other process wrote, or copies of them."""
        place, area = 0, self._mapped(sum(sizes), len(sizes))
        for size in sizes:
            buffer = area[place : place + size]
            yield bytearray(buffer) if copied else buffer
            place += -(-size // ALIGNED) * ALIGNED

    def _mapped(self, size: int, count: int, grow: bool = False) -> memoryview:
        size += ALIGNED * count if size else 0  # each buffer starts at a multiple of `ALIGNED`
        if size and (self.map is None or len(self.map) < size):
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                if grow and hasattr(
                    os, "posix_fallocate"
                ):  # a mapped page for which the disk has no room would end the process
                    os.posix_fallocate(file.fileno(), 0, size)
                elif grow:
                    file.truncate(max(size, os.fstat(file.fileno()).st_size))
                self.map = memoryview(mmap.mmap(file.fileno(), 0))
        return self.map if self.map is not None else memoryview(b"")


def rows_of(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor whose numbers are in a buffer."""
    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def as_buffer(rows: Tensor) -> Any:
    """How a tensor is pickled: torch would pass each one as a shared file, which takes milliseconds."""
    array = rows.contiguous().numpy()
    return rows_of, (pickle.PickleBuffer(array), array.dtype.str, array.shape)  # type: ignore[arg-type]


class Pickler(pickle.Pickler):
    """Pickles tensors as buffers."""

    dispatch_table: ClassVar[Any] = ChainMap({Tensor: as_buffer}, copyreg.dispatch_table)  # type: ignore[arg-type]


def least_asked(channels: list[Channel]) -> Channel | None:
    """The channel with the fewest calls, if it can take another one."""
    found = min(channels, key=lambda channel: len(channel.asked))
    return found if len(found.asked) < QUEUED else None


def answering(channels: list[Channel], block: bool) -> list[Channel]:
    """The channels whose next answer is there; with `block`, wait for one."""
    asked: dict[Any, Channel] = {channel.pipe: channel for channel in channels if channel.asked}
    if block and len(asked) == 1:  # reading waits as well, in a fraction of the time that asking takes
        return list(asked.values())
    return [asked[pipe] for pipe in wait(list(asked), None if block else 0)]


# -- in a worker --------------------------------------------------------------------------------------


def serve(
    pipe: Connection, number: int, context: Context, shared: list[dict[str, Any]], folder: Path, compute: Compute
) -> None:
    """The program of a worker: receive a call, compute it, answer; until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows workers receive Ctrl-C; the parent decides when to stop
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    configure_process()
    for part, its in zip(context.parts, shared, strict=True):
        x, y = (from_file(*its[name]) for name in ("x", "y"))
        part.batches = Batches(replace(its["federation"], x=x, y=y), **its["batches"])
        kind, rows = its["memory"]
        part.memory = kind(part.topology, rows)
    channel = Channel(pipe, folder / f"from-{number}", folder / f"to-{number}")
    while True:
        try:
            call = channel.receive()
        except WorkerLost:
            return  # the parent has closed its end
        try:
            answer = compute(context, call), None, ""
        except Exception as error:
            answer = None, as_message(error), traceback.format_exc()
        channel.send(answer)
        release_memory()


def as_message(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def end_with_parent(folder: Path) -> None:
    """Delete the files and end this process when its parent ends: a parent that was killed can do neither."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# -- what a worker is given ---------------------------------------------------------------------------


def without_data(context: Context) -> Context:
    """A copy of a context without data and memory, which a worker opens itself, and without what it does not need."""
    scopes = {name: without_data(part) for name, part in context.scopes.items()}
    return replace(context, engine=None, batches=None, memory=None, ledger=None, module=None, scopes=scopes)  # type: ignore[arg-type]


def subfolder(folder: Path, number: int) -> Path:
    """The folder of the data and memory of one of several models."""
    path = folder / str(number)
    path.mkdir(exist_ok=True)
    return path


def share(context: Context, folder: Path) -> None:
    """Move data, frozen parameters and memory of a context into files that worker processes map."""
    places = {p.data_ptr(): name for name, p in context.objective.frozen.items() if p.numel()}
    context.objective.share_frozen(folder)
    frozen = context.objective.frozen
    for parameter in () if context.module is None else context.module.parameters():
        if parameter.data_ptr() in places:  # it shared the memory of a frozen one, of which there is a single copy
            parameter.data = frozen[places[parameter.data_ptr()]].data
    federation = context.batches.federation
    x, y = (from_file(*as_file(getattr(federation, name), folder / name)) for name in ("x", "y"))
    context.batches.federation = replace(federation, x=x, y=y)
    if context.memory.folder is None:
        memory = Memory(context.topology, folder)
        memory.load(context.memory.state())
        context.memory = memory


def describe_shared(context: Context, folder: Path) -> dict[str, Any]:
    """What a worker needs to open the data and memory that `share` has moved."""
    federation = context.batches.federation
    return {
        "federation": replace(federation, x=torch.zeros(0), y=torch.zeros(0)),
        **{name: as_file(getattr(federation, name), folder / name) for name in ("x", "y")},
        "memory": (type(context.memory), context.memory.folder),
        "batches": batch_settings(context),
    }


def batch_settings(context: Context) -> dict[str, Any]:
    """The arguments of `Batches` other than the data."""
    return {name: getattr(context.batches, name) for name in ("seed", "dtype", "device", "keyed")}
