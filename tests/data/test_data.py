"""Sources on small files in the public formats, partitions, formations and the whole pipeline."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from polytier._text import bind, own_arguments, parse_text
from polytier.data import sources
from polytier.data.build import build_federation
from polytier.data.federation import Federation
from polytier.data.huggingface import from_huggingface
from polytier.data.own_npz import load_npz
from polytier.data.partition import PARTITIONS, Assignment, apportion
from polytier.data.sources import SOURCES, Source
from polytier.data.synthetic import quadratic_clusters, quadratics, synthetic, synthetic_of_pfedme, tridiagonal
from polytier.data.teams import FORMATIONS

RNG = np.random.default_rng(7)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---------------------------------------------------------------- files in the public formats


def write_idx(path: Path, values: np.ndarray, packed: bool = False) -> None:
    raw = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if packed else raw)


def write_mnist(folder: Path, prefixes=("train", "t10k"), num_classes: int = 10, packed: bool = False):
    end = ".gz" if packed else ""
    pairs = []
    for prefix, n in zip(prefixes, (30, 11), strict=True):
        x, y = RNG.integers(0, 256, (n, 4, 3), np.uint8), (np.arange(n) % num_classes).astype(np.uint8)
        write_idx(folder / f"{prefix}-images-idx3-ubyte{end}", x, packed)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{end}", y, packed)
        pairs.append((x, y))
    return (np.concatenate(column) for column in zip(*pairs, strict=True))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("place", ["", "NAME", "raw", "NAME/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_is_found_in_every_folder(tmp_path, name, place, packed):
    x, y = write_mnist(tmp_path / place.replace("NAME", name), packed=packed)
    source = SOURCES[name](tmp_path)
    assert source.x.dtype == np.uint8
    assert source.num_classes == 10
    np.testing.assert_array_equal(source.x, x[:, None])
    np.testing.assert_array_equal(source.y, y)


@pytest.mark.parametrize(("name", "classes"), [("emnist-digits", 10), ("emnist-byclass", 62)])
@pytest.mark.parametrize("folder", ["", "emnist", "emnist/raw"])
def test_emnist_is_turned_back(tmp_path, name, classes, folder):
    x, y = write_mnist(tmp_path / folder, (f"{name}-train", f"{name}-test"), classes)
    source = SOURCES[name](tmp_path)
    assert source.num_classes == classes
    np.testing.assert_array_equal(source.x[:, 0], x.transpose(0, 2, 1))
    np.testing.assert_array_equal(source.y, y)


def test_default_folder_is_named_by_the_environment(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setenv("POLYTIER_DATA", str(tmp_path))
    assert len(SOURCES["mnist"](None).y) == 41
    monkeypatch.delenv("POLYTIER_DATA")
    assert sources.default_dir() == Path.home() / ".cache" / "polytier"


def test_missing_files_are_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte.*polytier data get mnist") as error:
        SOURCES["mnist"](tmp_path)
    assert "train-images" not in str(error.value)
    assert str(tmp_path / "mnist" / "raw") in str(error.value)
    for name in ("cifar-10", "celeba", "leaf", "emnist-byclass"):
        with pytest.raises(ValueError, match=f"polytier data get {name}"):
            SOURCES[name](tmp_path / "nowhere")


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    changed = {
        "empty": b"",
        "short": raw[:-5],
        "header": raw[:6],
        "long": raw + b"x",
        "magic": b"\x00\x00\x0d" + raw[3:],
        "noise": bytes(range(256)) * 3,
    }
    path.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["empty", "short", "header", "long", "magic", "noise"])
@pytest.mark.parametrize("packed", [False, True])
def test_broken_idx(tmp_path, how, packed):
    write_mnist(tmp_path, packed=packed)
    file = tmp_path / ("train-images-idx3-ubyte" + (".gz" if packed else ""))
    damage(file, how)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte.* cannot be read as an idx file"):
        SOURCES["mnist"](tmp_path)


def test_idx_pairs_must_agree(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(29, np.uint8))
    with pytest.raises(ValueError, match="29 labels for 30 images"):
        SOURCES["mnist"](tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.full(30, 10, np.uint8))
    with pytest.raises(ValueError, match="expected 0 to 9"):
        SOURCES["mnist"](tmp_path)
    write_mnist(tmp_path)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((11, 5, 5), np.uint8))
    with pytest.raises(ValueError, match="different sizes"):
        SOURCES["mnist"](tmp_path)


def cifar_batch(rows: int, keys: dict[str, int], protocol: int) -> bytes:
    content: dict = {b"data": RNG.integers(0, 256, (rows, 3072), np.uint8)}
    content |= {key.encode(): [int(v) for v in RNG.integers(0, n, rows)] for key, n in keys.items()}
    return pickle.dumps(content, protocol=protocol)


def write_cifar(folder: Path, name: str, as_archive: bool = True, protocol: int = 2, **replaced: bytes):
    if name == "cifar-10":
        inside, keys = "cifar-10-batches-py", {"labels": 10}
        files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    else:
        inside, keys, files = "cifar-100-python", {"fine_labels": 100, "coarse_labels": 20}, ["train", "test"]
    raw = {file: cifar_batch(3 + 2 * k, keys, protocol) for k, file in enumerate(files)} | replaced
    folder.mkdir(parents=True, exist_ok=True)
    if not as_archive:
        (folder / inside).mkdir()
        for file, content in raw.items():
            (folder / inside / file).write_bytes(content)
    else:
        with tarfile.open(folder / f"{name}-python.tar.gz", "w:gz") as tar:
            for file, content in raw.items():
                member = tarfile.TarInfo(f"{inside}/{file}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return raw


@pytest.mark.parametrize("name", ["cifar-10", "cifar-100"])
@pytest.mark.parametrize("as_archive", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar(tmp_path, name, as_archive, protocol):
    raw = write_cifar(tmp_path, name, as_archive, protocol)
    source = SOURCES[name](tmp_path)
    batches = [pickle.loads(batch) for batch in raw.values()]
    key = b"labels" if name == "cifar-10" else b"fine_labels"
    np.testing.assert_array_equal(source.x.reshape(-1, 3072), np.concatenate([b[b"data"] for b in batches]))
    np.testing.assert_array_equal(source.y, np.concatenate([b[key] for b in batches]))
    assert source.x.shape[1:] == (3, 32, 32)
    if name == "cifar-100":
        coarse = SOURCES[name](tmp_path, coarse=True)
        assert coarse.num_classes == 20
        np.testing.assert_array_equal(coarse.y, np.concatenate([b[b"coarse_labels"] for b in batches]))


def python2_batch(rows: int) -> tuple[bytes, np.ndarray]:
    """A batch as Python 2 pickled it: byte strings and numpy.core, opcode by opcode."""
    data = RNG.integers(0, 256, (rows, 3072), np.uint8)

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01(K" + bytes([rows]) + b"M\x00\x0ct" + dtype + b"\x89"
    state += b"T" + struct.pack("<i", data.nbytes) + data.tobytes() + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([i % 10]) for i in range(rows)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + state + text(b"labels") + labels + b"u.", data


def test_cifar_of_python_2(tmp_path):
    raw, data = python2_batch(5)
    write_cifar(tmp_path, "cifar-10", data_batch_1=raw)
    np.testing.assert_array_equal(SOURCES["cifar-10"](tmp_path).x[:5].reshape(5, -1), data)


class Evil:
    def __reduce__(self):
        return sys.exit, (3,)


BAD_BATCHES = {
    "asks for sys.exit": pickle.dumps({b"data": Evil()}),
    "labels": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}),
    "expected uint8": pickle.dumps({b"data": np.zeros((2, 3000), np.uint8), b"labels": [0, 1]}),
    "for 2 images": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}),
    "expected 0 to 9": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]}),
    "zlib": b"c_codecs\nencode\n(Vabc\nVzlib\ntR.",
    "UnpicklingError": b"no pickle at all",
    "EOFError": b"",
    "truncated": cifar_batch(4, {"labels": 10}, 2)[:-900],
}


@pytest.mark.parametrize("reason", BAD_BATCHES)
@pytest.mark.parametrize("as_archive", [True, False])
def test_bad_cifar_batches(tmp_path, reason, as_archive):
    write_cifar(tmp_path, "cifar-10", as_archive, data_batch_3=BAD_BATCHES[reason])
    with pytest.raises(ValueError, match=f"data_batch_3 cannot be read.*{reason}"):
        SOURCES["cifar-10"](tmp_path)


@pytest.mark.parametrize("how", ["empty", "short", "noise"])
def test_bad_cifar_archive(tmp_path, how):
    write_cifar(tmp_path, "cifar-100")
    damage(tmp_path / "cifar-100-python.tar.gz", how)
    with pytest.raises(ValueError, match="cifar-100-python.tar.gz.* cannot be read"):
        SOURCES["cifar-100"](tmp_path)


def test_incomplete_cifar(tmp_path):
    write_cifar(tmp_path, "cifar-10", as_archive=False)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(ValueError, match="data_batch_4.*unpack it again"):
        SOURCES["cifar-10"](tmp_path)
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match="it has no train"):
        SOURCES["cifar-100"](tmp_path)


def write_celeba(folder: Path, n: int = 6) -> None:
    from PIL import Image

    (folder / "img_align_celeba").mkdir(parents=True)
    lines = [str(n), "Bald Male Smiling"]
    for k in range(n):
        image = np.full((8, 6, 3), (10 * k, 100, 200), np.uint8)
        Image.fromarray(image).save(folder / "img_align_celeba" / f"{k:06}.png")
        lines.append(f"{k:06}.png -1  {1 if k % 2 else -1} {1 if k % 3 else -1}")
    (folder / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")


def test_celeba(tmp_path):
    write_celeba(tmp_path / "celeba")
    source = SOURCES["celeba"](tmp_path, image_size=5)
    assert source.x.shape == (6, 3, 5, 5)
    assert source.device is None
    assert source.x[3, :, 0, 0].tolist() == [30, 100, 200]
    assert source.y.tolist() == [0, 1, 1, 0, 1, 1]
    (tmp_path / "celeba" / "identity_CelebA.txt").write_text("".join(f"{k:06}.png {k // 2}\n" for k in range(6)))
    both = SOURCES["celeba"](tmp_path, attributes="Smiling+Male", image_size=4, limit=5)
    assert both.y.tolist() == [[0, 0], [1, 1], [1, 0], [0, 1], [1, 0]]
    assert both.num_classes == 2
    assert both.device is not None
    assert both.device.tolist() == [0, 0, 1, 1, 2]
    federation = build_federation("celeba:Smiling+Male,image_size=4", tmp_path, teams=2)
    assert len(federation) == 3
    assert federation.task(1).y.shape == (6,)


def test_bad_celeba(tmp_path, monkeypatch):
    write_celeba(tmp_path)
    with pytest.raises(ValueError, match="'Smilling'.*Smiling"):
        SOURCES["celeba"](tmp_path, attributes="Smilling")
    (tmp_path / "identity_CelebA.txt").write_text("000000.png 1\n")
    with pytest.raises(ValueError, match="identity_CelebA.txt.*it has no 000001.png"):
        SOURCES["celeba"](tmp_path)
    (tmp_path / "identity_CelebA.txt").unlink()
    image = tmp_path / "img_align_celeba" / "000002.png"
    image.write_bytes(image.read_bytes()[:50])
    with pytest.raises(ValueError, match="000002.png cannot be read as an image"):
        SOURCES["celeba"](tmp_path)
    image.unlink()
    with pytest.raises(ValueError, match="000002.png"):
        SOURCES["celeba"](tmp_path)
    listing = tmp_path / "list_attr_celeba.txt"
    listing.write_text(listing.read_text()[:-4])
    with pytest.raises(ValueError, match="000005.png does not have 3 attributes"):
        SOURCES["celeba"](tmp_path)
    listing.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="list_attr_celeba.txt cannot be read"):
        SOURCES["celeba"](tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r'pip install "polytier\[images\]"'):
        SOURCES["celeba"](tmp_path)


def write_leaf(path: Path, users: dict[str, int], changed: dict | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {u: {"x": [[k / 8, 0.5, 0, 1] for k in range(n)], "y": list(range(n))} for u, n in users.items()}
    content = {"users": list(users), "num_samples": list(users.values()), "user_data": data}
    path.write_text(json.dumps(content | (changed or {})))


def test_leaf(tmp_path):
    write_leaf(tmp_path / "leaf" / "data" / "train" / "a.json", {"f01": 3, "f02": 2})
    write_leaf(tmp_path / "leaf" / "data" / "train" / "b.json", {"f03": 4})
    write_leaf(tmp_path / "leaf" / "data" / "test" / "a.json", {"f01": 1, "f02": 2, "f03": 1})
    source = SOURCES["leaf"](tmp_path, shape=(1, 2, 2))
    assert source.x.shape == (13, 1, 2, 2)
    assert source.num_classes == 4
    federation = build_federation("leaf", tmp_path, teams=2)
    assert federation.ids.tolist() == ["f01", "f02", "f03"]
    assert (federation.bounds[:, 1:] - federation.bounds[:, :-1]).tolist() == [
        [3, 0, 1],
        [2, 0, 2],
        [4, 0, 1],
    ]
    assert len(build_federation("leaf", tmp_path, devices=2, teams=1)) == 2
    other = build_federation("leaf", tmp_path, devices=2, partition="iid", teams=1)
    assert other.ids.tolist() == [0, 1]


def test_flat_leaf(tmp_path):
    write_leaf(tmp_path / "all.json", {"a": 3, "b": 5, "nobody": 0})
    source = SOURCES["leaf"](tmp_path)
    assert source.split is None
    assert source.device is not None
    assert source.device.tolist() == ["a"] * 3 + ["b"] * 5
    with pytest.raises(ValueError, match="1x28x28"):
        SOURCES["leaf"](tmp_path, shape=(28, 28))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_samples": [4, 2]}, "user a has 3 inputs and 3 labels, num_samples says 4"),
        ({"num_samples": [3]}, "zip"),
        ({"users": ["a", "c"]}, "KeyError 'c'"),
        ({"user_data": {}}, "KeyError 'a'"),
        ({"users": None}, "TypeError"),
        ({"user_data": {"a": {"x": ["u", "v", "w"], "y": [0, 1, 2]}, "b": {}}}, "not numbers"),
        ({"user_data": {"a": {"x": [[1], [2, 3], [4]], "y": [0, 1, 2]}, "b": {}}}, "inhomogeneous"),
        ({"user_data": {"a": {"x": [[1]] * 3, "y": [0, -1, 2]}, "b": {}}}, "labels run from -1"),
    ],
)
def test_bad_leaf(tmp_path, changed, reason):
    write_leaf(tmp_path / "a.json", {"a": 3, "b": 2}, changed)
    with pytest.raises(ValueError, match=f"a.json cannot be read as LEAF json: .*{reason}"):
        SOURCES["leaf"](tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"users": []}'])
def test_leaf_that_is_no_json(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="a.json cannot be read as LEAF json"):
        SOURCES["leaf"](tmp_path)


def test_leaf_without_samples(tmp_path):
    write_leaf(tmp_path / "a.json", {})
    with pytest.raises(ValueError, match="no samples"):
        SOURCES["leaf"](tmp_path)


def test_digits():
    source = SOURCES["digits"](None)
    assert source.x.shape == (1797, 1, 8, 8)
    assert source.x.dtype == np.float32
    assert (source.x.min(), source.x.max()) == (0, 1)
    x, y = load_digits(return_X_y=True)
    assert np.array_equal(source.x.reshape(-1, 64), (np.asarray(x) / 16).astype(np.float32))
    assert np.array_equal(source.y, np.asarray(y))


# ---------------------------------------------------------------- the user's own data


def save(path: Path, **columns) -> Path:
    n = 12
    arrays = {"x": RNG.normal(size=(n, 3)), "y": np.arange(n) % 2, "device": np.repeat(["u", "v", "w"], 4)}
    arrays = {key: value for key, value in (arrays | columns).items() if value is not None}
    np.savez(path, **arrays)
    return path


def test_npz_keeps_ids_and_teams(tmp_path):
    x = RNG.normal(size=(12, 3)) * 1000
    team, split = np.repeat([70, 5, 70], 4), np.tile(["train", "train", "test", "validation"], 3)
    federation = build_federation(save(tmp_path / "own.npz", x=x, team=team, split=split))
    assert federation.ids.tolist() == ["u", "v", "w"]
    assert federation.team is not None
    assert federation.team.tolist() == [70, 5, 70]
    assert (federation.bounds[:, 1:] - federation.bounds[:, :-1]).tolist() == [[2, 1, 1]] * 3
    assert federation.scale is None
    np.testing.assert_allclose(federation.device(0)[0], x[:2], rtol=1e-6)
    assert len(np.unique(federation.team)) == 2
    assert build_federation(tmp_path / "own.npz", teams=2).team is not None
    with pytest.raises(ValueError, match="3 teams asked for, the data name 2"):
        build_federation(tmp_path / "own.npz", teams=3)


def test_npz_types(tmp_path):
    file = tmp_path / "OWN.NPZ"
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 5, 6), np.uint8), y=np.ones(4, bool), device=np.array([b"a"] * 4))
    (tmp_path / "a.npz").rename(file)
    source = load_npz(file)
    assert source.x.shape == (4, 1, 5, 6)
    assert source.y.tolist() == [1, 1, 1, 1]
    assert source.device is not None
    assert source.device.tolist() == ["a"] * 4
    assert build_federation(file, teams=1).inputs(torch.full((1,), 255, dtype=torch.uint8), torch.float32) == 1
    tokens = load_npz(save(tmp_path / "t.npz", x=np.arange(12, dtype=">i4").reshape(12, 1)))
    assert tokens.x.dtype == np.int64
    load_npz(save(tmp_path / "more.npz", note=np.array([object()])))  # what nobody asks for is not opened
    targets = load_npz(save(tmp_path / "r.npz", x=np.arange(12.0), y=np.linspace(0, 1, 12)))
    assert targets.x.shape == (12, 1)
    assert targets.num_classes is None
    assert build_federation(tmp_path / "r.npz").num_classes is None


def test_npz_without_teams_is_grouped(tmp_path):
    file = save(tmp_path / "own.npz", device=np.arange(12) // 2)
    federation = build_federation(file, teams=3)
    assert federation.team is not None
    assert np.unique(federation.team, return_counts=True)[1].tolist() == [2, 2, 2]
    assert build_federation(file, teams=0).team is None
    assert np.unique(np.asarray(build_federation(save(tmp_path / "few.npz")).team)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "given",
    [{"devices": 3}, {"partition": "labels:2"}, {"partition": "column"}, {"per_class": (1, 1)}],
)
def test_npz_refuses_devices_and_partition(tmp_path, given):
    with pytest.raises(ValueError, match="names its own devices"):
        build_federation(save(tmp_path / "own.npz"), **given)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"device": None}, "no device"),
        ({"x": None}, "no x"),
        ({"y": None}, "no y"),
        ({"device": np.arange(11)}, "device needs one row per sample; got 11 for 12"),
        ({"team": np.arange(3)}, "team needs one row per sample"),
        ({"split": np.arange(3)}, "split needs one row per sample"),
        ({"split": np.full(12, "trian")}, "trian"),
        ({"team": np.arange(12)}, "device u is in more than one team"),
        ({"device": np.linspace(0, 1, 12)}, "device is float64.*integers or strings"),
        ({"x": np.array(["a"] * 12)}, "x is <U1"),
        ({"x": np.array(1.0)}, "x is float64"),
        ({"x": np.array([object()] * 12)}, "allow_pickle=False"),
        ({"x": np.full((12, 3), np.nan)}, "NaN or infinity, the first in row 0"),
        ({"x": np.full((12, 3), 1e300)}, "NaN or infinity"),
        ({"y": np.full(12, -1)}, "labels must be 0, 1, 2"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, int), "device": np.zeros(0, int)}, "1 devices|empty|0"),
    ],
)
def test_bad_npz(tmp_path, columns, reason):
    with pytest.raises(ValueError, match=reason):
        build_federation(save(tmp_path / "own.npz", **columns))


@pytest.mark.parametrize("how", ["empty", "short", "noise", "npy"])
def test_unreadable_npz(tmp_path, how):
    file = save(tmp_path / "own.npz")
    if how == "npy":
        np.save(tmp_path / "x.npy", np.arange(3))
        (tmp_path / "x.npy").replace(file)
    else:
        damage(file, how)
    with pytest.raises(ValueError, match="own.npz cannot be read as an .npz file.*np.savez"):
        build_federation(str(file))
    with pytest.raises(ValueError, match="nowhere.npz"):
        build_federation(tmp_path / "nowhere.npz")


def test_huggingface(tmp_path):
    from datasets import Dataset, DatasetDict
    from PIL import Image

    images = [Image.fromarray(np.full((4, 5, 3), k, np.uint8)) for k in range(6)]
    table = {
        "image": images,
        "row": [[k, k + 0.5] for k in range(6)],
        "digit": [0, 1, 2, 0, 1, 2],
        "word": ["b", "a", "c", "b", "a", "c"],
        "site": ["s", "s", "s", "t", "t", "t"],
    }
    dataset = Dataset.from_dict(table)
    source = from_huggingface(dataset, "image", "digit", device="site")
    assert source.x.shape == (6, 3, 4, 5)
    assert source.x.dtype == np.uint8
    assert source.x[:, 0, 0, 0].tolist() == list(range(6))
    assert build_federation(source, teams=1).ids.tolist() == ["s", "t"]
    rows = from_huggingface(dataset, "row", "word")
    assert rows.x.dtype == np.float32
    assert rows.y.tolist() == [1, 0, 2, 1, 0, 2]
    assert rows.device is None
    assert len(build_federation(rows, devices=2, partition="iid", teams=1)) == 2
    grey = Dataset.from_dict({"image": [image.convert("L") for image in images], "y": [0] * 6})
    assert from_huggingface(grey, "image", "y").x.shape == (6, 1, 4, 5)
    DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "saved"))
    assert len(from_huggingface(tmp_path / "saved", "row", "digit").y) == 12
    with pytest.raises(ValueError, match="no column 'picture'; available: image, row"):
        from_huggingface(dataset, "picture", "digit")
    ragged = Dataset.from_dict({"row": [[1.0], [1.0, 2.0]], "y": [0, 1]})
    with pytest.raises(ValueError, match="column 'row' cannot be read as an array"):
        from_huggingface(ragged, "row", "y")


def test_huggingface_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "polytier\[huggingface\]"'):
        from_huggingface("some/name", "x", "y")


# ---------------------------------------------------------------- made data


def test_synthetic_is_drawn_as_described():
    x, y, device = synthetic(30, seed=3, min_samples=20, max_samples=400)
    assert x.shape[1] == 60
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    sizes = np.bincount(device)
    assert len(sizes) == 30
    assert 20 <= sizes.min() <= sizes.max() <= 400
    assert np.median(sizes) < sizes.mean()  # a long tail
    residual = np.concatenate([x[device == k] - x[device == k].mean(0) for k in range(30)])
    np.testing.assert_allclose(residual.var(0), np.arange(1, 61) ** -1.2, rtol=0.15)


def test_synthetic_devices_do_not_depend_on_their_number():
    few, many = synthetic(3, seed=1, max_samples=400), synthetic(5, seed=1, max_samples=400)
    for a, b in zip(few, many, strict=True):
        np.testing.assert_array_equal(a, b[: len(a)])
    assert not np.array_equal(synthetic(3, seed=2, max_samples=400)[0][:9], few[0][:9])


def test_alpha_and_beta_are_deviations():
    def means(beta: float) -> np.ndarray:
        x, _, device = synthetic(200, 0, beta, seed=0, min_samples=5, max_samples=5)
        return np.array([x[device == k].mean() for k in range(200)])

    inner = (1 / 60 + (np.arange(1, 61) ** -1.2).sum() / 5 / 60**2) ** 0.5  # spread of v and x around B
    assert means(0).std() == pytest.approx(inner, rel=0.2)
    assert means(3).std() == pytest.approx(3, rel=0.2)


def test_iid_synthetic_shares_one_model():
    x, y, device = synthetic(4, seed=0, min_samples=300, max_samples=300, iid=True)
    assert np.abs(x.mean(0)).max() < 0.2
    first = np.bincount(y[device == 0], minlength=10) / 300
    for k in range(1, 4):
        assert np.abs(np.bincount(y[device == k], minlength=10) / 300 - first).max() < 0.15


@pytest.mark.parametrize(("devices", "most_frequent"), [(40, 0.812), (50, 0.878)])
def test_the_recipe_of_pfedme_gives_the_papers_data(devices, most_frequent):
    """The range of sizes that PerMFL prints, and how often the most frequent label of a device is right, pooled."""
    source = SOURCES["synthetic"](None, devices, seed=7, recipe="pfedme")
    assert source.device is not None
    counts = np.zeros((devices, 10), int)
    np.add.at(counts, (source.device, np.asarray(source.y)), 1)
    assert (counts.sum(1).min(), counts.sum(1).max()) == (250, 25_810)
    assert counts.max(1).sum() / counts.sum() == pytest.approx(most_frequent, abs=5e-4)


def test_the_recipe_of_pfedme_draws_in_the_order_of_its_code():
    """A plain transcription of the order of draws, for one device more than the first."""
    np.random.seed(0)  # noqa: NPY002
    sizes = (np.random.lognormal(4, 2, 3).astype(int) + 50) * 5  # noqa: NPY002
    mean_w = np.random.normal(0, 0.5, 3)  # noqa: NPY002
    centre = np.random.normal(0, 0.5, 3)  # noqa: NPY002
    mean_x = [np.random.normal(centre[i], 1, 60) for i in range(3)]  # noqa: NPY002
    x, y, device = synthetic_of_pfedme(3)
    for i in range(3):
        w = np.random.normal(mean_w[i], 1, (60, 10))  # noqa: NPY002
        b = np.random.normal(mean_w[i], 1, 10)  # noqa: NPY002
        cov = np.diag([(j + 1.0) ** -1.2 for j in range(60)])
        points = np.random.multivariate_normal(mean_x[i], cov, sizes[i])  # noqa: NPY002
        np.testing.assert_array_equal(x[device == i], points.astype(np.float32))
        scores = np.exp(points @ w + b)
        np.testing.assert_array_equal(y[device == i], (scores / scores.sum(1, keepdims=True)).argmax(1))


def test_the_recipe_of_pfedme_is_fixed():
    with pytest.raises(ValueError, match="leave them out"):
        SOURCES["synthetic"](None, 4, recipe="pfedme", max_samples=99)
    with pytest.raises(ValueError, match="pfedme"):
        SOURCES["synthetic"](None, 4, recipe="pfedmee")


@pytest.mark.parametrize(
    "wrong", [{"num_devices": 0}, {"alpha": -1}, {"beta": np.nan}, {"min_samples": 0}, {"max_samples": 5}]
)
def test_bad_synthetic(wrong):
    with pytest.raises(ValueError, match="got"):
        synthetic(**{"num_devices": 2, **wrong})


def test_quadratics():
    federation = quadratics(5, 4, seed=2, mu=0.3, smoothness=7.0)
    assert federation.x.dtype == federation.y.dtype == torch.float64
    assert federation.x.shape == (5, 4, 4)
    assert federation.samples.tolist() == [1] * 5
    assert torch.equal(federation.x, federation.x.mT)
    eigen = torch.linalg.eigvalsh(federation.x)
    np.testing.assert_allclose(eigen[:, 0], 0.3, rtol=1e-10)
    np.testing.assert_allclose(eigen[:, -1], 7.0, rtol=1e-10)
    same = quadratics(3, 2, spread=0).y
    assert torch.equal(same[0], same[1])
    assert 0.1 <= float(quadratics(1, 1).x) <= 1
    with pytest.raises(ValueError, match="0 < mu <= smoothness"):
        quadratics(2, 2, mu=2, smoothness=1)
    with pytest.raises(ValueError, match="at least 1"):
        quadratics(0, 2)


# ---------------------------------------------------------------- partitions


def check_dealt(assignment, y: np.ndarray, num_devices: int, minimum: int = 1) -> np.ndarray:
    """No sample twice, nobody empty; returns the counts [n, classes]."""
    assert len(np.unique(assignment.index)) == len(assignment.index)
    assert 0 <= assignment.index.min() <= assignment.index.max() < len(y)
    sizes = np.bincount(assignment.device, minlength=num_devices)
    assert len(sizes) == num_devices
    assert sizes.min() >= minimum
    counts = np.zeros((num_devices, int(y.max()) + 1), dtype=int)
    np.add.at(counts, (assignment.device, y[assignment.index]), 1)
    return counts


seeds = st.integers(0, 10_000)
counts_of_classes = st.lists(st.integers(20, 120), min_size=2, max_size=12)


def labelled(sizes: list[int]) -> np.ndarray:
    return rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))


@settings(max_examples=60, deadline=None)
@given(seeds, counts_of_classes, st.integers(1, 20), st.data())
def test_labels_partition(seed, sizes, num_devices, data):
    y = labelled(sizes)
    per_device = data.draw(st.integers(1, len(sizes)))
    counts = check_dealt(PARTITIONS["labels"](y, num_devices, rng(seed), per_device=per_device), y, num_devices)
    for device, row in enumerate(counts):
        assert set(np.flatnonzero(row)) == {(device + j) % len(sizes) for j in range(per_device)}


def test_labels_partition_follows_the_recipe():
    y = np.repeat(np.arange(10), 7000)
    counts = check_dealt(PARTITIONS["labels"](y, 40, rng(), per_device=2), y, 40)
    assert counts.sum() == 70_000  # the shares of the holders add up to the pool
    assert counts[counts > 0].min() >= 10 + 250  # half of 6,920 over eight draws of 300 to 599
    sizes = counts.sum(1)
    assert sizes.max() > 2 * np.median(sizes)
    alone = check_dealt(PARTITIONS["labels"](np.zeros(500, int), 1, rng(), per_device=1), np.zeros(500, int), 1)
    assert alone.sum() == 500  # nobody to share with


def test_labels_are_rotated_within_a_team():
    y = np.repeat(np.arange(10), 50)
    _, allowed = FORMATIONS["worst"](8, 2, 10, rng())
    counts = check_dealt(PARTITIONS["labels"](y, 8, rng(), allowed=allowed, per_device=2), y, 8)
    held = [np.flatnonzero(row).tolist() for row in counts]
    assert held == [[0, 1], [1, 2], [2, 3], [3, 4], [5, 6], [6, 7], [7, 8], [8, 9]]


@settings(max_examples=80, deadline=None)
@given(seeds, counts_of_classes, st.integers(1, 12), st.sampled_from([1e-6, 1e-3, 0.1, 0.5, 10, 1e6]), st.data())
def test_dirichlet_always_ends_with_the_minimum(seed, sizes, num_devices, alpha, data):
    y = labelled(sizes)
    minimum = data.draw(st.integers(1, len(y) // num_devices))
    assignment = PARTITIONS["dirichlet"](y, num_devices, rng(seed), alpha=alpha, minimum=minimum)
    assert check_dealt(assignment, y, num_devices, minimum).sum() == len(y)


def test_dirichlet_alpha_means_what_it_says():
    y = np.repeat(np.arange(10), 500)
    shares = {}
    for alpha in (0.01, 0.5, 1000.0):
        counts = check_dealt(PARTITIONS["dirichlet"](y, 10, rng(), alpha=alpha), y, 10)
        shares[alpha] = (counts.max(1) / counts.sum(1)).mean()
    assert shares[0.01] > shares[0.5] > shares[1000.0]
    assert shares[1000.0] < 0.15


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 30), st.integers(0, 300))
def test_iid_and_power_law(seed, num_devices, more):
    y = rng(seed).integers(0, 5, 5 * num_devices + more)
    even = check_dealt(PARTITIONS["iid"](y, num_devices, rng(seed)), y, num_devices).sum(1)
    assert even.max() - even.min() <= 1
    assert even.sum() == len(y)
    skewed = PARTITIONS["power-law"](y, num_devices, rng(seed), exponent=1.5, minimum=5)
    assert check_dealt(skewed, y, num_devices, 5).sum() == len(y)


def test_power_law_has_a_tail():
    y = np.zeros(10_000, dtype=int)
    steep = np.bincount(PARTITIONS["power-law"](y, 50, rng(), exponent=2).device)
    flat = np.bincount(PARTITIONS["power-law"](y, 50, rng(), exponent=50).device)
    assert steep.max() > 3 * np.median(steep)
    assert flat.max() < 1.2 * flat.min()


@settings(max_examples=60, deadline=None)
@given(
    seeds,
    st.sampled_from(["worst", "average", "overlapping"]),
    st.sampled_from(["labels", "iid", "dirichlet", "power-law", "per-class"]),
    st.integers(2, 4),
)
def test_allowed_labels_are_respected(seed, formation, name, num_teams):
    num_devices, y = 13, labelled([80] * 9)
    allowed = FORMATIONS[formation](num_devices, num_teams, 9, rng(seed))[1]
    assert allowed is not None
    own = {"per-class": {"train": 20, "test": 5, "per_device": 2}}.get(name, {})
    assignment = PARTITIONS[name](y, num_devices, rng(seed), allowed=allowed, **own)
    counts = check_dealt(assignment, y, num_devices)
    assert not counts[~allowed].any()


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(2, 8), st.integers(1, 30))
def test_masks_that_leave_too_little_are_refused_or_kept(seed, num_devices, minimum):
    y = labelled([40, 5, 5, 40])
    allowed = rng(seed).random((num_devices, 4)) < 0.5
    try:
        assignment = PARTITIONS["dirichlet"](y, num_devices, rng(seed), allowed=allowed, minimum=minimum)
    except ValueError as error:
        assert "ask for" in str(error)  # noqa: PT017
    else:
        assert not check_dealt(assignment, y, num_devices, minimum)[~allowed].any()


def test_per_class_counts_are_over_the_population():
    y = np.repeat(np.arange(10), 1100)
    assignment = PARTITIONS["per-class"](y, 20, rng(), train=200, test=800)
    check_dealt(assignment, y, 20)
    assert assignment.split is not None
    for part, count in ((0, 200), (2, 800)):
        mine = assignment.split == part
        assert np.bincount(y[assignment.index[mine]]).tolist() == [count] * 10
        assert set(np.bincount(assignment.device[mine])) == {count * 10 // 20}
    held = [len(np.unique(y[assignment.index[assignment.device == u]])) for u in range(20)]
    assert set(held) == {5}


def test_per_class_counts_per_device():
    y = np.repeat(np.arange(4), 100)
    assignment = PARTITIONS["per-class"](y, 8, rng(), train=30, test=10, per_device=2, shared=True)
    assert assignment.split is not None
    for device in range(8):
        for part, count in ((0, 30), (2, 10)):
            mine = assignment.index[(assignment.device == device) & (assignment.split == part)]
            assert len(np.unique(mine)) == len(mine) == 2 * count
    train, test = (set(assignment.index[assignment.split == part]) for part in (0, 2))
    assert not train & test
    with pytest.raises(ValueError, match="label 0 has 100 samples, not 90 \\+ 20"):
        PARTITIONS["per-class"](y, 8, rng(), train=90, test=20, per_device=2)
    with pytest.raises(ValueError, match="too few for 4 devices"):
        PARTITIONS["per-class"](y, 8, rng(), train=3, test=20, per_device=2)
    with pytest.raises(ValueError, match="at least 1:0"):
        PARTITIONS["per-class"](y, 8, rng(), train=0, test=20, per_device=2)


def test_column_draws_some_of_the_owners():
    ids = np.repeat(["d", "a", "c", "b"], 5)
    everyone = PARTITIONS["column"](np.zeros(20), 4, rng(), ids=ids)
    assert everyone.index.tolist() == list(range(20))
    assert everyone.device.tolist() == [3] * 5 + [0] * 5 + [2] * 5 + [1] * 5
    some = PARTITIONS["column"](np.zeros(20), 2, rng(), ids=ids)
    names = np.unique(ids[some.index])
    assert (names[some.device] == ids[some.index]).all()
    assert len(names) == 2
    with pytest.raises(ValueError, match="5 devices asked for, the data name 4"):
        PARTITIONS["column"](np.zeros(20), 5, rng(), ids=ids)
    with pytest.raises(ValueError, match="name no devices"):
        PARTITIONS["column"](np.zeros(20), 5, rng())


def test_labels_first_come_gives_an_amount_or_ten():
    y = labelled([3000] * 10)
    counts = check_dealt(PARTITIONS["labels-first-come"](y, 40, rng(), per_device=2), y, 40)
    assert all(np.flatnonzero(own).tolist() == sorted((u % 10, (u + 1) % 10)) for u, own in enumerate(counts))
    given = counts[counts > 0]
    assert set(given[given < 310]) == {10}
    assert (given == 10).any()
    assert (given >= 310).any()
    with pytest.raises(ValueError, match="fewer than 10 samples for each of its devices"):
        PARTITIONS["labels-first-come"](labelled([50] * 10), 40, rng())


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(0, 9), st.booleans())
def test_clusters_permuted(seed, num_clusters, more, whole):
    y = labelled([30] * 6)
    num_devices = num_clusters + more
    given = PARTITIONS["clusters-permuted"](y, num_devices, rng(seed), num_clusters=num_clusters, whole=whole)
    assert given.cluster is not None
    assert given.y is not None
    seen = np.zeros((num_clusters, 6), dtype=int)
    for c in range(num_clusters):
        mine = given.cluster[given.device] == c
        assert len(np.unique(given.index[mine])) == mine.sum()
        if whole:
            assert mine.sum() == len(y)
        pairs = np.unique(np.stack([y[given.index[mine]], given.y[mine]]), axis=1)
        assert pairs.shape[1] == len(np.unique(pairs[1])) <= 6  # one to one
        if whole:
            seen[c] = pairs[1]
    if whole:
        assert seen[0].tolist() == list(range(6))
        for label in seen.T:
            assert len(set(label)) == num_clusters  # no two clusters agree on a class
    assert np.bincount(given.device).min() >= 1


def test_clusters_disjoint():
    y = labelled([50] * 20)
    given = PARTITIONS["clusters-disjoint"](y, 11, rng(), sizes=(2, 3, 6))
    counts = check_dealt(given, y, 11)
    assert given.cluster is not None
    assert np.bincount(given.cluster).tolist() == [2, 3, 6]
    groups = [set(np.flatnonzero(counts[given.cluster == c].sum(0))) for c in range(3)]
    assert sum(len(group) for group in groups) == len(set().union(*groups)) == 20
    few = PARTITIONS["clusters-disjoint"](y, 8, rng(), num_clusters=4, classes_per_cluster=3)
    assert len(np.unique(y[few.index])) == 12
    for wrong in ({"sizes": (5, 5)}, {"sizes": (11, 0)}, {"num_clusters": 21}, {"classes_per_cluster": 6}):
        with pytest.raises(ValueError, match="must be above 0|cannot be made"):
            PARTITIONS["clusters-disjoint"](y, 11, rng(), **wrong)


def test_clusters_refuse_what_they_cannot_do():
    y = labelled([20] * 3)
    with pytest.raises(ValueError, match="ask for 1 to 3"):
        PARTITIONS["clusters-permuted"](y, 8, rng(), num_clusters=4)
    with pytest.raises(ValueError, match="3 clusters of 2 devices"):
        PARTITIONS["clusters-permuted"](y, 2, rng(), num_clusters=3)
    with pytest.raises(ValueError, match="random or sequential"):
        PARTITIONS["clusters-permuted"](y, 8, rng(), allowed=np.ones((8, 3), bool), num_clusters=2)


@pytest.mark.parametrize(
    ("name", "own", "reason"),
    [
        ("labels", {"per_device": 4}, "4 labels per device.*ask for 1 to 3"),
        ("labels", {"per_device": 0}, "ask for 1 to 3"),
        ("dirichlet", {"alpha": 0}, "alpha must lie"),
        ("dirichlet", {"minimum": 0}, "minimum of at least 1"),
        ("dirichlet", {"minimum": 31}, "90 samples are too few for 3 devices with at least 31"),
        ("power-law", {"exponent": 1.0}, "1.1 or more"),
    ],
)
def test_bad_partition_arguments(name, own, reason):
    with pytest.raises(ValueError, match=reason):
        PARTITIONS[name](labelled([30] * 3), 3, rng(), **own)


@pytest.mark.parametrize("name", ["labels", "dirichlet", "iid", "power-law", "per-class"])
def test_more_devices_than_samples(name):
    with pytest.raises(ValueError, match="6 samples are too few for 7 devices"):
        PARTITIONS[name](np.arange(6) % 3, 7, rng())


def test_several_tasks_have_no_one_label():
    y = np.zeros((20, 2), dtype=int)
    with pytest.raises(ValueError, match="one class label"):
        PARTITIONS["labels"](y, 2, rng())
    check_dealt(PARTITIONS["iid"](y, 4, rng()), y[:, 0], 4)


@given(st.integers(0, 10_000), st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=30))
def test_apportion_adds_up(total, weights):
    counts = apportion(total, np.array(weights))
    assert counts.sum() == total
    assert counts.min() >= 0
    assert np.abs(counts - total * np.array(weights) / sum(weights)).max() <= 1.001


# ---------------------------------------------------------------- teams


@given(seeds, st.integers(1, 40), st.data())
def test_team_sizes_differ_by_at_most_one(seed, num_devices, data):
    num_teams = data.draw(st.integers(1, num_devices))
    for name in ("random", "sequential"):
        team, allowed = FORMATIONS[name](num_devices, num_teams, None, rng(seed))
        sizes = np.bincount(team, minlength=num_teams)
        assert allowed is None
        assert len(sizes) == num_teams
        assert sizes.max() - sizes.min() <= 1


def label_sets(name: str, num_teams: int, num_classes: int, **own) -> list[set[int]]:
    team, allowed = FORMATIONS[name](3 * num_teams, num_teams, num_classes, rng(), **own)
    assert allowed is not None
    rows = [np.unique(allowed[team == t], axis=0) for t in range(num_teams)]
    assert all(len(row) == 1 for row in rows)
    return [set(np.flatnonzero(row[0]).tolist()) for row in rows]


def test_teams_of_table_2():
    assert label_sets("worst", 2, 10) == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]
    assert label_sets("average", 2, 10) == [{0, 1, 2, 3, 4, 5, 6}, {5, 6, 7, 8, 9, 0, 1}]


def test_overlap():
    assert label_sets("overlapping", 2, 8) == [{0, 1, 2, 3, 4, 5}, {4, 5, 6, 7, 0, 1}]
    assert label_sets("overlapping", 2, 8, overlap=0.0) == label_sets("worst", 2, 8)
    assert label_sets("overlapping", 3, 6, overlap=1.0) == [{0, 1, 2, 3}, {2, 3, 4, 5}, {4, 5, 0, 1}]
    assert label_sets("average", 1, 3) == [{0, 1, 2}]


def test_bad_teams():
    with pytest.raises(ValueError, match="5 teams of 4 devices.*ask for 1 to 4"):
        FORMATIONS["random"](4, 5, 10, rng())
    with pytest.raises(ValueError, match="11 teams need at least one class each, there are 10"):
        FORMATIONS["worst"](20, 11, 10, rng())
    with pytest.raises(ValueError, match="no classes"):
        FORMATIONS["worst"](20, 2, None, rng())
    with pytest.raises(ValueError, match="from 0 to 1"):
        FORMATIONS["overlapping"](20, 2, 10, rng(), overlap=2.0)


# ---------------------------------------------------------------- words to functions


def test_spec():
    assert parse_text("labels") == ("labels", [], {})
    assert parse_text("labels:2") == ("labels", ["2"], {})
    assert parse_text("synthetic:1, beta = 2") == ("synthetic", ["1"], {"beta": "2"})
    for wrong in ("a:b=1,b=2", "a:b=1,2"):
        with pytest.raises(ValueError, match="comes twice or after"):
            parse_text(wrong)


def model(inputs: tuple[int, ...], num_classes: int, *, hidden: tuple[int, ...] = (100,), flag: bool = False):
    return hidden, flag


def test_bind():
    table = {"dnn": model}
    assert bind("dnn:500x200", table, "model") == ("dnn", model, {"hidden": (500, 200)})
    assert bind("dnn:7,true", table, "model")[2] == {"hidden": (7,), "flag": True}
    assert bind("dnn:flag=no", table, "model")[2] == {"flag": False}
    assert bind("clusters-disjoint:sizes=6+7", PARTITIONS, "partition")[2] == {"sizes": (6, 7)}
    assert bind("dirichlet:0.1,minimum=3", PARTITIONS, "partition")[2] == {"alpha": 0.1, "minimum": 3}
    assert bind("celeba:Smiling+Male", SOURCES, "data")[2] == {"attributes": "Smiling+Male"}
    for functions in (SOURCES, PARTITIONS, FORMATIONS):
        for function in functions.values():
            assert set(own_arguments(function).values()) <= {"int", "float", "bool", "str", "tuple[int, ...]"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dirichle:1", "no partition 'dirichle'; did you mean 'dirichlet'\\? available: labels, "),
        ("", "no partition ''; available: labels, "),
        ("labels:two", "per_device of labels must be a whole number; got 'two'"),
        ("labels:2.5", "whole number"),
        ("labels:2,3", "2 arguments \\(2, 3\\); it takes per_device"),
        ("labels:count=3", "got 'count'; it takes per_device"),
        ("labels:2,per_device=3", "'per_device' twice"),
        ("iid:3", "it takes no arguments"),
        ("column:3", "it takes no arguments"),
        ("dirichlet:nan", "alpha of dirichlet must be a number"),
        ("clusters-permuted:whole=maybe", "true or false"),
        ("clusters-disjoint:sizes=6y7", "whole numbers such as 500x200"),
    ],
)
def test_bad_words(text, reason):
    with pytest.raises(ValueError, match=reason):
        bind(text, PARTITIONS, "partition")


# ---------------------------------------------------------------- the whole pipeline


def same(a: Federation, b: Federation) -> bool:
    return all(torch.equal(getattr(a, key), getattr(b, key)) for key in ("x", "y", "bounds"))


def test_default_is_digits_on_40_devices_in_4_teams():
    federation = build_federation()
    assert len(federation) == 40
    assert federation.ids.tolist() == list(range(40))
    assert federation.team is not None
    assert np.bincount(federation.team).tolist() == [10] * 4
    assert ((federation.label_counts() > 0).sum(1) == 2).all()
    assert same(federation, build_federation("digits", None, 40, 4, "labels:2", None, "random", (3, 0, 1)))
    assert not same(federation, build_federation(seed=1))


@pytest.mark.parametrize("partition", [name for name in PARTITIONS if name not in ("column", "per-class")])
@pytest.mark.parametrize("formation", ["random", "sequential"])
def test_everything_is_a_pure_function_of_the_arguments(partition, formation):
    def build() -> Federation:
        return build_federation(devices=12, teams=3, partition=partition, team_formation=formation, seed=5)

    first = build()
    np.random.default_rng().random()
    torch.manual_seed(99)
    assert same(first, build())
    assert len(first) == 12
    assert (first.cluster is not None) == partition.startswith("clusters")


@pytest.mark.parametrize("shares", [(3, 0, 1), (6, 2, 2), (1, 0, 0), (0.5, 0.25, 0.25)])
def test_split_shares(shares):
    federation = build_federation(split=shares, partition="iid", devices=10)
    sizes = (federation.bounds[:, 1:] - federation.bounds[:, :-1]).numpy()
    wanted = sizes.sum(1, keepdims=True) * np.array(shares) / sum(shares)
    assert np.abs(sizes - wanted).max() <= 2


def test_every_device_that_can_is_judged():
    x, y, device = np.zeros((5, 2)), np.zeros(5, int), np.array([0, 1, 1, 2, 2])
    federation = Federation.from_arrays(x, y, device)
    assert (federation.bounds[:, 1:] - federation.bounds[:, :-1]).tolist() == [
        [1, 0, 0],
        [1, 0, 1],
        [1, 0, 1],
    ]
    tiny = Federation.from_arrays(x, y, device, shares=(1e-12, 1, 1))
    assert int(tiny.samples.min()) == 1
    for wrong in ((0, 0, 1), (1, -1, 1), (1, float("nan"), 1), (1, 1)):
        with pytest.raises(ValueError, match="train:validation:test"):
            Federation.from_arrays(x, y, device, shares=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="team needs one value"):
        Federation.from_arrays(x, y, device, team=[0, 1])


def test_standardize():
    for data, axes in (("synthetic", (0,)), ("digits", (0, 2, 3))):
        federation = build_federation(data, devices=10, standardize=True)
        train = np.concatenate([federation.inputs(federation.device(k)[0], torch.float64) for k in range(10)])
        np.testing.assert_allclose(train.mean(axes), 0, atol=1e-5)
        np.testing.assert_allclose(train.std(axes), 1, atol=1e-5)


@pytest.mark.parametrize("words", ["mnist:low=-1", "mnist:-1"])
def test_black_pixels(tmp_path, words):
    write_mnist(tmp_path)
    federation = build_federation(words, tmp_path, devices=3)
    seen = federation.inputs(federation.x, torch.float64)
    torch.testing.assert_close(seen, 2 * federation.x.double() / 255 - 1, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="low 1 for"):
        build_federation("mnist:low=1", tmp_path, devices=3)


def test_two_tiers_of_teams():
    federation = build_federation(teams=(2, 4))
    assert federation.team is not None
    assert np.bincount(federation.team).tolist() == [5] * 8
    for wrong in ((2, 0), (-2, -4), ()):
        with pytest.raises(ValueError, match="several tiers"):
            build_federation(teams=wrong)


def test_formation_decides_on_labels():
    federation = build_federation(teams=2, team_formation="worst")
    assert federation.team is not None
    counts = federation.label_counts()
    assert not counts[federation.team == 0, 5:].any()
    assert not counts[federation.team == 1, :5].any()


def test_synthetic_has_devices_of_its_own():
    federation = build_federation("synthetic:alpha=1,beta=1,num_features=7", devices=6, teams=2)
    assert len(federation) == 6
    assert federation.x.shape[1] == 7
    again = build_federation("synthetic:alpha=1,beta=1,num_features=7", devices=6, teams=2, partition="labels:2")
    assert ((again.label_counts() > 0).sum(1) == 2).all()
    assert len(build_federation("synthetic")) == 40
    with pytest.raises(ValueError, match="worst decides on labels"):
        build_federation("synthetic", team_formation="worst")


def test_per_class_in_the_pipeline():
    federation = build_federation(devices=20, per_class=(40, 60))
    sizes = federation.bounds[:, 1:] - federation.bounds[:, :-1]
    assert sizes.unique(dim=0).tolist() == [[20, 0, 30]]
    assert ((federation.label_counts() > 0).sum(1) == 5).all()
    two = build_federation(devices=20, per_class=(40, 60), partition="labels:2")
    assert ((two.label_counts() > 0).sum(1) == 2).all()
    shared = build_federation(devices=20, per_class=(40, 60), partition="per-class:shared=true")
    assert set((shared.bounds[:, 1] - shared.bounds[:, 0]).tolist()) == {200}
    with pytest.raises(ValueError, match="not with iid"):
        build_federation(per_class=(1, 1), partition="iid")


def test_clusters_reach_the_federation():
    federation = build_federation(devices=8, teams=2, partition="clusters-permuted")
    assert federation.cluster is not None
    assert federation.cluster.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert federation.num_classes == 10


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"data": "minst"}, "no data set or .npz file 'minst'; did you mean 'mnist'"),
        ({"data": "table.csv"}, "available: digits, digits-sites, sentences, synthetic"),
        ({"devices": 0}, "devices at 1; got seed 0 and 0 devices"),
        ({"seed": -1}, "seeds start at 0"),
        ({"devices": 3, "teams": 4}, "4 teams of 3 devices"),
        ({"teams": -1}, "-1 teams"),
        ({"partition": "column"}, "name no devices"),
        ({"partition": "labels:11"}, "ask for 1 to 10"),
        ({"devices": 2000}, "1797 samples are too few for 2000 devices"),
        ({"team_formation": "best"}, "no team formation 'best'"),
        ({"teams": 4, "team_formation": "worst", "partition": "labels:3"}, "or for fewer teams"),
    ],
)
def test_bad_input(given, reason):
    with pytest.raises(ValueError, match=reason):
        build_federation(**given)


def test_a_source_needs_rows_of_one_number():
    with pytest.raises(ValueError, match="y needs one row per sample; got 2 for 3"):
        Source(np.zeros((3, 1)), np.zeros(2, int), 1)


# -- problems with a known optimum, by name -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "made", "devices"),
    [
        ("quadratics:dimension=3,mu=0.5", lambda: quadratics(6, 3, 5, mu=0.5), 6),
        ("tridiagonal", lambda: tridiagonal(6), 6),
        ("tridiagonal", tridiagonal, None),
        ("quadratic-clusters:num_clusters=2,dimension=4", lambda: quadratic_clusters(6, 2, 4, 5), 6),
    ],
)
def test_quadratics_by_name_are_those_made_in_python(name, made, devices):
    ours, theirs = build_federation(name, devices=devices, teams=2, seed=5), made()
    np.testing.assert_allclose(ours.x.numpy(), theirs.x.numpy(), rtol=1e-6)
    np.testing.assert_allclose(ours.y.numpy(), theirs.y.numpy(), rtol=1e-6)
    assert (ours.samples == 1).all()
    assert ours.team is not None
    assert len(np.unique(ours.team)) == 2
    assert (ours.cluster is None) == (theirs.cluster is None)


@pytest.mark.parametrize("chosen", [{"per_class": (20, 5)}, {"data": "own"}])
def test_validation_comes_from_training_where_the_data_name_test_samples(chosen, tmp_path):
    if chosen.get("data") == "own":
        rng = np.random.default_rng(3)
        split = np.tile([0, 0, 0, 0, 2], 40)
        np.savez(tmp_path / "own.npz", x=rng.random((200, 4)), y=split // 2, device=np.arange(200) // 50, split=split)
        chosen = {"data": tmp_path / "own.npz"}
    before, after = (build_federation(**chosen, split=split) for split in ((3, 0, 1), (4, 1, 0)))
    spans = [np.diff(each.bounds.numpy(), axis=1) for each in (before, after)]
    assert (spans[0][:, 1] == 0).all()
    assert (spans[1][:, 1] > 0).all()
    np.testing.assert_array_equal(spans[1][:, 1], spans[0][:, 0] // 5)
    np.testing.assert_array_equal(spans[1][:, :2].sum(1), spans[0][:, 0])
    for device in range(len(before)):  # the test samples stay
        assert torch.equal(before.device(device, "test")[0], after.device(device, "test")[0])


# -- a partition from outside ---------------------------------------------------------------------------


def in_turn(y, num_devices, rng, allowed=None):
    return Assignment(np.arange(len(y)), np.arange(len(y)) % num_devices)


def test_a_function_may_be_the_partition():
    federation = build_federation(devices=7, teams=2, partition=in_turn)
    assert len(federation) == 7
    assert federation.team is not None
    sizes = (federation.bounds[:, 3] - federation.bounds[:, 0]).tolist()
    assert (sum(sizes), max(sizes) - min(sizes)) == (1797, 1)
    table = np.random.default_rng(1).random((50, 3), dtype=np.float32)
    named = Source(table, np.arange(50) % 2, 2, device=np.repeat(["a", "b"], 25))
    assert len(build_federation(named, devices=5, teams=0, partition=in_turn)) == 5  # instead of the data's devices


def test_a_function_that_is_a_partition_of_the_house():
    a, b = (build_federation(devices=6, seed=3, partition=p) for p in ("iid", PARTITIONS["iid"]))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.bounds, b.bounds)


def test_a_function_is_given_the_labels_that_the_formation_allows():
    seen = []

    def partition(y, num_devices, rng, allowed=None):
        seen.append(allowed)
        return PARTITIONS["iid"](y, num_devices, rng, allowed)

    build_federation(devices=6, teams=2, team_formation="worst", partition=partition)
    assert seen[0].shape == (6, 10)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (lambda n: None, "a partition returns an Assignment.*got NoneType"),
        (lambda n: Assignment(np.arange(n), np.arange(n - 1)), "one of each per sample"),
        (lambda n: Assignment(np.arange(n), np.zeros(n)), "are integers"),
        (lambda n: Assignment(np.arange(n) + 1, np.arange(n) % 3), "index of an Assignment goes from 0 to 1796"),
        (lambda n: Assignment(np.arange(n), np.arange(n) % 4), "device of an Assignment goes from 0 to 2"),
        (lambda n: Assignment(np.arange(n), np.arange(n) % 2), "no samples to device 2"),
        (lambda n: Assignment(np.arange(n), np.arange(n) % 3, split=np.zeros(3)), "split of an Assignment needs 1797"),
        (lambda n: Assignment(np.arange(n), np.arange(n) % 3, cluster=np.zeros(4)), "cluster of an Assignment needs 3"),
    ],
)
def test_what_is_no_assignment_brings_advice(given, advice):
    with pytest.raises(ValueError, match=advice):
        build_federation(devices=3, partition=lambda y, num_devices, rng, allowed=None: given(len(y)))


def test_counts_per_class_do_not_go_with_a_function():
    with pytest.raises(ValueError, match="labels or per-class, not with a function"):
        build_federation(devices=3, per_class=(10, 5), partition=in_turn)


def test_digits_at_sites_are_the_digits_turned_by_the_site_and_named_by_the_device():
    plain, turned = SOURCES["digits"](None), SOURCES["digits-sites"](None, 20, seed=3)
    assert turned.device is not None
    assert turned.team is not None
    straight = np.stack([np.rot90(x[0], -site).ravel() for x, site in zip(turned.x, turned.team, strict=True)])
    known = plain.x.reshape(len(plain.x), -1)
    order, wanted = np.lexsort(straight.T), np.lexsort(known.T)
    assert np.array_equal(straight[order], known[wanted])  # every image once
    assert np.bincount(turned.device).min() >= 15
    assert [len(np.unique(turned.team[turned.device == device])) for device in range(20)] == [1] * 20
    other = turned.y[order] != plain.y[wanted]
    renamed = set(turned.device[order][other])
    assert renamed <= set(range(1, 20, 2))
    assert len(renamed) > 5
    for device in renamed:  # two digits have each other's name
        here = other & (turned.device[order] == device)
        pairs = set(zip(turned.y[order][here], plain.y[wanted][here], strict=True))
        assert len({frozenset(pair) for pair in pairs}) == 1


def test_what_is_kept_of_the_bounds_does_not_hang_on_their_memory():
    """Bounds that are sent to a worker process move to shared memory; a view of them would read freed memory."""
    federation = build_federation("digits", devices=4)
    starts = federation.training[0]
    assert not np.shares_memory(starts, federation.bounds.numpy())
    federation.bounds.share_memory_()
    np.testing.assert_array_equal(starts, federation.bounds[:, 0])
