"""The one loop: rounds of the server's program, evaluation, callbacks."""

from __future__ import annotations

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

from polytier.algorithm import Algorithm, Children, check_finite
from polytier.codec import CODECS
from polytier.collaboration import Collaboration, when_kept
from polytier.data.batches import Batches, check_batch_size
from polytier.data.federation import Federation
from polytier.engines.stacked import Stacked
from polytier.evaluation import Evaluation, evaluate
from polytier.ledger import Ledger, add_up
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
from polytier.rows import Rows, pack, unpack
from polytier.run import Run
from polytier.store import Store
from polytier.topology import Topology
from polytier.world import Clock, World

log = logging.getLogger("polytier")
WORKERS_PAY = 30  # seconds of work that are worth the start of worker processes


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
        batching: OneOrEach[str | None] = None,
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

        A wrapper of several methods takes federation, model, loss, l2, batch_size and batching once for all of
        them or one by name.
        """
        check_settings(eval_every, workers, tile, dtype, on, codec, absent)
        self.algorithm, self.seed, self.eval_every = algorithm, seed, eval_every
        own = {
            "federation": federation, "model": model, "loss": loss, "l2": l2, "batch_size": batch_size,
            "batching": batching,
        }  # fmt: skip
        shared = {
            "seed": seed, "topology": topology, "metrics": metrics, "absent": absent, "dtype": dtype, "on": on,
            "rules": (Participation.parse(team_participation), Participation.parse(device_participation)),
        }  # fmt: skip
        methods = algorithm.parts() or {"": algorithm}
        of_each = {name: {k: one_of(k, v, name, methods) for k, v in own.items()} for name in methods}
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more would change the order of sums with the machine
        try:
            made: dict[str, Objective] = {}  # models alike share theirs: its graphs are traced once
            worlds = {
                name: make_world(method, name=name, hold=algorithm.frame, made=made, **of_each[name], **shared)
                for name, method in methods.items()
            }
            self.world = join(algorithm, worlds) if algorithm.parts() else worlds[""]
            note_flat(topology, list(worlds.values()))
            for warning in algorithm.check(self._server(0)):
                log.warning("%s", warning)
        except Exception:
            torch.set_num_threads(self.threads)
            raise
        self.codec = CODECS[codec or dtype]
        recorded = {
            name: {
                "model": each["model"] if isinstance(each["model"], str) else "python", "l2": each["l2"],
                "batch_size": each["batch_size"], "batching": worlds[name].objective.batching,
            }
            for name, each in of_each.items()
        }  # fmt: skip
        self.settings: dict[str, Any] = {  # what a run folder records
            "seed": seed, "absent": absent, "eval_every": eval_every, "dtype": dtype, "on": on,
            "codec": self.codec.name, **({"models": recorded} if algorithm.parts() else recorded[""]),
        }  # fmt: skip
        self.use(Stacked(self.world, self.codec, tile=tile, inner_tile=inner_tile, workers=workers or 1))
        self.choose_workers = workers is None
        first = {name: world.objective.initial.unsqueeze(0).clone() for name, world in worlds.items()}
        self.state: Rows = algorithm.init(first if algorithm.parts() else first[""])
        self.round, self.rounds = 0, 0  # done, and asked for
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.evaluations: dict[str, Evaluation] = {}  # by model; "" where there is one
        self.collaboration: dict[int, Collaboration] = {}  # by round, of a method that learns whom to listen to

    @property
    def ledger(self) -> Ledger:
        """The messages of the run; where there are several models each one's world has its own."""
        return self.world.ledger

    def use(self, engine: Any) -> None:
        """Run the nodes by this engine."""
        for world in (self.world, *self.world.parts):
            world.engine = engine

    def keep_in(self, folder: Path) -> None:
        """Keep the nodes' rows in files there; a checkpoint then leaves them where they are. Before the first round."""
        for k, part in enumerate(self.world.parts):
            part.memory = Store(part.topology, folder / str(k))

    @property
    def stores(self) -> list[Store]:
        return [part.memory for part in self.world.parts if isinstance(part.memory, Store)]

    def part_state(self, name: str) -> Rows:
        """What the server keeps of one of several models; of the only one, all of it."""
        assert isinstance(self.state, dict) or not name
        return unpack(name, self.state) if name and isinstance(self.state, dict) else self.state

    def _server(self, round_: int) -> Children:
        return Children(self.world, 0, torch.zeros(1, dtype=torch.int64), Clock(round_))

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
        for part in self.world.parts:
            part.ledger.start_round()
        server = self._server(self.round)
        self.state = self.algorithm.server(self.state, server)
        check_finite(server, self.state)
        self.round += 1
        if when_kept(self.round):
            self.collaboration |= self.learned()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return seconds

    def learned(self) -> dict[int, Collaboration]:
        """Who listens to whom now, under the round's number; nothing if the method does not learn that."""
        learned = self.algorithm.collaboration(self.state)
        return {} if learned is None else {self.round: replace(learned, ids=self.world.topology.names[1])}

    def _record(self, seconds: float, last: bool) -> dict[str, Any]:
        """What is known of the round that has just ended."""
        record: dict[str, Any] = {"round": self.round}
        if self.round % self.eval_every == 0 or last:
            self._evaluate()
            figures = {name: evaluation.figures() for name, evaluation in self.evaluations.items()}
            record |= {**means(list(figures.values())), "models": figures} if self.world.scopes else figures[""]
        ledgers = [part.ledger for part in self.world.parts]
        present: dict[str, list[np.ndarray]] = {}  # a team may be in the trees of several models
        for ledger in ledgers:
            for tier, mask in ledger.took_part.items():
                names = ledger.topology.names[tier][mask.numpy()]
                present.setdefault(ledger.topology.tier_names[tier], []).append(names)
        counts = {t: len(np.unique(np.concatenate(n)) if len(n) > 1 else n[0]) for t, n in present.items()}
        nbytes = add_up(ledger.rounds[-1] for ledger in ledgers)
        return {**record, "bytes": nbytes, "seconds": seconds, "participants": counts}

    def _evaluate(self) -> None:
        self.evaluations = {p.name: evaluate(p, self.part_state(p.name), self.round) for p in self.world.parts}

    # -- to go on later ------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts from which `restore` goes on to the bit."""
        tensors = pack("state", self.state)
        for part in self.world.parts:
            rows = {} if self.stores else part.memory.state()
            kept = {f"memory:{k}": v for k, v in rows.items()} | part.ledger.state()
            tensors |= {f"{part.name}>{k}" if part.name else k: v for k, v in kept.items()}
        for number, learned in self.collaboration.items():
            arrays = {"base": learned.base, "pairs": learned.pairs, "weights": learned.weights}
            tensors |= {f"collaboration:{number}:{k}": torch.from_numpy(v) for k, v in arrays.items()}
        of_each = {p.name: {"device_steps": p.device_steps, "traffic": p.ledger.rounds} for p in self.world.parts}
        facts = {
            "round": self.round, "seconds": self.seconds, "history": self.history,
            "collaboration": list(self.collaboration), "epochs": [store.advance() for store in self.stores],
            **(of_each.get("") or {"device_steps": self.world.all_steps, "models": of_each}),
        }  # fmt: skip
        return tensors, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.state = unpack("state", tensors)
        if len(self.stores) != len(epochs := facts.get("epochs", [])):
            raise ValueError("the rows of this checkpoint are in files of their own; call keep_in(FOLDER) first")
        for store, epoch in zip(self.stores, epochs, strict=True):
            store.undo(epoch)
        for part in self.world.parts:
            prefix = f"{part.name}>" if part.name else ""
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            part.memory.load({k.removeprefix("memory:"): v for k, v in own.items() if k.startswith("memory:")})
            its = facts["models"][part.name] if part.name else facts
            part.ledger.load(own, its["traffic"])
            part.device_steps = its["device_steps"]
        ids = self.world.topology.names[1]
        for number in facts.get("collaboration", ()):
            arrays = (tensors[f"collaboration:{number}:{k}"].numpy() for k in ("base", "pairs", "weights"))
            self.collaboration[number] = Collaboration(ids, *arrays)
        self.round, self.seconds, self.history = facts["round"], facts["seconds"], facts["history"]
        if self.history:
            self._evaluate()


