"""Data sets of Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytier.data.own_npz import from_columns
from polytier.data.sources import Source
from polytier.files.read import reading


def from_huggingface(
    dataset: Any,
    input: str,
    label: str,
    device: str | None = None,
    team: str | None = None,
    split: str | None = None,
) -> Source:
    """Columns of a `datasets.Dataset` as a source for `build_federation`.

    Images become uint8 [N, C, H, W], numbers and arrays float32; labels that are strings are numbered in their sorted
    order.

    Args:
        dataset: a `Dataset`, a `DatasetDict`, whose parts are concatenated, or the name of one on disk or on the hub.
        input: the column with the inputs.
        label: the column with the targets.
        device: the column with the name of each sample's device, if there is one.
        team: the column with the team, if there is one.
        split: the column with "train", "validation" or "test", if there is one.

    Raises:
        ValueError: there is no such column, its rows are not of one shape, or `datasets` is not installed.
    """
    dataset = open_huggingface(dataset) if isinstance(dataset, str | Path) else dataset
    if isinstance(dataset, dict):
        from datasets import concatenate_datasets

        dataset = concatenate_datasets(list(dataset.values()))
    names = {"x": input, "y": label, "device": device, "team": team, "split": split}
    columns = {key: read_column(dataset, name, key) for key, name in names.items() if name is not None}
    if columns["y"].dtype.kind == "U":
        columns["y"] = np.unique(columns["y"], return_inverse=True)[1]
    return from_columns(columns)


def read_column(dataset: Any, name: str, key: str) -> np.ndarray:
    """A column as an array; `key` is "x" for the inputs."""
    if name not in dataset.column_names:
        raise ValueError(f"no column {name!r}; available: {', '.join(dataset.column_names)}")
    with reading(f"column {name!r}", "an array", "make its rows numbers or images of one size"):
        values = list(dataset.with_format(None)[name])
        column = image_rows(values) if key == "x" and hasattr(values[0], "convert") else np.asarray(values)
        if key == "x" and column.dtype.kind in "biuf" and column.dtype != np.uint8:
            column = column.astype(np.float32)
        return column


def open_huggingface(name: str | Path) -> Any:
    """The data set that was saved in this folder, or the one on the hub."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError('named data sets need an extra: pip install "polytier[huggingface]"') from error
    with reading(name, "a data set", "name a saved folder, or one on the hub if there is a network"):
        return datasets.load_from_disk(str(name)) if Path(name).is_dir() else datasets.load_dataset(str(name))


def image_rows(images: Sequence[Any]) -> np.ndarray:
    """PIL images of one size as uint8 [N, C, H, W]; grey ones have one channel."""
    mode = "L" if all(image.mode in ("1", "L") for image in images) else "RGB"
    x = np.stack([np.asarray(image.convert(mode)) for image in images])
    return x[:, None] if mode == "L" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
