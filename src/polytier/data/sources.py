"""Where samples come from: public data sets in their own file formats, and the user's own files.

A source only reads; who owns which sample is decided in `partition.py`. The official training and test sets
are merged, as the papers do: each device cuts its own samples into training and test.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from polytier.data.federation import Federation
from polytier.data.synthetic import quadratic_clusters, quadratics, synthetic, tridiagonal


@dataclass(frozen=True)
class Source:
    """Samples with what is known of them by nature.

    field       | shape          | meaning
    x           | [N, ...]       | images uint8 [N, C, H, W] or float32 in [0, 1]; tables float32 [N, F]
    y           | [N] or [N, k]  | labels int64, or several tasks; float32 if they are no classes
    num_classes |                | None for targets that are no classes
    device, team, split, cluster | [N] or None: the sample's owner, team, split and true group
    low         |                | what a model sees as a black pixel of a uint8 image; a white one is 1
    """

    x: np.ndarray
    y: np.ndarray
    num_classes: int | None
    device: np.ndarray | None = None
    team: np.ndarray | None = None
    split: np.ndarray | None = None
    cluster: np.ndarray | None = None
    low: float = 0.0

    def __post_init__(self) -> None:
        for name in ("y", "device", "team", "split", "cluster"):
            values = getattr(self, name)
            rows = len(self.x) if values is None else len(values)
            if rows != len(self.x):
                raise ValueError(f"{name} needs one row a sample; got {rows} for {len(self.x)} samples")


def default_dir() -> Path:
    """Where data are kept when the user names no folder."""
    return Path(os.environ.get("POLYTIER_DATA") or Path.home() / ".cache" / "polytier")


@contextmanager
def reading(path: Path | str, what: str, advice: str = "get the file again") -> Iterator[None]:
    """Whatever goes wrong while a file is read becomes advice that names the file."""
    try:
        yield
    except Exception as error:  # a broken pickle or archive can raise nearly anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        raise ValueError(f"{path} cannot be read as {what}: {reason}; {advice}") from error


def folders(data_dir: Path | None, *names: str) -> list[Path]:
    """The folders searched for the files of a source, in order."""
    base = default_dir() if data_dir is None else Path(data_dir)
    return [base, *(base / n for n in names), base / "raw", *(base / n / "raw" for n in names)]


def find(file: str, places: Sequence[Path]) -> Path | None:
    """The first of FILE and FILE.gz in the folders."""
    found = (place / (file + end) for place in places for end in ("", ".gz"))
    return next((path for path in found if path.exists()), None)


def missing(name: str, files: Sequence[str], places: Sequence[Path]) -> ValueError:
    return ValueError(
        f"{name} needs {', '.join(files)}; looked in {', '.join(map(str, places))}. "
        f"Name the folder with --data-dir, or fetch the files with `polytier data get {name}`"
    )


def find_all(name: str, files: Sequence[str], places: Sequence[Path]) -> list[Path]:
    found = {file: find(file, places) for file in files}
    absent = [f"{file}(.gz)" for file, path in found.items() if path is None]
    if absent:
        raise missing(name, absent, places)
    return [path for path in found.values() if path is not None]


def in_range(y: np.ndarray, num_classes: int) -> np.ndarray:
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(f"labels run from {y.min()} to {y.max()}, expected 0 to {num_classes - 1}")
    return y.astype(np.int64)


def digits(data_dir: Path | None = None) -> Source:
    """8x8 images of handwritten digits, bundled with scikit-learn: 1,797 samples, 10 classes."""
    places = find_spec("sklearn")
    assert places is not None
    assert places.submodule_search_locations is not None
    # its file alone: to import scikit-learn takes as long as to import torch
    table = np.loadtxt(Path(places.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    x = (table[:, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return Source(x, table[:, -1].astype(np.int64), 10)


def synthetic_devices(
    data_dir: Path | None = None,
    num_devices: int = 40,
    seed: int = 0,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    num_features: int = 60,
    num_classes: int = 10,
    min_samples: int = 50,
    max_samples: int = 1000,
    iid: bool = False,
) -> Source:
    """synthetic(alpha, beta) of FedProx, made on the spot; smaller devices than the papers', to run fast."""
    x, y, device = synthetic(num_devices, alpha, beta, num_features, num_classes, seed, min_samples, max_samples, iid)
    return Source(x, y, num_classes, device)


