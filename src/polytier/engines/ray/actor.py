"""The actors of the Ray engine: each one runs a sub-tree. Also the messages between them and the driver."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.data.batches import Batches
from polytier.engines.process_settings import configure_process
from polytier.engines.stacked import Stacked
from polytier.messages.codec import Codec
from polytier.messages.ledger import WAYS, Ledger
from polytier.messages.transforms import Transform
from polytier.method.call import Call
from polytier.method.context import Context
from polytier.method.memory import Memory


class SubTree:
    """An actor with some nodes of tier 1 and all nodes below them.

    Args:
        path: `sys.path` of the driver, so that the actor finds the user's methods and models.
    """

    context: Context

    def __init__(self, path: list[str]) -> None:
        sys.path += [place for place in path if place not in sys.path]
        configure_process()

    def do(self, what: str, message: list) -> list:
        """Call the method `what` with packed arguments.

        Returns:
            The packed result; or the packed error, since Ray would raise an error of another type in the driver.
        """
        try:
            return pack(getattr(self, what)(*unpack(message)))
        except Exception as error:
            error.add_note(traceback.format_exc())
            return pack(error)

    def start(
        self,
        context: Context,
        shares: list,
        codec: Codec,
        upload: Transform | None,
        tiles: dict[str, int],
        inner_tile: int | None,
    ) -> None:
        """Take over nodes.

        Args:
            context: What the programs share, without data and memory.
            shares: For each model the data of the own devices, the settings of `Batches`, and the own nodes by tier.
            codec, upload, tiles, inner_tile: Settings of the stacked engine.
        """
        for part, (federation, batches, held) in zip(context.parts, shares, strict=True):
            part.batches, part.memory = Batches(federation, **batches), SubTreeMemory(held)
        engine = Stacked(context, codec=codec, upload=upload, tile=1, inner_tile=inner_tile)
        engine.tiles = tiles
        for part in (context, *context.parts):
            part.engine = engine
        self.context = context

    def deliver(self, call: Call) -> tuple[list[Any], list[tuple[int, str, Tensor, Tensor]], int]:
        """Run a call at own nodes.

        Returns:
            The answers; the bytes of this call and of all calls below it, as arguments of `Ledger.add`; and the number
            of device steps.
        """
        part = self.context.scope(call.scope)
        before, part.ledger = part.device_steps, Ledger(part.topology)
        part.ledger.start_round()
        answers = list(part.engine.deliver(call))
        traffic = []
        for tier, mask in part.ledger.took_part.items():
            ids, link = mask.nonzero().squeeze(1), part.ledger.nodes[part.topology.link(tier)]
            traffic += [(tier, way, ids, link[way][ids]) for way in WAYS if len(ids)]
        return answers, traffic, part.device_steps - before

    def memory(self, scope: str, what: str, *given: Any) -> Any:
        """Call a method of the memory of a model."""
        return getattr(self.context.scope(scope).memory, what)(*given)


class SubTreeMemory(Memory):
    """The rows of the nodes of a sub-tree.

    Args:
        held: For each tier the first of these nodes and their number.
    """

    def __init__(self, held: list[tuple[int, int]]) -> None:
        sizes: Any = SimpleNamespace(num_tiers=len(held), size=lambda tier: held[tier][1])
        super().__init__(sizes)
        self._first = [first for first, _ in held]

    def read(self, tier: int, name: str, ids: Tensor, default: Tensor, field: str | None = None) -> Tensor:
        return super().read(tier, name, ids - self._first[tier], default, field)

    def write(self, tier: int, name: str, ids: Tensor, rows: Tensor, field: str | None = None) -> None:
        super().write(tier, name, ids - self._first[tier], rows, field)

    def load(self, state: dict[str, Tensor]) -> None:
        self._rows.clear()  # rows that were first kept after the snapshot must be gone
        super().load(state)


@cache
def pickler() -> Any:
    """A pickler that writes tensors as NumPy arrays, and classes and functions that no module defines by value."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            plain = type(obj) is Tensor
            return (torch.from_numpy, (obj.numpy(),)) if plain else super().reducer_override(obj)

    return Pickler


def pack(value: Any) -> list:
    """Pack a value as a message: a pickle, and the arrays in it, which Ray moves without another copy."""
    file, arrays = io.BytesIO(), []
    pickler()(file, protocol=5, buffer_callback=arrays.append).dump(value)
    return [file.getvalue(), *(np.asarray(array.raw()) for array in arrays)]


def unpack(message: list) -> Any:
    """Return the value of a message."""
    return pickle.loads(message[0], buffers=[array.copy() for array in message[1:]])
