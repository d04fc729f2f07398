"""The one loop: rounds of the server's program, evaluation, callbacks."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from polytier.data.federation import Federation
from polytier.engines.machine import settle, tidy
from polytier.messages.codec import CODECS
from polytier.messages.ledger import Ledger, add_up
from polytier.method.algorithm import Algorithm
from polytier.method.call import Clock, NodesLost
from polytier.method.mapped_memory import MappedMemory
from polytier.method.node import Children, check_finite
from polytier.models.losses import Loss
from polytier.models.trainable import Trainable
from polytier.runs.evaluate import Evaluation, evaluate
from polytier.runs.making import check_settings, join, make_context, make_engine, note_flat, one_of
from polytier.runs.run import Run
from polytier.stack.objective import Objective
from polytier.stack.rows import Rows, pack, unpack
from polytier.tree.collaboration import Collaboration, when_kept
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology

log = logging.getLogger("polytier")
WORKERS_PAY = 30  # seconds of work that are worth the start of worker processes
PATIENCE = 10  # a snapshot may cost a tenth of the time, no more
ATTEMPTS = 3  # a round in which nodes are lost as often as this is given up


T = TypeVar("T")
OneOrEach = T | Mapping[str, T]  # where several models share the devices: one for all, or one by name


class Callback:
    """Hooks of a run; each does nothing unless overridden."""

    def on_start(self, training: Training) -> None: ...

    def on_round(self, training: Training, record: dict[str, Any]) -> None: ...

    def on_end(self, training: Training, run: Run) -> None: ...

    def close(self) -> None:
        """Always called, also after an error."""


def train(
    algorithm: Algorithm, federation: OneOrEach[Federation], model: OneOrEach[nn.Module | str], *, rounds: int = 100,
    seed: int = 0, callbacks: Iterable[Callback] = (), **settings: Any,
) -> Run:  # fmt: skip
    """Train `model` over `federation` with `algorithm` for `rounds` rounds. `settings` are those of `Training`."""
    with Training(algorithm, federation, model, seed=seed, **settings) as training:
        return training.run(rounds, callbacks)


class Training:
    """A run in progress: what is fixed before the first round, and what changes from round to round."""

    def __init__(
        self, algorithm: Algorithm, federation: OneOrEach[Federation], model: OneOrEach[nn.Module | str], *,
        seed: int = 0, topology: Topology | None = None, loss: OneOrEach[Loss | None] = None,
        metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None, l2: OneOrEach[float] = 0.0,
        team_participation: Any = 1.0, device_participation: Any = 1.0, absent: str = "skip",
        batch_size: OneOrEach[int | str] = 32, eval_every: int = 1, workers: int | None = 1, tile: int | None = None,
        inner_tile: int | None = None, dtype: str = "float32", on: str = "cpu", codec: str | None = None,
        batching: OneOrEach[str | None] = None, engine: str = "stacked", train: OneOrEach[str | Trainable] = "all",
    ) -> None:  # fmt: skip
        """Settle everything; nothing is drawn from a generator with hidden state.

        topology            | by default the federation's teams, or flat if there are none
        loss, metrics       | functions (outputs, targets) -> one value a sample; by default cross-entropy and
                              accuracy for classes, half the squared error otherwise
        l2                  | adds l2/2 |theta|^2 to every device's objective
        *_participation     | a fraction, "count:N", "table:FILE", "schedule:FILE" or a table [rounds, nodes]
        absent              | "skip": the mean is over those who answered; "stale": the others' last answers count too
        batch_size          | a number, or "grow:A/(B+t)": at least the share 1 - A/(B+t) of a device's samples
        tile, workers       | devices computed at once, processes; neither changes a bit of the result. workers=None:
                              one a core, as soon as the rest of the run would take so long that it pays
        batching            | how stacks are run (see objective.py); None: found by a check at the start
        engine              | "stacked", or "ray": sub-trees in `workers` processes (None: one a core) of a Ray instance
                              made for this run; "ray:auto", "ray:HOST:PORT": of a cluster. No bit changes
        train               | which parameters train: "all", "head", "layers=PATTERN" (models/trainable.py); all others,
                              and those with requires_grad=False, stay as they are and are neither sent nor saved

        A wrapper of several methods takes federation, model, loss, l2, batch_size, batching and train once for all of
        them or one by name.
        """
        check_settings(eval_every, workers, tile, dtype, on, codec, absent, engine)
        self.algorithm, self.seed, self.eval_every = algorithm, seed, eval_every
        own = {
            "federation": federation, "model": model, "loss": loss, "l2": l2, "batch_size": batch_size,
            "batching": batching, "train": train,
        }  # fmt: skip
        shared = {
            "seed": seed, "topology": topology, "metrics": metrics, "absent": absent, "dtype": dtype, "on": on,
            "rules": (Participation.parse(team_participation), Participation.parse(device_participation)),
        }  # fmt: skip
        methods = algorithm.parts() or {"": algorithm}
        of_each = {name: {k: one_of(k, v, name, methods) for k, v in own.items()} for name in methods}
        self.codec = CODECS[codec or dtype]
        self.threads = torch.get_num_threads()
        settle()
        try:
            made: dict[str, Objective] = {}  # models alike share theirs: its graphs are traced once
            contexts = {
                name: make_context(method, name=name, hold=algorithm.frame, made=made, **of_each[name], **shared)
                for name, method in methods.items()
            }
            self.context = join(algorithm, contexts) if algorithm.parts() else contexts[""]
            note_flat(topology, list(contexts.values()))
            for warning in algorithm.check(self._server(0)):
                log.warning("%s", warning)
            self.use(make_engine(engine, self.context, self.codec, tile, inner_tile, workers))
        except Exception:
            torch.set_num_threads(self.threads)
            raise
        recorded = {
            name: {
                "model": each["model"] if isinstance(each["model"], str) else "python", "l2": each["l2"],
                "batch_size": each["batch_size"], "batching": contexts[name].objective.batching,
                **({} if Trainable.parse(each["train"]).kind == "all" else {"train": str(each["train"])}),
            }
            for name, each in of_each.items()
        }  # fmt: skip
        self.settings: dict[str, Any] = {  # what a run folder records
            "seed": seed, "absent": absent, "eval_every": eval_every, "dtype": dtype, "on": on,
            "codec": self.codec.name, **({"models": recorded} if algorithm.parts() else recorded[""]),
        }  # fmt: skip
        self.choose_workers = workers is None and engine == "stacked"
        first = {name: context.objective.initial.unsqueeze(0).clone() for name, context in contexts.items()}
        self.state: Rows = algorithm.init(first if algorithm.parts() else first[""])
        self.round, self.rounds = 0, 0  # done, and asked for
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.evaluations: dict[str, Evaluation] = {}  # by model; "" where there is one
        self.collaboration: dict[int, Collaboration] = {}  # by round, of a method that learns whom to listen to
        self._saved: Any = None  # a snapshot to go back to if nodes are lost, when it was taken, and how long that took
        self._saved_at = self._cost = 0.0

    @property
    def ledger(self) -> Ledger:
        """The messages of the run; where there are several models each one's context has its own."""
        return self.context.ledger

    def use(self, engine: Any) -> None:
        """Run the nodes by this engine."""
        for context in (self.context, *self.context.parts):
            context.engine = engine

    @property
    def _remote(self) -> bool:
        """Whether nodes, and what they keep, are in processes that may be lost."""
        return getattr(self.context.engine, "remote", False)

    def keep_in(self, folder: Path) -> None:
        """Keep the nodes' rows in files there; a checkpoint then leaves them where they are. Before the first round."""
        for k, part in enumerate(() if self._remote else self.context.parts):
            part.memory = MappedMemory(part.topology, folder / str(k))

    @property
    def stores(self) -> list[MappedMemory]:
        return [part.memory for part in self.context.parts if isinstance(part.memory, MappedMemory)]

    def part_state(self, name: str) -> Rows:
        """What the server keeps of one of several models; of the only one, all of it."""
        assert isinstance(self.state, dict) or not name
        return unpack(name, self.state) if name and isinstance(self.state, dict) else self.state

    def _server(self, round_: int) -> Children:
        return Children(self.context, 0, torch.zeros(1, dtype=torch.int64), Clock(round_))

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.context.engine.close()  # type: ignore[attr-defined]
        torch.set_num_threads(self.threads)

    def run(self, rounds: int, callbacks: Iterable[Callback] = (), stop: Callable[[], bool] = lambda: False) -> Run:
        """Rounds up to number `rounds`; `stop()` is asked after each one."""
        callbacks, self.rounds = list(callbacks), rounds
        try:
            for callback in callbacks:
                callback.on_start(self)
            while self.round < rounds and not stop():
                self._secure()
                seconds = self._surely(self.step)
                if self.choose_workers and self.round > 1:  # the first round also traced
                    self.choose_workers = False
                    if seconds * (rounds - self.round) > WORKERS_PAY:
                        self.context.engine.use_workers(os.cpu_count() or 1)  # type: ignore[attr-defined]
                record = self._surely(lambda spent=seconds: self._record(spent, last=self.round == rounds))
                self.history.append(record)
                for callback in callbacks:
                    callback.on_round(self, record)
            run = self._surely(lambda: Run.of(self))
            for callback in callbacks:
                callback.on_end(self, run)
            return run
        finally:
            for callback in callbacks:
                callback.close()

    def step(self) -> float:
        """One round of the server's program; the seconds it took."""
        started = time.perf_counter()
        for part in self.context.parts:
            part.ledger.start_round()
        server = self._server(self.round)
        self.state = self.algorithm.server(self.state, server)
        check_finite(server, self.state)
        self.round += 1
        if when_kept(self.round):
            self.collaboration |= self.learned()
        tidy()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return seconds

    def learned(self) -> dict[int, Collaboration]:
        """Who listens to whom now, under the round's number; nothing if the method does not learn that."""
        learned = self.algorithm.collaboration(self.state)
        return {} if learned is None else {self.round: replace(learned, ids=self.context.topology.names[1])}

    def _record(self, seconds: float, last: bool) -> dict[str, Any]:
        """What is known of the round that has just ended."""
        record: dict[str, Any] = {"round": self.round}
        if self.round % self.eval_every == 0 or last:
            self._evaluate()
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

    def _evaluate(self) -> None:
        self.evaluations = {p.name: evaluate(p, self.part_state(p.name), self.round) for p in self.context.parts}

    # -- to go on later ------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts from which `restore` goes on to the bit."""
        return self._surely(self._snapshot)

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = pack("state", self.state)
        for part in self.context.parts:
            rows = {} if self.stores else part.memory.state()
            kept = {f"memory:{k}": v for k, v in rows.items()} | part.ledger.state()
            tensors |= {f"{part.name}>{k}" if part.name else k: v for k, v in kept.items()}
        for number, learned in self.collaboration.items():
            arrays = {"base": learned.base, "pairs": learned.pairs, "weights": learned.weights}
            tensors |= {f"collaboration:{number}:{k}": torch.from_numpy(v) for k, v in arrays.items()}
        of_each = {p.name: {"device_steps": p.device_steps, "traffic": p.ledger.rounds} for p in self.context.parts}
        facts = {
            "round": self.round, "seconds": self.seconds, "history": self.history,
            "collaboration": list(self.collaboration), "epochs": [store.advance() for store in self.stores],
            **(of_each.get("") or {"device_steps": self.context.all_steps, "models": of_each}),
        }  # fmt: skip
        return tensors, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._go_back(tensors, facts)
        self.seconds, self.history = facts["seconds"], facts["history"]
        if self.history:
            self._evaluate()

    def _go_back(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.state, self.round = unpack("state", tensors), facts["round"]
        if len(self.stores) != len(epochs := facts.get("epochs", [])):
            raise ValueError(
                "the rows of this checkpoint are in files of their own; call keep_in(FOLDER) first (engine stacked)"
            )
        for store, epoch in zip(self.stores, epochs, strict=True):
            store.undo(epoch)
        for part in self.context.parts:
            prefix = f"{part.name}>" if part.name else ""
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            part.memory.load({k.removeprefix("memory:"): v for k, v in own.items() if k.startswith("memory:")})
            its = facts["models"][part.name] if part.name else facts
            part.ledger.load(own, its["traffic"])
            part.device_steps = its["device_steps"]
        ids = self.context.topology.names[1]
        for number in facts.get("collaboration", ()):
            arrays = (tensors[f"collaboration:{number}:{k}"].numpy() for k in ("base", "pairs", "weights"))
            self.collaboration[number] = Collaboration(ids, *arrays)

    # -- where nodes may be lost ---------------------------------------------------------------------

    def _secure(self) -> None:
        """Take a snapshot to go back to: before the first round, and then as often as is cheap."""
        started = time.perf_counter()
        if self._remote and (self._saved is None or started - self._saved_at > PATIENCE * self._cost):
            self._saved = copy.deepcopy(self.snapshot())
            self._saved_at = time.perf_counter()
            self._cost = self._saved_at - started

    def _surely(self, work: Callable[[], T]) -> T:
        """The result of `work`; if nodes are lost they are brought back to this round, and callbacks hear nothing."""
        goal, lost = self.round, None
        for _ in range(ATTEMPTS):
            try:
                if lost is not None:
                    self._go_back(*copy.deepcopy(self._saved))
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
