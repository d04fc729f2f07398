"""What a run is made of: the context of each model, and the engine; settings are checked here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polytier.data.batches import Batches, check_batch_size
from polytier.data.federation import Federation
from polytier.engines.stacked import Stacked
from polytier.messages.codec import CODECS, Codec
from polytier.messages.ledger import Ledger
from polytier.method.algorithm import Algorithm
from polytier.method.context import Context
from polytier.method.memory import Memory
from polytier.models.losses import Loss, default_loss
from polytier.models.metrics import correct
from polytier.models.trainable import Trainable
from polytier.models.zoo import checked, make_model
from polytier.stack.objective import BATCHINGS, Objective, choose_batching
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology

log = logging.getLogger("polytier")


def one_of(key: str, value: Any, name: str, methods: Mapping[str, Algorithm]) -> Any:
    """The setting of one of several models, if it is given by name."""
    if not isinstance(value, Mapping):
        return value
    if set(value) != set(methods) or "" in methods:
        wanted = f"the models are {', '.join(methods)}" if "" not in methods else "there is one model"
        raise ValueError(f"{key} is given for {', '.join(map(str, value)) or 'no model'}; {wanted}")
    return value[name]


def make_context(
    algorithm: Algorithm, *, name: str, federation: Federation, model: nn.Module | str, seed: int,
    topology: Topology | None, rules: tuple[Participation, Participation], loss: Loss | None,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None, l2: float, batch_size: int | str, absent: str,
    dtype: str, on: str, batching: str | None, hold: int, made: dict[str, Objective], train: str | Trainable = "all",
) -> Context:  # fmt: skip
    """All that the programs of one model share."""
    check_batch_size(batch_size)
    if batching not in (None, *BATCHINGS):
        raise ValueError(f"batching {batching!r} is unknown; allowed: {', '.join(BATCHINGS)}")
    topology = topology or default_topology(federation)
    if algorithm.tiers == 2 and topology.num_tiers > 2:
        topology = topology.flat()
    kind: torch.dtype = getattr(torch, dtype)
    trainable = Trainable.parse(train)
    named_or_id = model if isinstance(model, str) else id(model)
    alike = repr((id(federation), named_or_id, id(loss), l2, batch_size, batching, trainable))
    if isinstance(model, str):
        model = make_model(model, tuple(federation.x.shape[1:]), federation.num_classes, seed)
    classes = federation.num_classes is not None
    metrics = metrics if metrics is not None else {"accuracy": correct} if classes else {}
    objective = made.get(alike) or Objective(
        checked(type(model).__name__, model), loss or default_loss(model, classes), l2=l2, dtype=kind, device=on,
        batching=batching or "stacked", trainable=trainable,
    )  # fmt: skip
    batches = Batches(federation, seed, kind, on, bool(objective.dropouts))
    if batching is None and alike not in made:
        few = torch.arange(min(8, len(federation)))
        size = batch_size if isinstance(batch_size, int) else 32
        choose_batching(objective, batches.walk(few, 0, 0, size).next(), seed)
        if objective.batching != "stacked":
            log.info("batching: %s (rows of this model depend on their stack)", objective.batching)
    made[alike] = objective
    teams, devices = rules
    participation = (Participation(), *[teams] * (topology.num_tiers - 2), devices)
    return Context(
        algorithm, topology, objective, batches, Memory(topology), named(participation, topology), seed, batch_size,
        absent, metrics=metrics, ledger=Ledger(topology), name=name, hold=hold, module=model,
    )  # fmt: skip


def note_flat(topology: Topology | None, contexts: list[Context]) -> None:
    """Say once which methods have no use for the teams that there are."""
    deep = [w.batches.federation.team is not None if topology is None else topology.num_tiers > 2 for w in contexts]
    flat = {
        type(w.algorithm).__name__ for w, teams in zip(contexts, deep, strict=True) if teams and w.algorithm.tiers == 2
    }
    for name in sorted(flat):
        log.info("%s is a flat method: the teams are ignored", name)


def join(algorithm: Algorithm, contexts: dict[str, Context]) -> Context:
    """The context above those of several models on one pool of devices."""
    first, *others = contexts.values()
    for context in others:
        if not np.array_equal(context.batches.federation.ids, first.batches.federation.ids):
            raise ValueError(
                f"the data of {first.name} and {context.name} name other devices; several models share one pool, "
                "so each device needs data for every model"
            )
    deepest = max(contexts.values(), key=lambda context: context.topology.num_tiers)
    for context in contexts.values():
        if context.algorithm.tiers != 2 and not deepest.topology.same_as(context.topology):
            raise ValueError(
                f"the data of {deepest.name} and {context.name} have other teams; several models share one pool, so "
                "each device is in one team: give a topology, or data that name the same teams"
            )
    return replace(
        deepest, algorithm=algorithm, memory=Memory(deepest.topology), name="", scopes=contexts, ledger=None, hold=1
    )  # type: ignore[arg-type]


def default_topology(federation: Federation) -> Topology:
    return Topology.build(federation.ids, *([] if federation.team is None else [federation.team]))


def named(participation: tuple[Participation, ...], topology: Topology) -> tuple[Participation, ...]:
    """The rules for the nodes of this tree."""
    for tier, rule in enumerate(participation):
        if rule.table is not None and rule.table.shape[1] != topology.size(tier):
            raise ValueError(
                f"the participation table has {rule.table.shape[1]} columns; "
                f"there are {topology.size(tier)} nodes in tier {topology.tier_names[tier]}"
            )
    return tuple(rule.of(topology.names[tier]) for tier, rule in enumerate(participation))


def make_engine(
    name: str, context: Context, codec: Codec, tile: int | None, inner_tile: int | None, workers: int | None
) -> Any:
    if name == "stacked":
        return Stacked(context, codec, tile=tile, inner_tile=inner_tile, workers=workers or 1)
    from polytier.engines.ray.driver import Ray

    address = name.partition(":")[2]
    return Ray(context, codec, tile=tile, inner_tile=inner_tile, workers=workers, address=address)


def check_settings(eval_every, workers, tile, dtype, on, codec, absent, engine) -> None:
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
    if engine not in ("stacked", "ray") and (not engine.startswith("ray:") or engine == "ray:"):
        raise ValueError(f"engine {engine!r} is unknown; allowed: stacked, ray, ray:auto and ray:HOST:PORT")
    backend = on.split(":")[0]
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(backend, False):
        raise ValueError(f"no {on!r} here; there is {', '.join(k for k, v in there.items() if v)}")
