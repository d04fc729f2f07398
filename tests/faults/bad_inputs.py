"""Bad inputs: command lines and files that Polytier has to refuse with advice. `bad_inputs` lists them.

What is valid, if odd, is not among them. Files that are named are those of `bad_files.prepare`.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from faults import bad_files as files
from polytier.algorithms import ALGORITHMS
from polytier.runs.spec import RunSpec

FILE = "given.toml"  # where the text of an input is written


@dataclass(frozen=True)
class Bad:
    """A command line that has to be refused, and the content of FILE, if it names that.

    The kind says what is wrong: it groups inputs in the summary.
    """

    kind: str
    args: tuple[str, ...]
    content: bytes | None = None

    @property
    def name(self) -> str:
        """The command line, and what the file holds."""
        held = "" if self.content is None else f" < {self.content[:60]!r} {zlib.crc32(self.content):08x}"
        return ascii(shlex.join(self.args))[1:-1] + held


RUN = ("run", "fedavg", "--devices", "4", "--teams", "2", "--rounds", "1", "--set", "device_steps=1")
OWN = ("run", "fedavg", "--rounds", "1", "--set", "device_steps=1")  # without settings that data of one's own refuse
LONG = "x" * 300  # longer than the name of a file may be
NO_NUMBERS = (
    "",
    " ",
    "abc",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1_0",
    "0_1",
    "0x10",
    "1,5",
    "1 5",
    "--",
    "²",
    "٣",
    "\uff11",
    "½",
)
NO_NUMBERS += ("true", "None", "null", "1e", "e5", ".", "+", "1..2", "1/2", "one", "∞", "NaN", "Infinity")
NO_WHOLE = (*NO_NUMBERS, "1.5", "1e300", "-1", "99999999999999999999", "1e3")
# by setting: what may not be given; whole numbers get NO_WHOLE too
FLAGS: dict[str, tuple[str, ...]] = {
    "devices": ("0", "1798", "100000", "1000000000"),
    "rounds": ("0", "1e9", "9223372036854775808"),
    "seed": ("9223372036854775808", "18446744073709551616"),
    "eval_every": ("0",),
    "workers": ("0", "1_000"),
    "tile": ("0",),
    "data": (
        *("", " ", "Digits", "digit", "digits,mnist", "digits:2", "digits:x=1", "digits:=", "digits:a=1,2", "python"),
        *("none.npz", "empty", "full", "file", "data/folder.npz", "packed/x", LONG, f"{LONG}.npz", "/", ".", ".."),
        *(f"synthetic:{key}={v}" for key in ("alpha", "beta") for v in ("-1", "nan", "inf", "x", "1e300", "1_0", "")),
        *(f"synthetic:{key}={v}" for key in ("num_features", "num_classes") for v in ("0", "-1", "1.5", "inf", "1_0")),
        *(f"synthetic:num_{key}=99999999999" for key in ("features", "classes")),
        *("synthetic:min_samples=0", "synthetic:min_samples=9,max_samples=3"),
        *("synthetic:min_samples=99999999999,max_samples=99999999999", "synthetic:max_samples=0"),
        *("synthetic:iid=maybe", "synthetic:1,2,3,4,5,6,7,8", "synthetic:alpha=1,alpha=2", "synthetic:1,alpha=2"),
        *("synthetic:num_devices=3", "synthetic:seed=3", "synthetic:gamma=1"),
        *(f"quadratics:mu={v}" for v in ("0", "-1", "nan", "inf", "2", "x")),
        *(f"quadratics:smoothness={v}" for v in ("0", "0.01", "inf", "1e300")),
        *(f"quadratics:spread={v}" for v in ("nan", "inf", "x", "1e300", "-1")),
        *(f"quadratics:dimension={v}" for v in ("0", "-1", "1.5", "9999999999", "x")),
        *(f"tridiagonal:p={v}" for v in ("0", "-1", "x", "99999999")),
        *(f"tridiagonal:mu={v}" for v in ("0", "-1", "nan", "inf", "1e300")),
        *(f"quadratic-clusters:num_clusters={v}" for v in ("0", "-1", "x")),
        *(f"quadratic-clusters:spread={v}" for v in ("nan", "inf", "1e300", "-1")),
        *(f"{name}" for name in ("mnist", "cifar-10", "cifar-100:coarse=perhaps", "leaf", "celeba", "mnist:low=x")),
    ),
    "data_dir": ("", " ", "nonsense", "empty", "file", "/no/such/folder", LONG, "data/folder.npz"),
    "model": (
        *("", " ", "MCLR", "mcrl", "mclr:3", "mclr:x=1", "dnn:0", "dnn:-5", "dnn:abc", "dnn:1.5", "dnn:10x", "dnn:x10"),
        *("dnn:10x0", "dnn:1_0", "dnn:hidden", "dnn:hidden=", "dnn:hidden=3,hidden=4", "dnn:99999999999", "dnn:3,4"),
        *("vgg:0", "vgg:-1", "vgg:M-M-M-M-M", "vgg:16--M", "vgg:x", "vgg:16-M-²", "vgg:99999999999"),
        *("resnet9:0", "resnet9:1", "resnet9:-4", "resnet9:x", "resnet9:9999999"),
        *("cnn-celeba", "quadratic", "quadratic:3", "dnn;3", "no-such-module-of-mine:net"),
    ),
    "train": ("", " ", "none", "All", "head,all", "layers", "layers=", "layers=nothing*", "layers=+", "all=3", "heads"),
    "teams": (
        *("", " ", "x", "2x", "x2", "2xx2", "-1", "-1x2", "0x4", "4x0", "1.5", "inf", "nan", "1_0", "four", "2,2"),
        *("2X2", "99999999999999999999", "2x99999999999", "5", "3x3", "\uff15", "²", "true", "2 x 2 x", "1e3"),
    ),
    "partition": (
        *("", " ", "label", "Labels", "labels:0", "labels:-1", "labels:11", "labels:1.5", "labels:nan", "labels:1_0"),
        *("labels:2,3", "labels:x=1", "labels:per_device", "labels:=2", "labels:per_device=1,per_device=2", "iid:3"),
        *("labels:99999999999999999999", "labels:2;3", "iid:x=1", "column", "column:3", "labels,iid", "labels 2"),
        *(f"dirichlet:{v}" for v in ("0", "-1", "nan", "inf", "1e300", "1e-9", "x", "0.5,0", "0.5,9999", "0.5,-1")),
        *(f"power-law:{v}" for v in ("1", "0", "-2", "nan", "inf", "x", "2,0", "2,9999", "2,-5")),
        *(f"clusters-permuted:{v}" for v in ("0", "-1", "11", "5", "x", "2,maybe", "1.5", "4,true,3")),
        *(f"clusters-disjoint:{v}" for v in ("0", "-1", "11", "5", "sizes=1+1", "sizes=0+4", "sizes=", "sizes=a+b")),
        *("clusters-disjoint:classes_per_cluster=99", "clusters-disjoint:classes_per_cluster=-1"),
        *("clusters-disjoint:sizes=-1+5", "clusters-disjoint:sizes=4.0", "per-class:9999", "per-class:0"),
        *("per-class:-1", "per-class:20,-5", "per-class:20,5,99", "per-class:20,5,0", "per-class:20,5,5,maybe"),
    ),
    "per_class": (
        *("", "20", "20:5:1", "0:5", "-1:5", "20:-5", "a:b", "1.5:2", "inf:1", "nan:1", "1_0:5", "99999999:1", ":"),
        *("20:", ":5", "20,5", "20;5", " ", "1e2:5", "٣:٣", "99999999999999999999:1"),
    ),
    "team_formation": (
        *("", " ", "worts", "Random", "worst:2", "random:1", "sequential:2", "average:x=1", "overlapping:2"),
        *("overlapping:nan", "overlapping:-1", "overlapping:inf", "overlapping:x", "overlapping:0.5,0.5"),
        *("learned", "learned:", "learned:none", "learned:.", "learned:done", "learned:file", "learned:pipe"),
        *("learned:data/x-nan.npz", "learned:good.npz", "learned:done,by=magic", "learned:done,threshold=x"),
    ),
    "split": (
        *("", " ", "3", "3:1", "3:0:1:0", "0:0:1", "-1:0:1", "3:-1:1", "3:0:-1", "nan:0:1", "3:nan:1", "3:0:nan"),
        *("inf:0:1", "3:0:inf", "a:b:c", "1e999:0:1", "1_0:0:1", "::", "3,0,1", "3/0/1", "1e308:1e308:1e308", "½:0:½"),
    ),
    "team_participation": ("0", "-0.5", "1.5", "0_1", "count:0", "count:5_0", "table:none", "schedule:none"),
    "device_participation": (
        *("0", "-0.5", "1.5", "-0.0", "2", "0.5_0", "count", "count:", "count:0", "count:-1", "count:1.5", "count:x"),
        *("count:1_0", "count:99999999999999999999", "count: ", "Count:2", "count:nan", "count:٣", "share:0.5"),
        *("table", "table:", "table:none", "table:empty", "table:file", "table:/", f"table:{LONG}", "table:good.npz"),
        *("schedule", "schedule:", "schedule:none", "schedule:empty", "schedule:/", f"schedule:{LONG}"),
        *("table:tables/pipe.csv", "table:tables/pipe.npy", "table:tables/zero.csv", "table:pipe", "table:/dev/zero"),
        *("schedule:schedules/pipe.csv", "schedule:schedules/zero.csv", "schedule:pipe", "schedule:/dev/zero"),
        *("table:/dev/null", "schedule:/dev/null", "table:tables/objects.npy"),
        *(f"table:tables/{name}" for name in (*files.TABLES, *files.TABLE_ARRAYS)),
        *(f"schedule:schedules/{name}" for name in files.SCHEDULES),
    ),
    "absent": ("", " ", "Skip", "both", "skip,stale", "none", "0", "ignore"),
    "batch_size": (
        *("", " ", "0", "-1", "1.5", "1_000", "²", "٣", "inf", "nan", "all", "grow", "grow:", "grow:3", "grow:t"),
        *("grow:1/(0+t)", "grow:0/(1+t)", "grow:-1/(1+t)", "grow:a/(b+t)", "grow:1/(1+t//0)", "grow:1/(1-t)", "1e3"),
        *("grow:1e999/(1+t)", "99999999999999999999", "9223372036854775808", "32,64", "Grow:8/(1+t)", "grow:8/(1+s)"),
    ),
    "codec": (
        *(
            "",
            " ",
            "zip",
            "Float32",
            "float8",
            "float32,int8",
            "float32:1",
            "int8:1",
            "sparse32",
            "top",
            "top:",
            "tops",
        ),
        *(f"top:{v}" for v in ("0", "-1", "2", "1.01", "nan", "inf", "x", "1_0", "0.1,0.2", "0.1:0.2", "1e300", "½")),
    ),
    "upload": (
        *("", " ", "clip", "clip:", "clip:x", "clip:0", "clip:-1", "clip:nan", "clip:inf", "clip:1e999", "clip:1e300"),
        *("noise", "noise:", "noise:-1", "noise:nan", "noise:inf", "noise:1e300", "noise:1,clip:1", "clip:1,clip:1"),
        *("blur:1", "clip:1,", ",clip:1", "clip=1", "clip:1;noise:1", "clip:1 noise:1", "clip:1_0", "Clip:1", "none"),
        *("clip:1e30,noise:1e30",),
    ),
    "metric": ("", " ", ",", "accurcy", "accuracy,none", "accuracy,,", "mae", "rmse", "accuracy auc"),
    "l2": ("-1", "-0.001", "1e300", "-1e300", "1e39"),
    "dtype": ("", " ", "float16", "float8", "FLOAT32", "float", "double", "32", "int8", "bfloat16", "float32,float64"),
    "models": ("", "x", "0", "2", "1.5", "-1"),  # fedavg trains one model
    "engine": ("", " ", "roy", "Stacked", "ray:", "stacked:1", "loopback:2", "stacked,ray", "none"),
    "on": ("", " ", "tpu", "CPU", "gpu", "cpu:x", "cpu:", "cpu:-1", "cpu:7", "cpu,cuda", "meta", "0"),
    "batching": ("", " ", "all", "Stacked", "stacked,single", "none", "auto", "1"),
    "out": (
        *("", "full", "file", "file/x", "done", "good.npz", ".", "/", "pipe", "empty/../full", LONG, f"new/{LONG}"),
        *("/dev/null", "/dev/null/x", "/proc/x", "/proc/1/x", "data/loop.npz", "data/loop.npz/x", "data/dangling.npz"),
    ),
}
WHOLE = ("devices", "rounds", "seed", "eval_every", "workers", "tile")
REAL = ("l2", "team_participation", "device_participation")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flags() -> Iterator[Bad]:
    """Bad values of every setting, on the command line."""
    for name, values in FLAGS.items():
        more = NO_WHOLE if name in WHOLE else NO_NUMBERS if name in REAL else ()
        base = OWN if name in ("data", "data_dir") else RUN
        for value in dict.fromkeys((*values, *more)):
            yield Bad(f"flag {name}", (*base, f"{flag(name)}={value}"))
    for word in ("maybe", "", "2", "yes"):
        yield Bad("flag standardize", (*RUN, f"--standardize={word}"))
    for models in ("0", "-1", "5", "x", "1_0", "1.5", "", "99999999999999999999"):
        yield Bad("flag models", ("run", "mfa-rr", *RUN[2:], f"--models={models}"))
    for value in ("nonsense", "empty", "file", ""):
        for data in ("digits", "synthetic", "quadratics", files.GOOD, files.PACKED):
            yield Bad("flag data_dir", (*OWN, "--data", data, f"--data-dir={value}"))
        yield Bad("flag data_dir", (*OWN, "--data", "mnist", f"--data-dir={value}"))


TOML_VALUES = {
    "text": "'text'",
    "nothing": "''",
    "minus": "-1",
    "float": "1.5",
    "inf": "inf",
    "minus inf": "-inf",
    "nan": "nan",
    "true": "true",
    "list": "[1, 2]",
    "no list": "[]",
    "nested": "[[1], [2]]",
    "table": "{ a = 1 }",
    "no table": "{}",
    "date": "2020-01-01",
    "moment": "2020-01-01T00:00:00Z",
    "huge": "1" + "0" * 400,
    "beyond int64": "9223372036854775808",
    "null": '"a\\u0000b"',
    "zero": "0",
}
# values that are allowed, by setting
FINE = {
    "text": ("out", "algorithm"),  # out is a name; a method of this name is refused, see `names`
    "nothing": (),
    "float": ("l2",),
    "beyond int64": ("l2",),
    "true": ("standardize",),
    "zero": ("seed", "teams", "l2"),
    "no table": ("set",),
    "null": (),
}
UNKNOWN = ("table", "huge")  # of `set`, these are unknown fields


def toml_values() -> Iterator[Bad]:
    """Values of wrong types, for every setting in a TOML file and in a table of one of several models."""
    for name in RunSpec.model_fields:
        for word, value in TOML_VALUES.items():
            if name in FINE.get(word, ()):
                continue
            first = "" if name == "algorithm" else "algorithm = 'fedavg'\n"
            text = f"{first}{name} = {value}\n"
            args = ("run", FILE, *(() if name == "rounds" else ("--rounds", "1")))
            yield Bad(f"file {name}", args, text.encode())
    for name in ("data", "model", "train", "partition", "split", "l2", "batch_size", "set", "standardize", "rounds"):
        for word, value in TOML_VALUES.items():
            if name in FINE.get(word, ()):
                continue
            text = f"algorithm = 'mfa-rr'\ndevices = 4\nteams = 0\nrounds = 1\n[models.a]\n{name} = {value}\n"
            yield Bad("file models", ("run", FILE), text.encode())
    yield Bad("file algorithm", ("run", FILE), b"algorithm = 'text'\n")


TOMLS: tuple[bytes, ...] = (
    *(b"", b" ", b"\n\n", b"# nothing\n", b"null", b"NULL\n", b"[versions]\npolytier = '0.1.0'\n"),
    *(b"rounds", b"rounds = ", b"rounds = 1\nrounds = 2\n", b"= 3", b"rounds: 3", b"rounds == 3", b"'rounds' 3"),
    *(b"rounds = 1 2", b"rounds = [1", b"rounds = {", b"rounds = '1", b'rounds = """1', b"[set", b"[[set]]\na = 1\n"),
    *(b"[set]\n[set]\n", b"set.a = 1\n[set]\nb = 2\n", b"\x00", b"rounds = 1\x00", b"\xff\xfe\x00", bytes(range(256))),
    *(b"\xef\xbb\xbfrounds = x", "rounds = \u0661".encode(), "röunds = 1".encode(), b"rounds = 1_\n", b"rounds = 01\n"),
    *(
        b"{}",
        b"[]",
        b'{"rounds": 1}',
        b"<xml/>",
        b"rounds: 1\nseed: 2\n",
        b"\x80\x04}\x94.",
        b"PK\x03\x04",
        b"%PDF-1.4",
    ),
    *(b"round = 1", b"Rounds = 1", b"set = 3", b"set = []", b"set = 'x'", b"set.device_lr.team.x = 1", b"out = ''"),
    *(b"x = " + b"[" * 50_000, b"x = " + b"[" * 300 + b"]" * 300, b"[" + b"a." * 5000 + b"a]\nb = 1\n"),
    *(b"x = " + b"{a=" * 300 + b"1" + b"}" * 300, b"rounds = " + b"9" * 5000, b"x = '" + b"y" * 1_000_000 + b"'"),
    *(b"models = 3", b"models = 'x'", b"models = {}", b"[models.a]\nrounds = 3", b"models = { a = 3 }"),
    *(b"algorithm = 'mfa-rr'\n[models]\n", b"algorithm = 'mfa-rr'\n[models.a]\nalgorithm = 'mfa-rr'\n"),
    *(b"algorithm = 'mfa-rr'\n[models.'a b']\n", b"algorithm = 'mfa-rr'\n[models.'']\n"),
    *(b"algorithm = 'mfa-rr'\n[models.'../a']\n", b"algorithm = 'mfa-rr'\nmodels = { a = 3 }\n"),
    *(b"algorithm = 'mfa-rr'\n[models.a]\nnot = 3\n", b"algorithm = 'mfa-rr'\n[models.a]\nset = { nothing = 3 }\n"),
    *(b"algorithm = 'permfl'\n[models.a]\n", b"algorithm = ''\n", b"algorithm = ['permfl']\n", b"data = 'python'\n"),
    *(b"model = 'python'\n", b"data = 'digits'\ndata_dir = 'nonsense'\n", b'data = "a\\u0000.npz"\n'),
    *(b'out = "a\\u0000b"\n', b'data_dir = "a\\u0000b"\n', b'team_formation = "learned:a\\u0000b"\n'),
    *(b'device_participation = "table:a\\u0000b"\n', b'device_participation = "schedule:a\\u0000.csv"\n'),
    *(b"metric = ['accuracy', 3]\n", b"metric = ['']\n", b"metric = []\n", b"teams = true\n", b"seed = 1.0\n"),
)