def quadratic_devices(
    data_dir: Path | None = None,
    num_devices: int = 40,
    seed: int = 0,
    *,
    dimension: int = 10,
    mu: float = 0.1,
    smoothness: float = 1.0,
    spread: float = 1.0,
) -> Source:
    """A strongly convex quadratic a device, made on the spot, for the model quadratic: its optimum is known."""
    return one_sample_each(quadratics(num_devices, dimension, seed, mu, smoothness, spread))


def tridiagonal_devices(
    data_dir: Path | None = None, num_devices: int = 24, seed: int = 0, *, p: int = 4, mu: float = 2e-4
) -> Source:
    """The strongly convex problem of MFA's paper, made on the spot, for the model quadratic."""
    return one_sample_each(tridiagonal(num_devices, p, mu))


def clustered_quadratics(
    data_dir: Path | None = None,
    num_devices: int = 40,
    seed: int = 0,
    *,
    num_clusters: int = 4,
    dimension: int = 10,
    spread: float = 1.0,
) -> Source:
    """Quadratics in clusters (CoBo, Example 2), made on the spot, for the model quadratic."""
    return one_sample_each(quadratic_clusters(num_devices, num_clusters, dimension, seed, spread))


def one_sample_each(data: Federation) -> Source:
    """Devices whose only sample is their problem: to train on."""
    split = np.zeros(len(data), dtype=np.int64)
    return Source(data.x.numpy(), data.y.numpy(), None, data.ids, split=split, cluster=data.cluster)


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


