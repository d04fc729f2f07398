"""From settings to everything that a run is made of, in one pass: data, tree, model, objective, method, engine.

The command line, TOML files, `polytier.train`, searches and checks of methods all enter here. In Python any part may be
handed in ready-made; the specification then says `python` in the place of its name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from polytier._errors import unknown
from polytier._text import spec as parse
from polytier.data.batches import Batches, check_batch_size
from polytier.data.build import build_federation, is_npz, load
from polytier.data.federation import Federation
from polytier.data.pack import is_stored
from polytier.data.sources import MADE, default_dir
from polytier.engines.machine import settle
from polytier.engines.stacked import Stacked
from polytier.messages.codec import CODECS, Codec
from polytier.messages.ledger import Ledger
from polytier.method.algorithm import Algorithm
from polytier.method.call import Clock
from polytier.method.context import Context
from polytier.method.memory import Memory
from polytier.method.node import Children
from polytier.models.losses import Loss, default_loss
from polytier.models.metrics import correct
from polytier.models.zoo import checked, make_model
from polytier.runs.methods import (
    check_tiers,
    field_names,
    fields_of,
    make_method,
    method_class,
    method_name,
    method_of,
    wraps_others,
)
from polytier.runs.spec import PYTHON, RunSpec, check_spec, per_model, read_numbers, read_teams, settings
from polytier.stack.objective import BATCHINGS, Objective, choose_batching
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology, nested

log = logging.getLogger("polytier")

T = TypeVar("T")
OneOrEach = T | Mapping[str, T]  # one for all models, or one for each of several by name
READY_MADE = ("topology", "loss", "metrics", "inner_tile", "objectives")  # arguments of `assemble` that are no settings
RULES = ("team_participation", "device_participation")


@dataclass(frozen=True)
class Identity:
    """An object as a key: equal only to itself. It is kept, so that no other object can take its place in memory."""

    thing: Any = field(hash=False, compare=False)
    number: int = 0

    @classmethod
    def of(cls, thing: Any) -> Identity:
        return cls(thing, id(thing))


# Models that are alike share a module and its objective, so that graphs are traced once.
Objectives = dict[Hashable, tuple[nn.Module, Objective]]


@dataclass
class Assembly:
    """Everything that a run is made of.

    Attributes:
        spec: The specification with all decisions written out: `polytier run` repeats the run from it.
        algorithm: The method, or the wrapper of several methods.
        context: What the programs of the run share; of several models, the context above theirs.
        codec: How rows are encoded for sending.
        given: By model, the module and the loss that were given; None where the specification names them.
        objectives: What `assemble` takes to spare tracing the same graphs again.
        threads: The number of torch threads before the run, which `close` restores.
    """

    spec: RunSpec
    algorithm: Algorithm
    context: Context
    codec: Codec
    given: dict[str, tuple[nn.Module | None, Loss | None]]
    objectives: Objectives
    threads: int

    def close(self) -> None:
        """Stop the engine's processes."""
        self.context.engine.close()  # type: ignore[attr-defined]
        torch.set_num_threads(self.threads)


