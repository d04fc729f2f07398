"""Data of one's own: an .npz file, or a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytier.data.sources import Source, reading


def own_column(values: np.ndarray, name: str, kinds: str) -> np.ndarray:
    """A user's column, in a type that the rest of the house knows."""
    allowed = {"b": "true/false", "i": "whole numbers", "u": "whole numbers", "f": "floats", "U": "strings"}
    values = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    if values.dtype.kind not in kinds or not values.ndim:
        words = " or ".join(dict.fromkeys(allowed[kind] for kind in kinds))
        raise ValueError(f"{name} is {values.dtype} {values.shape}; it must be {words}, one row a sample")
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):  # too large becomes infinite, which Federation refuses by row
            return values.astype(np.float32)
    if values.dtype == np.uint8 and name == "x":
        return values[:, None] if values.ndim == 3 else values  # grey images get their channel
    return values.astype(np.int64) if name in ("x", "y") else values


COLUMNS = {"x": "biuf", "y": "biuf", "device": "iuU", "team": "iuU", "split": "iuU", "cluster": "iuU"}


def from_columns(columns: dict[str, np.ndarray]) -> Source:
    ready: dict[str, Any] = {key: own_column(columns[key], key, COLUMNS[key]) for key in columns}
    if ready["x"].ndim == 1:
        ready["x"] = ready["x"][:, None]
    y = ready["y"]
    return Source(num_classes=int(y.max()) + 1 if y.dtype == np.int64 and y.size else None, **ready)


def load_npz(path: Path | str) -> Source:
    """The user's own file: x, y, device and optionally team, split, cluster. Floats are used as they are."""
    advice = "write it by np.savez with x, y, device (optional: team, split, cluster) as numbers or strings"
    with reading(path, "an .npz file", advice), open(path, "rb") as file:
        archive: Any = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array without a name")
        absent = [key for key in ("x", "y", "device") if key not in archive]
        if absent:
            raise ValueError(f"it has {', '.join(archive) or 'no arrays'} but no {absent[0]}")
        return from_columns({key: archive[key] for key in COLUMNS if key in archive})


def from_huggingface(
    dataset: Any,
    input: str,
    label: str,
    device: str | None = None,
    team: str | None = None,
    split: str | None = None,
) -> Source:
    """Columns of a `datasets.Dataset`, or of one named or saved on disk; a DatasetDict is merged.

    Images become uint8 [N, C, H, W], numbers and arrays float32; labels that are strings are numbered in
    their sorted order.
    """
    dataset = open_huggingface(dataset) if isinstance(dataset, str | Path) else dataset
    if isinstance(dataset, dict):
        from datasets import concatenate_datasets

        dataset = concatenate_datasets(list(dataset.values()))
    names = {"x": input, "y": label, "device": device, "team": team, "split": split}
    columns: dict[str, np.ndarray] = {}
    for key, name in names.items():
        if name is None:
            continue
        if name not in dataset.column_names:
            raise ValueError(f"no column {name!r}; there are {', '.join(dataset.column_names)}")
        with reading(f"column {name!r}", "an array", "make its rows numbers or images of one size"):
            values = list(dataset.with_format(None)[name])
            columns[key] = image_rows(values) if key == "x" and hasattr(values[0], "convert") else np.asarray(values)
            if key == "x" and columns[key].dtype.kind in "biuf" and columns[key].dtype != np.uint8:
                columns[key] = columns[key].astype(np.float32)
    if columns["y"].dtype.kind == "U":
        columns["y"] = np.unique(columns["y"], return_inverse=True)[1]
    return from_columns(columns)


def open_huggingface(name: str | Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError('named data sets need an extra: pip install "polytier[huggingface]"') from error
    with reading(name, "a data set", "name a saved folder, or one on the hub where there is a network"):
        return datasets.load_from_disk(str(name)) if Path(name).is_dir() else datasets.load_dataset(str(name))


def image_rows(images: Sequence[Any]) -> np.ndarray:
    """PIL images of one size as uint8 [N, C, H, W]; grey ones have one channel."""
    mode = "L" if all(image.mode in ("1", "L") for image in images) else "RGB"
    x = np.stack([np.asarray(image.convert(mode)) for image in images])
    return x[:, None] if mode == "L" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
