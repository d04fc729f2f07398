"""Makes all parts of a run from its settings: data, tree, model, objective, method, engine.

The command line, TOML files, `polytier.train`, searches and checks of methods all use this module. In Python any part
may be given as an object; the specification then has `python` in place of its name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from polytier.data.batches import Batch, Batches, check_batch_size
from polytier.data.federation import Federation
from polytier.engines.build import make_engine
from polytier.engines.process_settings import configure_process
from polytier.engines.protocol import EngineFactory, engine_of
from polytier.messages.codec import Codec, make_codec
from polytier.messages.ledger import Ledger
from polytier.messages.transforms import Transform, make_upload
from polytier.method.algorithm import Algorithm
from polytier.method.call import Clock
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.memory import Memory
from polytier.method.parameters import check_fit
from polytier.method.travel import Travel
from polytier.models.losses import Loss, default_loss
from polytier.models.metrics import Asked, Metric, resolve_metrics
from polytier.models.trainable import Trainable
from polytier.models.zoo import checked, make_model
from polytier.runs.cached_features import with_features
from polytier.runs.first_fields import data_advice, with_first_fields
from polytier.runs.make_data import make_data, make_topology, names_teams
from polytier.runs.methods import (
    check_tiers,
    make_method,
    method_of,
)
from polytier.runs.model_specs import RULES, OneOrEach, completed, given_specs, model_specs, one_each, own_fields
from polytier.runs.sample_check import check_kinds, check_tokens, predicts_outputs, try_loss_and_metrics
from polytier.runs.spec import PYTHON, RunSpec, read_teams
from polytier.stack.dropout import check_dropout
from polytier.stack.held import bytes_per_sample, physical_memory
from polytier.stack.objective import BATCHINGS, Objective, choose_batching
from polytier.stack.optimizers import LocalOptimizer
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology

log = logging.getLogger("polytier")
LARGE = 1 << 24  # parameters of a model from which the values on the way to a gradient may not fit into memory
LEAST_TILE = 4  # devices in a tile of a large model


@dataclass(frozen=True)
class Identity:
    """Makes an object usable as a key that is equal only to itself.

    The object is kept, because Python may reuse the `id` of an object that no longer exists.
    """

    thing: Any = field(hash=False, compare=False)
    number: int = 0

    @classmethod
    def of(cls, thing: Any) -> Identity:
        """The key of an object."""
        return cls(thing, id(thing))


# Models with the same settings share a module and its objective, so that graphs are traced once.
Objectives = dict[Hashable, tuple[nn.Module, Objective]]


@dataclass
class Assembly:
    """All parts of a run. `polytier.assemble` makes one.

    Attributes:
        spec: The complete settings. `polytier run` repeats the run from them.
        algorithm: The method, or the wrapper of several methods.
        context: The data, tree, objective and memory that the programs of the run share. If there are several models:
            the context that contains those of all models.
        codec: How rows are encoded for sending.
        upload: The transform that devices apply to the change of a model before they send it.
        given: By model, the module and the loss that were given as objects; None if the specification names them.
        objects: The arguments of `assemble` that were given as objects, by name.
        objectives: A cache of traced graphs, to pass to `assemble` again.
        threads: The number of torch threads before the run, which `close` restores.
    """

    spec: RunSpec
    algorithm: Algorithm
    context: Context
    codec: Codec
    upload: Transform | None
    given: dict[str, tuple[nn.Module | None, Loss | None]]
    objects: dict[str, Any]
    objectives: Objectives
    threads: int

    def close(self) -> None:
        """Stop the engine's processes and restore the number of torch threads."""
        engine_of(self.context).close()
        torch.set_num_threads(self.threads)


