"""Which code a file may name. A TOML file or a run folder may come from anyone, and an import runs the module.

A name that was typed on the command line or in a Python program is the user's choice, and so are installed packages.
A file that names a module of the current folder is refused unless the user says that the module is trusted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polytier.models.own_code import in_current_folder

KEYS = ("algorithm", "model")  # the settings that may be package.module:attribute


def named_code(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting, value) for every setting of a run, or of one of its models, that may name code."""
    tables = values.get("models")
    for table in (values, *(tables.values() if isinstance(tables, Mapping) else ())):
        for key in KEYS:
            value = table.get(key) if isinstance(table, Mapping) else None
            if isinstance(value, str) and ":" in value:
                yield key, value


def check_trusted(values: Mapping[str, Any], file: Path, advice: str, typed: Iterable[str] = ()) -> None:
    """Raise an error if settings name code of the current folder, or a cluster. None of that code is imported.

    Args:
        values: The settings, as in config.toml.
        file: Where they come from.
        advice: What to do if the code is trusted.
        typed: Names that the user typed; other names in the same packages are trusted, too.

    Raises:
        ValueError: The message has the name, the file that names it, and the advice.
    """
    engine = values.get("engine")
    if isinstance(engine, str) and engine.startswith("ray:") and engine not in typed:
        raise ValueError(
            f"{file} has engine = {engine!r}: a cluster of Ray that the run joins can run code here and read the data; "
            f"give --engine ray for one on this machine, or, if you trust it, {advice}"
        )
    trusted = {package_of(name) for name in typed}
    for key, name in named_code(values):
        place = None if package_of(name) in trusted else in_current_folder(name.partition(":")[0])
        if place is not None and not (key == "model" and is_built_in(name)):
            here = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
            raise ValueError(
                f"{file} has {key} = {name!r}, which imports {here} from the current folder and runs its code; "
                f"read that code, and if you trust it, {advice}"
            )


def package_of(name: str) -> str:
    """The first part of package.module:attribute."""
    return name.partition(":")[0].partition(".")[0]


def is_built_in(model: str) -> bool:
    """Whether a model with arguments, such as dnn:500x200, has the name of a model of this package."""
    from polytier.models.zoo import MODELS

    return model.partition(":")[0] in MODELS


def with_flag() -> str:
    """Advice to repeat the command that is running, with --trust."""
    program, *words = sys.argv
    name = ["python", "-m", "polytier"] if Path(program).name == "__main__.py" else ["polytier"]
    return f"repeat the command with --trust: {shlex.join([*name, *words, '--trust'])}"
