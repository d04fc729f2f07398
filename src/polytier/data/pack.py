"""A federation in a folder. Its samples are mapped from files, so that they may be larger than memory.

federation.json | types, shapes, number of classes, and how inputs are scaled
x, y            | the samples as raw numbers, in the order of `Federation`
*.npy           | bounds, ids, team, cluster
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.data.federation import Federation

FILE = "federation.json"
CHUNK = 64 << 20  # bytes that are written at a time
COLUMNS = ("bounds", "ids", "team", "cluster")


def is_stored(folder: Any) -> bool:
    """Whether this is a folder that `save` wrote."""
    return isinstance(folder, str | Path) and (Path(folder).expanduser() / FILE).is_file()


def save(federation: Federation, folder: Path | str) -> None:
    """Write a federation to a new folder. federation.json is written last: it is there only if all the rest is.

    Raises:
        ValueError: the folder holds a federation already.
    """
    folder = Path(folder)
    if (folder / FILE).exists():
        raise ValueError(f"{folder} holds a federation already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"num_classes": federation.num_classes}
    for name in ("x", "y"):
        write(getattr(federation, name), folder / name)
        about[name] = [dtype_name(getattr(federation, name).dtype), list(getattr(federation, name).shape)]
    columns = {name: np.asarray(v) for name in COLUMNS if (v := getattr(federation, name)) is not None}
    about["columns"] = list(columns)
    for name, values in columns.items():
        plain = values.astype(str) if values.dtype == object else values
        np.save(folder / f"{name}.npy", plain, allow_pickle=False)
    for name in ("scale", "shift"):
        values = getattr(federation, name)
        about[name] = None if values is None else [dtype_name(values.dtype), values.tolist()]
    partial = folder / f".{FILE}.partial"
    partial.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / FILE)


def load(folder: Path | str) -> Federation:
    """Map a federation that `save` wrote.

    Raises:
        ValueError: there is none, or files of it are broken.
    """
    folder = Path(folder).expanduser().resolve()
    try:
        about = json.loads((folder / FILE).read_text(encoding="utf-8"))
        x, y = (from_file(folder / name, *about[name]) for name in ("x", "y"))
        columns: dict[str, Any] = {
            name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in about["columns"]
        }
        scaling: dict[str, Any] = {
            name: None if about[name] is None else torch.tensor(about[name][1], dtype=getattr(torch, about[name][0]))
            for name in ("scale", "shift")
        }
        bounds = torch.from_numpy(columns.pop("bounds"))
        found = Federation(x, y, bounds, num_classes=about["num_classes"], **columns, **scaling)
        sizes = {len(found.ids), *(len(values) for values in columns.values())}
        if not len(found) or bounds.shape != (len(found), 4) or sizes != {len(found)} or not fits(bounds, x, y):
            raise ValueError("its files do not belong together")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{folder} is no federation ({error}); write one by `polytier data pack`") from None
    return found


def fits(bounds: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether the bounds are in order and inside the samples."""
    return bool(bounds.min() >= 0) and bool(bounds.diff(dim=1).min() >= 0) and int(bounds.max()) <= min(len(x), len(y))


# -- tensors in files ---------------------------------------------------------------------------------


def write(values: Tensor, path: Path) -> None:
    """Write the numbers of a tensor to a file, some of them at a time."""
    with path.open("wb") as file:
        for part in values.split(max(1, CHUNK // max(1, values[:1].nbytes))):
            part.contiguous().numpy().tofile(file)


def from_file(path: Path, dtype: str, shape: list[int]) -> Tensor:
    """A tensor that is mapped from a file. If it is changed, the file stays as it is.

    Raises:
        ValueError: the file has another size.
    """
    kind, numel = getattr(torch, dtype), int(np.prod(shape))
    if os.path.getsize(path) != numel * kind.itemsize:
        raise ValueError(f"{path.name} has {os.path.getsize(path)} bytes, not {numel * kind.itemsize}")
    made = torch.from_file(str(path), shared=False, size=numel, dtype=kind) if numel else torch.zeros(0, dtype=kind)
    values = made.reshape(shape)
    values.file = path, values._version  # type: ignore[attr-defined]  # for `as_file`; tensors computed from it have no such attribute
    return values


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


def as_file(values: Tensor, path: Path) -> tuple[Path, str, list[int]]:
    """The arguments of `from_file` for these numbers: the file they are mapped from, or `path`, which is written."""
    place, version = getattr(values, "file", (path, None))
    if values._version != version:  # not from a file, or changed since
        place = path
        write(values, path)
    return place, dtype_name(values.dtype), list(values.shape)
