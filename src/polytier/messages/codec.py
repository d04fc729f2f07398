"""Codecs: how rows are written as bytes, and which values the receiver reads from them.

`CODECS` lists the codecs by name; `make_codec` also accepts names with a parameter, such as `top:0.1`.

float64, float32, float16 | every value in that format
sparse, sparse16, sparse64 | the values that are not zero, in float32, float16 or float64, and their positions
paper                      | the same in float64, counted as the authors of sFedHP count
int8                       | uploads of models: the change of the model, one byte per value and one scale per row
top:FRACTION               | uploads of models: the values of the change that are largest in magnitude
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from polytier._errors import unknown
from polytier._text import finite

DENSE, BITMAP, INDEX = range(3)  # layouts of a sparse message
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by bytes per value
LEVELS = 127  # int8: values are whole numbers from -127 to 127 times the scale of the row
SCALE = np.dtype(np.float32)  # int8: format of the scale


class Codec:
    """Base class of codecs.

    A subclass defines `encode` and `decode`. `through` and `nbytes` follow from these two, one row at a time, and a
    subclass may override them with something faster. Simulations call `through` and `nbytes` only, so both have to
    agree with `encode` and `decode` to the bit.

    Attributes:
        name: Name of the codec, recorded by a run.
        dtype: Floating-point format of all rows that are not changes.
        change: If True, the codec is used for uploads of models alone, and what it encodes is the change of the
            model: the answer of a node minus the model that was sent down to it. The receiver adds the decoded change
            to the model it sent. All other rows are sent in the format `dtype`; see `plain`.

    Examples:
        A codec that sends one bit per value, the sign, and the mean magnitude of the row:

        >>> class Sign(Codec):
        ...     name, change = "sign", True
        ...
        ...     def encode(self, row):
        ...         mean = row.abs().mean(dtype=torch.float32).numpy().tobytes()
        ...         return mean + np.packbits(row.numpy() >= 0).tobytes()
        ...
        ...     def decode(self, message, like):
        ...         mean = np.frombuffer(message[:4], np.float32)
        ...         positive = np.unpackbits(np.frombuffer(message[4:], np.uint8), count=like.numel())
        ...         return torch.from_numpy(np.where(positive, mean, -mean)).to(like)
        >>> Sign().through(torch.tensor([[1.0, -2.0, 3.0]]))
        tensor([[ 2., -2.,  2.]])
        >>> Sign().nbytes(torch.zeros(2, 100))
        tensor([17, 17])
    """

    name: str
    dtype: torch.dtype = torch.float32
    change: ClassVar[bool] = False

    @property
    def plain(self) -> Codec:
        """The codec of the rows that are not changes: this one, or for a codec of changes the one of its `dtype`."""
        return CODECS[str(self.dtype).removeprefix("torch.")] if self.change else self

    def encode(self, row: Tensor) -> bytes:
        """Write one row as bytes.

        Args:
            row: Values of any shape.

        Returns:
            The message.

        Raises:
            ValueError: If the format cannot represent the values.
        """
        raise NotImplementedError(f"codec {type(self).__name__} needs a method encode(row)")

    def decode(self, message: bytes, like: Tensor) -> Tensor:
        """Read one row from bytes.

        Args:
            message: What `encode` returned.
            like: A row of the shape and dtype of the result.

        Returns:
            The row that the receiver works with.

        Raises:
            ValueError: If the message does not describe a row like `like`.
        """
        raise NotImplementedError(f"codec {type(self).__name__} needs a method decode(message, like)")

    def through(self, rows: Tensor) -> Tensor:
        """Return what arrives when the rows [n, ...] are sent: `decode(encode(row))` of each row."""
        return torch.stack([self.decode(self.encode(row), row) for row in rows]) if len(rows) else rows

    def nbytes(self, rows: Tensor) -> Tensor:
        """Return the length of the message of each row, [n] int64."""
        return torch.tensor([len(self.encode(row)) for row in rows], dtype=torch.int64)


@dataclass(frozen=True)
class Floats(Codec):
    """Floating-point values in one format. Whole numbers are sent as they are."""

    name: str
    dtype: torch.dtype

    def _wire(self, rows: Tensor) -> torch.dtype:
        """The dtype in which these rows are sent."""
        return self.dtype if rows.is_floating_point() else rows.dtype

    def _cast(self, rows: Tensor) -> Tensor:
        """The rows in the format of the message.

        NaN and infinity are not refused here: the engine names the diverged nodes, which is the better error.
        """
        wire = self._wire(rows)
        narrow = wire != rows.dtype and torch.finfo(wire).max < torch.finfo(rows.dtype).max
        # reading the extremes is ten times as fast as testing every value
        if narrow and rows.numel() and not torch.isfinite(torch.stack(torch.aminmax(rows)).to(wire)).all():
            largest = torch.where(torch.isfinite(rows), rows, 0).abs().max()
            if torch.isinf(largest.to(wire)):
                alike = [c for c in CODECS.values() if type(c) is type(self) and torch.isfinite(largest.to(c.dtype))]
                better = min(alike or [CODECS["float64"]], key=lambda c: c.dtype.itemsize).name
                raise ValueError(
                    f"codec {self.name} holds values up to {torch.finfo(wire).max:.5g}; got {float(largest):.5g}: "
                    f"use {better}"
                )
        return rows.to(wire)

    def to_bytes(self, row: Tensor) -> Tensor:
        """The message as a tensor of bytes, copied once."""
        return self._cast(row).to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)

    def from_bytes(self, message: Tensor, like: Tensor) -> Tensor:
        """The row in a message that is a tensor of bytes; it may share the memory of the message."""
        wire = self._wire(like)
        if len(message) != like.numel() * wire.itemsize:
            raise ValueError(f"got a message of {len(message)} bytes, expected {like.numel() * wire.itemsize}")
        whole = message if message.data_ptr() % wire.itemsize == 0 else message.clone()
        return whole.view(wire).reshape(like.shape).to(like.dtype)

    def encode(self, row: Tensor) -> bytes:
        return self._cast(row).contiguous().cpu().numpy().tobytes()

    def decode(self, message: bytes, like: Tensor) -> Tensor:
        wire = self._wire(like)
        expected = like.numel() * wire.itemsize
        if len(message) != expected:
            raise ValueError(f"got a message of {len(message)} bytes, expected {expected}")
        flat = torch.frombuffer(bytearray(message), dtype=wire) if message else torch.empty(0, dtype=wire)
        return flat.reshape(like.shape).to(like.dtype)

    def through(self, rows: Tensor) -> Tensor:
        if self._wire(rows).itemsize > rows.dtype.itemsize:
            return rows  # the format of the message represents every value of a narrower one
        return self._cast(rows).to(rows.dtype)

    def nbytes(self, rows: Tensor) -> Tensor:
        size = rows[0].numel() * self._wire(rows).itemsize if len(rows) else 0
        return torch.full((len(rows),), size, dtype=torch.int64)


@dataclass(frozen=True)
class Sparse(Floats):
    """Zeros are left out where that makes the message shorter. Whole numbers are sent as they are.

    The first byte of a message is layout + 4 * (number of values mod 64); the number makes it possible to notice a
    truncated list of positions. Then follow, by layout:

    DENSE  | all values
    BITMAP | one bit per position (the first position is the lowest bit of the first byte), then the non-zero values
    INDEX  | the positions of the non-zero values, 2 bytes each (4 in rows of more than 65,536 values), then the values

    The shortest layout is sent. A value counts as zero if none of its bits is set, so -0.0 is transmitted.

    Attributes:
        counted: Count as the authors of sFedHP do: a bitmap or all values, and no first byte; the length of the
            message tells which.
    """

    counted: bool = False

    def encode(self, row: Tensor) -> bytes:
        if not row.is_floating_point():
            return super().encode(row)
        if not torch.isfinite(row).all():
            raise ValueError(not_finite(self.name))
        values = self._cast(row).cpu().reshape(-1)
        sent = (values.view(BITS[self.dtype.itemsize]) != 0).numpy()
        values = values.numpy()
        sizes = [int(size) for size in self._sizes(len(values), torch.tensor(sent.sum()))]
        layout = sizes.index(min(sizes))
        where = b""
        if layout == BITMAP:
            where = np.packbits(sent, bitorder="little").tobytes()
        elif layout == INDEX:
            where = np.flatnonzero(sent).astype(index_type(len(values))).tobytes()
        values = values if layout == DENSE else values[sent]
        first = b"" if self.counted else bytes([layout + 4 * (len(values) % 64)])
        return first + where + values.tobytes()

    def decode(self, message: bytes, like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return super().decode(message, like)
        size, kind = like.numel(), torch.empty(0, dtype=self.dtype).numpy().dtype
        layout, body = self._layout(message, size)
        where, split = self._positions(message, layout, body, size)
        fits = self.counted or message[0] // 4 == len(where) % 64
        if not fits or len(body) != split + len(where) * kind.itemsize:
            self._refuse(message, size, "the number of values does not fit its length")
        row = np.zeros(size, kind)
        row[where] = np.frombuffer(body[split:], kind)
        return torch.from_numpy(row).reshape(like.shape).to(like.dtype)

    def _layout(self, message: bytes, size: int) -> tuple[int, bytes]:
        """The layout of a message, and the message without its first byte."""
        if not self.counted:
            return (message[0] % 4, message[1:]) if message else self._refuse(message, size, "it is empty")
        full = size * self.dtype.itemsize
        if len(message) > full:
            self._refuse(message, size, "it is too long")
        return (BITMAP if len(message) < full else DENSE), message

    def _positions(self, message: bytes, layout: int, body: bytes, size: int) -> tuple[np.ndarray, int]:
        """The positions of the values in the row, and where in the body the values start."""
        if layout not in (DENSE, BITMAP, INDEX):
            self._refuse(message, size, f"its first byte names layout {layout}, not {DENSE}, {BITMAP} or {INDEX}")
        if layout == DENSE:
            return np.arange(size), 0
        if layout == BITMAP:
            split = -(-size // 8)
            bits = np.unpackbits(np.frombuffer(body[:split], np.uint8), bitorder="little")
            if bits[size:].any():
                self._refuse(message, size, "its bitmap has bits set beyond the row")
            return np.flatnonzero(bits), split
        index = index_type(size)
        split = len(body) // (index.itemsize + self.dtype.itemsize) * index.itemsize
        where = np.frombuffer(body[:split], index).astype(np.int64)
        if (where >= size).any() or (np.diff(where) <= 0).any():
            self._refuse(message, size, "its positions lie beyond the row or do not increase")
        return where, split

    def _refuse(self, message: bytes, size: int, why: str) -> NoReturn:
        """Raise an error about a message that cannot be read."""
        raise ValueError(damaged(self.name, message, size, why))

    def nbytes(self, rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            return super().nbytes(rows)
        size = rows.shape[1:].numel()
        arrived = Floats.through(self, rows)  # has zeros exactly where the message has none
        bits = arrived.view(BITS[arrived.dtype.itemsize]).reshape(len(rows), size)
        count = (bits != 0).sum(1, dtype=torch.int32).long()  # six times as fast as a sum in int64
        return torch.stack(self._sizes(size, count)).amin(0).cpu()

    def _sizes(self, size: int, count: Tensor) -> list[Tensor]:
        """The length of a message of `count` non-zero values by layout. Of equal lengths the first layout is sent."""
        value = self.dtype.itemsize
        sizes = [torch.full_like(count, size * value), -(-size // 8) + count * value]
        return sizes if self.counted else [1 + s for s in (*sizes, count * (index_type(size).itemsize + value))]


# -- codecs of changes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8(Floats):
    """Changes of models, quantised to one byte per value.

    Each row has a scale, its largest magnitude divided by 127. A value is sent as the nearest whole number of scales
    (halves go to the even one), so the error is at most half a scale. A message is the scale (float32), then one
    signed byte per value.

    Examples:
        >>> CODECS["int8"].through(torch.tensor([[1.27, 0.204, -0.5]]))
        tensor([[ 1.2700,  0.2000, -0.5000]])
        >>> CODECS["int8"].nbytes(torch.zeros(1, 1000))
        tensor([1004])
    """

    change: ClassVar[bool] = True

    def _levels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The scales [n, 1] and the values [n, size] as whole numbers of scales, both in float32."""
        values = self._cast(rows).reshape(len(rows), rows.shape[1:].numel())
        scale = values.abs().amax(1, keepdim=True) / LEVELS if values.shape[1] else values.new_zeros(len(rows), 1)
        levels = (values / torch.where(scale == 0, 1, scale)).round().clamp(-LEVELS, LEVELS)
        return scale, levels + 0.0  # a byte has no negative zero

    def encode(self, row: Tensor) -> bytes:
        if not row.is_floating_point():
            return super().encode(row)
        scale, levels = self._levels(row.cpu().unsqueeze(0))
        if not torch.isfinite(scale * LEVELS).all():
            raise ValueError(not_finite(self.name))
        return scale.numpy().astype(SCALE).tobytes() + levels.to(torch.int8).numpy().tobytes()

    def decode(self, message: bytes, like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return super().decode(message, like)
        size = like.numel()
        if len(message) != SCALE.itemsize + size:
            raise ValueError(damaged(self.name, message, size, f"its length is not {SCALE.itemsize} + {size}"))
        scale = torch.from_numpy(np.frombuffer(message[: SCALE.itemsize], SCALE).copy())
        levels = torch.from_numpy(np.frombuffer(message[SCALE.itemsize :], np.int8).astype(SCALE))
        if not torch.isfinite(scale * LEVELS) or torch.signbit(scale):
            raise ValueError(damaged(self.name, message, size, f"its scale is {float(scale)}"))
        if (levels < -LEVELS).any():
            raise ValueError(damaged(self.name, message, size, f"it has a value below -{LEVELS}"))
        return (levels * scale).to(like.dtype).reshape(like.shape)

    def through(self, rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            return rows
        scale, levels = self._levels(rows)
        return (levels * scale).to(rows.dtype).reshape(rows.shape)

    def nbytes(self, rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            return super().nbytes(rows)
        return torch.full((len(rows),), SCALE.itemsize + rows.shape[1:].numel(), dtype=torch.int64)


@dataclass(frozen=True)
class Top(Sparse):
    """Changes of models, of which the values largest in magnitude are sent, and zeros in place of the others.

    Of a row of d values, max(1, round(fraction * d)) are kept. Among equal magnitudes those at the first positions
    are kept. The message is that of `Sparse`. What is left out is not added to the next change (there is no error
    feedback: a device has no state beyond what its method keeps).

    Attributes:
        fraction: Share of the values that are sent, above 0 and at most 1.

    Examples:
        >>> make_codec("top:0.5").through(torch.tensor([[1.0, -3.0, 2.0, 0.5]]))
        tensor([[ 0., -3.,  2.,  0.]])
    """

    change: ClassVar[bool] = True
    fraction: float = 1.0

    def _count(self, size: int) -> int:
        """The number of values that are sent of a row of `size` values."""
        return min(size, max(1, round(self.fraction * size)))

    def _largest(self, rows: Tensor) -> Tensor:
        """The rows with zeros in place of all but the largest values, judged as they are sent."""
        values = self._cast(rows).reshape(len(rows), rows.shape[1:].numel())
        count = self._count(values.shape[1])
        if count == values.shape[1] or not len(rows):
            return rows
        magnitude = values.abs()
        least = magnitude.topk(count, 1).values[:, -1:]
        equal = magnitude == least
        room = count - (magnitude > least).sum(1, keepdim=True)
        dropped = (magnitude < least) | (equal & (equal.cumsum(1) > room))  # keeps NaN, which the engine reports
        return rows.masked_fill(dropped.reshape(rows.shape), 0)

    def encode(self, row: Tensor) -> bytes:
        return super().encode(self._largest(row.unsqueeze(0))[0] if row.is_floating_point() else row)

    def decode(self, message: bytes, like: Tensor) -> Tensor:
        row = super().decode(message, like)
        if row.is_floating_point():
            if not torch.isfinite(row).all():
                self._refuse(message, row.numel(), "it has values that are not finite")
            if int(row.count_nonzero()) > self._count(row.numel()):
                self._refuse(message, row.numel(), f"more than {self._count(row.numel())} of its values are not zero")
        return row

    def through(self, rows: Tensor) -> Tensor:
        return super().through(self._largest(rows) if rows.is_floating_point() else rows)

    def nbytes(self, rows: Tensor) -> Tensor:
        return super().nbytes(self._largest(rows) if rows.is_floating_point() else rows)


# -- helpers ------------------------------------------------------------------------------------------


def index_type(size: int) -> np.dtype:
    """The integer type of positions in a row of `size` values."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


def not_finite(name: str) -> str:
    """The error message for values that are not finite."""
    return f"codec {name} was given a row with NaN or infinity: the run has diverged; use smaller step sizes"


def damaged(name: str, message: bytes, size: int, why: str) -> str:
    """The error message for a message that cannot be read."""
    return (
        f"got a message of {len(message)} bytes, expected a row of {size} values in codec {name}: {why}; "
        "it was damaged, or sent with another codec or model"
    )


CODECS: dict[str, Codec] = {
    "float64": Floats("float64", torch.float64),
    "float32": Floats("float32", torch.float32),
    "float16": Floats("float16", torch.float16),
    "sparse": Sparse("sparse", torch.float32),
    "sparse16": Sparse("sparse16", torch.float16),
    "sparse64": Sparse("sparse64", torch.float64),
    "paper": Sparse("paper", torch.float64, counted=True),
    "int8": Int8("int8", torch.float32),
}


def make_codec(codec: str | Codec) -> Codec:
    """Return a codec by name.

    Args:
        codec: A name in `CODECS`, `top:FRACTION`, or a codec, which is returned as it is.

    Returns:
        The codec.

    Raises:
        ValueError: If there is no codec of that name, or the fraction is not in (0, 1].

    Examples:
        >>> make_codec("top:0.1").name
        'top:0.1'
    """
    if isinstance(codec, Codec):
        if not hasattr(codec, "name"):
            raise ValueError(f"codec {type(codec).__name__} needs an attribute name, which a run records")
        return codec
    if not isinstance(codec, str):
        raise ValueError(f"codec is a name or an instance of a subclass of polytier.Codec; got {codec!r}")
    if codec in CODECS:
        return CODECS[codec]
    name, _, value = codec.partition(":")
    if name != "top":
        raise unknown("codec", codec, [*CODECS, "top:FRACTION"])
    try:
        fraction = finite(value)
        if not 0 < fraction <= 1:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"codec {codec!r} needs the fraction of values to send, above 0 and at most 1; for example top:0.1"
        ) from None
    return Top(f"top:{fraction}", torch.float32, fraction=fraction)
