"""Several models on one pool of devices, from a configuration: `--models N`, or a table [models.NAME] each."""

from __future__ import annotations

from typing import Any

from polytier._errors import unknown
from polytier.data.federation import Federation
from polytier.runs.config import (
    Config,
    algorithm_kind,
    check_config,
    fields_of,
    known_fields,
    make_algorithm,
    make_federation,
    settled_algorithm,
    start,
)
from polytier.runs.loop import Training

OWN = (  # what a model may have of its own; the rest is the pool's
    "algorithm", "data", "data_dir", "model", "partition", "per_class", "split", "batch_size", "standardize", "l2",
    "batching", "set",
)  # fmt: skip
DATA = ("data", "data_dir", "partition", "per_class", "split", "standardize")


def prepare_several(config: Config) -> tuple[Training, Config]:
    """A run of several models that is ready to start, and its configuration, complete enough to repeat it."""
    shared = config.model_dump(exclude={"algorithm", "set", "models"})
    fields, tables = tables_of(config)
    configs = {name: check_config({"algorithm": "fedavg", **shared, **own}) for name, own in tables.items()}
    methods = {name: settled_algorithm(each) for name, each in configs.items()}
    algorithm = make_algorithm(config.algorithm, fields, methods)
    federations: dict[str, Federation] = {}
    made: dict[str, tuple[Federation, Config]] = {}
    for name, each in configs.items():
        key = repr([getattr(each, k) for k in DATA])  # models alike share their data
        if key not in made:
            made[key] = make_federation(each)
        federations[name], found = made[key]
        settled = {k: getattr(found, k) for k in (*DATA, "devices", "teams")}
        configs[name] = each.model_copy(update=settled)
    first, pool = next(iter(configs.values())), next(iter(federations.values()))
    config = config.model_copy(update={"devices": first.devices, "teams": first.teams})
    own = {k: {name: getattr(each, k) for name, each in configs.items()} for k in ("l2", "batch_size", "batching")}
    models = {name: each.model for name, each in configs.items()}
    training, config = start(algorithm, federations, models, pool, config, own)
    for name, context in training.context.scopes.items():
        found = {"batching": context.objective.batching, "set": fields_of(methods[name])}
        configs[name] = configs[name].model_copy(update=found)
    complete = {name: each.model_dump(include=set(OWN), exclude_none=True) for name, each in configs.items()}
    return training, config.model_copy(update={"set": fields_of(algorithm), "models": complete})


def tables_of(config: Config) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The wrapper's own fields, and each model's settings by name."""
    known = known_fields(algorithm_kind(config.algorithm))
    if isinstance(config.models, dict):
        for name, own in config.models.items():
            for key in own:
                if key not in OWN:
                    raise unknown(f"setting of the model {name}", key, OWN)
        return config.set, config.models
    number = 2 if config.models is None else config.models
    if number < 1:
        raise ValueError(f"models = {number}; at least one model is trained")
    # alike: what is no field of the wrapper is one of theirs
    inner = {key: value for key, value in config.set.items() if key not in known}
    fields = {key: value for key, value in config.set.items() if key in known}
    return fields, {f"model{k}": {"set": inner} for k in range(1, number + 1)}
