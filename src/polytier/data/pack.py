"""A federation in a folder. Its samples are mapped from files, so that they may be larger than memory.

federation.json | types, shapes, number of classes, how inputs are scaled, and the digests of the other files
x, y            | the samples as raw numbers, in the order of `Federation`
*.npy           | bounds, ids, team, cluster
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier._errors import Fault
from polytier.data.federation import MOST_CLASSES, Federation
from polytier.files.read import Damaged, check_file, check_path, open_regular, read_json, refuse_links
from polytier.files.write import PARTIAL, make_folder, remove_partials, sync_file, write_json

FILE = "federation.json"
CHUNK = 64 << 20  # bytes that are written at a time
BLOCK = 4 << 20  # bytes that share a digest
SAMPLED = 8  # blocks of each file that are checked when it is first used
FORMAT = 3  # from here on with digests
COLUMNS = ("bounds", "ids", "team", "cluster")
# what reading files that are not what they should be may raise
BROKEN = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def is_stored(folder: Any) -> bool:
    """Whether this is a folder that `save` wrote."""
    return isinstance(folder, str | Path) and (Path(folder).expanduser() / FILE).is_file()


def save(federation: Federation, folder: Path | str) -> None:
    """Write a federation to a new folder. federation.json is written last: it is there only if all the rest is.

    Raises:
        ValueError: the folder holds a federation already, or links.
    """
    folder = Path(folder)
    check_new(folder)
    make_folder(folder)
    refuse_links(folder)
    remove_partials(folder)
    about: dict[str, Any] = {"format": FORMAT, "num_classes": federation.num_classes}
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
    files = ["x", "y", *(f"{name}.npy" for name in columns)]
    about["digests"] = {name: [digest for _, digest in block_digests(folder / name)] for name in files}
    for name in files:
        sync_file(folder / name)
    write_json(folder / FILE, about)


def check_new(folder: Path) -> None:
    """Raise a ValueError unless a federation can be written here: a new folder, or what an interrupted one left."""
    check_path(folder, "the folder")
    if (folder / FILE).exists():
        raise ValueError(f"{folder} holds a federation already; name a new folder")
    own = {"x", "y", *(f"{name}.npy" for name in COLUMNS)}
    if folder.exists() and (
        not folder.is_dir() or any(path.name not in own and path.suffix != PARTIAL for path in folder.iterdir())
    ):
        raise ValueError(f"{folder} exists and holds other files; name a new folder")


def load(folder: Path | str) -> Federation:
    """Map a federation that `save` wrote, after a check of some blocks of its files.

    Raises:
        ValueError: there is none, or files of it are broken.
    """
    folder = Path(folder).expanduser().resolve()
    try:
        about = read_json(folder / FILE)
        check_blocks(folder, about, SAMPLED)
        x, y = (from_file(folder / name, *about[name]) for name in ("x", "y"))
        columns: dict[str, Any] = {name: read_column(folder, name) for name in about["columns"]}
        scaling: dict[str, Any] = {
            name: None if about[name] is None else torch.tensor(about[name][1], dtype=getattr(torch, about[name][0]))
            for name in ("scale", "shift")
        }
        bounds = torch.from_numpy(columns.pop("bounds"))
        found = Federation(x, y, bounds, num_classes=about["num_classes"], **columns, **scaling)
        check_parts(found)
    except BROKEN as error:
        raise ValueError(f"{folder} is no federation ({error}); write one by `polytier data pack`") from None
    return found


def verify(folder: Path | str) -> int:
    """Compare all blocks of a packed federation with their digests.

    Returns:
        The number of blocks.

    Raises:
        ValueError: the folder holds no federation, has no digests, or is damaged.
    """
    folder = Path(folder).expanduser()
    if not is_stored(folder):
        raise ValueError(f"{folder} holds no federation; write one by `polytier data pack`")
    about = read_json(folder / FILE)
    if "digests" not in about:
        raise ValueError(f"{folder} was packed by an earlier version, without digests; pack it again")
    check_blocks(folder, about, None)
    load(folder)
    return sum(map(len, about["digests"].values()))


def check_blocks(folder: Path, about: dict[str, Any], most: int | None) -> None:
    """Compare blocks of the files with their digests.

    Args:
        folder: the folder.
        about: the content of federation.json.
        most: blocks to check per file, spread evenly, the first and the last among them; None: all.

    Raises:
        Damaged: a file is missing or has other content.
    """
    for name, digests in about.get("digests", {}).items():
        path = folder / Path(name).name
        count = len(digests)
        some = np.linspace(0, count - 1, count if most is None else min(count, most), dtype=int).tolist()
        try:
            if -(-path.stat().st_size // BLOCK) != count:
                raise Damaged(f"{path} is damaged: it does not have its size")
            for k, digest in block_digests(path, some):
                if digest != digests[k]:
                    raise Damaged(f"{path} is damaged: block {k} of {count} does not match its digest; pack it again")
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}; pack it again") from None


def block_digests(path: Path, some: Iterable[int] | None = None) -> Iterator[tuple[int, str]]:
    """The number and the SHA-256 digest of some blocks of a file; by default of all."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for k in range(-(-size // BLOCK)) if some is None else some:
            file.seek(k * BLOCK)
            yield k, sha256(file.read(BLOCK)).hexdigest()


