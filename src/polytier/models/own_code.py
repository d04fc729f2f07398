"""Models and methods of the user, named as `package.module:attribute`. This module does not import torch.

A module is searched where Python finds installed packages, and then in the current folder. `in_current_folder` tells
beforehand whether an import would run code of the current folder; `runs/trust.py` decides whether it may.
"""

from __future__ import annotations

import importlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    """Import what `package.module:attribute` names.

    The current folder joins `sys.path`, as its last entry, if the module is there and nowhere else. It stays, because
    worker processes import the module too.

    Raises:
        ValueError: If it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if in_current_folder(module) is not None and here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(str(error)) from error


def exists(module: str) -> bool:
    """Whether there is such a module, or may be one in a package. Nothing is imported."""
    if not module or "." in module or module in sys.modules:
        return bool(module)
    return find_spec(module) is not None or in_current_folder(module) is not None


def in_current_folder(module: str) -> Path | None:
    """The place in or below the current folder whose code an import of the module would run.

    No code of the current folder is run to find this; packages that are installed are imported to search them.

    Args:
        module: The full name, such as `package.module`.

    Returns:
        A file or folder. None if the module is imported already, if it belongs to Python or to an installed package,
        or if there is none. A folder with installed packages below the current folder, such as that of a virtual
        environment in use, counts as installed.
    """
    here = Path.cwd()
    for name in accumulate(module.split("."), "{}.{}".format):
        if name in sys.modules:
            continue
        try:
            spec = find_spec(name)
        except Exception:  # importing an installed package may raise anything; `load` then raises the same
            return None
        if spec is None:
            found = PathFinder.find_spec(module.partition(".")[0], [str(here)])
            return None if found is None else next(places(found), here)
        for place in places(spec):
            if below(place, here):
                return place
    return None


def places(spec: ModuleSpec) -> Iterator[Path]:
    """The file of a module, and the folders in which the modules of a package are searched."""
    if spec.has_location and spec.origin is not None:
        yield Path(spec.origin).absolute()
    yield from (Path(folder).absolute() for folder in spec.submodule_search_locations or ())


def below(place: Path, here: Path) -> bool:
    """Whether a place is in or below a folder, but in no folder of the environment's packages."""
    known = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    packages = [Path(folder) for folder in (*known, *site.getsitepackages(), site.getusersitepackages())]
    return any(
        form.is_relative_to(here) and not any(form.is_relative_to(folder) for folder in packages)
        for form in (place, place.resolve())
    )