def tomls() -> Iterator[Bad]:
    """Files that are no settings, for every command that takes them."""
    for content in TOMLS:
        for args in (("run", FILE), ("check", FILE), ("compare", "fedavg", FILE), ("gain", FILE, "--single-rounds=1")):
            if args[0] != "compare" or b"device_lr" not in content:  # `compare` uses no fields of another method
                yield Bad("file", args, content)
    for name in ("pipe.toml", "zero.toml", "loop.toml", "folder.toml", "none.toml", "done", "./none", "full/", "/"):
        for command in (("run",), ("check",), ("tune",), ("compare", "fedavg")):
            yield Bad("file", (*command, name))


def method_fields() -> Iterator[Bad]:
    """Bad values of every field of every method, by --set and in files."""
    for method, kind in ALGORITHMS.items():
        for field in dataclasses.fields(kind):
            if field.metadata:
                yield from one_field(method, field)


def one_field(method: str, field: dataclasses.Field) -> Iterator[Bad]:
    meta, base = field.metadata, ("run", method, *RUN[2:8])
    words = bool(meta["choices"]) or isinstance(field.default, bool)
    texts = ["", "inf", "-inf", "nan", "1e999", "abc", "1_0", "\uff11", "null", "1/0", "3/(0+t)", "1,x", ",", "0x1"]
    if words:
        texts += ["0.5", "2", "-1", "1e300"]
    else:
        texts += ["1e300", "-1e300", "true"]
        if meta["above"] is not None or meta["least"] is not None:
            texts += ["-1", "-1e-3"]
        texts += ["0", "-0.0"] if meta["above"] is not None else []
        texts += ["1.01", "2"] if meta["most"] == 1 else []
    if isinstance(field.default, int) and not words:
        texts += ["1.5", "99999999999999999999", "3/(60+t)"]
    if meta["per"] == "node":
        texts += [
            "1,1,1",
            "1,-1,1,1",
            "nan,1,1,1",
            "1,1,1,1,1",
            "3/(60-t)",
            "0/(60+t)",
            "1e300/(1e-300+t)",
            "1e300/(1+t)",
        ]
    for text in texts:
        yield Bad(f"field of {method}", (*base, "--set", f"{field.name}={text}"))
    for tier in ("teem", "", "device.device", "9"):
        yield Bad(f"field of {method}", (*base, "--set", f"{field.name}.{tier}=1"))
    for value in ("{}", "[]", "{ nobody = 1 }", "[[1], [1], [1], [1]]", "2020-01-01", "1" + "0" * 400, "''"):
        content = f"algorithm = '{method}'\ndevices = 4\nteams = 2\nrounds = 1\nset.{field.name} = {value}\n"
        yield Bad(f"field of {method}", ("run", FILE), content.encode())


