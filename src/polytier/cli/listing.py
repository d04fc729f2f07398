"""The command `polytier list`: available methods, data sets, models and settings."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from polytier._errors import unknown
from polytier.report.tables import line, table
from polytier.runs.spec import RunSpec, settings

KINDS = ("algorithms", "data", "models", "partitions", "teams", "papers", "settings")


def choices(kind: str) -> Mapping[str, Any]:
    """The available names of a kind. Modules are imported here, because some import torch."""
    if kind == "algorithms":
        from polytier.algorithms import ALGORITHMS as found
    elif kind == "data":
        from polytier.data.sources import SOURCES as found
    elif kind == "models":
        from polytier.models.zoo import MODELS as found
    elif kind == "partitions":
        from polytier.data.partition import PARTITIONS as found
    elif kind == "teams":
        from polytier.data.teams import FORMATIONS as found
    else:
        raise unknown("list of", kind, KINDS)
    return found


def text_of(thing: Any) -> str:
    """The description of a function or class: its docstring, or that of the module for a method."""
    text = sys.modules[thing.__module__].__doc__ if isinstance(thing, type) else thing.__doc__
    return inspect.cleandoc(text or "")


def print_papers(console: Console, name: str | None) -> None:
    """The papers, or the items of one."""
    from polytier.papers import PAPERS, items_of

    if name is None:
        console.print(table(("papers", ""), list(PAPERS.items())))
        return
    items = items_of(name, "full")
    line(console, f"{PAPERS[name]}\n")
    console.print(table((f"polytier reproduce {name}/ITEM", ""), [(item.name, item.title) for item in items]))


def own_method(name: str) -> type:
    from polytier.runs.methods import method_class

    return method_class(name)


def print_settings(console: Console, name: str | None) -> None:
    """All settings of a run, or one of them."""
    known = settings()
    if name is not None and name not in known:
        raise unknown("setting", name, list(known))
    console.print(table(("setting", "flag", "default", "scope", ""), settings_rows([name] if name else known)))


def settings_rows(names: Iterable[str], spec: type[BaseModel] = RunSpec) -> list[tuple[str, str, str, str, str]]:
    """A row per setting: name, flag, default, scope, meaning. docs/settings.md is made from these rows."""
    known = settings(spec)
    return [(n, known[n].flag, known[n].default_text or "-", known[n].scope, known[n].help) for n in names]


def print_list(console: Console, kind: str, name: str | None) -> None:
    """Print the names of a kind, or the fields or arguments of one name."""
    if kind in ("papers", "settings"):
        (print_papers if kind == "papers" else print_settings)(console, name)
        return
    found = choices(kind)
    if name is None:
        rows = [(key, text_of(thing).splitlines()[0]) for key, thing in found.items()]
        console.print(table((kind, ""), rows))
        return
    own = kind == "algorithms" and ":" in name
    if not own and name not in found:
        raise unknown(kind.removesuffix("s") if kind != "teams" else "team formation", name, list(found))
    thing = own_method(name) if own else found[name]
    line(console, f"{text_of(thing)}\n")
    if isinstance(thing, type):
        line(console, "--set FIELD=VALUE", style="bold")
        console.print(fields_table(thing))
        print_defaults(console, name)
    else:
        print_arguments(console, name, thing)


def fields_table(algorithm: type) -> Any:
    from polytier.method.parameters import describe_range

    spread = {"tier": "; or by tier", "node": "; or by tier, or one value per node"}
    rows = [
        (
            field.name,
            field.metadata["letter"],
            str(field.default),
            field.metadata["meaning"],
            describe_range(field.metadata) + spread.get(field.metadata["per"], ""),
        )
        for field in dataclasses.fields(algorithm)
        if field.metadata
    ]
    return table(("field", "letter", "default", "meaning", "range"), rows)


def print_defaults(console: Console, algorithm: str) -> None:
    """Print the rows of the table of defaults for a method."""
    from polytier.runs.defaults import TABLE

    rows = [
        (
            ", ".join(row.data),
            ", ".join(row.models),
            "" if row.steps is None else f"{row.steps}",
            ", ".join(f"{name} = {value}" for name, value in row.fields.items()),
            row.source,
        )
        for row in TABLE
        if algorithm in row.algorithms
    ]
    if rows:
        line(console, "\nDefaults for these data and models", style="bold")
        console.print(table(("data", "model", "compare --steps", "fields", "source"), rows))


def print_arguments(console: Console, name: str, function: Callable) -> None:
    own = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    if not own:
        line(console, f"{name} takes no arguments")
        return
    line(console, f"{name}:VALUE,... or {name}:{own[-1].name}=VALUE", style="bold")
    rows = [(p.name, shown(p.default), str(p.annotation)) for p in own]
    console.print(table(("argument", "default", "type"), rows))


def shown(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "-"
    return "x".join(map(str, default)) if isinstance(default, tuple) else str(default)
