"""Methods by name: from `permfl` and fields to PerMFL(...), and back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytier._errors import unknown
from polytier.algorithms import ALGORITHMS
from polytier.algorithms.multimodel import MultiModel
from polytier.method.algorithm import Algorithm
from polytier.models.own_code import load
from polytier.runs.defaults import settings as default_fields
from polytier.runs.spec import RunSpec, plain

log = logging.getLogger("polytier")


def method_class(name: str) -> type[Algorithm]:
    """The class of a method: a name in `ALGORITHMS`, or package.module:Class for your own."""
    kind = own_class(name) if ":" in name else ALGORITHMS.get(name)
    if kind is None:
        raise unknown("algorithm", name, list(ALGORITHMS))
    return kind


def own_class(name: str) -> type[Algorithm]:
    """The class package.module:Class."""
    try:
        kind = load(name)
    except ValueError as error:
        raise ValueError(
            f"algorithm {name} cannot be imported ({error}); give package.module:Class, importable from "
            f"{Path.cwd()}, or one of {', '.join(ALGORITHMS)}"
        ) from None
    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        raise ValueError(f"algorithm {name} is not a polytier.Algorithm; derive your class from it")
    return kind


def method_name(algorithm: Algorithm) -> str:
    """The name for which `method_class` returns the class of this method."""
    kind = type(algorithm)
    own = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, known in ALGORITHMS.items() if known is kind), own)


def field_names(kind: type[Algorithm]) -> list[str]:
    """The fields that a user may set; without the methods that a wrapper contains."""
    return [field.name for field in dataclasses.fields(kind) if field.name != "models"]


def make_method(name: str, fields: Mapping[str, Any], models: Mapping[str, Algorithm] | None = None) -> Algorithm:
    """The method with these fields; `models` are the methods that it wraps."""
    kind = method_class(name)
    for field in fields:
        if field not in field_names(kind):
            raise unknown(f"field of {name}", field, field_names(kind))
    return kind(**fields) if models is None else kind(models=models, **fields)  # type: ignore[call-arg]


def method_of(spec: RunSpec, tell: bool = True) -> Algorithm:
    """The method of a specification. Fields that are not set come from the table in defaults.py.

    Args:
        spec: The settings of one model.
        tell: Whether to log the values from the table with their source.
    """
    own = {field.name: field.default for field in dataclasses.fields(method_class(spec.algorithm))}
    table = default_fields(spec.algorithm, spec.data, spec.model)
    found = {name: pair for name, pair in table.items() if name not in spec.set and pair[0] != own[name]}
    for source in dict.fromkeys(source for _, source in found.values()) if tell else ():
        values = ", ".join(f"{name} = {value}" for name, (value, where) in found.items() if where == source)
        log.info("%s on %s with %s: %s (%s)", spec.algorithm, spec.data, spec.model, values, source)
    return make_method(spec.algorithm, {name: value for name, (value, _) in found.items()} | spec.set)


def fields_of(algorithm: Algorithm) -> dict[str, Any]:
    """The hyper-parameters of a method, as TOML has them; none for an object that is not a dataclass."""
    if not isinstance(algorithm, Algorithm):
        return {}
    values = {name: getattr(algorithm, name) for name in field_names(type(algorithm))}
    return plain({name: value for name, value in values.items() if value is not None})


def wraps_others(spec: RunSpec) -> bool:
    """Whether the method trains several models, each with its own method."""
    wraps = issubclass(method_class(spec.algorithm), MultiModel)
    if spec.models is not None and not wraps:
        raise ValueError(f"{spec.algorithm} trains one model; use mfa-rr or mfa-rand for several")
    return wraps


def check_tiers(algorithm: Algorithm, tiers: Sequence[str]) -> None:
    """Raise an error if a field given by tier names a tier that does not exist."""
    for field in dataclasses.fields(algorithm) if isinstance(algorithm, Algorithm) else ():
        value = getattr(algorithm, field.name)
        for tier in value if isinstance(value, Mapping) else ():
            if tier not in tiers:
                raise unknown(f"tier for {field.name}", tier, tiers)