def set_texts() -> Iterator[Bad]:
    """--set that is no FIELD=VALUE."""
    texts = ("", " ", "=", "=1", "device_lr", "device_lr=", "device_lr.=1", ".device=1", ".=", "device_lr==1", "a b=1")
    texts += ("device lr=1", "device_lr:1", "-1", "device_lrs=1", "Device_lr=1", "models=1", "budget=1", "tiers=2")
    texts += ("__class__=1", "device_lr.device.x=1", "device_steps=1=1", "set=1", "dévice_lr=1", "device_lr=1;2")
    for text in texts:
        for method in ("permfl", "fedavg", "mfa-rr"):
            yield Bad("--set", ("run", method, *RUN[2:8], "--set", text))
        yield Bad("--set", ("compare", "fedavg,local", "--set", text))
        yield Bad("--set", ("compare", "fedavg,local", "--set", f"fedavg.{text}"))
    yield Bad("--set", ("run", "--set", "team_lr=1", "--set", "team_lr.team=1"))


def own_data() -> Iterator[Bad]:
    """Files of one's own, for the commands that read them."""
    names = [f"data/{name}.npz" for name in files.ARRAYS]
    names += [f"data/cut-{keep}.npz" for keep in files.CUTS]
    names += [f"data/{name}" for name in (*files.RAW, *files.SPECIAL, "one-array.npz")]
    names += [f"data/two-{name}.npz" for name in ("x", "y", "device")]
    for name in names:
        yield Bad("own data", (*OWN, "--data", name))
        if name.removeprefix("data/").removesuffix(".npz") not in files.FOR_OWN_MODELS:
            yield Bad("own data", ("data", "pack", "new", "--data", name))
    for args in (
        ("--devices", "2"),
        ("--partition", "iid"),
        ("--per-class", "1:1"),
        ("--teams", "3"),
        ("--teams", "0"),
    ):
        yield Bad("own data", (*OWN, "--data", files.GOOD, *args))
    for model in ("cnn-mnist", "resnet9", "quadratic", "vgg"):
        yield Bad("own data", (*OWN, "--data", files.GOOD_ZIP, "--model", model))


