"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from polytier.data.sources.source import Source


def digits(data_dir: Path | None = None) -> Source:
    """8x8 images of handwritten digits, bundled with scikit-learn: 1,797 samples, 10 classes."""
    places = find_spec("sklearn")
    assert places is not None
    assert places.submodule_search_locations is not None
    # only its file is read: importing scikit-learn takes as long as importing torch
    table = np.loadtxt(Path(places.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    x = (table[:, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return Source(x, table[:, -1].astype(np.int64), 10)
