"""Worker processes of the embedded engine. They map the data and the memory of a run, and are sent calls.

A message is a pickle that goes through a pipe; the rows in it go through a file that both sides map.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polytier.data.batches import Batches
from polytier.data.pack import as_file, from_file
from polytier.engines.machine import settle, tidy
from polytier.engines.processes import start
from polytier.method.call import NodesLost
from polytier.method.context import Context
from polytier.method.memory import Memory

Compute = Callable[[Context, Any], Any]  # of a worker: what a call gives


class WorkerLost(NodesLost):
    """A worker process ended in the middle of a round."""

    def __init__(self) -> None:
        super().__init__(
            "a worker process ended in the middle of a round (killed, or out of memory); "
            "resume the run, with fewer --workers or a smaller --tile if memory was short"
        )


class WorkerTraceback(Exception):
    """Where in a worker an error was raised."""


class Workers:
    """Processes that compute calls in a copy of `context`, whose data and memory they share."""

    def __init__(self, context: Context, number: int, compute: Compute) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="polytier-"))
        for k, part in enumerate(context.parts):
            share(part, subfolder(self.folder, k))
        self.context, self.number, self.compute = context, number, compute
        self._channels: list[Channel] = []

    def run(self, calls: Iterable[Any]) -> Iterator[Any]:
        """What each call gives, in their order."""
        ahead, found = enumerate(calls), {}
        idle, busy = list(self._started()), {}
        number, following = 0, next(ahead, None)
        try:
            while following or busy or number in found:
                while following and idle and following[0] <= number + 2 * self.number:
                    channel = idle.pop()
                    channel.send(following[1])
                    busy[channel.pipe] = following[0], channel
                    following = next(ahead, None)
                if number in found:
                    yield found.pop(number)
                    number += 1
                    continue
                for pipe in wait(list(busy)):
                    place, channel = busy.pop(pipe)
                    found[place] = received(channel)
                    idle.append(channel)
        except WorkerLost:
            self._stop(kill=True)
            raise
        finally:  # whoever asked may have given up: what is under way belongs to nobody
            for _, channel in busy.values():
                with suppress(WorkerLost):
                    channel.receive()

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _started(self) -> list[Channel]:
        if not self._channels:
            specs = [spec(part, subfolder(self.folder, k)) for k, part in enumerate(self.context.parts)]
            shared = (bare(self.context), specs, self.folder, self.compute)
            for k in range(self.number):
                ours, theirs = multiprocessing.Pipe()
                process = start(serve, theirs, k, *shared, daemon=True)
                theirs.close()
                self._channels.append(Channel(ours, self.folder / f"to-{k}", self.folder / f"from-{k}", process))
        return self._channels

    def _stop(self, kill: bool = False) -> None:
        for channel in self._channels:
            channel.pipe.close()  # the worker's next receive ends it
            if kill:
                channel.process.kill()
            channel.process.join()
        self._channels = []


class Channel:
    """Messages to a process and back, one at a time."""

    def __init__(self, pipe: Connection, sent: Path, received: Path, process: Any = None) -> None:
        self.pipe, self.process = pipe, process
        self._sent, self._received = Area(sent), Area(received)

    def send(self, message: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(message)
        sizes = self._sent.write([b.raw() for b in buffers])
        with self._other_side():
            self.pipe.send_bytes(pickle.dumps((sizes, stream.getvalue())))

    def receive(self) -> Any:
        with self._other_side():
            head = self.pipe.recv_bytes()
        sizes, message = pickle.loads(head)
        return pickle.loads(message, buffers=self._received.read(sizes))

    @contextmanager
    def _other_side(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            raise WorkerLost from None


class Area:
    """A file that two processes map; it grows with the largest message."""

    def __init__(self, path: Path) -> None:
        self.path, self.map = path, None

    def write(self, buffers: list[memoryview]) -> list[int]:
        sizes = [len(b) for b in buffers]
        place, area = 0, self._mapped(sum(sizes), grow=True)
        for buffer, size in zip(buffers, sizes, strict=True) if any(sizes) else ():
            area[place : place + size] = buffer
            place += size
        return sizes

    def read(self, sizes: list[int]) -> Iterator[bytearray]:
        place, area = 0, self._mapped(sum(sizes))
        for size in sizes:
            yield bytearray(area[place : place + size])
            place += size

    def _mapped(self, size: int, grow: bool = False) -> memoryview:
        if size and (self.map is None or len(self.map) < size):
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                if grow and hasattr(os, "posix_fallocate"):  # a mapped page without room on the disk would end us
                    os.posix_fallocate(file.fileno(), 0, size)
                elif grow:
                    file.truncate(max(size, os.fstat(file.fileno()).st_size))
                self.map = memoryview(mmap.mmap(file.fileno(), 0))
        return self.map if self.map is not None else memoryview(b"")


class Pickler(pickle.Pickler):
    """Tensors as plain arrays: torch would pass each one as a shared file, which costs milliseconds."""

    def reducer_override(self, obj: Any) -> Any:
        return (torch.from_numpy, (obj.contiguous().numpy(),)) if isinstance(obj, Tensor) else NotImplemented


def received(channel: Channel) -> Any:
    answer, error, where = channel.receive()
    if error is not None:
        raise error from WorkerTraceback("\n" + where)
    return answer


# -- in a worker --------------------------------------------------------------------------------------


def serve(
    pipe: Connection, number: int, context: Context, shared: list[dict[str, Any]], folder: Path, compute: Compute
):
    """Until the pipe ends: receive a call, compute it, answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Windows' processes hear Ctrl-C; the parent lets the round end
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    settle()
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
        tidy()


def as_message(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def end_with_parent(folder: Path) -> None:
    """A parent that was killed can neither stop its workers, which would wait for ever, nor tidy up."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# -- what a worker is given ---------------------------------------------------------------------------


def bare(context: Context) -> Context:
    """Without what a worker opens anew or has no need of."""
    scopes = {name: bare(part) for name, part in context.scopes.items()}
    return replace(context, engine=None, batches=None, memory=None, ledger=None, module=None, scopes=scopes)  # type: ignore[arg-type]


def subfolder(folder: Path, number: int) -> Path:
    """Where the data and memory of one of several models are."""
    path = folder / str(number)
    path.mkdir(exist_ok=True)
    return path


def share(context: Context, folder: Path) -> None:
    """Move data, frozen parameters and memory into files that worker processes map."""
    context.objective.share_frozen(folder)
    federation = context.batches.federation
    x, y = (from_file(*as_file(getattr(federation, name), folder / name)) for name in ("x", "y"))
    context.batches.federation = replace(federation, x=x, y=y)
    if context.memory.folder is None:
        memory = Memory(context.topology, folder)
        memory.load(context.memory.state())
        context.memory = memory


def spec(context: Context, folder: Path) -> dict[str, Any]:
    """What a worker needs to open the shared data."""
    federation = context.batches.federation
    return {
        "federation": replace(federation, x=torch.zeros(0), y=torch.zeros(0)),
        **{name: as_file(getattr(federation, name), folder / name) for name in ("x", "y")},
        "memory": (type(context.memory), context.memory.folder),
        "batches": drawing(context),
    }


def drawing(context: Context) -> dict[str, Any]:
    """How its batches are drawn, whatever the data."""
    return {name: getattr(context.batches, name) for name in ("seed", "dtype", "device", "keyed")}