def packed_data() -> Iterator[Bad]:
    """Damaged folders of `data pack`, and settings that a packed folder does not take."""
    for name in files.DAMAGES:
        yield Bad("packed data", (*OWN, "--data", f"packs/{name}"))
        yield Bad("packed data", ("check", "fedavg", "--data", f"packs/{name}"))
    given = ("--devices=2", "--teams=3", "--partition=iid", "--per-class=1:1", "--team-formation=sequential")
    for text in (*given, "--split=1:1:1", "--data-dir=nonsense", "--model=cnn-mnist"):
        yield Bad("packed data", (*OWN, "--data", files.PACKED, text))
    for folder in ("packed", "file", "file/x", "/dev/null/x", "", "full", "done", "data/loop.npz", LONG, "/proc/x"):
        yield Bad("packed data", ("data", "pack", folder, "--data", files.GOOD_ZIP))


FOLDERS = (
    "none",
    "",
    "empty",
    "full",
    "file",
    "good.npz",
    "pipe",
    "/dev/null",
    "data/loop.npz",
    "packed",
    LONG,
    "a/b/c",
)


def folders() -> Iterator[Bad]:
    """Folders that are no runs, and arguments that do not fit a run, for the commands that read runs."""
    npz, model = ("--data", files.GOOD, "--out", "new.npz", "--global"), ("--out", "new.safetensors", "--global")
    for folder in FOLDERS:
        for args in (("resume",), ("show",), ("report", "-o", "new.html")):
            yield Bad("run folder", (*args, folder))
        yield Bad("run folder", ("predict", folder, *npz))
        yield Bad("run folder", ("export", folder, *model))
    for value in (*NO_WHOLE, "0"):
        for name in ("rounds", "workers", "tile"):
            yield Bad("resume", ("resume", files.RUN, f"--{name}={value}"))
    for args in ("--seed=3", "--devices=3", "--out=x", "--data=digits", "--set=device_lr=1", "--bogus"):
        yield Bad("resume", ("resume", files.RUN, *args.split("=", 1)))
    yield from predictions()
    for value in (*NO_NUMBERS,):
        yield Bad("show", ("show", files.RUN, f"--until={value}"))
    yield from reports()


