"""CIFAR-10 and CIFAR-100, from the python archives. Their pickles are read by a reader that only makes arrays."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytier.data.sources.files import checked_labels, not_found, search_folders
from polytier.data.sources.source import Source
from polytier.files.read import reading


def cifar_10(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """CIFAR-10, 32x32 in colour, 10 classes, 60,000 samples, from the python archive."""
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return cifar("cifar-10", "cifar-10-batches-py", files, b"labels", 10, data_dir, low)


def cifar_100(data_dir: Path | None = None, *, coarse: bool = False, low: float = 0.0) -> Source:
    """CIFAR-100, 32x32 in colour, 100 classes (coarse: 20), 60,000 samples, from the python archive."""
    key, num_classes = (b"coarse_labels", 20) if coarse else (b"fine_labels", 100)
    return cifar("cifar-100", "cifar-100-python", ["train", "test"], key, num_classes, data_dir, low)


def cifar(
    name: str, folder: str, files: Sequence[str], key: bytes, num_classes: int, data_dir: Path | None, low: float
) -> Source:
    """The images of all batches.

    Args:
        name: of the data set.
        folder: the name of the archive's folder.
        files: the batches in it.
        key: under which a batch has its labels.
        num_classes: labels are 0 .. num_classes - 1.
        data_dir: where data are kept.
        low: see `Source`.
    """
    xs, ys = [], []
    for path, raw in cifar_batches(name, folder, files, data_dir).items():
        with reading(path, "a CIFAR batch"):
            batch = ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
            x, y = np.asarray(batch[b"data"]), np.asarray(batch[key])
            if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072:
                raise ValueError(f"data are {x.dtype} {x.shape}, expected uint8 [rows, 3072]")
            if y.shape != (len(x),) or y.dtype.kind not in "iu":
                raise ValueError(f"{y.shape} labels of type {y.dtype} for {len(x)} images")
            xs.append(x.reshape(-1, 3, 32, 32))
            ys.append(checked_labels(y, num_classes))
    return Source(np.concatenate(xs), np.concatenate(ys), num_classes, low=low)


def cifar_batches(name: str, folder: str, files: Sequence[str], data_dir: Path | None) -> dict[str, bytes]:
    """The bytes of each batch by its path, from the unpacked folder or the official archive."""
    places = search_folders(data_dir, name)
    for place in places:
        unpacked = place if (place / files[0]).is_file() else place / folder
        if (unpacked / files[0]).is_file():
            with reading(unpacked, f"the unpacked {name}-python.tar.gz", "unpack it again"):
                return {str(unpacked / file): (unpacked / file).read_bytes() for file in files}
    archive = next((p for q in places if (p := q / f"{name}-python.tar.gz").is_file()), None)
    if archive is None:
        raise not_found(name, [f"{name}-python.tar.gz or its unpacked folder {folder}"], places)
    with reading(archive, "a tar.gz archive"):
        whole = io.BytesIO(gzip.decompress(archive.read_bytes()))  # all at once, so that its checksum is compared
        with tarfile.open(fileobj=whole) as tar:
            members = {Path(m.name).name: m for m in tar.getmembers() if m.isfile()}
            absent = [file for file in files if file not in members]
            if absent:
                raise ValueError(f"it has no {absent[0]}")
            streams = {f"{archive}:{file}": tar.extractfile(members[file]) for file in files}
            return {path: stream.read() for path, stream in streams.items() if stream is not None}


class ArrayUnpickler(pickle.Unpickler):
    """Loads containers, numbers, strings and NumPy arrays; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("multiarray", "_reconstruct"): np.zeros(1).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): encode_latin1,
        }
        short = "multiarray" if module in ("numpy.core.multiarray", "numpy._core.multiarray") else module
        if (short, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image batches do not need")
        return allowed[short, name]


def encode_latin1(text: str, codec: str) -> bytes:
    """How Python 3 pickles bytes for Python 2; no other codec is allowed."""
    if codec != "latin1":
        raise pickle.UnpicklingError(f"codec {codec!r} is not allowed")
    return text.encode("latin1")