def idx_source(
    name: str, prefixes: Sequence[str], num_classes: int, places: Sequence[Path], low: float, transposed: bool = False
) -> Source:
    """The idx pairs of images and labels, merged."""
    files = [f"{p}-{kind}" for p in prefixes for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    paths = find_all(name, files, places)
    xs, ys = [], []
    for images, labels in zip(paths[::2], paths[1::2], strict=True):
        xs.append(read_idx(images, 3))
        ys.append(read_idx(labels, 1))
        with reading(labels, f"the labels of {images.name}"):
            ys[-1] = in_range(ys[-1], num_classes)
            if len(ys[-1]) != len(xs[-1]):
                raise ValueError(f"{len(ys[-1])} labels for {len(xs[-1])} images")
    if len({x.shape[1:] for x in xs}) > 1:
        raise ValueError(f"{paths[0]} and {paths[2]} hold images of different sizes; replace one of them")
    x = np.concatenate(xs)
    if transposed:
        x = np.ascontiguousarray(x.transpose(0, 2, 1))
    return Source(x[:, None], np.concatenate(ys), num_classes, low=low)


def mnist(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """MNIST, 28x28, 10 digits, 70,000 samples, from its four idx files."""
    return idx_source("mnist", ("train", "t10k"), 10, folders(data_dir, "mnist"), low)


def fashion_mnist(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """Fashion-MNIST, 28x28, 10 kinds of clothing, 70,000 samples, from its four idx files."""
    return idx_source("fashion-mnist", ("train", "t10k"), 10, folders(data_dir, "fashion-mnist"), low)


def emnist(data_dir: Path | None, kind: str, num_classes: int, low: float) -> Source:
    """EMNIST's files hold each image transposed; it is turned back."""
    name = f"emnist-{kind}"
    prefixes = [f"{name}-{part}" for part in ("train", "test")]
    return idx_source(name, prefixes, num_classes, folders(data_dir, name, "emnist"), low, transposed=True)


def emnist_digits(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """EMNIST digits ("EMNIST-10"), 28x28, 10 classes, 280,000 samples."""
    return emnist(data_dir, "digits", 10, low)


def emnist_byclass(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """EMNIST by class ("FEMNIST" in PerMFL), 28x28, 62 digits and letters, 814,255 samples."""
    return emnist(data_dir, "byclass", 62, low)


def encode_latin1(text: str, codec: str) -> bytes:
    """How Python 3 pickles bytes for Python 2; no other codec is let through."""
    if codec != "latin1":
        raise pickle.UnpicklingError(f"codec {codec!r} is not allowed")
    return text.encode("latin1")


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
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image batches have no need of")
        return allowed[short, name]


def cifar_batches(name: str, folder: str, files: Sequence[str], data_dir: Path | None) -> dict[str, bytes]:
    """The raw batches, from the unpacked folder or the official archive; keys are paths to show."""
    places = folders(data_dir, name)
    for place in places:
        unpacked = place if (place / files[0]).is_file() else place / folder
        if (unpacked / files[0]).is_file():
            with reading(unpacked, f"the unpacked {name}-python.tar.gz", "unpack it again"):
                return {str(unpacked / file): (unpacked / file).read_bytes() for file in files}
    archive = next((p for q in places if (p := q / f"{name}-python.tar.gz").is_file()), None)
    if archive is None:
        raise missing(name, [f"{name}-python.tar.gz or its unpacked folder {folder}"], places)
    with reading(archive, "a tar.gz archive"):
        whole = io.BytesIO(gzip.decompress(archive.read_bytes()))  # at once, so that its checksum is looked at
        with tarfile.open(fileobj=whole) as tar:
            members = {Path(m.name).name: m for m in tar.getmembers() if m.isfile()}
            absent = [file for file in files if file not in members]
            if absent:
                raise ValueError(f"it has no {absent[0]}")
            streams = {f"{archive}:{file}": tar.extractfile(members[file]) for file in files}
            return {shown: stream.read() for shown, stream in streams.items() if stream is not None}


def cifar(
    name: str, folder: str, files: Sequence[str], key: bytes, num_classes: int, data_dir: Path | None, low: float
) -> Source:
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
            ys.append(in_range(y, num_classes))
    return Source(np.concatenate(xs), np.concatenate(ys), num_classes, low=low)


def cifar_10(data_dir: Path | None = None, *, low: float = 0.0) -> Source:
    """CIFAR-10, 32x32 in colour, 10 classes, 60,000 samples, from the python archive."""
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return cifar("cifar-10", "cifar-10-batches-py", files, b"labels", 10, data_dir, low)


def cifar_100(data_dir: Path | None = None, *, coarse: bool = False, low: float = 0.0) -> Source:
    """CIFAR-100, 32x32 in colour, 100 classes (coarse: 20), 60,000 samples, from the python archive."""
    key, num_classes = (b"coarse_labels", 20) if coarse else (b"fine_labels", 100)
    return cifar("cifar-100", "cifar-100-python", ["train", "test"], key, num_classes, data_dir, low)


def read_words(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_attributes(path: Path, wanted: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """File names and the wanted columns (0 or 1) of list_attr_celeba.txt."""
    with reading(path, "CelebA's attributes"):
        _, names, *lines = read_words(path)  # first comes the number of images
        for line in lines:
            if len(line) != len(names) + 1:
                raise ValueError(f"the line of {line[0]} does not have {len(names)} attributes")
        values = np.array([line[1:] for line in lines], dtype=np.int64).reshape(-1, len(names)) > 0
    for attribute in wanted:
        if attribute not in names:
            near = difflib.get_close_matches(attribute, names, 3) or names[:5]
            raise ValueError(f"{path} has no attribute {attribute!r}; did you mean {', '.join(near)}?")
    return [line[0] for line in lines], values[:, [names.index(attribute) for attribute in wanted]]


def celeba(
    data_dir: Path | None = None, *, attributes: str = "Smiling", image_size: int = 84, limit: int = 0
) -> Source:
    """CelebA faces; every attribute ("Smiling+Male") is a task of two classes.

    `limit` takes only the first images: all 202,599 at 84x84 need 4.3 GB. With identity_CelebA.txt a person
    is a device.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError('celeba needs an extra to read images: pip install "polytier[images]"') from error
    if image_size < 1 or limit < 0:
        raise ValueError(f"image_size must be above 0 and limit 0 or more; got {image_size} and {limit}")
    places = folders(data_dir, "celeba")
    home = next((p for p in places if (p / "img_align_celeba").is_dir()), None)
    listing = find("list_attr_celeba.txt", places)
    if home is None or listing is None:
        raise missing("celeba", ["the folder img_align_celeba and list_attr_celeba.txt"], places)
    files, y = read_attributes(listing, attributes.split("+"))
    files, y = (files[:limit], y[:limit]) if limit else (files, y)
    device = identities(find("identity_CelebA.txt", places), files)
    x = np.empty((len(files), 3, image_size, image_size), dtype=np.uint8)
    for row, file in enumerate(files):
        path = home / "img_align_celeba" / file
        with reading(path, "an image"), Image.open(path) as image:
            x[row] = np.asarray(image.convert("RGB").resize((image_size, image_size))).transpose(2, 0, 1)
    y = y.astype(np.int64)
    return Source(x, y[:, 0] if y.shape[1] == 1 else y, 2, device)


def identities(path: Path | None, files: Sequence[str]) -> np.ndarray | None:
    """The person in each image, if the file is there."""
    if path is None:
        return None
    with reading(path, "CelebA's identities"):
        person = {line[0]: int(line[1]) for line in read_words(path)}
        absent = [file for file in files if file not in person]
        if absent:
            raise ValueError(f"it has no {absent[0]}")
        return np.array([person[file] for file in files], dtype=np.int64)


def leaf(data_dir: Path | None = None, *, shape: tuple[int, ...] = ()) -> Source:
    """A LEAF data set: json files in train/ and test/, or flat; users are devices, the split is kept.

    `shape=1x28x28` turns LEAF's flat rows into images.
    """
    places = [*folders(data_dir, "leaf"), *(p / "data" for p in folders(data_dir, "leaf")[:2])]
    parts = ("train", "test")
    home = next((p for p in places if all(list((p / part).glob("*.json")) for part in parts)), None)
    flat = next((p for p in places if list(p.glob("*.json"))), None)
    if home is not None:
        files = [(path, part) for part in parts for path in sorted((home / part).glob("*.json"))]
    elif flat is not None:
        files = [(path, "") for path in sorted(flat.glob("*.json"))]
    else:
        raise missing("leaf", ["folders train and test with LEAF's json files (or json files)"], places)
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
    """Name, inputs and labels of every user of a json file that has samples."""
    with reading(path, "LEAF json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        absent = [key for key in ("users", "num_samples", "user_data") if key not in content]
        if absent:
            raise ValueError(f"it has no {absent[0]!r}")
        for user, size in zip(content["users"], content["num_samples"], strict=True):
            x, y = np.asarray(content["user_data"][user]["x"]), np.asarray(content["user_data"][user]["y"])
            if not size == len(x) == len(y):
                raise ValueError(f"user {user} has {len(x)} inputs and {len(y)} labels, announced are {size}")
            if size and (x.dtype.kind not in "iuf" or y.dtype.kind not in "iu"):
                raise ValueError(f"user {user} has inputs that are not numbers or labels that are not whole")
            if size:
                yield str(user), x.astype(np.float32), in_range(y, int(max(y.max(), 0)) + 1)


# made for a number of devices and a seed
MADE: dict[str, Callable[..., Source]] = {
    "synthetic": synthetic_devices,
    "quadratics": quadratic_devices,
    "tridiagonal": tridiagonal_devices,
    "quadratic-clusters": clustered_quadratics,
}
SOURCES: dict[str, Callable[..., Source]] = {
    "digits": digits,
    **MADE,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "emnist-digits": emnist_digits,
    "emnist-byclass": emnist_byclass,
    "cifar-10": cifar_10,
    "cifar-100": cifar_100,
    "celeba": celeba,
    "leaf": leaf,
}