def predictions() -> Iterator[Bad]:
    """Arguments of `predict` and `export`."""
    chosen = ((), ("--device", "0", "--global"), ("--device", "99"), ("--device", ""), ("--device", "anna"))
    chosen += (("--team", "99"), ("--team", ""), ("--team", "0", "--device", "0"), ("--global", "--of", "model1"))
    chosen += (
        ("--team", "x", "--global"),
        ("--device", "0_0"),
        ("--device", "\u0660"),
        ("--team", "-1"),
        ("--device", "-1"),
    )
    for args in chosen:
        yield Bad("predict", ("predict", files.RUN, "--data", files.GOOD, "--out", "new.npz", *args))
        yield Bad("export", ("export", files.RUN, "--out", "new.safetensors", *args))
    for args in (("--global",), ("--global", "--of", "x"), ("--global", "--of", ""), ("--global", "--of", "MODEL1")):
        yield Bad("export", ("export", files.SEVERAL, "--out", "new.safetensors", *args))
    for out in ("", "new", "new.npy", "good.npz", "full", "none/new.npz", "file/new.npz", f"{LONG}.npz", "pipe"):
        yield Bad("predict", ("predict", files.RUN, "--global", "--data", files.GOOD, "--out", out))
    for out in ("", "new", "new.pt", "good.npz", "full", "none/new.pt2", "file/new.safetensors", f"{LONG}.pt2", "pipe"):
        yield Bad("export", ("export", files.RUN, "--global", "--out", out))
    names = [f"data/{name}.npz" for name, made in files.ARRAYS.items() if "x" in made or name == "y-2-columns"]
    names += [f"data/cut-{keep}.npz" for keep in files.CUTS[::5]]
    names += [f"data/{name}" for name in (*files.RAW, *files.SPECIAL, "one-array.npz", "two-x.npz")]
    for name in (*names, "none.npz", "", "file", "pipe", "full"):
        yield Bad("predict", ("predict", files.RUN, "--global", "--out", "new.npz", "--data", name))