# -- what a run is made of ----------------------------------------------------------------------------


def one_of(key: str, value: Any, name: str, methods: Mapping[str, Algorithm]) -> Any:
    """The setting of one of several models, if it is given by name."""
    if not isinstance(value, Mapping):
        return value
    if set(value) != set(methods) or "" in methods:
        wanted = f"the models are {', '.join(methods)}" if "" not in methods else "there is one model"
        raise ValueError(f"{key} is given for {', '.join(map(str, value)) or 'no model'}; {wanted}")
    return value[name]


def make_world(
    algorithm: Algorithm, *, name: str, federation: Federation, model: nn.Module | str, seed: int,
    topology: Topology | None, rules: tuple[Participation, Participation], loss: Loss | None,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None, l2: float, batch_size: int | str, absent: str,
    dtype: str, on: str, batching: str | None, hold: int, made: dict[str, Objective],
) -> World:  # fmt: skip
    """All that the programs of one model share."""
    check_batch_size(batch_size)
    if batching not in (None, *BATCHINGS):
        raise ValueError(f"batching {batching!r} is unknown; allowed: {', '.join(BATCHINGS)}")
    topology = topology or default_topology(federation)
    if algorithm.tiers == 2 and topology.num_tiers > 2:
        topology = topology.flat()
    kind: torch.dtype = getattr(torch, dtype)
    alike = repr((id(federation), model if isinstance(model, str) else id(model), id(loss), l2, batch_size, batching))
    if isinstance(model, str):
        model = make_model(model, tuple(federation.x.shape[1:]), federation.num_classes, seed)
    classes = federation.num_classes is not None
    metrics = metrics if metrics is not None else {"accuracy": correct} if classes else {}
    objective = made.get(alike) or Objective(
        checked(type(model).__name__, model), loss or default_loss(model, classes), l2=l2, dtype=kind, device=on,
        batching=batching or "stacked",
    )  # fmt: skip
    batches = Batches(federation, seed, kind, on, bool(objective.dropouts))
    if batching is None and alike not in made:
        few = torch.arange(min(4, len(federation)))
        size = batch_size if isinstance(batch_size, int) else 32
        choose_batching(objective, batches.walk(few, 0, 0, size).next(), seed)
        if objective.batching != "stacked":
            log.info("batching: %s (rows of this model depend on their stack)", objective.batching)
    made[alike] = objective
    teams, devices = rules
    participation = (Participation(), *[teams] * (topology.num_tiers - 2), devices)
    return World(
        algorithm, topology, objective, batches, Memory(topology), named(participation, topology), seed, batch_size,
        absent, metrics=metrics, ledger=Ledger(topology), name=name, hold=hold, module=model,
    )  # fmt: skip


