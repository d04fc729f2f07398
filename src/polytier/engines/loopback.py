"""An engine for checks: every node is computed alone, and every row is encoded to bytes and decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from polytier.engines.exchange import Exchange
from polytier.messages.codec import Codec
from polytier.messages.transforms import Transform
from polytier.method.call import Call
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.stack.rows import Folded, Rows, as_dict, cat_rows, fold


class Loopback:
    """Runs the nodes of a tree one by one in this process.

    Args:
        context: What the programs share.
        codec: How rows are encoded.
        upload: What is done to the changes of models before devices send them.
        tile, inner_tile, workers: Ignored; they are what other engines take.
    """

    remote = False
    workers = 1

    def __init__(
        self,
        context: Context,
        *,
        codec: Codec,
        upload: Transform | None = None,
        tile: int | None = None,
        inner_tile: int | None = None,
        workers: int | None = None,
    ) -> None:
        self.context, self.exchange = context, Exchange(codec, upload)
        self.tiles = {part.name: 1 for part in context.parts}

    def use_workers(self, workers: int) -> None:
        """Change nothing: there is one process."""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def deliver(self, call: Call) -> Iterator[Folded | Rows]:
        """Run the program of a call at its receivers; see `Engine.deliver`."""
        answers = [self._answer(call.part(i, i + 1)) for i in range(len(call.ids))]
        if answers:
            rows = cat_rows(answers)
            yield rows if call.blocks is None or call.shares is None else fold(rows, call.shares, call.blocks)

    def _answer(self, call: Call) -> Rows:
        """The answer of the only receiver of a call."""
        if call.quiet:
            return execute(self.context, call, 0, 1)
        plain = self.exchange.codec.plain
        sent = {field: self._send(call, "down", plain, rows) for field, rows in as_dict(call.rows).items()}
        call = replace(call, rows=sent if isinstance(call.rows, dict) else sent[""])
        answer = self.exchange.outgoing(self.context, call, execute(self.context, call, 0, 1))
        decoded = {
            field: self._send(call, "up", self.exchange.codec_of(self.context, call, field), rows)
            for field, rows in as_dict(answer).items()
        }
        if not decoded:  # an empty message is one all the same: the node took part
            self._count(call, "up", 0)
        return self.exchange.incoming(self.context, call, decoded if isinstance(answer, dict) else decoded[""])

    def _send(self, call: Call, direction: str, codec: Codec, rows: Tensor) -> Tensor:
        """What arrives of the only row of a field."""
        message = codec.encode(rows[0])
        self._count(call, direction, len(message))
        return codec.decode(message, rows[0]).unsqueeze(0)

    def _count(self, call: Call, direction: str, nbytes: int) -> None:
        self.context.scope(call.scope).ledger.add(call.tier, direction, call.ids, torch.tensor([nbytes]))