def reports() -> Iterator[Bad]:
    """Arguments of `report` and `watch`."""
    for out in ("", "full", "none/new.html", "file/new.html", "/dev/null/x", f"{LONG}.html", "data/loop.npz"):
        yield Bad("report", ("report", files.RUN, f"--out={out}"))
    for form in ("", "jpg", "PNG", "png,svg", "pdf ", "gif", "1"):
        yield Bad("report", ("report", files.RUN, "-o", "new.html", "--figures", "new", f"--format={form}"))
    for name in ("--figures", "--tables"):
        for folder in ("", "file", "file/x", "pipe", "/dev/null/x", LONG, "data/loop.npz"):
            yield Bad("report", ("report", files.RUN, "-o", "new.html", f"{name}={folder}"))
    for port in (*NO_WHOLE, "65536", "100000"):
        yield Bad("watch", ("watch", files.RUN, "--no-browser", f"--port={port}"))
    for folder in ("file", "good.npz", "", "pipe"):  # a folder that does not exist yet is waited for
        yield Bad("watch", ("watch", folder, "--no-browser", "--port=0"))


def studies() -> Iterator[Bad]:
    """Arguments of the commands that make several runs."""
    small = ("--devices", "4", "--teams", "2", "--rounds", "1")
    compare, tune = ("compare", "fedavg,local", *small), ("tune", "fedavg", *small, "--split", "3:1:1", "--trials", "1")
    gain = ("gain", "mfa-rr", "--single-rounds", "1", "--seeds", "1")
    for command, names in (
        (compare, ("seeds", "jobs", "steps", "workers", "tile")),
        (tune, ("trials", "seeds")),
        (gain, ("seeds", "single-rounds", "most-rounds")),
        (("reproduce", "permfl", "--dry-run"), ("jobs",)),
        (("bench", "common"), ("repeat", "workers")),
    ):
        for name in names:
            for value in (*NO_WHOLE, "0"):
                yield Bad(command[0], (*command, f"--{name}={value}"))
    for value in (*NO_NUMBERS, "-0.1", "1.1", "1e300"):
        yield Bad("compare", (*compare, f"--until={value}"))
    for methods in ("", ",", "fedavg,", ",fedavg", "fedavg,fedavg", "fedavg,,local", "fedavg local", "none", "FedAvg"):
        yield Bad("compare", ("compare", methods, *small))
    for out in ("", "file", "full", "done", "file/x", "/dev/null/x", LONG, "pipe", "data/loop.npz", "/proc/x"):
        for command in (compare, tune, ("reproduce", "permfl")):
            yield Bad(command[0], (*command, f"--out={out}"))
    yield from searches(tune)
    for split in ("", "validation", "Test", "none", "3:0:1", "train,test"):
        yield Bad("gain", (*gain, f"--split={split}"))
    for what in ("fedavg", "permfl", "", "none.toml", "x"):
        yield Bad("gain", ("gain", what, "--single-rounds", "1"))
    for what in ("", "none", "PerMFL", "permfl/", "permfl/none", "permfl/,", "/", "permfl/table-1,none", "permfl cobo"):
        yield Bad("reproduce", ("reproduce", what, "--dry-run"))
    for scale in ("", "Quick", "small", "1", "quick,full"):
        yield Bad("reproduce", ("reproduce", "permfl", "--dry-run", f"--scale={scale}"))
    for file in ("", "full", "none/x.json", "file/x.json", "/dev/null/x", f"{LONG}.json", "pipe", "data/loop.npz"):
        yield Bad("bench", ("bench", "common", "--repeat=1", f"--json={file}"))
    for work in ("", "none", "Common", "common,dnn"):
        yield Bad("bench", ("bench", work))


