"""LEAF's json files: users are devices, and the files say which samples are for training and which for testing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from polytier.data.sources.files import checked_labels, not_found, search_folders
from polytier.data.sources.source import Source
from polytier.files.read import reading


def leaf(data_dir: Path | None = None, *, shape: tuple[int, ...] = ()) -> Source:
    """A data set made by LEAF: json files in the folders train and test, or json files without a split.

    Args:
        data_dir: where data are kept; DIR, DIR/leaf and their subfolders raw and data are searched.
        shape: the shape of one sample, such as 1x28x28: LEAF writes images as flat rows. Not given: as in the files.

    Raises:
        ValueError: there are no files, or a file is not what LEAF writes.
    """
    searched = search_folders(data_dir, "leaf")
    places = [*searched, *(p / "data" for p in searched[:2])]
    parts = ("train", "test")
    home = next((p for p in places if all(list((p / part).glob("*.json")) for part in parts)), None)
    flat = next((p for p in places if list(p.glob("*.json"))), None)
    if home is not None:
        files = [(path, part) for part in parts for path in sorted((home / part).glob("*.json"))]
    elif flat is not None:
        files = [(path, "") for path in sorted(flat.glob("*.json"))]
    else:
        raise not_found("leaf", ["folders train and test with LEAF's json files (or json files)"], places)
    rows = [(*user, part) for path, part in files for user in read_leaf(path)]
    sizes = [len(y) for _, _, y, _ in rows]
    if not sum(sizes):
        raise ValueError(f"{files[0][0].parent} has no samples in its json files; put LEAF's output there")
    with reading(files[0][0].parent, "rows of one shape", "give the shape of one sample, such as 1x28x28"):
        x = np.concatenate([x for _, x, _, _ in rows])
        x = x.reshape(len(x), *shape) if shape else x
    y = np.concatenate([y for _, _, y, _ in rows])
    device = np.repeat([user for user, _, _, _ in rows], sizes)
    split = np.repeat([part for _, _, _, part in rows], sizes) if home is not None else None
    return Source(x, y, int(y.max()) + 1, device, split=split)


def read_leaf(path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, inputs and labels of each user in a json file; users without samples are left out."""
    with reading(path, "LEAF json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        absent = [key for key in ("users", "num_samples", "user_data") if key not in content]
        if absent:
            raise ValueError(f"it has no {absent[0]!r}")
        for user, size in zip(content["users"], content["num_samples"], strict=True):
            x, y = np.asarray(content["user_data"][user]["x"]), np.asarray(content["user_data"][user]["y"])
            if not size == len(x) == len(y):
                raise ValueError(f"user {user} has {len(x)} inputs and {len(y)} labels, num_samples says {size}")
            if size and (x.dtype.kind not in "iuf" or y.dtype.kind not in "iu"):
                raise ValueError(f"user {user} has inputs that are not numbers or labels that are not integers")
            if size:
                yield str(user), x.astype(np.float32), checked_labels(y, int(max(y.max(), 0)) + 1)
