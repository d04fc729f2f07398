"""The memory of nodes that live in actors, as the driver of the Ray engine sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.call import Call, Clock
from polytier.method.context import Context
from polytier.method.memory import Memory, RowName, entries
from polytier.method.node import Node
from polytier.stack.rows import Rows, as_dict, cat_rows

if TYPE_CHECKING:
    from polytier.engines.ray.driver import Ray


class RemoteMemory(Memory):
    """Rows that nodes keep. The rows of the server are in this process, those of all other nodes in their actors.

    Args:
        engine: The engine with the actors.
        part: The context of the model whose rows these are.
    """

    def __init__(self, engine: Ray, part: Context) -> None:
        super().__init__(part.topology)
        self._engine, self._scope, self._own = engine, part.name, Memory(part.topology)

    def _of_server(self, row: RowName) -> bool:
        """Whether the server keeps these rows: its own, and what it remembers of its children."""
        return row.tier == 0 or (row.tier == 1 and row.field is not None)

    def _ask(self, what: str, *given: Any) -> Iterator[tuple[int, Any]]:
        """The result of a method of `Memory` in every actor."""
        return self._engine.ask("memory", dict.fromkeys(range(self._engine.workers), (self._scope, what, *given)))

    def names(self, tier: int) -> list[str]:
        found = {name for _, names in self._ask("names", tier) for name in names}
        return sorted(found.union(self._own.names(tier)))

    def read(self, tier: int, name: str, ids: Tensor, default: Tensor, field: str | None = None) -> Tensor:
        row = RowName(tier, name, field).checked()
        if self._of_server(row):
            return self._own.read(tier, name, ids, default, field)
        assert field is None, "what teams remember about their children is with them"
        sender = torch.arange(len(ids))
        call = Call(tier, ids, recalled, Clock(0), {name: default}, sender, quiet=True, scope=self._scope)
        return as_dict(cat_rows(list(self._engine.deliver(call))))[name]

    def write(self, tier: int, name: str, ids: Tensor, rows: Tensor, field: str | None = None) -> None:
        assert self._of_server(RowName(tier, name, field)), "other nodes' rows are written where they are"
        self._own.write(tier, name, ids, rows, field)

    def state(self) -> dict[str, Tensor]:
        state = self._own.state()
        for k, part in self._ask("state"):
            for row, rows, kept in entries(part):
                owner = self._engine.owners[self._scope][row.tier]
                for key, values in ((f"{row}/rows", rows), (f"{row}/kept", kept)):
                    whole = state.setdefault(key, values.new_zeros((len(owner), *values.shape[1:])))
                    whole[owner == k] = values
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        own, others = {}, [{} for _ in range(self._engine.workers)]
        for row, rows, kept in entries(state):
            for key, values in ((f"{row}/rows", rows), (f"{row}/kept", kept)):
                if self._of_server(row):
                    own[key] = values
                else:
                    for k, part in enumerate(others):
                        part[key] = values[self._engine.owners[self._scope][row.tier] == k]
        self._own = Memory(self.topology)
        self._own.load(own)
        list(self._engine.ask("memory", {k: (self._scope, "load", part) for k, part in enumerate(others)}))


def recalled(algorithm: Algorithm, rows: dict[str, Tensor], node: Node) -> Rows:
    """A program of nodes: the rows that they keep under these names."""
    return {name: node.memory(name, default) for name, default in rows.items()}
