"""What messages carry: rows as their codec encodes them, or exact tensors; and the limits that follow from the job."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from polytier.engines.network.message import HEADER, Message, Refused
from polytier.messages.codec import Codec, Floats
from polytier.method.algorithm import Algorithm
from polytier.method.call import Call
from polytier.stack.rows import Rows, as_dict

DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool)
}
MOST_FIELDS = 64
MOST_AXES = 4
DOWN, UP = "down", "up"

Form = tuple[str, tuple[int, ...]]  # dtype and shape of one row of a field


@dataclass(frozen=True)
class Limits:
    """What rows in messages may look like.

    Args:
        forms: By `form_key`, the form of every field that the rehearsal of the job has seen; None for a form that
            depends on the number of nodes. Calls that the rehearsal has not seen are limited by `row_bytes` alone.
        row_bytes: Largest size of one row of one field, decoded, in bytes.
        largest: Largest message in bytes.
        team_models: Where teams keep models that are evaluated, as MODEL/TIER.
        fixed: Whether nobody can join or leave during a run, because of what the method keeps about its devices.
    """

    forms: dict[str, dict[str, Form | None]] = field(default_factory=dict)
    row_bytes: int = 64 << 20
    largest: int = 256 << 20
    team_models: frozenset[str] = frozenset()
    fixed: bool = False

    def check(self, key: str, forms: dict[str, Form]) -> None:
        """Raise `Refused` unless fields with these forms are allowed. Which fields are sent may vary between calls."""
        known = self.forms.get(key)
        for name, form in forms.items():
            expected = None if known is None else known.get(name)
            if expected is not None and form != expected:
                raise Refused(f"{key}: a row {name!r} is {form[0]} {form[1]}, not {expected[0]} {expected[1]}")
            if prod(form[1]) * DTYPES[form[0]].itemsize > self.row_bytes:
                raise Refused(f"{key}: a row {name!r} of shape {form[1]} is larger than {self.row_bytes} bytes")

    def as_values(self) -> dict[str, Any]:
        """The limits as values that JSON can hold."""
        numbers = {"row_bytes": self.row_bytes, "largest": self.largest}
        return {"forms": self.forms, **numbers, "team_models": sorted(self.team_models), "fixed": self.fixed}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Limits:
        """The limits that `as_values` described."""
        forms = {
            key: {name: None if form is None else (form[0], tuple(form[1])) for name, form in fields.items()}
            for key, fields in values["forms"].items()
        }
        numbers = int(values["row_bytes"]), int(values["largest"])
        return cls(forms, *numbers, frozenset(values["team_models"]), bool(values.get("fixed", True)))


def form_key(call: Call, way: str) -> str:
    """What the forms of the rows of a call are stored under."""
    return f"{call.scope}/{call.tier}/{call.method}/{way}"


def forms_of(rows: Rows) -> dict[str, Form]:
    """The form of every field."""
    return {k: (str(v.dtype).removeprefix("torch."), tuple(v.shape[1:])) for k, v in as_dict(rows).items()}


def allowed_programs(algorithm: Algorithm) -> frozenset[str]:
    """The methods of an algorithm that a parent may call by name: programs of rows and a node, and no other hook."""
    own = {
        name
        for name in dir(type(algorithm))
        if not name.startswith("_") and not hasattr(Algorithm, name) and is_program(getattr(type(algorithm), name))
    }
    return frozenset({"solve", "team", "device", *own})


def is_program(function: Any) -> bool:
    """Whether this is a function of self, rows and a node."""
    return inspect.isfunction(function) and len(inspect.signature(function).parameters) == 3


# -- rows ---------------------------------------------------------------------------------------------


def pack_rows(
    rows: Rows, count: int, codec_of: Callable[[str], Codec]
) -> tuple[dict[str, Any], dict[str, Tensor], list[int]]:
    """Encode rows [count, ...].

    Returns:
        Facts and tensors of a message, and the number of encoded bytes of each row.
    """
    tensors, sizes = {}, [0] * count
    for name, value in as_dict(rows).items():
        for k, row in enumerate(value):
            tensors[f"{k}:{name}"] = data = encoded_row(row, codec_of(name))
            sizes[k] += len(data)
    facts = {"named": isinstance(rows, dict), "fields": forms_of(rows), "count": count}
    return {"rows": facts}, tensors, sizes


def encoded_row(row: Tensor, codec: Codec) -> Tensor:
    """One row as bytes; large rows are copied no more often than necessary."""
    if type(codec) is Floats:
        return codec.to_bytes(row)
    data = bytearray(codec.encode(row))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def read_forms(message: Message) -> tuple[bool, dict[str, Form], int]:
    """Whether the rows of a message have names, the form of each field, and the number of rows."""
    about = message.fact("rows", dict)
    named, fields, count = about.get("named"), about.get("fields"), about.get("count")
    if type(named) is not bool or not isinstance(fields, dict) or type(count) is not int or not 0 <= count <= HEADER:
        raise Refused("a message does not describe its rows")
    if len(fields) > MOST_FIELDS or (not named and list(fields) != [""]):
        raise Refused(f"a message has rows with the fields {sorted(fields)[:8]}")
    forms = {}
    for name, form in fields.items():
        fits = isinstance(form, list) and len(form) == 2 and isinstance(form[0], str) and form[0] in DTYPES
        if not fits or not isinstance(form[1], list) or len(form[1]) > MOST_AXES:
            raise Refused(f"a row {name[:40]!r} has no form that is known")
        if not all(type(n) is int and 0 <= n < 1 << 40 for n in form[1]):
            raise Refused(f"a row {name[:40]!r} has an impossible shape")
        forms[name] = (form[0], tuple(form[1]))
    return named, forms, count


def unpack_rows(
    message: Message, codec_of: Callable[[str], Codec], check: Callable[[dict[str, Form]], None], wanted: int | None
) -> tuple[Rows, list[int]]:
    """Decode the rows of a message.

    Args:
        message: With what `pack_rows` made.
        codec_of: The codec of each field.
        check: Raises `Refused` for fields that are not allowed; called before anything is decoded.
        wanted: The number of rows; None: any.

    Returns:
        Rows [k, ...], and the number of encoded bytes of each.

    Raises:
        Refused: Rows are missing, have another form than allowed, cannot be decoded or are not finite.
    """
    named, forms, count = read_forms(message)
    check(forms)
    if wanted is not None and count != wanted:
        raise Refused(f"a message has {count} rows; {wanted} were asked for")
    rows, sizes = {}, [0] * count
    for name, (dtype, shape) in forms.items():
        decoded = []
        for k in range(count):
            data = message.tensors.get(f"{k}:{name}")
            if data is None or data.dtype != torch.uint8 or data.ndim != 1:
                raise Refused(f"row {k} of the field {name[:40]!r} is missing")
            sizes[k] += len(data)
            decoded.append(decoded_row(data, codec_of(name), dtype, shape))
        rows[name] = stacked(decoded) if decoded else torch.zeros((0, *shape), dtype=DTYPES[dtype])
    return (rows if named else rows[""]), sizes


def stacked(rows: list[Tensor]) -> Tensor:
    """[n, ...]; one row is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def decoded_row(data: Tensor, codec: Codec, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """One row, after a check that its values are finite."""
    like = torch.zeros((), dtype=DTYPES[dtype]).expand(shape)
    try:
        row = codec.from_bytes(data, like) if type(codec) is Floats else codec.decode(data.numpy().tobytes(), like)
    except Exception as error:
        raise Refused(f"a row cannot be decoded: {str(error)[:120]}") from None
    if row.shape != torch.Size(shape) or row.dtype != DTYPES[dtype]:
        raise Refused(f"a decoded row is {row.dtype} {tuple(row.shape)}, not {dtype} {shape}")
    if row.is_floating_point() and row.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(row))).all()):
        raise Refused("a row holds NaN or infinity")  # the extremes of a row with NaN are NaN; this needs no memory
    return row


# -- lists --------------------------------------------------------------------------------------------


def as_tensor(values: Any) -> Tensor:
    """Values that JSON can hold as a tensor: a header is too short for long lists."""
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def from_tensor(message: Message, name: str) -> Any:
    """The values of `as_tensor`.

    Raises:
        Refused: There are none.
    """
    data = message.tensors.get(name)
    try:
        if data is None or data.dtype != torch.uint8 or data.ndim != 1:
            raise ValueError("missing")
        return json.loads(data.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name} of a message {message.kind} cannot be read ({str(error)[:80]})") from None
