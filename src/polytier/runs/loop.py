"""The loop of a run: rounds of the server's program, evaluation, callbacks."""

from __future__ import annotations

import copy
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
from polytier.engines.process_settings import release_memory
from polytier.engines.protocol import Engine, engine_of
from polytier.messages.ledger import Ledger, add_up
from polytier.method.algorithm import Algorithm
from polytier.method.call import NodesLost
from polytier.method.mapped_memory import MappedMemory
from polytier.method.node import check_finite
from polytier.runs import snapshot
from polytier.runs.assemble import Assembly, assemble, server_of
from polytier.runs.evaluate import Evaluation, evaluate
from polytier.runs.model_specs import OneOrEach, spec_of_python
from polytier.runs.run import Run
from polytier.runs.spec import RunSpec
from polytier.stack.rows import Rows, unpack
from polytier.tree.collaboration import Collaboration, when_kept

log = logging.getLogger("polytier")
WORKERS_PAY = 30  # seconds of remaining work from which starting worker processes is worth its time
PATIENCE = 10  # snapshots take at most about one part in so many of the time
ATTEMPTS = 3  # a round in which nodes are lost as often as this is given up

T = TypeVar("T")


class Callback:
    """Hooks of a run; each does nothing unless it is overridden.

    Examples:
        >>> class Losses(Callback):
        ...     def on_round(self, loop, record):
        ...         print(record["round"], record["global"]["train"]["loss"])
    """

    def on_start(self, loop: Loop) -> None:
        """Before the first round."""

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        """After each round; `record` is its line in metrics.jsonl."""

    def on_end(self, loop: Loop, run: Run) -> None:
        """After the last round, or when the run was asked to stop."""

    def on_error(self, loop: Loop, error: BaseException) -> None:
        """When the run is ended by an error."""

    def close(self) -> None:
        """Always called last, also after an error."""


def train(
    algorithm: Algorithm,
    federation: OneOrEach[Federation],
    model: OneOrEach[nn.Module | str],
    *,
    rounds: int = 100,
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    **settings: Any,
) -> Run:
    """Train a model over a federation.

    Args:
        algorithm: The method, for example `polytier.PerMFL(device_lr=0.02)`.
        federation: The devices' data; for a wrapper of several methods, for all of them or by name.
        model: A module, or a model by name such as "mclr" or "dnn:100"; likewise.
        rounds: Rounds of the server.
        seed: Every random draw follows from it.
        callbacks: Objects that are told of every round.
        **settings: The other settings of a run, by the names of `polytier run`'s flags (docs/settings.md), and parts
            that are handed in ready-made: `topology`, `loss`, `metrics`.

    Returns:
        The models and how they came about.

    Raises:
        ValueError: A setting is not allowed; the message says what is.
        Diverged: A model is no longer finite.

    Examples:
        >>> import polytier
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> run = polytier.train(polytier.FedAvg(device_steps=2), federation, "mclr", rounds=2)
        >>> run.rounds
        2
    """
    with make_loop(algorithm, federation, model, seed=seed, **settings) as loop:
        return loop.run(rounds, callbacks)


