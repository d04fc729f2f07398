"""How rows travel: the bytes of a message, and what is left of the rows after the journey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

DENSE, BITMAP, INDEX = range(3)  # forms of a sparse message
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes a value


@dataclass(frozen=True)
class Codec:
    """Floats are sent in one format; whole numbers as they are."""

    name: str
    dtype: torch.dtype

    def _wire(self, rows: Tensor) -> torch.dtype:
        return self.dtype if rows.is_floating_point() else rows.dtype

    def _cast(self, rows: Tensor) -> Tensor:
        """In the wire's format. NaN and infinity pass: a run that diverges is told so by its engine."""
        wire = self._wire(rows)
        narrow = wire != rows.dtype and torch.finfo(wire).max < torch.finfo(rows.dtype).max
        # the extremes are read ten times as fast as every value is asked
        if narrow and rows.numel() and not torch.isfinite(torch.stack(torch.aminmax(rows)).to(wire)).all():
            largest = torch.where(torch.isfinite(rows), rows, 0).abs().max()
            if torch.isinf(largest.to(wire)):
                alike = [c for c in CODECS.values() if type(c) is type(self) and torch.isfinite(largest.to(c.dtype))]
                raise ValueError(
                    f"codec {self.name} holds values up to {torch.finfo(wire).max:.5g}; got {float(largest):.5g}: "
                    f"use {min(alike, key=lambda c: c.dtype.itemsize).name}"
                )
        return rows.to(wire)

    def encode(self, row: Tensor) -> bytes:
        return self._cast(row).contiguous().cpu().numpy().tobytes()

    def decode(self, message: bytes, like: Tensor) -> Tensor:
        """The row back; `like` is a row of the same shape and dtype."""
        wire = self._wire(like)
        expected = like.numel() * wire.itemsize
        if len(message) != expected:
            raise ValueError(f"a message of {len(message)} bytes came where {expected} were expected")
        flat = torch.frombuffer(bytearray(message), dtype=wire) if message else torch.empty(0, dtype=wire)
        return flat.reshape(like.shape).to(like.dtype)

    def through(self, rows: Tensor) -> Tensor:
        """What arrives when these rows are sent: decode(encode(row)) of every row, without the bytes."""
        if self._wire(rows).itemsize > rows.dtype.itemsize:
            return rows  # the wire holds every value of a narrower format
        return self._cast(rows).to(rows.dtype)

    def nbytes(self, rows: Tensor) -> Tensor:
        """[n] the length of each row's message."""
        size = rows[0].numel() * self._wire(rows).itemsize if len(rows) else 0
        return torch.full((len(rows),), size, dtype=torch.int64)


@dataclass(frozen=True)
class Sparse(Codec):
    """Zeros are left out where that is shorter; whole numbers are sent as they are.

    A message is a first byte, form + 4 * (number of values mod 64), so that a cut list of positions is noticed; then
    DENSE  | all values
    BITMAP | a bit a position (the first one is the lowest bit of the first byte), then the values that are not zero
    INDEX  | the positions of these values, 2 bytes each (4 in rows of more than 65,536), then the values

    The shortest form is sent. Zero is a value without a bit set, so that -0.0 comes back as it was.
    `counted`: as sFedHP's authors count, a bitmap or dense and no first byte; the length tells which.
    """

    counted: bool = False

    def encode(self, row: Tensor) -> bytes:
        if not row.is_floating_point():
            return super().encode(row)
        if not torch.isfinite(row).all():
            raise ValueError(
                f"codec {self.name} was given a row with NaN or infinity: the run has diverged, lower its steps"
            )
        values = self._cast(row).cpu().reshape(-1)
        sent = (values.view(BITS[self.dtype.itemsize]) != 0).numpy()
        values = values.numpy()
        sizes = [int(size) for size in self._sizes(len(values), torch.tensor(sent.sum()))]
        form = sizes.index(min(sizes))
        where = b""
        if form == BITMAP:
            where = np.packbits(sent, bitorder="little").tobytes()
        elif form == INDEX:
            where = np.flatnonzero(sent).astype(index_type(len(values))).tobytes()
        values = values if form == DENSE else values[sent]
        first = b"" if self.counted else bytes([form + 4 * (len(values) % 64)])
        return first + where + values.tobytes()

    def decode(self, message: bytes, like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return super().decode(message, like)
        size, kind = like.numel(), torch.empty(0, dtype=self.dtype).numpy().dtype

        def refuse(why: str) -> NoReturn:
            raise ValueError(
                f"a message of {len(message)} bytes came where a row of {size} values in codec {self.name} "
                f"was expected: {why}; it was damaged, or sent with another codec or model"
            )

        if self.counted:
            if len(message) > size * kind.itemsize:
                refuse("it is too long")
            form, body = BITMAP if len(message) < size * kind.itemsize else DENSE, message
        else:
            form, body = message[0] % 4 if message else refuse("it is empty"), message[1:]
        if form == DENSE:
            split, where = 0, np.arange(size)
        elif form == BITMAP:
            split = -(-size // 8)
            bits = np.unpackbits(np.frombuffer(body[:split], np.uint8), bitorder="little")
            if bits[size:].any():
                refuse("its bitmap has bits set beyond the row")
            where = np.flatnonzero(bits)
        elif form == INDEX:
            index = index_type(size)
            split = len(body) // (index.itemsize + kind.itemsize) * index.itemsize
            where = np.frombuffer(body[:split], index).astype(np.int64)
            if (where >= size).any() or (np.diff(where) <= 0).any():
                refuse("its positions lie beyond the row or do not increase")
        else:
            refuse(f"its first byte tells form {form}, not {DENSE}, {BITMAP} or {INDEX}")
        fits = self.counted or message[0] // 4 == len(where) % 64
        if not fits or len(body) != split + len(where) * kind.itemsize:
            refuse("it has another number of values than it tells of")
        row = np.zeros(size, kind)
        row[where] = np.frombuffer(body[split:], kind)
        return torch.from_numpy(row).reshape(like.shape).to(like.dtype)

    def nbytes(self, rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            return super().nbytes(rows)
        size = rows.shape[1:].numel()
        arrived = self.through(rows)  # has its zeros where the message has
        bits = arrived.view(BITS[arrived.dtype.itemsize]).reshape(len(rows), size)
        count = (bits != 0).sum(1, dtype=torch.int32).long()  # six times as fast as a sum in int64
        return torch.stack(self._sizes(size, count)).amin(0).cpu()

    def _sizes(self, size: int, count: Tensor) -> list[Tensor]:
        """The length of a message by form; `count` values are not zero. Of equal ones the first is sent."""
        value = self.dtype.itemsize
        sizes = [torch.full_like(count, size * value), -(-size // 8) + count * value]
        return sizes if self.counted else [1 + s for s in (*sizes, count * (index_type(size).itemsize + value))]


def index_type(size: int) -> np.dtype:
    """Of positions in a row of that size."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


CODECS = {
    "float64": Codec("float64", torch.float64),
    "float32": Codec("float32", torch.float32),
    "float16": Codec("float16", torch.float16),
    "sparse": Sparse("sparse", torch.float32),
    "sparse16": Sparse("sparse16", torch.float16),
    "sparse64": Sparse("sparse64", torch.float64),
    "paper": Sparse("paper", torch.float64, counted=True),
}
