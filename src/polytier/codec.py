"""How rows travel: the bytes of a message, and what is left of the rows after the journey."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codec:
    """Floats are sent in one format; whole numbers as they are."""

    name: str
    dtype: torch.dtype

    def _wire(self, rows: Tensor) -> torch.dtype:
        return self.dtype if rows.is_floating_point() else rows.dtype

    def encode(self, row: Tensor) -> bytes:
        return row.to(self._wire(row)).contiguous().cpu().numpy().tobytes()

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
        return rows.to(self._wire(rows)).to(rows.dtype)

    def nbytes(self, rows: Tensor) -> Tensor:
        """[n] the length of each row's message."""
        size = rows[0].numel() * self._wire(rows).itemsize if len(rows) else 0
        return torch.full((len(rows),), size, dtype=torch.int64)


CODECS = {
    "float64": Codec("float64", torch.float64),
    "float32": Codec("float32", torch.float32),
    "float16": Codec("float16", torch.float16),
}