def searches(tune: Sequence[str]) -> Iterator[Bad]:
    """Search spaces of `tune`, and letters of `check`."""
    spaces = ("", "=", "=1:2", "none", "device_lr=", "device_lr=1", "device_lr=1:", "device_lr=:1", "device_lr=2:1")
    spaces += (
        "device_lr=1:1",
        "device_lr=0:1",
        "device_lr=-1:1",
        "device_lr=nan:1",
        "device_lr=1:inf",
        "device_lr=a:b",
    )
    spaces += ("device_lr=1:2:3", "device_lr=1,1", "device_lr=1,x", "device_lr=1,", "device_lr=,", "device_lr=1_0:2_0")
    spaces += ("device_lr=1:1e300", "device_steps=1.5:3", "device_steps=0:3", "device_steps=1:99999999999999999999")
    spaces += (
        "device_steps=1:inf",
        "weights=1:2",
        "weights=samples",
        "weights=samples,none",
        "weights=samples:uniform",
    )
    spaces += (
        "device_lr=3/(60+t):4/(60+t)",
        "Device_lr=1:2",
        "device_lr.device=1:2",
        "device_lr=\uff11:\uff12",
        "weights=",
    )
    for text in spaces:
        yield Bad("tune", (*tune, "--over", text))
    yield Bad("tune", (*tune, "--over", "device_lr", "--over", "device_lr=1:2"))
    yield Bad("tune", ("tune", "fedavg", "--devices", "4", "--trials", "1"))  # no validation samples
    yield Bad("tune", ("tune", "mfa-rr", "--devices", "4", "--split", "3:1:1", "--trials", "1", "--over", "step=x"))
    letters = (
        "",
        "=",
        "G",
        "G=",
        "=1",
        "G=x",
        "G=nan",
        "G=inf",
        "G=1_0",
        "G=1,2",
        "zz=1",
        "mu=",
        "L=-inf",
        "mu=\uff11",
        "L=\u22121",
    )
    for text in letters:
        yield Bad("check", ("check", "permfl", "--devices=4", "--teams=2", "--rounds=1", "--given", text))


