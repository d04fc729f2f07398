"""Rows that nodes keep, in files instead of memory and checkpoints, for populations that are too large for these.

A checkpoint does not copy the rows. It starts an epoch. During an epoch the old value of a row is written to a journal
before the row is overwritten for the first time. After a crash the journals restore the rows of the last checkpoint.

FOLDER/TIER/.../*.rows .kept .noted | mapped tensors [nodes, ...]: the rows, which are kept, and the epoch in which each
                                      row was last written to a journal ("noted")
FOLDER/epoch                        | the current epoch, for all processes
FOLDER/journal-EPOCH-PID            | the journal of one process: records of a length, then a pickled
                                      (name, ids, rows or None)
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polytier.method.memory import Memory, RowName, map_file, name_of_0_1
from polytier.tree.topology import Topology

FOLDER = "store"  # in a run folder
LENGTH = struct.Struct("<Q")


class MappedMemory(Memory):
    """Memory in files that a checkpoint does not copy. The folder belongs to the run and is used again on a resume."""

    folder: Path

    def __init__(self, topology: Topology, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(topology, folder)
        self._take_over_0_1()
        self._now = map_file(folder / "epoch", torch.int64, (1,))
        self._noted: dict[RowName, Tensor] = {}

    @property
    def epoch(self) -> int:
        return int(self._now[0])

    def _before_write(self, row: RowName, found: tuple[Tensor, Tensor], ids: Tensor) -> None:
        noted, epoch = self._noted[row], self.epoch
        fresh = ids[noted[ids] != epoch]
        if len(fresh):
            kept = found[1][fresh]
            self._note(epoch, str(row), fresh[~kept], None)
            self._note(epoch, str(row), fresh[kept], found[0][fresh[kept]])
            noted[fresh] = epoch

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
                for row, ids, rows in read_records(path):
                    found, where = self._open(row), torch.from_numpy(ids)
                    assert found is not None
                    found[1][where] = rows is not None
                    if rows is not None:
                        found[0][where] = torch.from_numpy(rows)
            path.unlink()
        self._now[0] = max(self.epoch, epoch) + 1  # a new epoch: no row is noted in it

    def _note(self, epoch: int, row: str, ids: Tensor, rows: Tensor | None) -> None:
        """Append a record to the journal. It is complete in the file before the rows themselves change."""
        if len(ids):
            record = row, ids.numpy(), None if rows is None else rows.numpy()
            data = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
            with (self.folder / f"journal-{epoch}-{os.getpid()}").open("ab") as file:
                file.write(LENGTH.pack(len(data)) + data)

    def _journals(self) -> list[tuple[int, Path]]:
        return [(int(path.name.split("-")[1]), path) for path in self.folder.glob("journal-*")]

    def _create(self, row: RowName, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        n = self.topology.size(row.tier)
        stem = self._stem(row, dtype, shape)
        wanted = {"rows": n * dtype.itemsize * max(1, torch.Size(shape).numel()), "kept": n, "noted": 8 * n}
        for what, size in wanted.items():
            reserve(Path(f"{stem}.{what}"), size)
        self._noted[row] = map_file(Path(f"{stem}.noted"), torch.int64, (n,))
        return super()._create(row, dtype, shape)

    def _take_over_0_1(self) -> None:
        """Files of version 0.1, FOLDER/TIER.NAME.DTYPE.SHAPE.*, are moved to where they are now."""
        for path in self.folder.glob("*.*.*.*.*"):
            tier, name, *rest = path.name.split(".")
            place = self.folder / name_of_0_1(int(tier), name).folder()
            place.mkdir(parents=True, exist_ok=True)
            path.rename(place / ".".join(rest))


def read_records(path: Path) -> Iterator[tuple[RowName, np.ndarray, np.ndarray | None]]:
    """The complete records of a journal. The rows of an incomplete one were not overwritten yet."""
    with path.open("rb") as file:
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(head)
            if len(data := file.read(size)) < size:
                return
            *name, ids, rows = pickle.loads(data)  # version 0.1 has the tier and the name in two
            yield RowName.parse(*name) if len(name) == 1 else name_of_0_1(*name), ids, rows


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