def assemble(
    spec: RunSpec,
    *,
    algorithm: Algorithm | None = None,
    federation: OneOrEach[Federation] | None = None,
    model: OneOrEach[nn.Module | None] | None = None,
    topology: Topology | None = None,
    loss: OneOrEach[Loss | None] | None = None,
    metrics: Asked = None,
    participation: tuple[Any, Any] = (None, None),
    codec: Codec | None = None,
    upload: Transform | None = None,
    engine: EngineFactory | None = None,
    inner_tile: int | None = None,
    objectives: Objectives | None = None,
    whole: bool = True,
) -> Assembly:
    """Make all parts of a run from its settings. Parts that are given as objects are used as they are.

    Args:
        spec: The settings.
        algorithm: The method; by default the one that the specification names.
        federation: The data of the devices. If there are several models: one for all, or a mapping from names.
        model: The module. If there are several models: one for all, or a mapping from names.
        topology: The tree; by default the teams of the federation, or a flat tree if it has none.
        loss: A function (outputs, targets) -> one value per sample, or the mean over the samples; by default
            cross-entropy for classes, half the squared error otherwise.
        metrics: Names and `Metric` objects, or a mapping from names to functions (outputs, targets) -> one value per
            sample. The first one is the leading metric.
        participation: Rules for teams and for devices.
        codec: How rows are encoded for sending.
        upload: The transform that devices apply to the change of a model before they send it.
        engine: A callable that makes the engine, such as a class that `polytier.Engine` describes.
        inner_tile: Number of teams computed at once.
        objectives: A cache. Pass the same dictionary to several calls to trace equal graphs only once.
        whole: Whether this is the tree of the run. In a part of it the method does not check the number of devices.

    Returns:
        The parts of the run, for `polytier.Loop`.

    Raises:
        ValueError: A name is unknown, or parts do not fit together. The message says what to change.

    Examples:
        >>> import polytier
        >>> assembly = polytier.assemble(polytier.RunSpec(algorithm="fedavg", devices=8, teams="2"))
        >>> assembly.spec.devices
        8
        >>> assembly.close()
    """
    objects = {
        "algorithm": algorithm,
        "federation": federation,
        "model": model,
        "topology": topology,
        "loss": loss,
        "metrics": metrics,
        "participation": participation,
        "codec": codec,
        "upload": upload,
        "engine": engine,
        "inner_tile": inner_tile,
    }
    specs = model_specs(spec) if algorithm is None else given_specs(spec, algorithm)
    if algorithm is None:
        methods = {name: method_of(each) for name, each in specs.items()}
    else:
        methods = dict(algorithm.parts() or {"": algorithm})
    specs = {name: each.replace(model=absolute_model(each.model)) for name, each in specs.items()}
    check_device(spec.on)
    given = specs
    federations, specs = make_data(given, one_each("federation", federation, methods))
    modules, losses = one_each("model", model, methods), one_each("loss", loss, methods)
    federations = with_features(specs, federations, modules)
    if algorithm is None:
        ready = {"topology": topology, "participation": participation, "codec": codec, "upload": upload}
        for name, each in specs.items():
            own = with_first_fields(each, federations[name], model=modules[name], loss=losses[name], **ready)
            if own is not each:
                specs[name], methods[name] = own, method_of(own, tell=False)
                for advice in data_advice(federations[name]):
                    log.warning("%s", advice)
        algorithm = methods[""] if "" in methods else make_method(spec.algorithm, own_fields(spec), methods)
    threads = torch.get_num_threads()
    configure_process()
    try:
        first = next(iter(specs.values()))
        spec = spec.replace(devices=first.devices, teams=first.teams, team_formation=first.team_formation)
        spec = spec.replace(**{name: absolute_file(getattr(spec, name)) for name in RULES})
        named = [getattr(spec, name) for name in RULES]
        rules = [Participation.parse(n if p is None else p) for n, p in zip(named, participation, strict=True)]
        tree = topology or make_topology(next(iter(federations.values())), read_teams(spec.teams))
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
                metrics=spec.metric if metrics is None else metrics,
                hold=algorithm.frame,
                objectives=objectives,
            )
            for name, method in methods.items()
        }
        context = join(algorithm, contexts) if algorithm.parts() else contexts[""]
        for each in contexts.values():
            check_tiers(each.algorithm, each.topology.tier_names)
            check_fields(each)
        if topology is not None or federation is not None or any(map(names_teams, given.values())):
            note_flat(tree, list(contexts.values()))
        for warning in algorithm.check(server_of(context)) if whole else ():
            log.warning("%s", warning)
        codec, upload = make_codec(codec or spec.codec or spec.dtype), make_upload(upload or spec.upload)
        layout = {"tile": spec.tile, "inner_tile": inner_tile, "workers": spec.workers}
        made = make_engine(engine or spec.engine, context, codec=codec, upload=upload, **layout)
        for each in (context, *context.parts):
            each.engine = made
    except Exception:
        torch.set_num_threads(threads)
        raise
    spec, given = completed(spec, specs, algorithm, context, codec), {k: (modules[k], losses[k]) for k in methods}
    objects = {name: each for name, each in objects.items() if each is not None}
    return Assembly(spec, algorithm, context, codec, upload, given, objects, objectives, threads)


def server_of(context: Context, round_: int = 0) -> Children:
    """The node of the server, as the server's program receives it."""
    return Children(context, 0, torch.zeros(1, dtype=torch.int64), Clock(round_))


