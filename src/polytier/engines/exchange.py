"""What travels between a node and its parent. All engines encode rows and transform uploads here and nowhere else.

Down, rows travel in the plain format of the codec. Up, an answer to `solve` may have fields that are models
(`Algorithm.model_fields`). For these, the change since what was sent down is computed if the run has a transform of
uploads (devices only) or a codec of changes (all tiers):

    device or team   change = answer - reference         a device: change = transform(change)
    message          encode(change)                      or, with a codec that does not send changes,
                                                         encode(reference + change)
    parent           received = reference + decode(message)

The reference is what the node was sent, so both sides know it. All other fields travel in the plain format. Differences
and sums are rounded, so that even a change that a transform leaves as it is may arrive with other last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polytier.messages.codec import Codec
from polytier.messages.transforms import Transform
from polytier.method.algorithm import Algorithm
from polytier.method.call import Call
from polytier.method.context import Context
from polytier.method.travel import OWN_PROGRAMS
from polytier.stack.rows import Rows, as_dict, map_rows
from polytier.tree import random


@dataclass(frozen=True)
class Exchange:
    """How rows travel in a run.

    A simulation uses `down` and `up`. An engine that moves bytes uses `outgoing` and `codec_of(...).encode` where a
    node answers, `codec_of(...).decode` and `incoming` where its parent receives.

    In all functions a `call` has exactly the receivers whose answers are given (`Call.part`).
    """

    codec: Codec
    upload: Transform | None = None

    def down(self, rows: Rows) -> Rows:
        """Return what arrives below when a parent sends these rows."""
        return map_rows(self.codec.plain.through, rows)

    def down_bytes(self, rows: Rows, n: int) -> Tensor:
        """Return the bytes [n] of the first n messages down."""
        return message_bytes(self.codec.plain, rows, n)

    def up(self, context: Context, call: Call, start: int, end: int, answer: Rows) -> tuple[Rows, Tensor]:
        """Pass the answers of some receivers of a call to their parents.

        Args:
            context: What the programs share.
            call: The call that is answered; its rows have passed `down`.
            start: First of the receivers that answer.
            end: One after the last of them.
            answer: [end - start, ...] their answers.

        Returns:
            What arrives [end - start, ...], and the bytes [end - start] of each message.
        """
        if not self._has_changes(context, call):  # nothing to add: rows of the ordinary run are not copied
            answer = map_rows(self.codec.plain.through, answer)
            return answer, message_bytes(self.codec.plain, answer, end - start)
        call = call.part(start, end)
        nbytes, decoded = torch.zeros(end - start, dtype=torch.int64), {}
        for field, rows in as_dict(self.outgoing(context, call, answer)).items():
            codec = self.codec_of(context, call, field)
            nbytes += codec.nbytes(rows)
            decoded[field] = codec.through(rows)
        return self.incoming(context, call, decoded if isinstance(answer, dict) else decoded[""]), nbytes

    def codec_of(self, context: Context, call: Call, field: str) -> Codec:
        """Return the codec of a field of an answer."""
        fields = context.scope(call.scope).algorithm.model_fields
        change = self.codec.change and call.method in OWN_PROGRAMS and field in fields
        return self.codec if change else self.codec.plain

    def outgoing(self, context: Context, call: Call, answer: Rows) -> Rows:
        """Return the rows that nodes encode, each with `codec_of` its field: changes, or transformed answers.

        Raises:
            ValueError: If a model in the answer has no reference, or the transform returns rows of another shape.
        """
        if not self._has_changes(context, call):
            return answer
        context, sent = context.scope(call.scope), dict(as_dict(answer))
        references = find_references(context.algorithm, call, sent)
        changes = {field: sent[field] - reference for field, reference in references.items()}
        if changes and self.upload is not None and call.tier == context.topology.leaf:
            changes = transformed(self.upload, changes, context, call)
        for field, change in changes.items():
            sent[field] = change if self.codec.change else references[field] + change
        return sent if isinstance(answer, dict) else sent[""]

    def incoming(self, context: Context, call: Call, decoded: Rows) -> Rows:
        """Return the answers that a parent works with, given the decoded rows of the messages."""
        if not (self.codec.change and self._has_changes(context, call)):
            return decoded
        fields = dict(as_dict(decoded))
        for field, reference in find_references(context.scope(call.scope).algorithm, call, fields).items():
            fields[field] = reference + fields[field]
        return fields if isinstance(decoded, dict) else fields[""]

    def _has_changes(self, context: Context, call: Call) -> bool:
        """Whether changes of models are computed for the answers to this call."""
        transforms = self.upload is not None and call.tier == context.scope(call.scope).topology.leaf
        return (self.codec.change or transforms) and call.method in OWN_PROGRAMS and not call.quiet


def message_bytes(codec: Codec, rows: Rows, n: int) -> Tensor:
    """The bytes [n] of the first n messages, each of one row of every field."""
    if isinstance(rows, Tensor):
        return codec.nbytes(rows)[:n]
    return sum((codec.nbytes(r)[:n] for r in rows.values()), torch.zeros(n, dtype=torch.int64))


def find_references(algorithm: Algorithm, call: Call, answer: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model that each model in an answer started from, by field."""
    sent = {field: rows[call.sender] for field, rows in as_dict(call.rows).items()}
    found = {}
    for field in algorithm.model_fields:
        if field in answer:
            reference = algorithm.reference(field, sent, answer)
            if reference is None or reference.shape != answer[field].shape:
                name, shape = type(algorithm).__name__, tuple(answer[field].shape[1:])
                given = "none" if reference is None else f"one of shape {tuple(reference.shape[1:])}"
                raise ValueError(
                    f"{name} answers a model{f' {field!r}' if field else ''} of shape {shape} and was sent {given} to "
                    "compare it with, so there is no change that upload= or a codec of changes could act on; send the "
                    "model down under the same name, define reference() of the method, or set its model_fields to the "
                    "fields that are models"
                )
            found[field] = reference
    return found


def transformed(upload: Transform, changes: dict[str, Tensor], context: Context, call: Call) -> dict[str, Tensor]:
    """The changes of all fields after the transform, which sees them as one row per device."""
    flat = [change.flatten(1) for change in changes.values()]
    base = random.key(context.seed, "upload")
    keys = random.node_keys(base, context.topology.keys[call.tier][call.ids])
    together = torch.cat(flat, 1) if len(flat) > 1 else flat[0]
    result = upload(together, keys, call.clock)
    if not isinstance(result, Tensor) or result.shape != together.shape or result.dtype != together.dtype:
        got = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"the transform of uploads {upload} was given changes {together.dtype} {list(together.shape)} and returned "
            f"{got}; return a tensor of the same shape and dtype"
        )
    pieces = result.split([rows.shape[1] for rows in flat], 1)
    return {field: piece.reshape(changes[field].shape) for field, piece in zip(changes, pieces, strict=True)}


def check_changes(context: Context, codec: Codec, upload: Transform | None) -> None:
    """Stop before the first round if a transform or a codec needs changes that a method does not have.

    Raises:
        ValueError: If `upload` is given or `codec` encodes changes, and a method has no `model_fields`.
    """
    if upload is None and not codec.change:
        return
    what = f"codec {codec.name}" if upload is None else f"upload {upload}"
    other = "use another codec" if upload is None else "run it without upload"
    for part in context.parts:
        if not part.algorithm.model_fields:
            raise ValueError(
                f"{what} acts on the change of a model since it was sent down, and what devices send up in "
                f"{type(part.algorithm).__name__} is no such change; {other}, or use a method such as FedAvg or PerMFL"
            )
