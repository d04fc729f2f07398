"""Rows that nodes keep, in files instead of memory and checkpoints, for populations that are too large for these.

A checkpoint does not copy the rows. It starts an epoch. During an epoch the old value of a row is written to a journal
before the row is overwritten for the first time. After a crash the journals restore the rows of the last checkpoint.

FOLDER/TIER.NAME.*       | mapped tensors [nodes, ...]: the rows, which are kept, and the epoch in which each row was
                           last written to a journal ("noted")
FOLDER/epoch             | the current epoch, for all processes
FOLDER/journal-EPOCH-PID | the journal of one process: records of a length, then a pickled (tier, name, ids, rows)
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from polytier.method.memory import Memory, map_file
from polytier.tree.topology import Topology

FOLDER = "store"  # in a run folder
LENGTH = struct.Struct("<Q")


class Store(Memory):
    """Memory in files that a checkpoint does not copy. The folder belongs to the run and is used again on a resume."""

    folder: Path

    def __init__(self, topology: Topology, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(topology, folder)
        self._now = map_file(folder / "epoch", torch.int64, (1,))
        self._noted: dict[tuple[int, str], Tensor] = {}

    @property
    def epoch(self) -> int:
        return int(self._now[0])

    def write(self, tier: int, name: str, ids: Tensor, rows: Tensor) -> None:
        found = self._open(tier, name) or self._create(tier, name, rows.dtype, tuple(rows.shape[1:]))
        noted, epoch = self._noted[tier, name], self.epoch
        fresh = ids[noted[ids] != epoch]
        if len(fresh):
            kept = found[1][fresh]
            self._note(epoch, (tier, name, fresh[~kept].numpy(), None))
            self._note(epoch, (tier, name, fresh[kept].numpy(), found[0][fresh[kept]].numpy()))
            noted[fresh] = epoch
        super().write(tier, name, ids, rows)

    def advance(self) -> int:
        """Start a new epoch. Its number is stored in the checkpoint that is written next."""
        self._now += 1
        return self.epoch

    def forget(self) -> None:
        """Remove the journals of earlier epochs. Called when the last checkpoint is complete."""
        for epoch, path in self._journals():
            if epoch < self.epoch:
                path.unlink()

    def undo(self, epoch: int) -> None:
        """Restore the rows as they were at the start of an epoch."""
        for number, path in sorted(self._journals(), reverse=True):
            if number >= epoch:
                for tier, name, ids, rows in read_records(path):
                    found, where = self._open(tier, name), torch.from_numpy(ids)
                    assert found is not None
                    found[1][where] = rows is not None
                    if rows is not None:
                        found[0][where] = torch.from_numpy(rows)
            path.unlink()
        self._now[0] = max(self.epoch, epoch) + 1  # a new epoch: no row is noted in it

    def _note(self, epoch: int, record: tuple) -> None:
        """Append a record to the journal. It is complete in the file before the rows themselves change."""
        if len(record[2]):
            data = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
            with (self.folder / f"journal-{epoch}-{os.getpid()}").open("ab") as file:
                file.write(LENGTH.pack(len(data)) + data)

    def _journals(self) -> list[tuple[int, Path]]:
        return [(int(path.name.split("-")[1]), path) for path in self.folder.glob("journal-*")]

    def _create(self, tier: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        n = self.topology.size(tier)
        stem = self._stem(tier, name, dtype, shape)
        wanted = {"rows": n * dtype.itemsize * max(1, torch.Size(shape).numel()), "kept": n, "noted": 8 * n}
        for what, size in wanted.items():
            reserve(self.folder / f"{stem}.{what}", size)
        self._noted[tier, name] = map_file(self.folder / f"{stem}.noted", torch.int64, (n,))
        return super()._create(tier, name, dtype, shape)


def read_records(path: Path) -> Iterator[tuple]:
    """The complete records of a journal. The rows of an incomplete one were not overwritten yet."""
    with path.open("rb") as file:
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(head)
            if len(data := file.read(size)) < size:
                return
            yield pickle.loads(data)


def reserve(path: Path, size: int) -> None:
    """Allocate `size` bytes on disk. Without this, writing to a mapped page on a full disk would end the process.

    Raises:
        OSError: if there is not enough space.
    """
    with path.open("ab") as file:
        if file.tell() >= size:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)  # macOS: missing space is only noticed later
        except OSError as error:
            path.unlink()
            raise OSError(
                error.errno, f"{error.strerror}: {path} needs {size / 2**30:.1f} GiB; make room, or use another --out"
            ) from None
