"""The files that bad inputs name: data of one's own, packed folders, participation files, folders that are no runs.

`prepare` writes all of them into a folder, with two good runs and good data beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from commands import SMALL, call, own_file

GOOD, RUN, SEVERAL, PACKED = "good.npz", "done", "several", "packed"
ROWS = 12
NAMES = np.arange(ROWS) // 3  # four devices of three samples


def columns(**changes: Any) -> dict[str, Any]:
    """The arrays of a good .npz file with some changed; None leaves one out."""
    x = np.linspace(0, 1, ROWS * 5, dtype=np.float32).reshape(ROWS, 5)
    good = {"x": x, "y": np.arange(ROWS) % 3, "device": NAMES}
    return {name: values for name, values in {**good, **changes}.items() if values is not None}


def with_value(value: float, dtype: Any = np.float32, row: int = 7) -> np.ndarray:
    x = np.ones((ROWS, 5), dtype)
    x[row, 2] = value
    return x


ROW = np.arange(ROWS)
TEXTS = np.array([f"t{k}" for k in ROW])
# by name: what is changed in a good file
ARRAYS: dict[str, dict[str, Any]] = {
    **{f"no-{key}": {key: None} for key in ("x", "y", "device")},
    "no-arrays": dict.fromkeys(("x", "y", "device")),
    **{f"x-{word}": {"x": with_value(v)} for word, v in {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf}.items()},
    "x-too-large": {"x": with_value(1e300, np.float64)},
    **{f"x-nan-{t.__name__}": {"x": with_value(np.nan, t)} for t in (np.float16, np.float64)},
    **{f"x-{t.__name__}": {"x": np.ones((ROWS, 5), t)} for t in (np.uint64, np.complex64, np.complex128)},
    **{f"x-{t.__name__}": {"x": np.ones((ROWS, 5), t)} for t in (np.int64, np.uint16, np.bool_)},
    "x-uint64-large": {"x": np.full((ROWS, 5), 2**63, np.uint64)},
    "x-0-features": {"x": np.zeros((ROWS, 0), np.float32)},
    "x-0-features-uint8": {"x": np.zeros((ROWS, 0), np.uint8)},
    "x-0-pixels": {"x": np.zeros((ROWS, 0, 4), np.uint8)},
    "x-0-channels": {"x": np.zeros((ROWS, 0, 4, 4), np.float32)},
    "x-0-last": {"x": np.zeros((ROWS, 3, 0), np.float32)},
    "x-scalar": {"x": np.float32(1)},
    "x-text": {"x": TEXTS},
    "x-bytes": {"x": TEXTS.astype("S")},
    "x-dates": {"x": np.full((ROWS, 2), "2020-01-01", "datetime64[D]")},
    "x-durations": {"x": np.ones((ROWS, 2), "timedelta64[s]")},
    "x-records": {"x": np.zeros(ROWS, [("a", "f4"), ("b", "i4")])},
    "x-objects": {"x": np.array([{}] * ROWS, object)},
    **{f"x-{n}-rows": {"x": np.ones((n, 5), np.float32)} for n in (1, 11, 13)},
    "empty": {"x": np.zeros((0, 5), np.float32), "y": np.zeros(0, int), "device": np.zeros(0, int)},
    "empty-floats": {"x": np.zeros((0, 5), np.float32), "y": np.zeros(0), "device": np.zeros(0, int)},
    "empty-no-features": {"x": np.zeros((0, 0), np.float32), "y": np.zeros(0, int), "device": np.zeros(0, int)},
    "y-2-columns": {"y": np.stack([ROW % 3, ROW % 2], 1)},
    "y-0-columns": {"y": np.zeros((ROWS, 0), int)},
    "y-0-float-columns": {"y": np.zeros((ROWS, 0), np.float32)},
    "y-3-axes": {"y": np.zeros((ROWS, 2, 2), int)},
    "y-bool-2-columns": {"y": np.zeros((ROWS, 2), bool)},
    "y-negative": {"y": ROW - 3},
    "y-minus-one": {"y": np.full(ROWS, -1)},
    "y-uint64-large": {"y": np.full(ROWS, 2**63, np.uint64)},
    "y-huge": {"y": np.where(ROW == 3, 2**40, 0)},
    "y-largest": {"y": np.where(ROW == 3, 2**63 - 1, 0)},
    "y-smallest": {"y": np.where(ROW == 3, -(2**63), 0)},
    "y-text": {"y": TEXTS},
    "y-bytes": {"y": TEXTS.astype("S")},
    "y-complex": {"y": np.ones(ROWS, np.complex64)},
    "y-dates": {"y": np.full(ROWS, "2020-01-01", "datetime64[D]")},
    "y-objects": {"y": np.array([None] * ROWS, object)},
    "y-scalar": {"y": np.int64(1)},
    **{f"y-{word}": {"y": np.where(ROW == 3, v, 1.0)} for word, v in {"nan": np.nan, "inf": np.inf}.items()},
    "y-too-large": {"y": np.where(ROW == 3, 1e300, 1.0)},
    **{f"y-{n}-rows": {"y": np.zeros(n, int)} for n in (1, 11, 13)},
    **{f"device-{n}-rows": {"device": np.zeros(n, int)} for n in (0, 1, 11, 13)},
    "device-floats": {"device": NAMES.astype(float)},
    "device-nan": {"device": np.full(ROWS, np.nan)},
    "device-bool": {"device": NAMES > 1},
    "device-objects": {"device": np.array([object()] * ROWS, object)},
    "device-scalar": {"device": np.int64(1)},
    "device-2-axes": {"device": np.stack([NAMES, NAMES], 1)},
    "device-0-columns": {"device": np.zeros((ROWS, 0), int)},
    "device-complex": {"device": NAMES.astype(complex)},
    "device-dates": {"device": np.full(ROWS, "2020-01-01", "datetime64[D]")},
    "device-not-utf8": {"device": np.array([b"\xff\xfe"] * ROWS)},
    "team-changes": {"team": ROW % 2},
    "team-floats": {"team": NAMES / 2},
    "team-2-axes": {"team": np.zeros((ROWS, 2), int)},
    "team-scalar": {"team": np.int64(1)},
    "team-objects": {"team": np.array([None] * ROWS, object)},
    **{f"team-{n}-rows": {"team": np.zeros(n, int)} for n in (0, 1, 11, 13)},
    "split-unknown": {"split": np.full(ROWS, "training")},
    "split-empty-words": {"split": np.full(ROWS, "")},
    "split-3": {"split": np.full(ROWS, 3)},
    "split-minus-1": {"split": np.full(ROWS, -1)},
    "split-all-test": {"split": np.full(ROWS, 2)},
    "split-all-validation": {"split": np.full(ROWS, "validation")},
    "split-floats": {"split": np.zeros(ROWS)},
    "split-2-axes": {"split": np.zeros((ROWS, 2), int)},
    "split-device-without-training": {"split": np.where(NAMES == 2, 2, 0)},
    **{f"split-{n}-rows": {"split": np.zeros(n, int)} for n in (0, 1, 11, 13)},
    "cluster-changes": {"cluster": ROW % 2},
    "cluster-floats": {"cluster": NAMES / 2},
    "cluster-2-axes": {"cluster": np.zeros((ROWS, 2), int)},
    **{f"cluster-{n}-rows": {"cluster": np.zeros(n, int)} for n in (0, 1, 11, 13)},
}
# these can be packed: a model of one's own may take them
FOR_OWN_MODELS = ("y-2-columns", "y-3-axes", "y-bool-2-columns")
FOR_OWN_MODELS += ("x-uint64", "x-int64", "x-uint16", "x-bool", "x-bool_")
GOOD_ZIP = "four.npz"  # a good file with four devices
CUTS = tuple(range(0, 900, 30))  # of a good file, so many bytes are left
RAW = {
    "text.npz": b"x,y,device\n1,2,3\n",
    "zeros.npz": bytes(1000),
    "zip-head.npz": b"PK\x03\x04" + bytes(100),
    "empty-zip.npz": b"PK\x05\x06" + bytes(18),
    "pickle.npz": b"\x80\x04}\x94.",
    "npy-head.npz": b"\x93NUMPY\x01\x00",
    "html.npz": b"<html><body>404</body></html>",
}
# files that are none, or cannot be opened
SPECIAL = ("folder.npz", "pipe.npz", "loop.npz", "dangling.npz", "device.npz", "socket.npz", "null.npz")
TABLES: dict[str, bytes] = {
    "empty.csv": b"",
    "blank.csv": b"\n\n",
    "words.csv": b"yes,no,yes,no\n",
    "twos.csv": b"1,2,1,0\n",
    "nan.csv": b"1,nan,1,0\n",
    "minus.csv": b"1,-1,1,0\n",
    "half.csv": b"1,0.5,1,0\n",
    "ragged.csv": b"1,0,1,0\n1,0\n",
    "one-number.csv": b"1\n",
    "narrow.csv": b"1,0\n1,1\n",
    "wide.csv": b"1,0,1,0,1\n1,1,1,1,1\n",
    "semicolons.csv": b"1;0;1;0\n1;1;1;1\n",
    "binary.csv": bytes(range(256)),
    "nulls.csv": bytes(64),
    "empty.npy": b"",
    "text.npy": b"1,0,1,0\n",
    "head.npy": b"\x93NUMPY\x01\x00",
}
TABLE_ARRAYS: dict[str, Any] = {
    "flat.npy": np.ones(4),
    "scalar.npy": np.ones(()),
    "cube.npy": np.ones((2, 2, 4)),
    "rows0.npy": np.ones((0, 4)),
    "columns0.npy": np.ones((2, 0)),
    "columns3.npy": np.ones((2, 3)),
    "columns5.npy": np.ones((2, 5)),
    "twos.npy": np.full((2, 4), 2),
    "nans.npy": np.full((2, 4), np.nan),
    "words.npy": np.full((2, 4), "yes"),
    "complex.npy": np.full((2, 4), 1j),
    "dates.npy": np.full((2, 4), "2020-01-01", "datetime64[D]"),
    "records.npy": np.zeros((2, 4), [("a", "f4")]),
}
SCHEDULES: dict[str, bytes] = {
    "empty.csv": b"",
    "blank.csv": b"\n\n\n",
    "header.csv": b"id,join,leave\n",
    "spaces.csv": b" \n",
    "one.csv": b"0\n",
    "two.csv": b"0,1\n",
    "four.csv": b"0,1,2,3\n",
    "words.csv": b"0,one,two\n",
    "zero.csv": b"0,0,5\n",
    "minus.csv": b"0,-1,5\n",
    "backwards.csv": b"0,5,2\n",
    "same.csv": b"0,3,3\n",
    "floats.csv": b"0,1.5,3\n",
    "infinite.csv": b"0,1,inf\n",
    "nan.csv": b"0,nan,3\n",
    "huge.csv": b"0,1,99999999999999999999\n",
    "underscore.csv": b"0,1_0,2_0\n",
    "unknown.csv": b"nobody,1,5\n",
    "unnamed.csv": b",1,5\n",
    "other-header.csv": b"node,from,to\n0,1,5\n",
    "semicolons.csv": b"0;1;5\n",
    "binary.csv": bytes(range(128, 256)),
    "nulls.csv": bytes(32),
    "quote.csv": b'"0,1,5\n',
    "field-too-long.csv": b"0," + b"1" * 200_000 + b",5\n",
}


def pack(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "federation.json").read_text())


def about(**changes: Any) -> Callable[[Path], None]:
    """Change federation.json; None removes a key."""

    def change(folder: Path) -> None:
        values = {k: v for k, v in {**pack(folder), **changes}.items() if v is not ...}
        (folder / "federation.json").write_text(json.dumps(values))

    return change


def raw(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return change


def array(name: str, make: Callable[[np.ndarray], Any]) -> Callable[[Path], None]:
    """Replace an .npy file."""

    def change(folder: Path) -> None:
        values = make(np.load(folder / f"{name}.npy"))
        np.save(folder / f"{name}.npy", values, allow_pickle=True)

    return change


def number(name: str, dtype: Any, value: float) -> Callable[[Path], None]:
    """Change one number of x or y."""

    def change(folder: Path) -> None:
        values = np.fromfile(folder / name, dtype)
        values[len(values) // 2] = value
        values.tofile(folder / name)

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, by: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        by(folder / name)

    return change


PARTS = ("bounds.npy", "ids.npy", "team.npy")
# by name: how a packed folder of four devices is damaged
DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"no-{name}": gone(name) for name in ("x", "y", *PARTS)},
    **{f"empty-{name}": raw(name, b"") for name in ("x", "y", "federation.json", *PARTS)},
    **{f"half-{name}": cut(name, 0.5) for name in ("x", "y", "federation.json", *PARTS)},
    **{f"binary-{name}": raw(name, bytes(range(256))) for name in ("x", "y", "federation.json", *PARTS)},
    **{f"folder-{name}": replaced(name, Path.mkdir) for name in ("x", "y", *PARTS)},
    **{f"pipe-{name}": replaced(name, os.mkfifo) for name in ("x", "y", *PARTS)},
    **{f"x-{v}": number("x", np.float32, v) for v in (np.nan, np.inf, -np.inf)},
    "y-minus-1": number("y", np.int64, -1),
    "y-too-large": number("y", np.int64, 99),
    **{
        f"json-{k}": raw("federation.json", text)
        for k, text in enumerate((b"null", b"[]", b"{}", b"3", b'"x"', b"nan", b"{", b"\x00", b"[" * 100_000))
    },
    **{f"without-{key}": about(**{key: ...}) for key in ("x", "y", "num_classes", "columns", "scale", "shift")},
    **{
        f"{key}-{k}": about(**{key: value})
        for key in ("x", "y")
        for k, value in enumerate(
            (3, [], "float32", None, ["float32"], ["float32", 3], ["float32", [-1, 5]], ["nonsense", [ROWS, 5]])
        )
    },
    "x-dtype-function": about(x=["zeros", [ROWS, 5]]),
    "x-dtype-bool": about(x=["bool", [ROWS, 20]]),
    "x-dtype-complex": about(x=["complex64", [ROWS // 2, 5]]),
    "x-flat": about(x=["float32", [ROWS * 5]]),
    "x-0-features": both(about(x=["float32", [ROWS, 0]]), raw("x", b"")),
    "x-shape-float": about(x=["float32", [ROWS, 5.5]]),
    "x-shape-words": about(x=["float32", ["a", "b"]]),
    "x-shape-huge": about(x=["float32", [10**30, 5]]),
    "y-pairs": about(y=["int64", [ROWS // 2, 2]]),
    "y-int32": about(y=["int32", [ROWS * 2]]),
    **{f"num_classes-{k}": about(num_classes=v) for k, v in enumerate((0, -1, 1.5, "3", [3], True, 1, 10**30))},
    **{f"columns-{k}": about(columns=v) for k, v in enumerate((None, 3, [], ["ids"], ["bounds"], ["x"], {}))},
    "columns-path": about(columns=["bounds", "ids", "../four"]),
    **{
        f"{key}-{k}": about(**{key: v})
        for key in ("scale", "shift")
        for k, v in enumerate((3, [], ["float32"], ["nonsense", 1.0], ["float32", "x"], ["float32", [1.0, 2.0]]))
    },
    **{f"scale-{v}": about(scale=["float32", v]) for v in (float("nan"), float("inf"))},
    "bounds-minus": array("bounds", lambda b: b - 1),
    "bounds-beyond": array("bounds", lambda b: b + 1000),
    "bounds-backwards": array("bounds", lambda b: b[:, ::-1]),
    "bounds-floats": array("bounds", lambda b: b.astype(float)),
    "bounds-nan": array("bounds", lambda b: b * np.nan),
    "bounds-words": array("bounds", lambda b: b.astype(str)),
    "bounds-objects": array("bounds", lambda b: b.astype(object)),
    "bounds-3-columns": array("bounds", lambda b: b[:, :3]),
    "bounds-flat": array("bounds", lambda b: b.ravel()),
    "bounds-empty": array("bounds", lambda b: b[:0]),
    "bounds-fewer": array("bounds", lambda b: b[:2]),
    "bounds-no-training": array("bounds", lambda b: np.stack([b[:, 0], b[:, 0], b[:, 1], b[:, 3]], 1)),
    "ids-fewer": array("ids", lambda v: v[:2]),
    "ids-more": array("ids", lambda v: np.append(v, 9)),
    "ids-twice": array("ids", lambda v: v * 0),
    "ids-2-axes": array("ids", lambda v: np.stack([v, v], 1)),
    "ids-scalar": array("ids", lambda v: v[0]),
    "ids-floats": array("ids", lambda v: v + 0.5),
    "ids-objects": array("ids", lambda v: v.astype(object)),
    "ids-empty": array("ids", lambda v: v[:0]),
    "team-fewer": array("team", lambda v: v[:2]),
    "team-2-axes": array("team", lambda v: np.stack([v, v], 1)),
    "team-floats": array("team", lambda v: v + 0.5),
    "team-objects": array("team", lambda v: v.astype(object)),
    "team-empty": array("team", lambda v: v[:0]),
    "team-scalar": array("team", lambda v: v[0]),
}


def prepare(folder: Path) -> None:
    """Write all files into a folder, which is the current one meanwhile."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_data()
        write_special()
        for name, content in TABLES.items():
            Path("tables", name).write_bytes(content)
        for name, values in TABLE_ARRAYS.items():
            np.save(Path("tables", name), values)
        np.save("tables/objects.npy", np.array([[{}] * 4], object), allow_pickle=True)
        for name, content in SCHEDULES.items():
            Path("schedules", name).write_bytes(content)
        call("run", *SMALL, "--rounds", 1, "--quiet", "--out", RUN)
        call("run", "mfa-rr", "--devices", 4, "--teams", 0, "--rounds", 1, "--set", "device_steps=1", "--out", SEVERAL)
        call("data", "pack", PACKED, "--data", GOOD_ZIP)
        for name, damage in DAMAGES.items():
            shutil.copytree(PACKED, f"packs/{name}")
            damage(Path("packs", name))
    finally:
        os.chdir(before)


