"""The interface of an engine: all that a run uses of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

from polytier.messages.codec import Codec
from polytier.messages.transforms import Transform
from polytier.method.call import Call
from polytier.method.context import Context, Delivery


class Engine(Delivery, Protocol):
    """What runs the programs of the nodes and moves rows between them.

    An engine is made by a factory with the signature of `EngineFactory`, usually the class itself. It may end a call
    with `polytier.method.call.NodesLost` if nodes and what they kept are gone, after it has replaced them with empty
    ones; the run then goes back to its last snapshot and computes the rounds since again.

    Examples:
        An engine that computes with another one and counts the calls:

        >>> class Counting:
        ...     remote = False
        ...
        ...     def __init__(self, context, **settings):
        ...         self._engine, self.calls = make_engine("stacked", context, **settings), 0
        ...         self.workers, self.tiles = self._engine.workers, self._engine.tiles
        ...
        ...     def deliver(self, call):
        ...         self.calls += 1
        ...         return self._engine.deliver(call)
        ...
        ...     def use_workers(self, workers):
        ...         self._engine.use_workers(workers)
        ...
        ...     def close(self):
        ...         self._engine.close()

        `polytier.train(..., engine=Counting)` runs on it.
    """

    def deliver(self, call: Call) -> Iterator[Any]:
        """Run the program of a call at its receivers, and count the bytes of all messages in the ledger.

        Rows pass the codec, and uploads their transform, in both directions (`polytier.engines.exchange`), unless the
        call is `quiet`. The program itself is run by `polytier.method.execute.execute`.

        Args:
            call: The program, its receivers and the rows sent to them.

        Yields:
            If `call.blocks` is None, the answers in the order of the receivers: rows [k, ...] of the next k receivers,
            or `Answered`, which says whose they are. Otherwise sums of blocks (`Folded`), in order; blocks are summed
            in the order of the receivers, whatever the order in which answers arrive.

        Whoever does not answer is absent, and means are over those who did. An engine over a network may therefore
        yield fewer answers than there are receivers: `Answered` without the absent ones, or sums in which they are
        not counted. In sums, `call.shares` (the share of each receiver in the samples of its parent) then has to be
        computed again for those who answered (`polytier.stack.rows.share_of_samples`), so that the means are those of
        a call to these receivers alone. Quiet calls, by which a run is evaluated, need all answers.
        """
        ...

    @property
    def remote(self) -> bool:
        """Whether nodes and what they keep live in other processes that may be lost."""
        ...

    @property
    def workers(self) -> int:
        """Number of processes that compute devices at the same time."""
        ...

    @property
    def tiles(self) -> Mapping[str, int]:
        """Devices that one process computes at once, by the name of the model ("" if there is one)."""
        ...

    def use_workers(self, workers: int) -> None:
        """Compute devices in this many processes from now on. An engine with a fixed number of them changes nothing."""
        ...

    def close(self) -> None:
        """End all processes and delete temporary files. The engine is not used afterwards, but may be closed again."""
        ...


class EngineFactory(Protocol):
    """What makes an engine: a class or a function with these arguments."""

    def __call__(
        self,
        context: Context,
        *,
        codec: Codec,
        upload: Transform | None,
        tile: int | None,
        inner_tile: int | None,
        workers: int | None,
    ) -> Engine:
        """Make the engine of a run.

        Args:
            context: What the programs share: methods, data, memory, ledgers.
            codec: How rows are encoded.
            upload: What is done to the changes of models before devices send them; None for nothing.
            tile: Devices to compute at once; None lets the engine choose.
            inner_tile: Teams to compute at once; None for all.
            workers: Processes that compute devices; None lets the engine choose.

        None of `tile`, `inner_tile` and `workers` may change a bit of the result.
        """
        ...


def engine_of(context: Context) -> Engine:
    """Return the engine of a context. Programs of methods see it as a `Delivery` only."""
    return cast(Engine, context.engine)