COMMANDS = ("run", "resume", "gain", "compare", "tune", "reproduce", "check", "bench", "show", "report", "watch")
COMMANDS += ("predict", "export", "data get", "data pack", "list", "schema")
NEEDED = ("resume", "gain", "compare", "reproduce", "show", "report", "watch", "predict", "export", "data get")


def shapes() -> Iterator[Bad]:
    """Command lines of a wrong shape: unknown commands and flags, arguments too many or missing."""
    for command in COMMANDS:
        for extra in ("--bogus", "--rouns=3", "-z", "--=", "--no-such"):
            yield Bad("shape", (*command.split(), extra))
        yield Bad("shape", (*command.split(), *["surplus"] * 4, "--bogus"))
    for command in (*NEEDED, "data pack", "list"):
        yield Bad("shape", tuple(command.split()))
    for command in ("Run", "runn", "", "--run", "data none", "data Get", "list none", "list Data", "list ''", "train"):
        yield Bad("shape", tuple(shlex.split(command)) or ("",))
    for kind in ("algorithms", "data", "models", "partitions", "teams", "papers", "settings"):
        for name in ("none", "", "Permfl", " ", "…"):
            yield Bad("list", ("list", kind, name))
    for name in ("none", "", "Mnist", "../mnist", "digits", "synthetic", "leaf", "celeba", "mnist ", "quadratics"):
        yield Bad("data get", ("data", "get", name, "--data-dir", "new"))
    for name in RunSpec.model_fields:
        if name not in ("algorithm", "standardize"):
            yield Bad("shape", ("run", flag(name)))


PLAIN = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
ODD = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=12)
NEAR_NUMBERS = st.text("0123456789._eE+-xinfa ,:/()t", min_size=1, max_size=9)


def drawn(strategy: st.SearchStrategy, count: int, fits: Callable[[Any], bool]) -> list[Any]:
    """Different examples of a strategy, the same ones every time."""
    found: dict[Any, None] = {}

    @settings(
        max_examples=4 * count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(strategy)
    def collect(value: Any) -> None:
        if fits(value):
            found[value] = None

    collect()
    return list(found)[:count]


def is_settings(content: bytes) -> bool:
    """Whether a file has a setting of a run."""
    try:
        return bool(set(tomllib.loads(content.decode())) & set(RunSpec.model_fields))
    except (ValueError, RecursionError):
        return False


def random_texts() -> Iterator[Bad]:
    """Texts that hypothesis makes, where names, numbers and files are expected."""
    for name in ("algorithm", "data", "model", "partition", "team_formation", "codec", "engine", "metric", "train"):
        for text in drawn(ODD, 40, lambda text: ":" not in text and "/" not in text and not text.startswith("-")):
            given = ("run", text, *RUN[2:8]) if name == "algorithm" else (*RUN, f"{flag(name)}={text}")
            yield Bad("random name", given)
    no_number = drawn(NEAR_NUMBERS, 150, lambda text: not PLAIN.fullmatch(text) and "/" not in text)
    for k, text in enumerate(no_number):
        name = (*WHOLE, *REAL)[k % 9]
        yield Bad("random number", (*RUN, f"{flag(name)}={text}"))
        if "," not in text:
            yield Bad("random number", (*RUN, "--set", f"device_lr={text}"))
    for content in drawn(ODD.map(str.encode), 60, lambda content: not is_settings(content)):
        yield Bad("random file", ("run", FILE), content)
    for content in drawn(st.binary(max_size=40), 60, lambda content: not is_settings(content)):
        yield Bad("random file", ("run", FILE), content)


def bad_inputs() -> list[Bad]:
    """All bad inputs, each once."""
    makers = (flags, toml_values, tomls, method_fields, set_texts, own_data, packed_data, folders, studies, shapes)
    found = {bad.name: bad for make in (random_texts, *makers) for bad in make()}
    return list(found.values())
