"""The files of public data sets: where they are searched for, and advice if they are missing or broken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def default_dir() -> Path:
    """The folder of all data if the user names none: $POLYTIER_DATA, or ~/.cache/polytier."""
    return Path(os.environ.get("POLYTIER_DATA") or Path.home() / ".cache" / "polytier")


def search_folders(data_dir: Path | None, *names: str) -> list[Path]:
    """The folders in which the files of a source are searched, in order: DIR, DIR/NAME, DIR/raw, DIR/NAME/raw."""
    base = default_dir() if data_dir is None else Path(data_dir)
    return [base, *(base / n for n in names), base / "raw", *(base / n / "raw" for n in names)]


def find_file(file: str, places: Sequence[Path]) -> Path | None:
    """The first FILE or FILE.gz in the folders."""
    found = (place / (file + end) for place in places for end in ("", ".gz"))
    return next((path for path in found if path.is_file()), None)


def find_files(name: str, files: Sequence[str], places: Sequence[Path]) -> list[Path]:
    """All of these files, each packed or not.

    Raises:
        ValueError: some are missing.
    """
    found = {file: find_file(file, places) for file in files}
    absent = [f"{file}(.gz)" for file, path in found.items() if path is None]
    if absent:
        raise not_found(name, absent, places)
    return [path for path in found.values() if path is not None]


def not_found(name: str, files: Sequence[str], places: Sequence[Path]) -> ValueError:
    """The error for files of a source that are in none of the folders."""
    return ValueError(
        f"{name} needs {', '.join(files)}; looked in {', '.join(map(str, places))}. "
        f"Name the folder with --data-dir, or fetch the files with `polytier data get {name}`"
    )


def checked_labels(y: np.ndarray, num_classes: int) -> np.ndarray:
    """The labels as int64.

    Raises:
        ValueError: a label is not in 0 .. num_classes - 1.
    """
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(f"labels run from {y.min()} to {y.max()}, expected 0 to {num_classes - 1}")
    return y.astype(np.int64)