def make_loop(
    algorithm: Algorithm, federation: OneOrEach[Federation], model: OneOrEach[nn.Module | str], **settings: Any
) -> Loop:
    """A run that is ready to start, for whoever wants to take its rounds one by one. Arguments as in `train`.

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
    """A run in progress: what is fixed before the first round, and what changes from round to round.

    Attributes:
        spec: The specification of the run, complete.
        context: What the programs of the run share.
        state: What the server keeps between rounds.
        round: How many rounds are done.
        history: One record per round, as in metrics.jsonl.
        evaluations: The last evaluation of each model; of the only one, under "".
        collaboration: By round, who listens to whom, for a method that learns it.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.spec, self.algorithm = assembly.spec, assembly.algorithm
        self.context, self.codec = assembly.context, assembly.codec
        self.eval_every = assembly.spec.eval_every
        self.choose_workers = assembly.spec.workers is None and assembly.spec.engine == "stacked"
        first = {part.name: part.objective.initial.unsqueeze(0).clone() for part in self.context.parts}
        self.state: Rows = self.algorithm.init(first if self.algorithm.parts() else first[""])
        self.round, self.rounds = 0, 0  # done, and asked for
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.evaluations: dict[str, Evaluation] = {}
        self.collaboration: dict[int, Collaboration] = {}
        self._saved: Any = None  # a snapshot to go back to if nodes are lost, when it was taken, and how long that took
        self._saved_at = self._cost = 0.0

    @classmethod
    def of(cls, spec: RunSpec) -> Loop:
        """A run of this specification, ready to start."""
        return cls(assemble(spec))

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's processes."""
        self.assembly.close()

    def run(self, rounds: int, callbacks: Iterable[Callback] = (), stop: Callable[[], bool] = lambda: False) -> Run:
        """Run rounds up to number `rounds`; `stop()` is asked after each one."""
        callbacks, self.rounds = list(callbacks), rounds
        try:
            for callback in callbacks:
                callback.on_start(self)
            while self.round < rounds and not stop():
                self._secure()
                seconds = self._surely(self.step)
                self._consider_workers(seconds)
                record = self._surely(lambda spent=seconds: self._record(spent, last=self.round == rounds))
                self.history.append(record)
                for callback in callbacks:
                    callback.on_round(self, record)
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

    def step(self) -> float:
        """One round of the server's program; returns the seconds it took."""
        started = time.perf_counter()
        for part in self.context.parts:
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
        """What is known of the round that has just ended."""
        record: dict[str, Any] = {"round": self.round}
        if self.round % self.eval_every == 0 or last:
            self.evaluate()
            figures = {name: evaluation.figures() for name, evaluation in self.evaluations.items()}
            record |= {**means(list(figures.values())), "models": figures} if self.context.scopes else figures[""]
        ledgers = [part.ledger for part in self.context.parts]
        present: dict[str, list[np.ndarray]] = {}  # a team may be in the trees of several models
        for ledger in ledgers:
            for tier, mask in ledger.took_part.items():
                names = ledger.topology.names[tier][mask.numpy()]
                present.setdefault(ledger.topology.tier_names[tier], []).append(names)
        counts = {t: len(np.unique(np.concatenate(n)) if len(n) > 1 else n[0]) for t, n in present.items()}
        nbytes = add_up(ledger.rounds[-1] for ledger in ledgers)
        return {**record, "bytes": nbytes, "seconds": seconds, "participants": counts}

    def evaluate(self) -> None:
        """Evaluate all models at all devices."""
        self.evaluations = {p.name: evaluate(p, self.part_state(p.name), self.round) for p in self.context.parts}

    def _consider_workers(self, seconds: float) -> None:
        """Start worker processes if the rest of the run is long; the first round also traced, so it does not count."""
        if self.choose_workers and self.round > 1:
            self.choose_workers = False
            if seconds * (self.rounds - self.round) > WORKERS_PAY:
                engine_of(self.context).use_workers(os.cpu_count() or 1)

    # -- what others ask ------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The messages of the run; of several models, each one's context has its own."""
        return self.context.ledger

    def part_state(self, name: str) -> Rows:
        """What the server keeps of one of several models; of the only one, all of it."""
        assert isinstance(self.state, dict) or not name
        return unpack(name, self.state) if name and isinstance(self.state, dict) else self.state

    def learned(self) -> dict[int, Collaboration]:
        """Who listens to whom now, under the round's number; empty if the method does not learn that."""
        learned = self.algorithm.collaboration(self.state)
        return {} if learned is None else {self.round: replace(learned, ids=self.context.topology.names[1])}

    def use(self, engine: Engine) -> None:
        """Run the nodes by another engine."""
        for context in (self.context, *self.context.parts):
            context.engine = engine

    @property
    def _remote(self) -> bool:
        """Whether nodes, and what they keep, are in processes that may be lost."""
        return engine_of(self.context).remote

    # -- to go on later -------------------------------------------------------------------------------

    def keep_in(self, folder: Path) -> None:
        """Keep the nodes' rows in files there; a checkpoint then leaves them where they are. Before the first round."""
        for k, part in enumerate(() if self._remote else self.context.parts):
            part.memory = MappedMemory(part.topology, folder / str(k))

    @property
    def stores(self) -> list[MappedMemory]:
        """The memories that are files."""
        return [part.memory for part in self.context.parts if isinstance(part.memory, MappedMemory)]

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts from which `restore` goes on to the bit."""
        return self._surely(lambda: snapshot.take(self))

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go back to a snapshot."""
        snapshot.put_back(self, tensors, facts)
        self.seconds, self.history = facts["seconds"], facts["history"]
        if self.history:
            self.evaluate()

    # -- where nodes may be lost ----------------------------------------------------------------------

    def _secure(self) -> None:
        """Take a snapshot to go back to: before the first round, and then as often as is cheap."""
        started = time.perf_counter()
        if self._remote and (self._saved is None or started - self._saved_at > PATIENCE * self._cost):
            self._saved = copy.deepcopy(self.snapshot())
            self._saved_at = time.perf_counter()
            self._cost = self._saved_at - started

    def _surely(self, work: Callable[[], T]) -> T:
        """The result of `work`; if nodes are lost, new ones are brought to this round first, without callbacks."""
        goal, lost = self.round, None
        for _ in range(ATTEMPTS):
            try:
                if lost is not None:
                    snapshot.put_back(self, *copy.deepcopy(self._saved))
                    log.warning("%s; going on from a snapshot after round %d", lost, self.round)
                    while self.round < goal:
                        self.step()
                return work()
            except NodesLost as error:
                if self._saved is None:
                    raise
                lost = error
        raise NodesLost(f"{lost}, {ATTEMPTS} times in a row; resume the run, with fewer --workers if memory was short")


def means(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss and metrics of several models, averaged over the models that have them."""
    result: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for each in figures for kind in each):
        for split in dict.fromkeys(split for each in figures for split in each.get(kind, ())):
            seen = [each[kind][split] for each in figures if split in each.get(kind, {})]
            shared = [metric for metric in seen[0] if all(metric in s and s[metric] is not None for s in seen)]
            result.setdefault(kind, {})[split] = {m: sum(s[m] for s in seen) / len(seen) for m in shared}
    return result
