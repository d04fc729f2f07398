"""The user's own data in an .npz file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polytier.data.sources import Source
from polytier.files.read import check_file, reading

# the columns that are read, and the kinds of NumPy types that each of them may have
COLUMNS = {"x": "biuf", "y": "biuf", "device": "iuU", "team": "iuU", "split": "iuU", "cluster": "iuU"}
WORDS = {"b": "true/false", "i": "integers", "u": "integers", "f": "floats", "U": "strings"}


def load_npz(path: Path | str, device_column: str | None = None, team_column: str | None = None) -> Source:
    """Read an .npz file with x, y and device, and optionally team, split and cluster.

    Args:
        path: the file. Each array has one row per sample. Images are uint8; floats are used as they are.
        device_column: the name of the array that names devices; by default "device".
        team_column: the name of the array that names teams; by default "team", which the file need not have.

    Returns:
        The samples, with the devices' names as they are in the file.

    Raises:
        ValueError: the file cannot be read, or a column is missing or has a type that is not allowed.
    """
    advice = (
        "write it by np.savez with x and y (numbers) and device (numbers or strings; so are team, split and cluster, "
        "which are optional); np.unique(names, return_inverse=True)[1] makes classes of names; "
        "--device-column and --team-column give other names for device and team"
    )
    names = {key: key for key in COLUMNS} | {"device": device_column or "device", "team": team_column or "team"}
    needed = [names[key] for key in ("x", "y", "device", *(["team"] if team_column else []))]
    with reading(path, "an .npz file", advice):
        arrays = read_arrays(path, needed, tuple(names.values()))
        return from_columns({key: arrays[name] for key, name in names.items() if name in arrays})


def read_arrays(path: Path | str, needed: Sequence[str], wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """The wanted arrays of an .npz file, by name.

    Raises:
        ValueError: it is no regular file, an array that is needed is missing, or a name is there twice.
    """
    check_file(path)
    with open(path, "rb") as file:
        archive: Any = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array without a name")
        twice = [name for name, count in Counter(archive.files).items() if count > 1]
        if twice:
            raise ValueError(f"it has {twice[0]} twice")
        absent = [key for key in needed if key not in archive]
        if absent:
            raise ValueError(f"it has {', '.join(archive) or 'no arrays'} but no {absent[0]}")
        return {key: archive[key] for key in wanted if key in archive}


def from_columns(columns: dict[str, np.ndarray]) -> Source:
    """A source of columns by name, each with one row per sample."""
    ready: dict[str, Any] = {key: own_column(columns[key], key, COLUMNS[key]) for key in columns}
    if ready["x"].ndim == 1:
        ready["x"] = ready["x"][:, None]
    for key in ("device", "team", "split", "cluster"):
        if key in ready and ready[key].ndim > 1:
            raise ValueError(f"{key} has shape {ready[key].shape}; it must be one name per sample")
    source = Source(num_classes=None, **ready)
    if source.y.dtype != np.int64 or not source.y.size:
        return source
    return replace(source, num_classes=int(max(source.y.max(), source.x.max() if source.is_tokens else 0)) + 1)


def own_column(values: np.ndarray, name: str, kinds: str) -> np.ndarray:
    """A column of the user in one of the types that the package works with: uint8, int64, float32 or strings.

    Args:
        values: one row per sample.
        name: of the column, for messages; "x" and "y" are converted to int64 or float32.
        kinds: the kinds of NumPy types that are allowed (`dtype.kind`).

    Raises:
        ValueError: the type is not allowed.
    """
    values = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    if values.dtype.kind not in kinds or not values.ndim:
        words = " or ".join(dict.fromkeys(WORDS[kind] for kind in kinds))
        raise ValueError(f"{name} is {values.dtype} {values.shape}; it must be {words}, one row per sample")
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):  # too large a number becomes infinite, which Federation refuses by row
            return values.astype(np.float32)
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has {int(values.max())}, which is too large; save it as int64 or float32")
    if values.dtype == np.uint8 and name == "x":
        return values[:, None] if values.ndim == 3 else values  # grey images get a channel
    return values.astype(np.int64) if name in ("x", "y") else values