def read_column(folder: Path, name: str) -> np.ndarray:
    """One of `COLUMNS`: a value per device, or for bounds four."""
    if name not in COLUMNS:
        raise ValueError(f"it names {name!r}, which is none of {', '.join(COLUMNS)}")
    path = folder / f"{name}.npy"
    try:
        check_file(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    values = np.load(path, allow_pickle=False)
    if values.dtype.kind not in ("iu" if name == "bounds" else "iuU") or (name != "bounds" and values.ndim != 1):
        raise ValueError(f"{path.name} is {values.dtype} {values.shape}")
    return values.astype(np.int64) if name == "bounds" else values


def check_parts(found: Federation) -> None:
    """Raise a ValueError if the parts of a federation are of wrong types or do not belong together."""
    x, y, bounds, classes = found.x, found.y, found.bounds, found.num_classes
    n, whole = len(found), not y.is_floating_point()
    named = [values for values in (found.team, found.cluster) if values is not None]
    sizes = {len(found.ids), *map(len, named)}
    if not n or tuple(bounds.shape) != (n, 4) or sizes != {n} or len(x) != len(y) or not fits(bounds, len(x)):
        raise ValueError("its files do not belong together")
    if len(np.unique(found.ids)) < n:
        raise ValueError("two devices have the same name")
    if x.dtype == torch.bool or x.is_complex() or y.dtype not in (torch.int64, torch.float32, torch.float64):
        raise ValueError(f"x is {dtype_name(x.dtype)} and y {dtype_name(y.dtype)}")
    labelled = classes is None or (type(classes) is int and whole and int(y.max()) < classes <= MOST_CLASSES)
    if not labelled:
        raise ValueError(f"it has {classes!r} classes, which its labels do not fit")
    for values in (found.scale, found.shift):
        if values is not None and not bool(torch.isfinite(values).all() and (x[:1] * values).shape == x[:1].shape):
            raise ValueError("scale and shift do not fit x")


def fits(bounds: Tensor, rows: int) -> bool:
    """Whether the bounds are in order and inside the samples, and each device has samples for training."""
    sizes = bounds.diff(dim=1)
    inside = int(bounds.min()) >= 0 and int(bounds.max()) <= rows
    return inside and int(sizes.min()) >= 0 and int(sizes[:, 0].min()) > 0


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
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{path.name} is {dtype!r} {shape}")
    numel = math.prod(shape)
    if os.path.getsize(path) != numel * kind.itemsize:
        raise ValueError(f"{path.name} has {os.path.getsize(path)} bytes, not {numel * kind.itemsize}")
    made = torch.from_file(str(path), shared=False, size=numel, dtype=kind) if numel else torch.zeros(0, dtype=kind)
    values = made.reshape(shape)
    values.file = path, values._version  # type: ignore[attr-defined]  # for `as_file`; tensors computed from it have no such attribute
    return values


def check_size(values: Tensor) -> None:
    """Raise an error if the file that a tensor is mapped from was cut: reading the missing part would end the process.

    Raises:
        Fault: the file is gone or has another size.
    """
    if not hasattr(values, "file"):
        return
    path = values.file[0]  # type: ignore[attr-defined]
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise Fault(f"{path} was removed during the run ({error.strerror}): restore it") from None
    if size != values.nbytes:
        raise Fault(f"{path} has {size} bytes, not {values.nbytes}: it was changed during the run; restore it")


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
