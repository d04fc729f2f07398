"""A federation in a folder: samples are mapped, not read, so that a population may be larger than memory.

federation.json | types, shapes, classes, and how inputs are scaled
x, y            | the samples as plain numbers, sorted as `Federation` has them
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
CHUNK = 64 << 20  # bytes that are written at once
COLUMNS = ("bounds", "ids", "team", "cluster")


def is_stored(folder: Any) -> bool:
    return isinstance(folder, str | Path) and (Path(folder).expanduser() / FILE).is_file()


def save(federation: Federation, folder: Path | str) -> None:
    """Write it to a new folder; federation.json comes last, without which there is no federation."""
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
    return bool(bounds.min() >= 0) and bool(bounds.diff(dim=1).min() >= 0) and int(bounds.max()) <= min(len(x), len(y))


# -- tensors in files ---------------------------------------------------------------------------------


def write(values: Tensor, path: Path) -> None:
    with path.open("wb") as file:
        for part in values.split(max(1, CHUNK // max(1, values[:1].nbytes))):
            part.contiguous().numpy().tofile(file)


def from_file(path: Path, dtype: str, shape: list[int]) -> Tensor:
    """Mapped; whoever changes it changes his own copy."""
    kind, numel = getattr(torch, dtype), int(np.prod(shape))
    if os.path.getsize(path) != numel * kind.itemsize:
        raise ValueError(f"{path.name} has {os.path.getsize(path)} bytes, not {numel * kind.itemsize}")
    made = torch.from_file(str(path), shared=False, size=numel, dtype=kind) if numel else torch.zeros(0, dtype=kind)
    values = made.reshape(shape)
    values.file = path, values._version  # type: ignore[attr-defined]  # for `as_file`; what is made of it has none
    return values


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_file(values: Tensor, path: Path) -> tuple[Path, str, list[int]]:
    """For `from_file`: the file that these numbers are mapped from, or `path`, which gets them."""
    place, version = getattr(values, "file", (path, None))
    if values._version != version:  # none yet, or changed since
        place = path
        write(values, path)
    return place, dtype_name(values.dtype), list(values.shape)