def check_device(on: str) -> None:
    """Raise an error if torch cannot use this kind of processor."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind, colon, number = on.partition(":")
    numbered = not colon or (kind == "cuda" and number.isdecimal() and int(number) < torch.cuda.device_count())
    if not there.get(kind, False) or not numbered:
        raise ValueError(f"{on!r} is not available; available: {', '.join(k for k, v in there.items() if v)}")


def check_fields(context: Context) -> None:
    """Raise an error if a field of the method does not fit the tree or the numbers of the run."""
    tree = context.topology
    sizes, devices = {tree.size(tier) for tier in range(1, tree.num_tiers)}, {tree.size(tree.leaf)}
    largest, method = torch.finfo(context.objective.dtype).max, context.algorithm
    for each in dataclasses.fields(method) if isinstance(method, Algorithm) else ():
        if each.metadata:
            own = devices if each.name.startswith("device") else sizes
            check_fit(each.name, getattr(method, each.name), own, largest)


def absolute_file(rule: float | str) -> float | str:
    """The participation rule with the path of its file made absolute."""
    kind, colon, path = rule.partition(":") if isinstance(rule, str) else ("", "", "")
    return f"{kind}:{Path(path).expanduser().resolve()}" if colon and kind in ("table", "schedule") else rule


def absolute_model(text: str) -> str:
    """The name of a model with the path of its file made absolute, so that config.toml can be used elsewhere."""
    for start in ("hf:path=", "hf:"):
        if text.startswith(start):
            return f"hf:{Path(text.removeprefix(start)).expanduser().resolve()}"
    name, weights, path = text.partition(",weights=")
    return f"{name}{weights}{Path(path).expanduser().resolve()}" if weights else text


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
    metrics: Asked,
    hold: int,
    objectives: Objectives,
) -> Context:
    """The context that the programs of one model share."""
    check_batch_size(spec.batch_size)
    if spec.batching not in (None, *BATCHINGS):
        raise ValueError(f"batching {spec.batching!r} is unknown; allowed: {', '.join(BATCHINGS)}")
    topology = topology or Topology.build(federation.ids, *([] if federation.team is None else [federation.team]))
    if algorithm.tiers == 2 and topology.num_tiers > 2:
        topology = topology.flat()
    classes = federation.num_classes is not None
    judged = resolve_metrics(metrics, classes, federation.is_tokens)
    alike = ("model", "seed", "l2", "batch_size", "dtype", "on", "train")
    key = (*map(Identity.of, (federation, module, loss)), *(getattr(spec, name) for name in alike))
    if (*key, spec.batching) not in objectives:
        if module is None:
            check_kinds(spec.model, federation, default=loss is None)
        made = module or make_model(
            spec.model, federation.population.shape, federation.num_classes, spec.seed, tuple(federation.y.shape[1:])
        )
        check_tokens(made, federation)
        tried = judged if (loss is not None or metrics is not None) and predicts_outputs(algorithm) else None
        objective = make_objective(spec, made, loss or default_loss(made, classes), federation, tried)
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
        shuffle=spec.shuffle,
        absent=spec.absent,
        metrics=judged,
        ledger=Ledger(topology),
        name=name,
        hold=hold,
        module=module,
        optimizer=optimizer_of(spec.optimizer, algorithm),
        travel=travel_of(spec.local_layers, algorithm, objective),
    )


def optimizer_of(text: str, algorithm: Algorithm) -> LocalOptimizer:
    """The local optimiser; an error if the method writes out its own steps."""
    optimizer = LocalOptimizer.parse(text)
    if not optimizer.plain and not algorithm.any_optimizer:
        raise ValueError(
            f"{type(algorithm).__name__} has steps of its own and cannot use optimizer {text!r}; use sgd, or a method "
            "such as FedAvg, PerMFL, Ditto or CoBo (in a method of your own, use the solvers of polytier.stack.solvers "
            "for all steps and set any_optimizer = True)"
        )
    return optimizer


def travel_of(text: str | None, algorithm: Algorithm, objective: Objective) -> Travel:
    """What of a model stays at the devices; an error if the method cannot leave layers there."""
    text = text or algorithm.local_layers
    if text and not (algorithm.any_optimizer and algorithm.model_fields):
        raise ValueError(
            "local layers are for methods whose devices train the model that they are sent; "
            f"{type(algorithm).__name__} is not one; use a method such as FedAvg, FedBN, FedProx, HierFedAvg, Ditto or "
            "PerMFL"
        )
    travel = Travel.of(objective, text, needed=text != algorithm.local_layers)
    if text and not travel.has_home:
        log.warning(
            "no parameter of the model matches %s, so that %s is FedAvg here; name its normalisation layers bn, choose "
            "layers with --local-layers PATTERN, or use resnet9:norm=batch",
            *(text, type(algorithm).__name__),
        )
    return travel


def make_objective(
    spec: RunSpec, module: nn.Module, loss: Loss, federation: Federation, tried: Sequence[Metric] | None
) -> Objective:
    """The objective of the devices, with `batching` as given or chosen by a check.

    If the user gave a loss or metrics (`tried`), they are first evaluated on a few samples.
    """
    dtype, named = getattr(torch, spec.dtype), spec.model != PYTHON
    check_fit("l2", spec.l2, (), torch.finfo(dtype).max)
    objective = Objective(
        checked(type(module).__name__, module),
        loss,
        l2=spec.l2,
        dtype=dtype,
        device=spec.on,
        batching=spec.batching or "stacked",
        trainable=Trainable.parse(spec.train),
        seed=spec.seed,
        share=named,
        boundary=None if federation.origin is None else federation.origin.boundary,
        micro_batch=spec.micro_batch,
    )
    batches = Batches(federation, spec.seed, objective.dtype, spec.on, bool(objective.dropouts))
    samples = len(federation.x) > 0  # the server of a network has none: its job was checked on made-up ones
    if samples and objective.boundary is None:  # features were made after this check
        check_dropout(objective.module, batches.example())
    if tried is not None and samples:
        try_loss_and_metrics(objective, batches, tried)
    if spec.batching is None:
        size = spec.batch_size if isinstance(spec.batch_size, int) else 32
        choose_batching(objective, batch_to_check(objective, batches, size), spec.seed)
        if objective.batching != "stacked":
            log.info(
                "models are computed one by one (batching %s): together, they would differ in their last bits",
                objective.batching,
            )
    return objective


def batch_to_check(objective: Objective, batches: Batches, size: int) -> Batch:
    """A batch of a few devices; of a large model at most a tile, with as many samples as half of the memory holds."""
    few = torch.arange(min(8, len(batches.federation)))
    if objective.dimension + objective.frozen_size > LARGE:
        few, have = few[:LEAST_TILE], physical_memory()
        one = batches.walk(few[:1], 0, 0, 1).next().groups[0]
        each = len(few) * bytes_per_sample(objective, one.x[0], one.y[0])
        size = size if have is None else min(size, max(1, have // 2 // max(1, each)))
    return batches.walk(few, 0, 0, size).next()


def join(algorithm: Algorithm, contexts: dict[str, Context]) -> Context:
    """The context that contains those of several models on the same devices."""
    first, *others = contexts.values()
    for context in others:
        if not np.array_equal(context.population.ids, first.population.ids):
            raise ValueError(
                f"the data of {first.name} and {context.name} have different devices; "
                "several models are trained on the same devices, so each device needs data for every model"
            )
    deepest = max(contexts.values(), key=lambda context: context.topology.num_tiers)
    for context in contexts.values():
        if context.algorithm.tiers != 2 and not deepest.topology.same_as(context.topology):
            raise ValueError(
                f"the data of {deepest.name} and {context.name} have different teams; "
                "several models are trained on the same tree: give a topology, or data with the same teams"
            )
    above: dict[str, Any] = {"algorithm": algorithm, "name": "", "scopes": contexts, "ledger": None, "hold": 1}
    return dataclasses.replace(deepest, memory=Memory(deepest.topology), **above)


def for_nodes(participation: tuple[Participation, ...], topology: Topology) -> tuple[Participation, ...]:
    """The participation rules for the nodes of this tree, after a check of the size of tables."""
    for tier, rule in enumerate(participation):
        if rule.table is not None and rule.table.shape[1] != topology.size(tier):
            raise ValueError(
                f"the participation table has {rule.table.shape[1]} columns; "
                f"there are {topology.size(tier)} nodes in tier {topology.tier_names[tier]}"
            )
    return tuple(rule.of(topology.names[tier]) for tier, rule in enumerate(participation))


def note_flat(topology: Topology | None, contexts: list[Context]) -> None:
    """Log once which methods ignore the teams of the tree."""
    deep = [c.population.team is not None if topology is None else topology.num_tiers > 2 for c in contexts]
    flat = {
        type(c.algorithm).__name__ for c, teams in zip(contexts, deep, strict=True) if teams and c.algorithm.tiers == 2
    }
    for name in sorted(flat):
        log.info("%s is a flat method: the teams are ignored", name)