def assemble(
    spec: RunSpec,
    *,
    algorithm: Algorithm | None = None,
    federation: OneOrEach[Federation] | None = None,
    model: OneOrEach[nn.Module | None] | None = None,
    topology: Topology | None = None,
    loss: OneOrEach[Loss | None] | None = None,
    metrics: Any = None,
    participation: tuple[Any, Any] = (None, None),
    inner_tile: int | None = None,
    objectives: Objectives | None = None,
) -> Assembly:
    """Make everything that the specification names; parts that are given are used as they are.

    Args:
        spec: The settings.
        algorithm: A method; by default the one that the specification names.
        federation: The devices' data; of several models, for all of them or by name.
        model: A module, likewise.
        topology: The tree; by default the teams of the federation, or a flat tree if it has none.
        loss: A function (outputs, targets) -> one value per sample; by default cross-entropy for classes, half the
            squared error otherwise.
        metrics: Functions (outputs, targets) -> one value per sample, by name.
        participation: Rules for teams and devices.
        inner_tile: Teams computed at once.
        objectives: Kept from one call to the next, it spares tracing the same graphs again.

    Raises:
        ValueError: Something does not exist or does not fit; the message says what to try.
    """
    specs = model_specs(spec) if algorithm is None else given_specs(spec, algorithm)
    if algorithm is None:
        methods = {name: method_of(each) for name, each in specs.items()}
        algorithm = methods[""] if "" in methods else make_method(spec.algorithm, own_fields(spec), methods)
    methods = algorithm.parts() or {"": algorithm}
    check_device(spec.on)
    threads = torch.get_num_threads()
    settle()
    try:
        federations, specs = make_data(specs, one_each("federation", federation, methods))
        first = next(iter(specs.values()))
        spec = spec.replace(devices=first.devices, teams=first.teams, team_formation=first.team_formation)
        spec = spec.replace(**{name: absolute_file(getattr(spec, name)) for name in RULES})
        named = [getattr(spec, name) for name in RULES]
        rules = [Participation.parse(n if p is None else p) for n, p in zip(named, participation, strict=True)]
        tree = topology or make_topology(next(iter(federations.values())), read_teams(spec.teams))
        modules, losses = one_each("model", model, methods), one_each("loss", loss, methods)
        objectives = {} if objectives is None else objectives
        contexts = {
            name: make_context(
                specs[name],
                name,
                method,
                federations[name],
                tree,
                rules,
                module=modules[name],
                loss=losses[name],
                metrics=metrics,
                hold=algorithm.frame,
                objectives=objectives,
            )
            for name, method in methods.items()
        }
        context = join(algorithm, contexts) if algorithm.parts() else contexts[""]
        for each in contexts.values():
            check_tiers(each.algorithm, each.topology.tier_names)
        note_flat(tree, list(contexts.values()))
        for warning in algorithm.check(server_of(context)):
            log.warning("%s", warning)
        codec = make_codec(spec.codec or spec.dtype)
        engine = make_engine(spec.engine, context, codec, spec.tile, inner_tile, spec.workers)
        for each in (context, *context.parts):
            each.engine = engine
    except Exception:
        torch.set_num_threads(threads)
        raise
    spec, given = completed(spec, specs, algorithm, context, codec), {k: (modules[k], losses[k]) for k in methods}
    return Assembly(spec, algorithm, context, codec, given, objectives, threads)


def server_of(context: Context, round_: int = 0) -> Children:
    """The server's node, as its program is given it."""
    return Children(context, 0, torch.zeros(1, dtype=torch.int64), Clock(round_))


# -- settings -----------------------------------------------------------------------------------------


def model_specs(spec: RunSpec) -> dict[str, RunSpec]:
    """The specification of each model by name; of the only one, under ""."""
    if not wraps_others(spec):
        return {"": spec}
    shared = spec.model_dump(exclude={"algorithm", "set", "models"})
    tables = model_tables(spec)
    return {name: check_spec({"algorithm": "fedavg", **shared, **own}) for name, own in tables.items()}


