"""The one loop: rounds of the server's program, evaluation, callbacks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polytier.algorithm import Algorithm, Children, Clock, World, check_finite
from polytier.checkpoint import pack, unpack
from polytier.codec import CODECS
from polytier.data.batches import Batches
from polytier.data.federation import Federation
from polytier.engines.stacked import Stacked
from polytier.evaluation import Evaluation, evaluate
from polytier.ledger import Ledger
from polytier.memory import Memory
from polytier.models import checked, make_model, quadratic_loss
from polytier.objective import (
    BATCHINGS,
    Loss,
    Objective,
    choose_batching,
    correct,
    cross_entropy,
    squared_error,
)
from polytier.participation import Participation
from polytier.rows import Rows
from polytier.run import Run
from polytier.topology import Topology

log = logging.getLogger("polytier")
WORKERS_PAY = 30  # seconds of work that are worth the start of worker processes


class Callback:
    """Hooks of a run; each does nothing unless overridden."""

    def on_start(self, training: Training) -> None: ...

    def on_round(self, training: Training, record: dict[str, Any]) -> None: ...

    def on_end(self, training: Training, run: Run) -> None: ...

    def close(self) -> None:
        """Always called, also after an error."""


def train(
    algorithm: Algorithm, federation: Federation, model: nn.Module | str, *, rounds: int = 100, seed: int = 0,
    callbacks: Iterable[Callback] = (), **settings: Any,
) -> Run:  # fmt: skip
    """Train `model` over `federation` with `algorithm` for `rounds` rounds. `settings` are those of `Training`."""
    with Training(algorithm, federation, model, seed=seed, **settings) as training:
        return training.run(rounds, callbacks)


class Training:
    """A run in progress: what is fixed before the first round, and what changes from round to round."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, model: nn.Module | str, *, seed: int = 0,
        topology: Topology | None = None, loss: Loss | None = None,
        metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None, l2: float = 0.0,
        team_participation: Any = 1.0, device_participation: Any = 1.0, absent: str = "skip", batch_size: int = 32,
        eval_every: int = 1, workers: int | None = 1, tile: int | None = None, inner_tile: int | None = None,
        dtype: str = "float32", on: str = "cpu", codec: str | None = None, batching: str | None = None,
    ) -> None:  # fmt: skip
        """Settle everything; nothing is drawn from a generator with hidden state.

        topology            | by default the federation's teams, or flat if there are none
        loss, metrics       | functions (outputs, targets) -> one value a sample; by default cross-entropy and
                              accuracy for classes, half the squared error otherwise
        l2                  | adds l2/2 |theta|^2 to every device's objective
        *_participation     | a fraction, "count:N", "table:FILE" or a table [rounds, nodes]
        absent              | "skip": the mean is over those who answered; "stale": the others' last answers count too
        tile, workers       | devices computed at once, processes; neither changes a bit of the result. workers=None:
                              one a core, as soon as the rest of the run would take so long that it pays
        batching            | how stacks are run (see objective.py); None: found by a check at the start
        """
        check_settings(batch_size, eval_every, workers, tile, dtype, on, codec, absent, batching)
        self.algorithm, self.federation, self.seed, self.eval_every = algorithm, federation, seed, eval_every
        topology = topology or default_topology(federation)
        if algorithm.tiers == 2 and topology.num_tiers > 2:
            log.info("%s is a flat method: the teams are ignored", type(algorithm).__name__)
            topology = topology.flat()
        kind: torch.dtype = getattr(torch, dtype)
        name = model if isinstance(model, str) else "python"
        if isinstance(model, str):
            model = make_model(model, tuple(federation.x.shape[1:]), federation.num_classes, seed)
        self.module = checked(type(model).__name__, model)
        classes = federation.num_classes is not None
        loss = loss or default_loss(model, classes)
        metrics = metrics if metrics is not None else {"accuracy": correct} if classes else {}
        objective = Objective(model, loss, l2=l2, dtype=kind, device=on, batching=batching or "stacked")
        teams, devices = Participation.parse(team_participation), Participation.parse(device_participation)
        participation = (Participation(), *[teams] * (topology.num_tiers - 2), devices)
        check_tables(participation, topology)
        self.world = World(
            algorithm, topology, objective, Batches(federation, seed, kind, on, bool(objective.dropouts)),
            Memory(topology), participation, seed, batch_size, absent, metrics=metrics,
        )  # fmt: skip
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more would change the order of sums with the machine
        if batching is None:
            choose_batching(objective, self._sample_batch(), seed)
            if objective.batching != "stacked":
                log.info("batching: %s (rows of this model depend on their stack)", objective.batching)
        self.ledger = Ledger(topology)
        self.codec = CODECS[codec or dtype]
        self.settings: dict[str, Any] = {  # what a run folder records
            "model": name, "seed": seed, "l2": l2, "absent": absent, "batch_size": batch_size,
            "eval_every": eval_every, "dtype": dtype, "on": on, "codec": self.codec.name,
            "batching": objective.batching,
        }  # fmt: skip
        self.world.engine = Stacked(
            self.world, self.ledger, self.codec, tile=tile, inner_tile=inner_tile, workers=workers or 1
        )
        self.choose_workers = workers is None
        self.state: Rows = algorithm.init(objective.initial.unsqueeze(0).clone())
        self.round, self.rounds = 0, 0  # done, and asked for
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.evaluation: Evaluation | None = None

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.world.engine.close()  # type: ignore[attr-defined]
        torch.set_num_threads(self.threads)

    def run(self, rounds: int, callbacks: Iterable[Callback] = (), stop: Callable[[], bool] = lambda: False) -> Run:
        """Rounds up to number `rounds`; `stop()` is asked after each one."""
        callbacks, self.rounds = list(callbacks), rounds
        try:
            for callback in callbacks:
                callback.on_start(self)
            while self.round < rounds and not stop():
                seconds = self.step()
                if self.choose_workers and self.round > 1:  # the first round also traced
                    self.choose_workers = False
                    if seconds * (rounds - self.round) > WORKERS_PAY:
                        self.world.engine.use_workers(os.cpu_count() or 1)  # type: ignore[attr-defined]
                record = self._record(seconds, last=self.round == rounds)
                self.history.append(record)
                for callback in callbacks:
                    callback.on_round(self, record)
            run = Run.of(self)
            for callback in callbacks:
                callback.on_end(self, run)
            return run
        finally:
            for callback in callbacks:
                callback.close()

    def step(self) -> float:
        """One round of the server's program; the seconds it took."""
        started = time.perf_counter()
        self.ledger.start_round()
        server = Children(self.world, 0, torch.zeros(1, dtype=torch.int64), Clock(self.round))
        self.state = self.algorithm.server(self.state, server)
        check_finite(server, self.state)
        self.round += 1
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return seconds

    def _record(self, seconds: float, last: bool) -> dict[str, Any]:
        """What is known of the round that has just ended."""
        record: dict[str, Any] = {"round": self.round}
        if self.round % self.eval_every == 0 or last:
            self.evaluation = evaluate(self.world, self.state, self.round)
            for model, split in self.evaluation.sums:
                record.setdefault(model, {})[split] = self.evaluation.summary(model, split)
        names = self.world.topology.tier_names
        took_part = {names[t]: int(mask.sum()) for t, mask in self.ledger.took_part.items()}
        return {**record, "bytes": self.ledger.rounds[-1], "seconds": seconds, "participants": took_part}

    def _sample_batch(self):
        """A batch of a few devices, for the self-check."""
        rows = torch.arange(min(4, len(self.federation)))
        return self.world.batches.walk(rows, 0, 0, self.world.batch_size).next()

    # -- to go on later ------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts from which `restore` goes on to the bit."""
        tensors = pack("state", self.state)
        tensors |= {f"memory:{k}": v for k, v in self.world.memory.state().items()}
        tensors |= self.ledger.state()
        facts = {
            "round": self.round, "seconds": self.seconds, "device_steps": self.world.device_steps,
            "history": self.history, "traffic": self.ledger.rounds,
        }  # fmt: skip
        return tensors, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.state = unpack("state", tensors)
        prefix = "memory:"
        self.world.memory.load({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        self.ledger.load(tensors, facts["traffic"])
        self.round, self.seconds, self.history = facts["round"], facts["seconds"], facts["history"]
        self.world.device_steps = facts["device_steps"]
        if self.history:
            self.evaluation = evaluate(self.world, self.state, self.round)


def default_topology(federation: Federation) -> Topology:
    return Topology.build(federation.ids, *([] if federation.team is None else [federation.team]))


def default_loss(model: nn.Module, classes: bool) -> Loss:
    if type(model).__name__ == "Quadratic":
        return quadratic_loss
    return cross_entropy if classes else squared_error


def check_tables(participation: Iterable[Participation], topology: Topology) -> None:
    for tier, rule in enumerate(participation):
        if rule.table is not None and rule.table.shape[1] != topology.size(tier):
            raise ValueError(
                f"the participation table has {rule.table.shape[1]} columns; "
                f"there are {topology.size(tier)} nodes in tier {topology.tier_names[tier]}"
            )


def check_settings(batch_size, eval_every, workers, tile, dtype, on, codec, absent, batching) -> None:
    for name, value in (
        ("batch size", batch_size),
        ("eval-every", eval_every),
        ("workers", 1 if workers is None else workers),
        ("tile", 1 if tile is None else tile),
    ):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} is a whole number of at least 1; got {value!r}")
    allowed = {
        "dtype": (dtype, ("float32", "float64")), "absent": (absent, ("skip", "stale")),
        "codec": (codec, (None, *CODECS)), "batching": (batching, (None, *BATCHINGS)),
    }  # fmt: skip
    for name, (value, choices) in allowed.items():
        if value not in choices:
            raise ValueError(f"{name} {value!r} is unknown; allowed: {', '.join(c for c in choices if c)}")
    backend = on.split(":")[0]
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(backend, False):
        raise ValueError(f"no {on!r} here; there is {', '.join(k for k, v in there.items() if v)}")
