"""The loop of a run: rounds of the server's program, evaluation, callbacks."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from polytier.data.federation import Federation
from polytier.data.pack import check_size
from polytier.engines.process_settings import release_memory
from polytier.engines.protocol import Engine, engine_of
from polytier.messages.ledger import Ledger, add_up
from polytier.method.algorithm import Algorithm
from polytier.method.call import NodesLost
from polytier.method.mapped_memory import MappedMemory
from polytier.method.node import check_finite
from polytier.runs import snapshot
from polytier.runs.assemble import Assembly, assemble, server_of
from polytier.runs.divergence import DivergenceWatch
from polytier.runs.evaluate import Evaluation, evaluate
from polytier.runs.model_specs import OneOrEach, python_settings, spec_of_python
from polytier.runs.run import Run
from polytier.runs.spec import RunSpec
from polytier.stack.rows import Rows, unpack
from polytier.tree.collaboration import Collaboration, when_kept

log = logging.getLogger("polytier")
WORKERS_PAY = 30  # start worker processes if at least this many seconds of work remain
PATIENCE = 10  # snapshots take at most about 1 / PATIENCE of the running time
ATTEMPTS = 3  # the run stops if worker processes end this many times in one round

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Callback:
    """Base class for objects that follow a run. Each method does nothing unless a subclass overrides it.

    The order of calls is `on_start`, `on_round` once per round, then `on_end` or `on_error`, and finally `close`.
    `on_start` and `on_round` may end the run by `loop.stop("the reason")`.

    Examples:
        >>> import polytier
        >>> class Rounds(polytier.Callback):
        ...     def on_round(self, loop, record):
        ...         print("round", record["round"])
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> method = polytier.FedAvg(device_steps=2)
        >>> run = polytier.train(method, federation, "mclr", rounds=1, callbacks=[Rounds()])
        round 1

        A run that ends when it has sent 100 kB:

        >>> class Budget(polytier.Callback):
        ...     def on_round(self, loop, record):
        ...         if sum(sum(ways.values()) for ways in loop.ledger.total().values()) > 100_000:
        ...             loop.stop("100 kB were sent")
        >>> polytier.train(method, federation, "mclr", rounds=50, callbacks=[Budget()]).rounds
        3
    """

    def on_start(self, loop: Loop) -> None:
        """Called before the first round.

        Args:
            loop: The run.
        """

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        """Called after each round.

        Args:
            loop: The run.
            record: The metrics, bytes, seconds and participants of the round, as in its line of metrics.jsonl.
        """

    def on_end(self, loop: Loop, run: Run) -> None:
        """Called after the last round, or after the round in which the run was asked to stop.

        Args:
            loop: The run.
            run: Its result.
        """

    def on_error(self, loop: Loop, error: BaseException) -> None:
        """Called if an exception ends the run; the exception is raised again afterwards.

        Args:
            loop: The run.
            error: The exception.
        """

    def close(self) -> None:
        """Called last in every case, also after an error. Use it to close files."""


def lists_settings(function: F) -> F:
    """Completes the docstring of a function that takes `**settings` with the declared settings."""
    lines = [
        f"            - `{each.name}`: {each.help}; by default {each.default_text or 'not given'}."
        for each in python_settings()
        if each.name not in inspect.signature(function).parameters
    ]
    before, returns, after = (function.__doc__ or "").partition("\n\n    Returns:")
    function.__doc__ = before + "\n\n" + "\n".join(lines) + returns + after
    return function


@lists_settings
def train(
    algorithm: Algorithm | str,
    federation: OneOrEach[Federation],
    model: OneOrEach[nn.Module | str],
    *,
    rounds: int = 100,
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    **settings: Any,
) -> Run:
    """Train a method on a federation and return the result.

    Args:
        algorithm: The method, for example `polytier.PerMFL(device_lr=0.02)`; or its name on the command line, for
            example "permfl", with fields in `set`. Fields that are not set are chosen as on the command line.
        federation: The data of the devices. If the method trains several models: one federation for all of them, or a
            mapping from the name of each model to its federation.
        model: A module, or the name of a built-in model such as "mclr" or "dnn:100". If the method trains several
            models: one for all of them, or a mapping from names to models.
        rounds: Number of rounds of the server.
        seed: Seed of every random draw. The same seed and settings give the same result.
        callbacks: Objects whose methods are called during the run; see `polytier.Callback`.
        **settings: Other settings of the run, with the names of the flags of `polytier run`; a participation rule,
            `codec`, `upload` and `engine` may also be objects. And parts that are Python objects: `loss`, a function
            (outputs, targets) -> one value per sample; `metrics`, names and `polytier.Metric` objects; `topology`.

    Returns:
        The trained models, their metrics per round, and the settings of the run.

    Raises:
        ValueError: A setting is not allowed. The message lists what is allowed.
        TypeError: There is no such setting. The message names the nearest one.
        Diverged: A parameter of a model became infinite or NaN, or a loss and the parameters grew so large that
            training cannot recover.

    Examples:
        >>> import polytier
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> run = polytier.train(polytier.FedAvg(device_steps=2), federation, "mclr", rounds=2)
        >>> run.rounds
        2
        >>> run = polytier.train("fedavg", federation, "mclr", rounds=2, set={"device_steps": 2})
    """
    with make_loop(algorithm, federation, model, seed=seed, **settings) as loop:
        return loop.run(rounds, callbacks)


@lists_settings
def make_loop(
    algorithm: Algorithm | str, federation: OneOrEach[Federation], model: OneOrEach[nn.Module | str], **settings: Any
) -> Loop:
    """Make a run without starting it, so that its rounds can be run one at a time.

    Args:
        algorithm: The method, as in `polytier.train`.
        federation: The data of the devices, as in `polytier.train`.
        model: A module or the name of a built-in model, as in `polytier.train`.
        **settings: Other settings of the run, as in `polytier.train`.

    Returns:
        The run before its first round. Use it in a `with` statement, which stops its worker processes at the end.

    Raises:
        ValueError: A setting is not allowed. The message lists what is allowed.

    Examples:
        >>> import polytier
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> with polytier.make_loop(polytier.FedAvg(device_steps=2), federation, "mclr", seed=1) as loop:
        ...     seconds = loop.step()
        ...     loop.round
        1
    """
    spec, ready = spec_of_python(algorithm, federation, model, settings)
    return Loop(assemble(spec, **ready))


class Loop:
    """A run in progress. `polytier.make_loop` makes one.

    Args:
        assembly: The parts of the run, from `polytier.assemble`.

    Attributes:
        spec: The complete settings of the run.
        context: The data, tree, objective and memory that the programs of the run share.
        state: The rows that the server keeps between rounds.
        round: Number of rounds completed.
        history: One record per round, as in metrics.jsonl.
        evaluations: The last evaluation of each model by name; the name is "" if there is one model.
        stop_reason: Why the run was asked to stop; empty if it was not.
        collaboration: By round, the learned collaboration between nodes; empty if the method does not learn one.

    Examples:
        >>> import polytier
        >>> spec = polytier.RunSpec(algorithm="fedavg", devices=8, teams="2", set={"device_steps": 2})
        >>> with polytier.Loop(polytier.assemble(spec)) as loop:
        ...     run = loop.run(rounds=1)
        >>> run.rounds
        1
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.spec, self.algorithm = assembly.spec, assembly.algorithm
        self.context, self.codec = assembly.context, assembly.codec
        self.eval_every = assembly.spec.eval_every
        self.choose_workers = assembly.spec.workers is None and assembly.spec.engine == "stacked"
        first = {part.name: part.objective.initial.unsqueeze(0).clone() for part in self.context.parts}
        self.state: Rows = self.algorithm.init(first if self.algorithm.parts() else first[""])
        self.round, self.rounds = 0, 0  # completed, and requested
        self.seconds, self.stop_reason = 0.0, ""
        self.history: list[dict[str, Any]] = []
        self.evaluations: dict[str, Evaluation] = {}
        self.collaboration: dict[int, Collaboration] = {}
        self.notes: dict[str, Any] = {}  # further facts for checkpoints
        self._watch = DivergenceWatch()
        self._saved: Any = (
            None  # a snapshot in case worker processes end; the next line: when it was taken and the seconds it took
        )
        self._saved_at = self._cost = 0.0

    @classmethod
    def of(cls, spec: RunSpec) -> Loop:
        """Make a run from its settings, without starting it."""
        return cls(assemble(spec))

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's processes."""
        self.assembly.close()

    def run(self, rounds: int, callbacks: Iterable[Callback] = (), stop: Callable[[], bool] = lambda: False) -> Run:
        """Run rounds until `rounds` rounds are completed, counting those completed earlier.

        Args:
            rounds: Number of rounds completed at the end.
            callbacks: Objects whose methods are called during the run.
            stop: Called before each round; the run stops if it returns True.

        Returns:
            The result after the last completed round.

        Raises:
            Diverged: A parameter of a model became infinite or NaN, or a loss and the parameters grew so large that
                training cannot recover.
            NodesLost: Worker processes ended several times in the same round.
        """
        callbacks, self.rounds, self.stop_reason = list(callbacks), rounds, ""
        try:
            for callback in callbacks:
                callback.on_start(self)
            while self.round < rounds and not self.stop_reason and not stop():
                self._secure()
                seconds = self._surely(self.step)
                self._consider_workers(seconds)
                record = self._surely(lambda spent=seconds: self._record(spent, last=self.round == rounds))
                self.history.append(record)
                for callback in callbacks:
                    callback.on_round(self, record)
            if self.stop_reason and self.round % self.eval_every:  # the last round is always evaluated
                self.history[-1] |= self._surely(self._figures)
            run = self._surely(lambda: Run.of(self))
            for callback in callbacks:
                callback.on_end(self, run)
            return run
        except BaseException as error:
            for callback in callbacks:
                callback.on_error(self, error)
            raise
        finally:
            for callback in callbacks:
                callback.close()

    def stop(self, reason: str) -> None:
        """End the run after the current round. Callbacks may call this.

        The result is that of a run with as many rounds. A run folder contains it, and the reason in state.json;
        `polytier.resume` and `polytier resume` continue the run.

        Args:
            reason: Why the run ends.

        Raises:
            ValueError: The reason is empty.
        """
        if not reason:
            raise ValueError('the reason is empty; give a text that state.json records, such as "time is up"')
        self.stop_reason = reason

    def step(self) -> float:
        """Run one round of the server's program, without evaluation or callbacks.

        Returns:
            The wall time of the round in seconds.

        Raises:
            Diverged: A parameter of a model became infinite or NaN.
        """
        started = time.perf_counter()
        for part in self.context.parts:
            check_size(part.batches.federation.x)
            part.ledger.start_round()
        server = server_of(self.context, self.round)
        self.state = self.algorithm.server(self.state, server)
        check_finite(server, self.state)
        self.round += 1
        if when_kept(self.round):
            self.collaboration |= self.learned()
        release_memory()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return seconds

    def _record(self, seconds: float, last: bool) -> dict[str, Any]:
        """The record of the round that has just ended; models are evaluated if an evaluation is due."""
        record: dict[str, Any] = {"round": self.round}
        if self.round % self.eval_every == 0 or last:
            record |= self._figures()
            self._watch.look(self, record)
        ledgers = [part.ledger for part in self.context.parts]
        present: dict[str, list[np.ndarray]] = {}  # a team may be in the trees of several models
        for ledger in ledgers:
            for tier, mask in ledger.took_part.items():
                names = ledger.topology.names[tier][mask.numpy()]
                present.setdefault(ledger.topology.tier_names[tier], []).append(names)
        counts = {t: len(np.unique(np.concatenate(n)) if len(n) > 1 else n[0]) for t, n in present.items()}
        nbytes = add_up(ledger.rounds[-1] for ledger in ledgers)
        return {**record, "bytes": nbytes, "seconds": seconds, "participants": counts}

    def _figures(self) -> dict[str, Any]:
        """Evaluate all models on all devices; the values for the record of the round."""
        self.evaluate()
        figures = {name: evaluation.figures() for name, evaluation in self.evaluations.items()}
        return {**means(list(figures.values())), "models": figures} if self.context.scopes else figures[""]

    def evaluate(self) -> None:
        """Evaluate all models on all devices."""
        self.evaluations = {p.name: evaluate(p, self.part_state(p.name), self.round) for p in self.context.parts}

    def _consider_workers(self, seconds: float) -> None:
        """Start worker processes if the remaining rounds take long enough.

        The first round is not used as a measurement, because it also traces the graphs.
        """
        if self.choose_workers and self.round > 1:
            self.choose_workers = False
            if seconds * (self.rounds - self.round) > WORKERS_PAY:
                engine_of(self.context).use_workers(os.cpu_count() or 1)

    # -- access for other modules ---------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The bytes sent in the run. If there are several models, the context of each has its own ledger."""
        return self.context.ledger

    def part_state(self, name: str) -> Rows:
        """The state of the server for the model `name`; the whole state if there is one model."""
        assert isinstance(self.state, dict) or not name
        return unpack(name, self.state) if name and isinstance(self.state, dict) else self.state

    def learned(self) -> dict[int, Collaboration]:
        """The current learned collaboration by round number; empty if the method does not learn one."""
        learned = self.algorithm.collaboration(self.state)
        return {} if learned is None else {self.round: replace(learned, ids=self.context.topology.names[1])}

    def use(self, engine: Engine) -> None:
        """Run the nodes with another engine."""
        for context in (self.context, *self.context.parts):
            context.engine = engine

    @property
    def _remote(self) -> bool:
        """Whether nodes and their memory are in other processes, which may end unexpectedly."""
        return engine_of(self.context).remote

    # -- snapshots ------------------------------------------------------------------------------------

    def keep_in(self, folder: Path) -> None:
        """Store the rows of nodes in memory-mapped files in `folder`, so that checkpoints need not copy them.

        Call this before the first round.
        """
        for k, part in enumerate(() if self._remote else self.context.parts):
            part.memory = MappedMemory(part.topology, folder / str(k))

    @property
    def stores(self) -> list[MappedMemory]:
        """The memories that are stored in files."""
        return snapshot.stores_of(self.context)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and other values from which `restore` continues with bitwise identical results."""
        return self._surely(lambda: snapshot.take(self))

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Set the run back to a snapshot."""
        snapshot.put_back(self, tensors, facts)
        self.seconds, self.history = facts["seconds"], facts["history"]
        self._watch = DivergenceWatch(self.history)
        if self.history:
            self.evaluate()

    # -- lost worker processes -------------------------------------------------------------------------

    def _secure(self) -> None:
        """Take a snapshot before the first round, and later when the time for one is short compared with training.

        Needed only if nodes run in other processes, which may end unexpectedly.
        """
        started = time.perf_counter()
        if self._remote and (self._saved is None or started - self._saved_at > PATIENCE * self._cost):
            self._saved = copy.deepcopy(self.snapshot())
            self._saved_at = time.perf_counter()
            self._cost = self._saved_at - started

    def _surely(self, work: Callable[[], T]) -> T:
        """The result of `work`. If worker processes end, rounds are repeated from the last snapshot.

        Callbacks are not called for repeated rounds.
        """
        goal, lost = self.round, None
        for _ in range(ATTEMPTS):
            try:
                if lost is not None:
                    snapshot.put_back(self, *copy.deepcopy(self._saved))
                    log.warning("%s; continuing from the snapshot after round %d", lost, self.round)
                    while self.round < goal:
                        self.step()
                return work()
            except NodesLost as error:
                if self._saved is None:
                    raise
                lost = error
        raise NodesLost(
            f"{lost}, {ATTEMPTS} times in a row; resume the run, with fewer --workers if memory is insufficient"
        )


def means(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss and metrics, averaged over those models that have them."""
    result: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for each in figures for kind in each):
        for split in dict.fromkeys(split for each in figures for split in each.get(kind, ())):
            seen = [each[kind][split] for each in figures if split in each.get(kind, {})]
            shared = [metric for metric in seen[0] if all(metric in s and s[metric] is not None for s in seen)]
            result.setdefault(kind, {})[split] = {m: sum(s[m] for s in seen) / len(seen) for m in shared}
    return result