def model_tables(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """The settings that each of several models has of its own."""
    if isinstance(spec.models, dict):
        for name, own in spec.models.items():
            for key in own:
                if key not in per_model():
                    raise unknown(f"setting of the model {name}", key, per_model())
        return spec.models
    number = 2 if spec.models is None else spec.models
    if number < 1:
        raise ValueError(f"models = {number}; at least one model is trained")
    outer = own_fields(spec)
    inner = {key: value for key, value in spec.set.items() if key not in outer}
    return {f"model{k}": {"set": inner} for k in range(1, number + 1)}


def own_fields(spec: RunSpec) -> dict[str, Any]:
    """The fields of a wrapper itself. Where its models are alike, other fields belong to their method."""
    if isinstance(spec.models, dict):
        return spec.set
    known = field_names(method_class(spec.algorithm))
    return {key: value for key, value in spec.set.items() if key in known}


def given_specs(spec: RunSpec, algorithm: Algorithm) -> dict[str, RunSpec]:
    """The same for a method that is given: its own fields count."""
    tables = spec.models if isinstance(spec.models, dict) else {}
    return {name: spec.replace(models=None, **tables.get(name, {})) for name in algorithm.parts() or {"": algorithm}}


def one_each(key: str, value: Any, methods: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each model, from one for all of them or one by name."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(methods, value)
    if set(value) != set(methods) or "" in methods:
        wanted = f"the models are {', '.join(methods)}" if "" not in methods else "there is one model"
        raise ValueError(f"{key} is given for {', '.join(map(str, value)) or 'no model'}; {wanted}")
    return dict(value)


def completed(
    spec: RunSpec, specs: Mapping[str, RunSpec], algorithm: Algorithm, context: Context, codec: Codec
) -> RunSpec:
    """The specification with everything that was decided, so that it repeats the run to the bit."""
    found = {
        name: specs[name].replace(
            algorithm=method_name(each.algorithm), set=fields_of(each.algorithm), batching=each.objective.batching
        )
        for name, each in (context.scopes or {"": context}).items()
    }
    spec = spec.replace(algorithm=method_name(algorithm), set=fields_of(algorithm), codec=codec.name)
    if not context.scopes:
        own = {key: getattr(found[""], key) for key in per_model() if key not in ("algorithm", "set")}
        return spec.replace(**own)
    own = {name: {k: v for k, v in each.values().items() if k in per_model()} for name, each in found.items()}
    return spec.replace(models=own)


def spec_of_python(
    algorithm: Algorithm,
    federation: OneOrEach[Federation],
    model: OneOrEach[nn.Module | str],
    given: Mapping[str, Any],
) -> tuple[RunSpec, dict[str, Any]]:
    """The specification of a run that is made in Python, and the arguments of `assemble` beside it."""
    for name in given:
        if name not in (*RunSpec.model_fields, *READY_MADE):
            raise TypeError(str(unknown("setting", name, [*RunSpec.model_fields, *READY_MADE])))
    methods = algorithm.parts() or {"": algorithm}
    ready: dict[str, Any] = {name: given[name] for name in READY_MADE if name in given}
    values: dict[str, Any] = {"data": PYTHON, "workers": 1}
    values |= {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items() if k not in READY_MADE}
    rules = [values.get(name) for name in RULES]
    objects = [rule if not isinstance(rule, float | int | str | None) else None for rule in rules]
    values |= {name: PYTHON for name, rule in zip(RULES, objects, strict=True) if rule is not None}
    values |= {name: float(values[name]) for name in RULES if isinstance(values.get(name), int)}
    models = one_each("model", model, methods)
    modules = {name: None if isinstance(each, str) else each for name, each in models.items()}
    named = {name: each if isinstance(each, str) else PYTHON for name, each in models.items()}
    own = {name: one_each(name, values.pop(name), methods) for name in per_model() if name in values and name != "data"}
    tables = {name: {**{key: each[name] for key, each in own.items()}, "model": named[name]} for name in methods}
    values |= {"algorithm": method_name(algorithm), "set": fields_of(algorithm)}
    if algorithm.parts():
        for table in tables.values():
            check_spec(table)
        values["models"] = tables
    else:
        values |= tables[""]
    ready |= {"algorithm": algorithm, "federation": federation, "model": modules if algorithm.parts() else modules[""]}
    return check_spec(values), {**ready, "participation": tuple(objects)}


def check_device(on: str) -> None:
    """Refuse a kind of processor that torch does not find."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(on.split(":")[0], False):
        raise ValueError(f"no {on!r} here; there is {', '.join(k for k, v in there.items() if v)}")


def absolute_file(rule: float | str) -> float | str:
    """A participation rule whose file is named by its absolute path."""
    kind, colon, path = rule.partition(":") if isinstance(rule, str) else ("", "", "")
    return f"{kind}:{Path(path).expanduser().resolve()}" if colon and kind in ("table", "schedule") else rule


def absolute_formation(text: str) -> str:
    """Learned teams whose run folder is named by its absolute path."""
    name, args, given = parse(text)
    if name != "learned" or not (args or "source" in given):
        return text
    source = args.pop(0) if args else given.pop("source")
    others = [*args, *(f"{key}={value}" for key, value in given.items())]
    return f"{name}:{','.join([str(Path(source).expanduser().resolve()), *others])}"


# -- data and tree ------------------------------------------------------------------------------------


def make_data(
    specs: Mapping[str, RunSpec], given: Mapping[str, Federation | None]
) -> tuple[dict[str, Federation], dict[str, RunSpec]]:
    """The data of each model; models with the same settings share theirs."""
    federations: dict[str, Federation] = {}
    complete: dict[str, RunSpec] = {}
    made: dict[str, tuple[Federation, RunSpec]] = {}
    own = [each.name for each in settings().values() if each.per_model and each.scope == "data"]
    decided = [*own, "devices", "teams", "team_formation"]
    for name, spec in specs.items():
        ready = given[name]
        if ready is not None:
            federations[name], complete[name] = ready, spec
            continue
        key = repr([getattr(spec, k) for k in own])
        if key not in made:
            made[key] = make_federation(spec)
        federations[name], found = made[key]
        complete[name] = spec.replace(**{k: getattr(found, k) for k in decided})
    return federations, complete


def make_federation(spec: RunSpec) -> tuple[Federation, RunSpec]:
    """The devices' data, and the specification with everything that they decide."""
    own_file, teams = is_npz(spec.data) or is_stored(spec.data), read_teams(spec.teams)
    if is_stored(spec.data) and spec.split != RunSpec.model_fields["split"].default:
        raise ValueError(f"{spec.data} holds its split: leave --split out, or pack the data anew with it")
    split: Any = read_numbers("split", spec.split, float, 3, "3:0:1")
    per_class: Any = None
    if spec.per_class is not None:
        per_class = read_numbers("per_class", spec.per_class, int, 2, "20:5")
    directory = None if spec.data_dir is None else Path(spec.data_dir).expanduser().resolve()
    if directory is None and not own_file and spec.data.split(":")[0] not in ("digits", *MADE):
        directory = default_dir().resolve()
    source: Any = Path(spec.data).expanduser().resolve()
    if not own_file:
        source = load(spec.data, directory, spec.devices, spec.seed)
    federation = build_federation(
        source,
        data_dir=directory,
        devices=spec.devices,
        teams=teams,
        partition=spec.partition,
        per_class=per_class,
        team_formation=spec.team_formation,
        split=split,
        standardize=spec.standardize,
        seed=spec.seed,
    )
    found: dict[str, Any] = {
        "data_dir": None if directory is None else str(directory),
        "team_formation": absolute_formation(spec.team_formation),
    }
    if own_file:
        found["data"] = str(source)
    else:
        found["devices"] = len(federation)
        if source.device is None and per_class is None:
            found["partition"] = spec.partition or "labels:2"
    if teams is None:
        found["teams"] = "0" if federation.team is None else str(len(np.unique(federation.team)))
    return federation, spec.replace(**found)


def make_topology(federation: Federation, teams: int | tuple[int, ...] | None) -> Topology | None:
    """The tree of several tiers of teams; None: the federation's own teams."""
    if not isinstance(teams, tuple) or federation.team is None:
        return None
    return Topology.build(federation.ids, *nested(federation.team, teams))


# -- what the programs of a model share ---------------------------------------------------------------


def make_context(
    spec: RunSpec,
    name: str,
    algorithm: Algorithm,
    federation: Federation,
    topology: Topology | None,
    rules: Sequence[Participation],
    *,
    module: nn.Module | None,
    loss: Loss | None,
    metrics: Any,
    hold: int,
    objectives: Objectives,
) -> Context:
    """Everything that the programs of one model share."""
    check_batch_size(spec.batch_size)
    if spec.batching not in (None, *BATCHINGS):
        raise ValueError(f"batching {spec.batching!r} is unknown; allowed: {', '.join(BATCHINGS)}")
    topology = topology or Topology.build(federation.ids, *([] if federation.team is None else [federation.team]))
    if algorithm.tiers == 2 and topology.num_tiers > 2:
        topology = topology.flat()
    classes = federation.num_classes is not None
    alike = ("model", "seed", "l2", "batch_size", "dtype", "on")
    key = (*map(Identity.of, (federation, module, loss)), *(getattr(spec, name) for name in alike))
    if (*key, spec.batching) not in objectives:
        made = module or make_model(spec.model, tuple(federation.x.shape[1:]), federation.num_classes, spec.seed)
        objective = make_objective(spec, made, loss or default_loss(made, classes), federation)
        objectives[*key, spec.batching] = objectives[*key, objective.batching] = made, objective
    module, objective = objectives[*key, spec.batching]
    batches = Batches(federation, spec.seed, objective.dtype, spec.on, bool(objective.dropouts))
    teams, devices = rules
    participation = (Participation(), *[teams] * (topology.num_tiers - 2), devices)
    return Context(
        algorithm,
        topology,
        objective,
        batches,
        Memory(topology),
        for_nodes(participation, topology),
        seed=spec.seed,
        batch_size=spec.batch_size,
        absent=spec.absent,
        metrics=metrics if metrics is not None else {"accuracy": correct} if classes else {},
        ledger=Ledger(topology),
        name=name,
        hold=hold,
        module=module,
    )


def make_objective(spec: RunSpec, module: nn.Module, loss: Loss, federation: Federation) -> Objective:
    """The objective of every device, and how its stacks are computed: as given, or found by a check."""
    objective = Objective(
        checked(type(module).__name__, module),
        loss,
        l2=spec.l2,
        dtype=getattr(torch, spec.dtype),
        device=spec.on,
        batching=spec.batching or "stacked",
    )
    if spec.batching is None:
        batches = Batches(federation, spec.seed, objective.dtype, spec.on, bool(objective.dropouts))
        few = torch.arange(min(8, len(federation)))
        size = spec.batch_size if isinstance(spec.batch_size, int) else 32
        choose_batching(objective, batches.walk(few, 0, 0, size).next(), spec.seed)
        if objective.batching != "stacked":
            log.info("batching: %s (rows of this model depend on their stack)", objective.batching)
    return objective


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
    above: dict[str, Any] = {"algorithm": algorithm, "name": "", "scopes": contexts, "ledger": None, "hold": 1}
    return dataclasses.replace(deepest, memory=Memory(deepest.topology), **above)


def for_nodes(participation: tuple[Participation, ...], topology: Topology) -> tuple[Participation, ...]:
    """The rules for the nodes of this tree."""
    for tier, rule in enumerate(participation):
        if rule.table is not None and rule.table.shape[1] != topology.size(tier):
            raise ValueError(
                f"the participation table has {rule.table.shape[1]} columns; "
                f"there are {topology.size(tier)} nodes in tier {topology.tier_names[tier]}"
            )
    return tuple(rule.of(topology.names[tier]) for tier, rule in enumerate(participation))


def note_flat(topology: Topology | None, contexts: list[Context]) -> None:
    """Say once which methods do not use the teams that there are."""
    deep = [c.batches.federation.team is not None if topology is None else topology.num_tiers > 2 for c in contexts]
    flat = {
        type(c.algorithm).__name__ for c, teams in zip(contexts, deep, strict=True) if teams and c.algorithm.tiers == 2
    }
    for name in sorted(flat):
        log.info("%s is a flat method: the teams are ignored", name)


def make_codec(name: str) -> Codec:
    if name not in CODECS:
        raise unknown("codec", name, list(CODECS))
    return CODECS[name]


def make_engine(
    name: str, context: Context, codec: Codec, tile: int | None, inner_tile: int | None, workers: int | None
) -> Any:
    if name == "stacked":
        return Stacked(context, codec, tile=tile, inner_tile=inner_tile, workers=workers or 1)
    if name != "ray" and (not name.startswith("ray:") or name == "ray:"):
        raise ValueError(f"engine {name!r} is unknown; allowed: stacked, ray, ray:auto and ray:HOST:PORT")
    from polytier.engines.ray.driver import Ray

    address = name.partition(":")[2]
    return Ray(context, codec, tile=tile, inner_tile=inner_tile, workers=workers, address=address)
