"""Rows that nodes keep, in files instead of memory and checkpoints, for populations that are too large for these.

A checkpoint does not copy the rows. It starts an epoch. During an epoch the old value of a row is written to a journal
and synced to the disk before the row is overwritten for the first time. After a crash the journals restore the rows of
a checkpoint; its digests, one per block of rows, prove it.

FOLDER/TIER/.../*.rows .kept .noted | mapped tensors [nodes, ...]: the rows, which are kept, and the epoch in which each
                                      row was last written to a journal ("noted")
FOLDER/epoch                        | the current epoch, for all processes
FOLDER/log-EPOCH-PID                | the journal of one process: records of a length, a checksum and a safetensors file
                                      with `ids:NAME` and, if the rows were kept before, `rows:NAME`
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from polytier.files.read import Damaged, read_bytes
from polytier.files.write import make_folder, sync_file, sync_folder, write_all
from polytier.method.memory import Memory, RowName, map_file, name_of_0_1
from polytier.tree.topology import Topology

HEAD = struct.Struct("<QI")  # of a record: length and CRC-32 of what follows
JOURNAL, JOURNAL_0_1 = "log", "journal"
BLOCK = 1 << 20  # bytes of rows that share a digest


class MappedMemory(Memory):
    """Memory in files that a checkpoint does not copy. The folder belongs to the run and is used again on a resume.

    Raises:
        ValueError: The folder has a journal of version 0.1, which cannot be read safely.
    """

    folder: Path

    def __init__(self, topology: Topology, folder: Path) -> None:
        make_folder(folder)
        super().__init__(topology, folder)
        if any(path.stat().st_size for path in folder.glob(f"{JOURNAL_0_1}-*")):
            raise ValueError(
                f"{folder} has a journal of version 0.1; reading it could run code from that file, so this version "
                "does not: continue the run with version 0.1, or repeat it"
            )
        self._take_over_0_1()
        self._now = map_file(folder / "epoch", torch.int64, (1,))
        self._journals_read = ""  # for errors
        self._noted: dict[RowName, Tensor] = {}
        self._digests: dict[RowName, Tensor] = {}  # [blocks, 32] uint8, as of the last checkpoint

    @property
    def epoch(self) -> int:
        return int(self._now[0])

    # -- journals ------------------------------------------------------------------------------------

    def _before_write(self, row: RowName, found: tuple[Tensor, Tensor], ids: Tensor) -> None:
        noted, epoch = self._noted[row], self.epoch
        fresh = ids[noted[ids] != epoch]
        if len(fresh):
            kept = found[1][fresh]
            self._note(epoch, {f"ids:{row}": fresh[~kept]})
            self._note(epoch, {f"ids:{row}": fresh[kept], f"rows:{row}": found[0][fresh[kept]]})
            noted[fresh] = epoch

    def _note(self, epoch: int, record: dict[str, Tensor]) -> None:
        """Append a record to the journal. It is on the disk before the rows themselves change."""
        if not len(next(iter(record.values()))):
            return
        path, data = self.folder / f"{JOURNAL}-{epoch}-{os.getpid()}", save(record)
        new = not path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(path, flags, 0o666)
        try:
            write_all(file, HEAD.pack(len(data), zlib.crc32(data)) + data)
            os.fsync(file)
        finally:
            os.close(file)
        if new:
            sync_folder(self.folder)

    def advance(self) -> int:
        """Write all rows to the disk and start a new epoch. The checkpoint that is written next stores its number."""
        for row in self._known():
            self._update_digests(row)
        self._now += 1
        self._sync()
        return self.epoch

    def forget(self, epoch: int) -> None:
        """Remove the journals of epochs before this one, which no checkpoint needs any more."""
        for number, path in self._journals():
            if number < epoch:
                path.unlink()

    def undo(self, epoch: int) -> None:
        """Restore the rows as they were at the start of an epoch."""
        latest = max([self.epoch, epoch, *(number for number, _ in self._journals())])
        for path in self.folder.glob("*/*/**/*.kept"):  # a loss of power may have removed one file of several
            if not path.with_suffix(".rows").exists():
                path.unlink()
        names = [path.name for number, path in self._journals() if number >= epoch]
        self._journals_read = f", or a journal: {', '.join(names) or f'{JOURNAL}-{epoch}-* is missing'}"
        for number, path in sorted(self._journals(), reverse=True):
            if number >= epoch:
                for row, ids, rows in read_records(path):
                    found = self._open(row)
                    if found is not None:
                        found[1][ids] = rows is not None
                        found[0][ids] = 0 if rows is None else rows
                    elif rows is not None:  # without rows before, a loss of power may have removed the files
                        raise self._missing(row)
        self._now[0] = latest + 1  # a new epoch: no row is noted in it
        for row in self._known():
            self._open(row)
            self._noted[row].zero_()  # whatever a damaged file says
        self._digests.clear()
        self._sync()
        for number, path in self._journals():
            if number >= epoch:
                path.unlink()

    def _journals(self) -> list[tuple[int, Path]]:
        return [(int(path.name.split("-")[1]), path) for path in self.folder.glob(f"{JOURNAL}-*-*")]

    # -- digests -------------------------------------------------------------------------------------

    def digests(self) -> dict[str, Tensor]:
        """[blocks, 32] for each name of rows: the digests of its blocks when the current epoch started."""
        return {str(row): digests.clone() for row, digests in self._digests.items()}

    def check(self, digests: dict[str, Tensor]) -> None:
        """Compare all rows with the digests of a checkpoint.

        Raises:
            Damaged: Rows are missing or differ from those that the checkpoint was written with.
        """
        for name, wanted in digests.items():
            row = RowName.parse(name)
            if self._open(row) is None:
                raise self._missing(row)
            self._update_digests(row)
            seen = self._digests[row]
            if seen.shape != wanted.shape or not torch.equal(seen, wanted):
                bad = int((seen != wanted).any(1).nonzero()[0]) if seen.shape == wanted.shape else 0
                stem = self._stem_of(row)
                raise Damaged(
                    f"{stem}.rows or {stem.name}.kept is damaged (block {bad} of {len(wanted)}){self._journals_read}"
                )
        for row in self._known():
            found = self._open(row)
            if str(row) not in digests and found is not None and bool(found[1].any()):
                text = f"{self._stem_of(row)}.kept is damaged: there were no such rows at this checkpoint"
                raise Damaged(f"{text}{self._journals_read}")

    def _update_digests(self, row: RowName) -> None:
        """Compute the digests of the blocks in which a row was written since they were last computed."""
        found = self._open(row)
        assert found is not None
        rows, kept = found
        size = max(1, BLOCK // max(1, rows[:1].nbytes))  # rows per block
        count = -(-len(rows) // size)
        if row in self._digests:
            changed = ((self._noted[row] == self.epoch).nonzero().squeeze(1) // size).unique().tolist()
        else:
            self._digests[row] = torch.zeros(count, 32, dtype=torch.uint8)
            changed = range(count)
        for k in changed:
            part = slice(k * size, (k + 1) * size)
            digest = sha256(memoryview(rows[part].reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
            digest.update(memoryview(kept[part].numpy()))  # type: ignore[arg-type]
            self._digests[row][k] = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    # -- files ---------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Wait until all rows are on the disk, and the epoch: `noted` must never have a later one."""
        sync_file(self.folder / "epoch")
        for row in self._known():
            stem = self._stem_of(row)
            for what in ("rows", "kept"):
                sync_file(Path(f"{stem}.{what}"))
            for folder in (stem.parent, *stem.parent.parents):
                sync_folder(folder)
                if folder == self.folder:
                    break

    def _missing(self, row: RowName) -> Damaged:
        """The error for rows that are not there; the name of their file is known from the files beside it."""
        folder = self.folder / row.folder()
        names = [path.with_suffix(".rows") for path in folder.glob("*.noted")]
        return Damaged(f"{(names or [folder])[0]} is missing")

    def _stem_of(self, row: RowName) -> Path:
        """The path of the files of rows that exist, without its ending."""
        found = self._open(row)
        assert found is not None
        return self._stem(row, found[0].dtype, tuple(found[0].shape[1:]))

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


def read_records(path: Path) -> Iterator[tuple[RowName, Tensor, Tensor | None]]:
    """The records of a journal: the name, the ids and the rows, or None for rows that were not kept.

    A record that is not whole, and what follows it, is left out. After a crash or a loss of power it is the last one,
    and its rows were not overwritten yet; if it was damaged later, the digests of the rows tell.

    Raises:
        Damaged: The file cannot be read, or a whole record has another content than records have.
    """
    try:
        data, start = memoryview(read_bytes(path)), 0
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    while start + HEAD.size <= len(data):
        size, checksum = HEAD.unpack(data[start : start + HEAD.size])
        record = data[start + HEAD.size : start + HEAD.size + size]
        if not size or len(record) < size or zlib.crc32(record) != checksum:
            return
        try:
            tensors = {name.partition(":")[0]: (name.partition(":")[2], v) for name, v in load(bytes(record)).items()}
            (name, ids), (_, rows) = tensors["ids"], tensors.get("rows", ("", None))
            yield RowName.parse(name), ids, rows
        except (SafetensorError, KeyError, ValueError) as error:
            raise Damaged(f"{path} is damaged: {error}") from None
        start += HEAD.size + size


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
