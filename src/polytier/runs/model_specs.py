"""The settings of each model, for one model, for several by name, and for runs made in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from torch import nn

from polytier._errors import unknown
from polytier.data.federation import Federation
from polytier.messages.codec import Codec
from polytier.method.algorithm import Algorithm
from polytier.method.context import Context
from polytier.runs.make_data import needs_files
from polytier.runs.methods import (
    field_names,
    fields_of,
    method_class,
    method_name,
    wraps_others,
)
from polytier.runs.spec import PYTHON, RunSpec, check_spec, per_model

T = TypeVar("T")
OneOrEach = T | Mapping[str, T]  # one for all models, or one for each of several by name
READY_MADE = (
    "topology",
    "loss",
    "metrics",
    "inner_tile",
    "objectives",
)  # arguments of `assemble` that are not settings
MOST_MODELS = 1000
RULES = ("team_participation", "device_participation")
OBJECTS = (*RULES, "codec", "upload", "engine")  # settings that may be objects in Python


def model_specs(spec: RunSpec) -> dict[str, RunSpec]:
    """The specification of each model by name; the name is "" if there is one model."""
    if not wraps_others(spec):
        return {"": spec}
    shared = spec.model_dump(exclude={"algorithm", "set", "models"})
    tables = model_tables(spec)
    found = {name: check_spec({"algorithm": "fedavg", **shared, **own}) for name, own in tables.items()}
    if any(needs_files(each.data) for each in found.values()):  # the others do without the folder of files
        found = {k: each if needs_files(each.data) else each.replace(data_dir=None) for k, each in found.items()}
    return found


def model_tables(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """The settings of each of several models."""
    if isinstance(spec.models, dict):
        if not all(spec.models):
            raise ValueError("a model has no name; name each: [models.NAME]")
        for name, own in spec.models.items():
            for key in own:
                if key not in per_model():
                    raise unknown(f"setting of the model {name}", key, per_model())
        return spec.models
    number = 2 if spec.models is None else spec.models
    if not 1 <= number <= MOST_MODELS:
        raise ValueError(f"models = {number}; at least one model is trained, and at most {MOST_MODELS:,}")
    outer = own_fields(spec)
    inner = {key: value for key, value in spec.set.items() if key not in outer}
    return {f"model{k}": {"set": inner} for k in range(1, number + 1)}


def own_fields(spec: RunSpec) -> dict[str, Any]:
    """The fields of the wrapper. If all models have the same method, other fields belong to that method."""
    if isinstance(spec.models, dict):
        return spec.set
    known = field_names(method_class(spec.algorithm))
    return {key: value for key, value in spec.set.items() if key in known}


def given_specs(spec: RunSpec, algorithm: Algorithm) -> dict[str, RunSpec]:
    """The specification of each model for a method given as an object, whose fields are used."""
    tables = spec.models if isinstance(spec.models, dict) else {}
    return {name: spec.replace(models=None, **tables.get(name, {})) for name in algorithm.parts() or {"": algorithm}}


def one_each(key: str, value: Any, methods: Mapping[str, Any]) -> dict[str, Any]:
    """One value per model, from one value for all of them or from values by name."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(methods, value)
    if set(value) != set(methods) or "" in methods:
        wanted = f"the models are {', '.join(methods)}" if "" not in methods else "there is one model"
        raise ValueError(f"{key} is given for {', '.join(map(str, value)) or 'no model'}; {wanted}")
    return dict(value)


def completed(
    spec: RunSpec, specs: Mapping[str, RunSpec], algorithm: Algorithm, context: Context, codec: Codec
) -> RunSpec:
    """The specification with all chosen values, so that it repeats the run with identical results."""
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
    """The specification of a run made in Python, and the other arguments of `assemble`."""
    for name in given:
        if name not in (*RunSpec.model_fields, *READY_MADE):
            raise TypeError(str(unknown("setting", name, [*RunSpec.model_fields, *READY_MADE])))
    methods = algorithm.parts() or {"": algorithm}
    ready: dict[str, Any] = {name: given[name] for name in READY_MADE if name in given}
    values: dict[str, Any] = {"data": PYTHON, "workers": 1}
    values |= {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items() if k not in READY_MADE}
    plain = {name: float | int | str | None if name in RULES else str | None for name in OBJECTS}
    objects = {name: values[name] for name, kind in plain.items() if not isinstance(values.get(name), kind)}
    values |= dict.fromkeys(objects, PYTHON)
    values |= {name: float(values[name]) for name in RULES if isinstance(values.get(name), int)}
    models = one_each("model", model, methods)
    modules = {name: None if isinstance(each, str) else each for name, each in models.items()}
    named = {name: each if isinstance(each, str) else PYTHON for name, each in models.items()}
    own = {name: one_each(name, values.pop(name), methods) for name in per_model() if name in values and name != "data"}
    own["train"] = {name: str(each) for name, each in own.get("train", dict.fromkeys(methods, "all")).items()}
    tables = {name: {**{key: each[name] for key, each in own.items()}, "model": named[name]} for name in methods}
    values |= {"algorithm": method_name(algorithm), "set": fields_of(algorithm)}
    if algorithm.parts():
        for table in tables.values():
            check_spec(table)
        values["models"] = tables
    else:
        values |= tables[""]
    ready |= {"algorithm": algorithm, "federation": federation, "model": modules if algorithm.parts() else modules[""]}
    ready["participation"] = tuple(objects.pop(name, None) for name in RULES)
    return check_spec(values), {**ready, **objects}
