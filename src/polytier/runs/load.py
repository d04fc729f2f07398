"""Loads a run folder: the models, and everything needed to use them without the data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from polytier.data.population import Population
from polytier.files.read import Damaged
from polytier.messages.ledger import Ledger
from polytier.method.context import Context
from polytier.method.memory import Memory
from polytier.models.losses import default_loss
from polytier.models.metrics import MetricInfo, describe
from polytier.models.trainable import Trainable
from polytier.models.zoo import make_model
from polytier.runs import checkpoint, snapshot
from polytier.runs.methods import make_method
from polytier.runs.read import RunRecord
from polytier.runs.read_files import (
    CHECKPOINTS,
    KINDS,
    Record,
    check_result,
    read_config,
    read_history,
    read_summary,
    read_tiers,
    repair,
)
from polytier.runs.run import Run, record_of
from polytier.runs.spec import PYTHON, RunSpec, naming, spec_in
from polytier.runs.trust import KEYS, check_trusted
from polytier.stack.objective import Objective
from polytier.stack.rows import unpack
from polytier.tree import collaboration
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology


def load_run(folder: Path, model: nn.Module | Mapping[str, nn.Module] | None = None, trust: bool = False) -> Run:
    """The run as it was saved, without its data."""
    config = read_config(folder)
    config.pop("versions", None)
    spec = spec_in(folder, config)
    if not trust:
        check_trusted(named_parts(spec, model), folder / "config.toml", f"use Run.load({str(folder)!r}, trust=True)")
    topology, history, summary = read_tree(folder), read_history(folder), read_summary(folder)
    if summary is None:
        raise ValueError(f"the run in {folder} is not finished; continue it with: polytier resume {folder}")
    for name in summary.get("files") or ():
        check_result(folder, name)
    tensors, facts = saved_state(folder, summary)
    learned = folder / collaboration.FILE
    matrices = collaboration.load(learned)[0] if learned.exists() else {}
    metrics = RunRecord(folder).metrics
    if not isinstance(spec.models, dict):
        assert not isinstance(model, Mapping), "this run has one model"
        run = load_model(folder, spec, topology, history, tensors, facts, metrics, model)
        return replace(run, collaboration=matrices, folder=folder)
    models = {}
    for name, own in spec.models.items():
        records = [record_of(record, name) for record in history]
        given = model.get(name) if isinstance(model, Mapping) else model
        own_spec = spec.replace(models=None, **own)
        measured = metrics_of_model(summary, name) or metrics
        loaded = load_model(folder, own_spec, topology, records, tensors, facts, measured, given, name)
        models[name] = replace(loaded, folder=folder)
    first = next(iter(models.values()))
    algorithm = make_method(spec.algorithm, spec.set, {n: run.algorithm for n, run in models.items()})
    scopes: Any = {name: run.context for name, run in models.items()}
    context: Any = replace(first.context, algorithm=algorithm, topology=topology, scopes=scopes, name="", ledger=None)
    state = unpack("state", tensors)
    return Run(spec, context, state, history, facts["seconds"], models=models, collaboration=matrices, folder=folder)


def metrics_of_model(summary: Record, name: str) -> tuple[MetricInfo, ...]:
    """The metrics of one of several models; none in a folder of version 0.1, which does not name them."""
    return tuple(map(describe, summary.get("models", {}).get(name, {}).get("metrics", ())))


def named_parts(spec: RunSpec, model: nn.Module | Mapping[str, nn.Module] | None) -> dict[str, Any]:
    """The names of all methods, and of the models that are not given as modules."""
    tables = spec.models if isinstance(spec.models, dict) else {"": {}}
    found = {name: {key: own.get(key, getattr(spec, key)) for key in KEYS} for name, own in tables.items()}
    for name, table in found.items():
        if (model.get(name) if isinstance(model, Mapping) else model) is not None:
            del table["model"]
    return {"algorithm": spec.algorithm, "models": found}


def load_model(
    folder: Path,
    spec: RunSpec,
    topology: Topology,
    history: list[dict[str, Any]],
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    metrics: tuple[MetricInfo, ...],
    model: nn.Module | None = None,
    name: str = "",
) -> Run:
    """The run of one model; `tensors` and `facts` are those of the checkpoint."""
    config, folder = folder / "config.toml", folder / "models" / name
    parts, about = read_models(folder)
    if model is None:
        if spec.model == PYTHON:
            raise ValueError(
                f"the model of {folder} was given in Python; give it again: Run.load(DIR, model=...), several by name"
            )
        with naming(config):
            model = make_model(spec.model, tuple(about["shape"]), about["classes"], spec.seed, tuple(about["targets"]))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    with naming(config):
        algorithm = make_method(spec.algorithm, spec.set)
    if algorithm.tiers == 2:
        topology = topology.flat()  # the tree has teams if another method uses them
    population = read_population(about, topology)
    loss = default_loss(model, about["classes"] is not None)
    objective = Objective(
        model,
        loss,
        l2=spec.l2,
        dtype=dtype,
        batching=spec.batching or "eager",
        trainable=Trainable.parse(spec.train),
        seed=spec.seed,
        share=spec.model != PYTHON,
        micro_batch=spec.micro_batch,
    )
    check_frozen(objective, about["frozen"])
    ledger = Ledger(topology)
    if tensors:
        snapshot.load_ledger(ledger, tensors, facts, name, [record["bytes"] for record in history])
    no_samples: Any = None
    names_of_metrics: Any = metrics  # nothing is measured without samples
    context = Context(
        algorithm,
        topology,
        objective,
        no_samples,
        Memory(topology),
        (Participation(),) * topology.num_tiers,
        seed=spec.seed,
        batch_size=spec.batch_size,
        shuffle=spec.shuffle,
        absent=spec.absent,
        device_steps=snapshot.facts_of(facts, name)["device_steps"],
        metrics=names_of_metrics,
        ledger=ledger,
        module=model,
        name=name,
        population=population,
    )
    statistics = {kind: flat_statistics(objective, found[0]) for kind, found in parts.items() if objective.norms}
    rows = {kind: flat_rows(objective, *found) for kind, found in parts.items()}
    everywhere = rows.get("global")
    kept = snapshot.state_of(tensors, name) if tensors else {} if everywhere is None else everywhere
    return Run(
        spec,
        context,
        kept,
        history,
        facts["seconds"],
        personal=rows.get("personal"),
        team=rows.get("team"),
        global_=None if everywhere is None else everywhere[0],
        statistics=statistics,
    )


def flat_statistics(objective: Objective, parts: dict[str, Tensor]) -> Tensor:
    """[nodes, s] the running statistics, which are taken out of `parts`."""
    if not all(name in parts for name in objective.statistic_names):
        raise ValueError("the saved models have no running statistics of BatchNorm; give the model of that run")
    return torch.cat([parts.pop(name) for name in objective.statistic_names], 1)


def flat_rows(objective: Objective, parts: dict[str, Tensor], ids: np.ndarray) -> Tensor:
    """[nodes, d] the parameters in the order of the module."""
    shapes = {name: tuple(part.shape[1:]) for name, part in parts.items()}
    if shapes != dict(zip(objective.names, objective.shapes, strict=True)):
        raise ValueError(
            "the parameters of the model differ from the saved ones; give the model of that run, with the same "
            "parameters frozen"
        )
    return torch.cat([parts[name].reshape(len(ids), -1) for name in objective.names], 1)


def check_frozen(objective: Objective, saved: str | None) -> None:
    """Raise an error if the frozen parameters of the module differ from those of the run, which are not saved."""
    if saved is not None and objective.frozen_digest != saved:
        raise ValueError(
            "the frozen parameters of this model are not those of the run; give the model of that run, with the same "
            "weights and with the same parameters frozen"
        )


def read_tree(folder: Path) -> Topology:
    """The tree from topology.json."""
    tiers = read_tiers(folder)
    parents = [torch.zeros(1, dtype=torch.int64)]
    try:
        names = tuple(np.array(tier["ids"]) for tier in tiers)
        for above, tier in pairwise(tiers):
            place = {name: k for k, name in enumerate(above["ids"])}
            parents.append(torch.tensor([place[name] for name in tier["parents"]]))
        return Topology(names, tuple(parents), torch.tensor(tiers[-1]["row"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{folder / 'topology.json'} is damaged: {error}; {repair(folder)}") from None


def read_population(about: dict[str, Any], topology: Topology) -> Population:
    """The devices of the run; their numbers of samples are not read."""
    ids = np.empty_like(topology.names[-1])
    ids[topology.order.numpy()] = topology.names[-1]
    return Population(
        ids,
        counts=torch.zeros(len(ids), 3, dtype=torch.int64),
        shape=tuple(about["shape"]),
        dtype=getattr(torch, about["dtype"]),
        target_shape=tuple(about["targets"]),
        num_classes=about["classes"],
        scale=read_tensor(about["scale"]),
        shift=read_tensor(about["shift"]),
    )


def read_tensor(value: list | None) -> Tensor | None:
    """A tensor from a list in JSON, or None."""
    return None if value is None else torch.tensor(value[1], dtype=getattr(torch, value[0]))


def saved_state(folder: Path, summary: dict[str, Any]) -> checkpoint.Checkpoint:
    """The checkpoint of the last round in the summary.

    Without it, because users have removed it or a longer run has replaced it, only what the summary says.
    """
    place = next(
        (p for p in checkpoint.found(folder / CHECKPOINTS) if checkpoint.number_of(p) == summary["rounds"]), None
    )
    try:
        return ({}, summary) if place is None else checkpoint.read(place)
    except Damaged as error:
        raise Damaged(f"{error}; {repair(folder)}") from None


def read_models(folder: Path) -> tuple[dict[str, tuple[dict[str, Tensor], np.ndarray]], dict[str, Any]]:
    """Parameters and ids by kind of model, and what was saved about inputs and frozen parameters."""
    found, about = {}, None
    for path in (folder / f"{kind}.safetensors" for kind in KINDS):
        if path.exists():
            try:
                with safe_open(path, "pt") as file:
                    meta = file.metadata()
                    parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    found[path.stem] = parts, np.array(json.loads(meta["ids"]))
                    # runs of version 0.1 do not name the shape of a target; no model of theirs depends on it
                    about = {"targets": (), **json.loads(meta["inputs"]), "frozen": meta.get("frozen")}
            except (SafetensorError, OSError, KeyError, TypeError) as error:
                raise ValueError(f"{path} cannot be read: {error}; resume or repeat the run") from None
    if about is None:
        raise ValueError(f"{folder} has no models; if the run was interrupted, use `polytier resume {folder.parent}`")
    return found, about