def note_flat(topology: Topology | None, worlds: list[World]) -> None:
    """Say once which methods have no use for the teams that there are."""
    deep = [w.batches.federation.team is not None if topology is None else topology.num_tiers > 2 for w in worlds]
    flat = {
        type(w.algorithm).__name__ for w, teams in zip(worlds, deep, strict=True) if teams and w.algorithm.tiers == 2
    }
    for name in sorted(flat):
        log.info("%s is a flat method: the teams are ignored", name)


def join(algorithm: Algorithm, worlds: dict[str, World]) -> World:
    """The world above those of several models on one pool of devices."""
    first, *others = worlds.values()
    for world in others:
        if not np.array_equal(world.batches.federation.ids, first.batches.federation.ids):
            raise ValueError(
                f"the data of {first.name} and {world.name} name other devices; several models share one pool, "
                "so each device needs data for every model"
            )
    deepest = max(worlds.values(), key=lambda world: world.topology.num_tiers)
    for world in worlds.values():
        if world.algorithm.tiers != 2 and not deepest.topology.same_as(world.topology):
            raise ValueError(
                f"the data of {deepest.name} and {world.name} have other teams; several models share one pool, so each "
                "device is in one team: give a topology, or data that name the same teams"
            )
    return replace(
        deepest, algorithm=algorithm, memory=Memory(deepest.topology), name="", scopes=worlds, ledger=None, hold=1
    )  # type: ignore[arg-type]


def means(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss and metrics of several models, averaged over the models that have them."""
    result: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for each in figures for kind in each):
        for split in dict.fromkeys(split for each in figures for split in each.get(kind, ())):
            seen = [each[kind][split] for each in figures if split in each.get(kind, {})]
            shared = [metric for metric in seen[0] if all(metric in s and s[metric] is not None for s in seen)]
            result.setdefault(kind, {})[split] = {m: sum(s[m] for s in seen) / len(seen) for m in shared}
    return result


def default_topology(federation: Federation) -> Topology:
    return Topology.build(federation.ids, *([] if federation.team is None else [federation.team]))


def default_loss(model: nn.Module, classes: bool) -> Loss:
    if type(model).__name__ == "Quadratic":
        return quadratic_loss
    return cross_entropy if classes else squared_error


def named(participation: tuple[Participation, ...], topology: Topology) -> tuple[Participation, ...]:
    """The rules for the nodes of this tree."""
    for tier, rule in enumerate(participation):
        if rule.table is not None and rule.table.shape[1] != topology.size(tier):
            raise ValueError(
                f"the participation table has {rule.table.shape[1]} columns; "
                f"there are {topology.size(tier)} nodes in tier {topology.tier_names[tier]}"
            )
    return tuple(rule.of(topology.names[tier]) for tier, rule in enumerate(participation))


def check_settings(eval_every, workers, tile, dtype, on, codec, absent) -> None:
    for name, value in (
        ("eval-every", eval_every),
        ("workers", 1 if workers is None else workers),
        ("tile", 1 if tile is None else tile),
    ):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} is a whole number of at least 1; got {value!r}")
    allowed = {
        "dtype": (dtype, ("float32", "float64")), "absent": (absent, ("skip", "stale")),
        "codec": (codec, (None, *CODECS)),
    }  # fmt: skip
    for name, (value, choices) in allowed.items():
        if value not in choices:
            raise ValueError(f"{name} {value!r} is unknown; allowed: {', '.join(c for c in choices if c)}")
    backend = on.split(":")[0]
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(backend, False):
        raise ValueError(f"no {on!r} here; there is {', '.join(k for k, v in there.items() if v)}")
