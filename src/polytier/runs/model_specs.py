"""The settings of each model, for one model, for several by name, and for runs made in Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from torch import nn

from polytier._errors import unknown
from polytier.algorithms.multimodel import MultiModel
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
from polytier.runs.spec import PYTHON, RunSpec, Setting, check_spec, of_scope, per_model, settings

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


def python_settings() -> list[Setting]:
    """The settings that `polytier.train` takes; the data and the model are given to it, and it writes no files."""
    others = {*of_scope("data"), "team_formation", "algorithm", "model", "models", "out"}
    shown = {"teams": "those of the data", "workers": "1"}  # defaults that differ from those of the command line
    found = [each for each in settings().values() if each.name not in others]
    return [replace(each, shown=shown.get(each.name, each.shown)) for each in found]


def check_names(algorithm: Algorithm | str, given: Iterable[str]) -> None:
    """Raise a TypeError, with advice, for a name that `polytier.train` does not take."""
    allowed = [*(each.name for each in python_settings()), *READY_MADE]
    kind = method_class(algorithm) if isinstance(algorithm, str) else type(algorithm)
    for name in given:
        if name == "set" and not isinstance(algorithm, str):
            raise TypeError(f"set= goes with the name of a method; give the fields to {kind.__name__}(...)")
        if name in allowed:
            continue
        if issubclass(kind, Algorithm) and name in field_names(kind):
            raise TypeError(
                f"{name} is a field of the method: give {kind.__name__}({name}=...), or the name of the method and "
                f"set={{{name!r}: ...}}"
            )
        if name in (*of_scope("data"), "team_formation"):
            raise TypeError(f"{name} is about the data, which are given; use polytier.build_federation({name}=...)")
        if name == "out":
            raise TypeError("out is for the command line; give callbacks=[polytier.RunFolder(FOLDER)]")
        raise TypeError(str(unknown("setting", name, allowed)))


def spec_of_python(
    algorithm: Algorithm | str,
    federation: OneOrEach[Federation],
    model: OneOrEach[nn.Module | str],
    given: Mapping[str, Any],
) -> tuple[RunSpec, dict[str, Any]]:
    """The specification of a run made in Python, and the other arguments of `assemble`."""
    check_names(algorithm, given)
    if isinstance(algorithm, str) and issubclass(method_class(algorithm), MultiModel):
        name = method_class(algorithm).__name__
        raise ValueError(f"{algorithm} trains several models, each with its method: give {name}({{NAME: METHOD, ...}})")
    parts = {} if isinstance(algorithm, str) else algorithm.parts()
    methods = parts or {"": algorithm}
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
    shared = ("data", "set")  # one for all models; fields are given by name for one method only
    own = {k: one_each(k, values.pop(k), methods) for k in per_model() if k in values and k not in shared}
    own["train"] = {name: str(each) for name, each in own.get("train", dict.fromkeys(methods, "all")).items()}
    tables = {name: {**{key: each[name] for key, each in own.items()}, "model": named[name]} for name in methods}
    if isinstance(algorithm, str):
        values |= {"algorithm": algorithm}
    else:
        values |= {"algorithm": method_name(algorithm), "set": fields_of(algorithm)}
        ready["algorithm"] = algorithm
    if parts:
        for table in tables.values():
            check_spec(table)
        values["models"] = tables
    else:
        values |= tables[""]
    ready |= {"federation": federation, "model": modules if parts else modules[""]}
    ready["participation"] = tuple(objects.pop(name, None) for name in RULES)
    return check_spec(values), {**ready, **objects}
