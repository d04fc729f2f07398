"""A message: a safetensors file with a small header. Lengths, types and shapes are checked before anything is decoded.

The metadata of the file hold one text, a JSON object: the kind of the message and its facts. There is no pickle and no
code in a message, and reading one allocates no more memory than its own length.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

HEADER = 64 << 10  # largest header in bytes
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


def encode(message: Message) -> bytes:
    """Write a message as bytes.

    Raises:
        ValueError: It has too many rows.
    """
    tensors, seen = {}, set()
    for name, value in message.tensors.items():
        value = value.detach().contiguous()
        place = value.untyped_storage().data_ptr()  # safetensors takes no two tensors of the same memory
        tensors[name] = value.clone() if place in seen else value
        seen.add(place)
    text = json.dumps({"kind": message.kind, **message.facts}, separators=(",", ":"))
    data = save(tensors, {FACTS: text})
    if int.from_bytes(data[:8], "little") > HEADER:
        raise ValueError(
            f"a message {message.kind} has {len(tensors)} rows, too many for its header; let fewer nodes take part, or "
            "compare fewer pairs in a round"
        )
    return data


def decode(data: bytes, largest: int) -> Message:
    """Read a message from bytes.

    Args:
        data: What came.
        largest: Largest length in bytes.

    Raises:
        Refused: It is no message, or it is too long.
    """
    if not isinstance(data, bytes):
        raise Refused("a message is a text and not bytes")
    if not 8 < len(data) <= largest:
        raise Refused(f"a message has {len(data)} bytes; allowed are 9 to {largest}")
    length = int.from_bytes(data[:8], "little")
    if length > min(HEADER, len(data) - 8):
        raise Refused(f"a header claims {length} bytes; allowed are {min(HEADER, len(data) - 8)}")
    facts = read_header(data[8 : 8 + length], len(data) - 8 - length)
    kind = facts.pop("kind", None)
    if kind not in KINDS:
        raise Refused(f"a message is of the kind {str(kind)[:40]!r}")
    try:
        return Message(kind, facts, load(data))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"a message cannot be read: {str(error)[:120]}") from None


def read_header(text: bytes, size: int) -> dict[str, Any]:
    """The facts in a header, after a check of the type, shape and place of every tensor.

    Args:
        text: The header.
        size: Number of bytes after the header.
    """
    try:
        header = json.loads(text)
        facts = json.loads(header.pop("__metadata__")[FACTS])
        ends = 0
        for about in header.values():
            start, end = about["data_offsets"]
            shape, width = about["shape"], TYPES[about["dtype"]].itemsize
            if not all(type(n) is int and 0 <= n < 1 << 40 for n in shape) or len(shape) > 4:
                raise ValueError("shape")
            if type(start) is not int or type(end) is not int or not 0 <= start <= end <= size:
                raise ValueError("offsets")
            if end - start != prod(shape) * width:
                raise ValueError("length")
            ends += end - start
        if ends != size or not isinstance(facts, dict):
            raise ValueError("size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"the header of a message is not valid ({type(error).__name__}: {str(error)[:80]})") from None
    return facts
