"""Images in idx files: MNIST, Fashion-MNIST and EMNIST."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polytier.data.sources.files import checked_labels, find_files, search_folders
from polytier.data.sources.source import Source
from polytier.files.read import reading


def mnist(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """MNIST, 28x28, 10 digits, 70,000 samples, from its four idx files."""
    return idx_source("mnist", ("train", "t10k"), 10, search_folders(data_dir, "mnist"), low)


def fashion_mnist(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """Fashion-MNIST, 28x28, 10 kinds of clothing, 70,000 samples, from its four idx files."""
    return idx_source("fashion-mnist", ("train", "t10k"), 10, search_folders(data_dir, "fashion-mnist"), low)


def emnist_digits(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """EMNIST digits ("EMNIST-10"), 28x28, 10 classes, 280,000 samples."""
    return emnist(data_dir, "digits", 10, low)


def emnist_byclass(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """EMNIST by class ("FEMNIST" in PerMFL), 28x28, 62 digits and letters, 814,255 samples."""
    return emnist(data_dir, "byclass", 62, low)


def emnist(data_dir: Path | None, kind: str, num_classes: int, low: float) -> Source:
    """One of EMNIST's sets. Its files hold each image transposed; here it is transposed back."""
    name = f"emnist-{kind}"
    prefixes = [f"{name}-{part}" for part in ("train", "test")]
    places = search_folders(data_dir, name, "emnist")
    return idx_source(name, prefixes, num_classes, places, low, transposed=True)


def idx_source(
    name: str, prefixes: Sequence[str], num_classes: int, places: Sequence[Path], low: float, transposed: bool = False
) -> Source:
    """Pairs of idx files with images and labels, merged.

    Args:
        name: of the data set, for messages.
        prefixes: how the names of each pair of files begin.
        num_classes: labels are 0 .. num_classes - 1.
        places: the folders in which the files are searched.
        low: see `Source`.
        transposed: whether rows and columns of the images are exchanged in the files.
    """
    files = [f"{p}-{kind}" for p in prefixes for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    paths = find_files(name, files, places)
    xs, ys = [], []
    for images, labels in zip(paths[::2], paths[1::2], strict=True):
        xs.append(read_idx(images, 3))
        ys.append(read_idx(labels, 1))
        with reading(labels, f"the labels of {images.name}"):
            ys[-1] = checked_labels(ys[-1], num_classes)
            if len(ys[-1]) != len(xs[-1]):
                raise ValueError(f"{len(ys[-1])} labels for {len(xs[-1])} images")
    if len({x.shape[1:] for x in xs}) > 1:
        raise ValueError(f"{paths[0]} and {paths[2]} hold images of different sizes; replace one of them")
    x = np.concatenate(xs)
    if transposed:
        x = np.ascontiguousarray(x.transpose(0, 2, 1))
    return Source(x[:, None], np.concatenate(ys), num_classes, low=low)


def read_idx(path: Path, dims: int) -> np.ndarray:
    """An idx file: 0, 0, 8 (for unsigned bytes), the number of axes, their sizes, the values."""
    with reading(path, "an idx file"):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if raw[:4] != bytes([0, 0, 8, dims]):
            raise ValueError(f"it starts with {raw[:4].hex()} instead of 000008{dims:02x}")
        start = 4 + 4 * dims
        if len(raw) < start:
            raise ValueError(f"it ends inside its header, after {len(raw)} bytes")
        shape = tuple(int(size) for size in np.frombuffer(raw[4:start], ">u4"))
        expected = start + int(np.prod(shape, dtype=object))
        if len(raw) != expected:
            raise ValueError(f"it has {len(raw):,} bytes, its header announces {expected:,}")
        return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