def write_data() -> None:
    """Files for --data."""
    for name in ("data", "tables", "schedules", "packs", "empty", "full/sub"):
        Path(name).mkdir(parents=True)
    Path("full/a.txt").write_text("not a run\n")
    Path("file").write_text("a file\n")
    own_file(Path(GOOD))
    np.savez(GOOD_ZIP, **columns(team=NAMES // 2))
    whole = Path(GOOD_ZIP).read_bytes()
    for name, changes in ARRAYS.items():
        with Path("data", f"{name}.npz").open("wb") as file:
            np.savez(file, **columns(**changes))
    for keep in CUTS:
        Path("data", f"cut-{keep}.npz").write_bytes(whole[:keep])
    for name, content in RAW.items():
        Path("data", name).write_bytes(content)
    np.save("data/one-array.npz.npy", np.ones(3))
    Path("data/one-array.npz.npy").rename("data/one-array.npz")
    for twice in ("x", "y", "device"):
        shutil.copy(GOOD_ZIP, f"data/two-{twice}.npz")
        with (
            warnings.catch_warnings(),
            zipfile.ZipFile(f"data/two-{twice}.npz", "a") as archive,
            zipfile.ZipFile(GOOD_ZIP) as good,
        ):
            warnings.simplefilter("ignore")  # the name is there twice: that is the point
            archive.writestr(f"{twice}.npy", good.read(f"{twice}.npy"))


def write_special() -> None:
    """Files that are no regular files."""
    import socket

    Path("data/folder.npz").mkdir()
    os.mkfifo("data/pipe.npz")
    os.symlink("loop.npz", "data/loop.npz")
    os.symlink("nowhere", "data/dangling.npz")
    os.symlink("/dev/zero", "data/device.npz")
    os.symlink("/dev/null", "data/null.npz")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("data/socket.npz")
    os.mkfifo("pipe.toml")
    os.mkfifo("pipe")
    os.symlink("/dev/zero", "zero.toml")
    os.symlink("loop.toml", "loop.toml")
    Path("folder.toml").mkdir()
    os.mkfifo("tables/pipe.csv")
    os.mkfifo("tables/pipe.npy")
    os.symlink("/dev/zero", "tables/zero.csv")
    os.mkfifo("schedules/pipe.csv")
    os.symlink("/dev/zero", "schedules/zero.csv")
