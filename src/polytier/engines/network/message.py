"""A message: a safetensors file with a small header. Lengths, types and shapes are checked before anything is decoded.

The metadata of the file hold one text, a JSON object: the kind of the message and its facts. There is no pickle and no
code in a message, and reading one allocates no more memory than its own length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

HEADER = 64 << 10  # largest header in bytes
ALIGNED = 8  # the length of a header is a multiple of it
CHUNK = 256 << 10  # bytes that are sent at a time
FACTS = "polytier"
KINDS = (
    *("hello", "welcome", "refused", "ready", "world", "stop"),  # who is there
    *("call", "answer", "measure", "measured", "absent", "failed"),  # training and evaluation
)
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


class Refused(ValueError):
    """A message is not what it has to be. Its sender is cut off."""


@dataclass(frozen=True)
class Message:
    """What travels between a node and its parent.

    Args:
        kind: One of `KINDS`.
        facts: Values that JSON can hold.
        tensors: Tensors by name.
    """

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def fact(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """A fact after a check of its type.

        Raises:
            Refused: There is none, or it has another type.
        """
        value = self.facts.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise Refused(f"{name} of a message {self.kind} is {type(value).__name__}")
        return value

    def whole(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        """A fact that is a whole number in a range."""
        value = self.fact(name, int)
        if not least <= value <= most:
            raise Refused(f"{name} of a message {self.kind} is {value}, not from {least} to {most}")
        return value


def buffers(message: Message) -> list[memoryview]:
    """A message as pieces of memory: its header, and the tensors themselves, which must not change until it is sent.

    Raises:
        ValueError: It has too many rows.
    """
    about: dict[str, Any] = {}
    views, end = [], 0
    for name, value in sorted(message.tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        flat: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        view = memoryview(flat)
        start, end = end, end + len(view)
        about[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
        views.append(view)
    text = json.dumps({"kind": message.kind, **message.facts}, separators=(",", ":"))
    header = json.dumps({"__metadata__": {FACTS: text}, **about}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNED)
    if len(header) > HEADER:
        raise ValueError(
            f"a message {message.kind} has {len(about)} rows, too many for its header; let fewer nodes take part, or "
            "compare fewer pairs in a round"
        )
    return [memoryview(len(header).to_bytes(8, "little") + header), *(view for view in views if len(view))]


def chunks(pieces: Iterable[memoryview], size: int = CHUNK) -> Iterator[memoryview]:
    """Pieces of memory in chunks of at most `size` bytes; small pieces are joined, large ones are not copied."""
    joined = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), size):
            chunk = piece[start : start + size]
            if len(joined) + len(chunk) > size:
                yield memoryview(joined)
                joined = bytearray()
            if len(chunk) == size:
                yield chunk
            else:
                joined += chunk
    if joined:
        yield memoryview(joined)


def encode(message: Message) -> bytes:
    """Write a message as bytes.

    Raises:
        ValueError: It has too many rows.
    """
    return b"".join(buffers(message))


def decode(data: bytes | bytearray, largest: int) -> Message:
    """Read a message from bytes. Its tensors are views of `data` if that is a bytearray, and a copy otherwise.

    Args:
        data: What came.
        largest: Largest length in bytes.

    Raises:
        Refused: It is no message, or it is too long.
    """
    if not isinstance(data, bytes | bytearray):
        raise Refused("a message is a text and not bytes")
    if not 8 < len(data) <= largest:
        raise Refused(f"a message has {len(data)} bytes; allowed are 9 to {largest}")
    length = int.from_bytes(data[:8], "little")
    if length > min(HEADER, len(data) - 8):
        raise Refused(f"a header claims {length} bytes; allowed are {min(HEADER, len(data) - 8)}")
    facts, places = read_header(bytes(data[8 : 8 + length]), len(data) - 8 - length)
    kind = facts.pop("kind", None)
    if kind not in KINDS:
        raise Refused(f"a message is of the kind {str(kind)[:40]!r}")
    whole = data if isinstance(data, bytearray) else bytearray(data)
    return Message(kind, facts, {name: tensor_at(whole, 8 + length, *place) for name, place in places.items()})


Place = tuple[torch.dtype, list[int], int]  # of a tensor: type, shape and first byte


def tensor_at(data: bytearray, first: int, dtype: torch.dtype, shape: list[int], start: int) -> Tensor:
    """A tensor as a view of a message whose tensors begin at byte `first`."""
    if (first + start) % dtype.itemsize:
        raise Refused("a tensor of a message does not start at a multiple of its width")
    if not (count := prod(shape)):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=first + start)
    if dtype == torch.bool and int(flat.view(torch.uint8).max()) > 1:
        raise Refused("a tensor of a message holds truth values that are neither 0 nor 1")
    return flat.reshape(shape)


def read_header(text: bytes, size: int) -> tuple[dict[str, Any], dict[str, Place]]:
    """The facts in a header, and the place of every tensor, after a check of types, shapes and places.

    Args:
        text: The header.
        size: Number of bytes after the header.
    """
    try:
        header = json.loads(text)
        facts = json.loads(header.pop("__metadata__")[FACTS])
        ends, places = 0, {}
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = about["data_offsets"]
            shape, width = about["shape"], TYPES[about["dtype"]].itemsize
            if (
                not isinstance(shape, list)
                or len(shape) > 4
                or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
            ):
                raise ValueError("shape")
            if type(start) is not int or type(end) is not int or not start == ends <= end <= size:
                raise ValueError("offsets")
            if end - start != prod(shape) * width or prod(max(n, 1) for n in shape) >= 1 << 40:
                raise ValueError("length")
            ends, places[name] = end, (TYPES[about["dtype"]], shape, start)
        if ends != size or not isinstance(facts, dict):
            raise ValueError("size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"the header of a message is not valid ({type(error).__name__}: {str(error)[:80]})") from None
    return facts, places
