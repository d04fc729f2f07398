"""Does this tree compute the same bits as another revision, and as fast?

    python benchmarks/same_bits.py REV                      # everything: bits, then speed
    python benchmarks/same_bits.py REV --only 'codec/*'     # some settings; 'speed/*' is the speed alone

REV is checked out into a temporary worktree. Each setting is run there and here by the command line, and the run
folders are compared: models byte by byte, all numbers exactly, except times. What only this tree writes is ignored,
what only REV writes is a difference. Fields that a setting does not name have the defaults of REV's classes in both
trees, so tables of defaults for some data do not matter. For the speed, both trees take turns on the works of
`polytier bench`.
Exit code 0: all settings are equal, and the median over the works of the ratio here / REV is at least 0.97.

Only the command line, the files of a run and `polytier.__all__` are used: the inside of the package may change.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("metrics.jsonl", "summary.json", "devices.csv", "traffic.csv", "topology.json")
COMPARED = ("models/**/*.safetensors", *TEXTS, "collaboration.npz", "predicted.npz")
# keys whose values are never the same: times, the checksums of records with times, and the name of a run, which is a
# digest of all its settings: a setting that REV does not know changes it
TIMES = ("seconds", "device_steps_per_second", "crc32", "sha256", "run")
SHOWN = 3  # differences of a setting that are printed
SLOWEST, SECONDS = 0.97, 1.5  # the ratio of speeds that is still accepted; how long one measurement takes

# -- the settings: a word FIELD=VALUE stands for --set FIELD=VALUE, later words win -----------------------

SHORT = "--rounds 2 --batch-size 16 --quiet"
POOL = "--devices 10 --teams 2"  # but data of a user's own name their devices
METHODS = {  # what each method needs, and what makes it short
    **dict.fromkeys(("permfl", "pfedmt", "sfedhp", "hier-fedavg"), "device_steps=3 team_rounds=2"),
    **dict.fromkeys(
        ("fedavg", "fedbn", "fedopt", "fedprox", "scaffold", "local", "apfl", "per-fedavg"), "device_steps=3"
    ),
    **dict.fromkeys(("fedamp", "heurfedamp", "demlearn"), "device_steps=3"),
    **dict.fromkeys(("mfa-rand", "mfa-rr"), "device_steps=3 --models 2"),
    "al2gd": "steps=6 p_team=0.3 p_server=0.3",
    "cobo": "weight_lr=1 sampling=all --partition clusters-permuted:2",
    "ditto": "device_steps=3 personal_steps=2",
    "fc": "nearest=3",
    "fedavg-ft": "device_steps=3 tune_steps=3",
    "fedrep": "head_steps=2 body_steps=2 --model dnn:16",
    "ifca": "device_steps=3 num_clusters=3",
    "oracle": "device_steps=3 --partition clusters-permuted:2",
    "pfedbayes": "device_steps=3 num_samples=2",
    "pfedgp": "device_steps=3 --model dnn:16",
    "pfedme": "local_rounds=3 device_steps=2",
    "validation": "device_steps=3 --split 3:1:1",
}
ANY_DEPTH = ("permfl", "pfedmt", "sfedhp", "hier-fedavg")
CODECS = ("float16", "sparse", "sparse16", "sparse64", "paper", "float64")
PARTITIONS = ("labels:3", "per-class:20,5", "dirichlet:0.3", "iid", "power-law", "clusters-disjoint:2")
PART = "--team-participation 0.5 --device-participation 0.6 --rounds 3 --teams 4"
SETTINGS = {
    **{f"method/{m}": m for m in METHODS},
    **{f"tiers/{m}-{n}": f"{m} --teams {t}" for m in ANY_DEPTH for n, t in ((2, "0"), (3, "2"), (4, "2x2"))},
    "tiers/by-tier": "permfl --teams 2x2 team_lr.team1=0.05 team_lr.team2=0.03 team_pull.team1=1 team_pull.team2=2",
    "tiers/al2gd-flat": "al2gd --teams 0 p_team=0",
    "variant/cobo-teams": "cobo clients=teams --teams 4",
    "variant/cobo-simplex": "cobo domain=simplex",
    "variant/cobo-constant": "cobo sampling=constant",
    "variant/cobo-mixed": "cobo sampling=mixed constant_rounds=1",
    "variant/per-fedavg-hessian-free": "per-fedavg variant=hessian-free",
    "variant/scaffold-I": "scaffold option=I",
    "variant/sfedhp-plain": "sfedhp solver=plain accuracy=0.01",
    "variant/demlearn-updates": "demlearn cluster_by=updates regroup_rounds=1",
    "variant/apfl-fixed": "apfl adaptive=false",
    "variant/validation-some": "validation candidates=3",
    **{f"tile/{m}": f"{m} --tile 3" for m in ("permfl", "sfedhp", "ifca", "pfedgp", "cobo", "mfa-rand")},
    **{f"workers/{m}": f"{m} --workers 2" for m in ("permfl", "cobo", "scaffold", "apfl", "mfa-rr")},
    **{f"codec/{m}-{codec}": f"{m} --codec {codec}" for m in ("sfedhp", "permfl") for codec in CODECS},
    "codec/sfedhp-sparser": "sfedhp --codec sparse threshold=50 device_sparsity=0.05 team_sparsity=0.05",
    "codec/cobo-float16": "cobo --codec float16",
    **{f"float64/{m}": f"{m} --dtype float64" for m in ("permfl", "sfedhp", "cobo", "pfedgp")},
    "several/three-by-proof": "mfa-rand step=proof --models 3 --rounds 4",
    "several/example": "{rev}/examples/several_models.toml --devices 8 --rounds 3",
    "several/teams-and-flat": "{files}/several.toml",
    **{f"absent/{m}-{absent}": f"{m} {PART} --absent {absent}" for m in ANY_DEPTH for absent in ("skip", "stale")},
    **{f"absent/{m}-skip": f"{m} {PART}" for m in ("al2gd", "cobo", "scaffold", "oracle", "fedamp", "mfa-rr")},
    "absent/count": "fedavg --device-participation count:3",
    "absent/schedule": "permfl --device-participation schedule:{files}/schedule.csv --rounds 4",
    "data/synthetic": "permfl --data synthetic:alpha=1,beta=1,max_samples=400 --partition column",
    "data/quadratics": "permfl --data quadratics --model quadratic --partition column",
    "data/quadratic-clusters": "cobo --data quadratic-clusters --model quadratic --partition column",
    "data/own": "permfl --data {files}/own.npz",
    "data/regression": "permfl --data {files}/regression.npz --model own_models:line",
    "data/standardize": "permfl --standardize",
    "data/split": "permfl --split 3:1:1 --rounds 3",
    "data/per-class": "permfl --per-class 40:20",
    **{f"partition/{kind}": f"permfl --partition {kind}" for kind in PARTITIONS},
    **{
        f"teams/{kind}": f"permfl --team-formation {kind}" for kind in ("sequential", "worst", "average", "overlapping")
    },
    "model/dnn": "permfl --model dnn:16x8",
    "model/dnn-wide": "permfl --model dnn:400x200 --devices 6",  # the gradient of a large layer comes as two factors
    "model/dnn-wide-fedavg": "fedavg --model dnn:400x200 --devices 6",
    "model/cnn-fmnist": "permfl --model cnn-fmnist --devices 6",
    "model/cnn-mnist": "fedavg --model cnn-mnist --devices 4",
    "model/dropout": "permfl --model own_models:dropout --tile 3",
    "model/l2": "permfl --l2 0.01",
    "model/l2-dnn": "pfedme --l2 0.01 --model dnn:16",
    "training/grow": "permfl --batch-size grow:30/(40+t) --rounds 3",
    "training/schedule": "permfl device_lr=3/(60+t) --rounds 3",
    "training/one-a-node": "fedavg device_lr=.1,.2,.3,.1,.2,.3,.1,.2,.3,.1",
    "training/seed": "permfl --seed 7 --eval-every 2 --rounds 3",
    "training/single": "permfl --batching single",
    "training/eager": "permfl --batching eager --model dnn:16",
}
RESUMED = ("permfl", "sfedhp --codec sparse", "cobo", "fc", "mfa-rr", f"scaffold {PART}")
RAY = {f"ray/{m}": f"{m} --engine ray --workers 2" for m in ("permfl", "cobo")}

# files that settings read
SEVERAL = """
algorithm = "mfa-rr"
devices = 8
teams = 2
rounds = 3
batch_size = 16
device_participation = 0.75
[models.teams]
algorithm = "permfl"
[models.teams.set]
device_steps = 2
team_rounds = 2
device_lr = 0.01
team_lr = 0.03
server_lr = 0.6
device_pull = 0.5
team_pull = 1.5
[models.flat]
algorithm = "scaffold"
data = "synthetic:max_samples=300"
model = "dnn:8"
partition = "column"
set = { device_steps = 2 }
"""
OWN_MODELS = """
from torch import nn

def dropout(inputs, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, classes))

def line(inputs, classes):
    return nn.Sequential(nn.Linear(inputs[0], 1), nn.Flatten(0))
"""


def arguments(text: str, out: str = "{out}") -> list[str]:
    """A command line from a method (or a file) and further words."""
    what, *more = text.split()
    first = f"{SHORT} {METHODS[what]}" if what in METHODS else "--quiet"
    pool = POOL if what in METHODS and "--data {" not in text else ""
    words = [*pool.split(), *first.split(), *more]
    marked = (("--set", word) if re.match(r"[\w.]+=", word) else (word,) for word in words)
    return ["run", what, *chain.from_iterable(marked), "--out", out]


def all_settings() -> dict[str, list[list[str]]]:
    """Command lines by name. {out} is a folder of the setting, {files} has our files, {rev} is the worktree."""
    found = {name: [arguments(text)] for name, text in SETTINGS.items()}
    for text in RESUMED:
        begun = [arguments(f"{text} --rounds 2", "{out}/resumed"), ["resume", "{out}/resumed", "--rounds", "4"]]
        found[f"resume/{text.split()[0]}"] = [arguments(f"{text} --rounds 4", "{out}/whole"), *begun]
    learned = "permfl --partition clusters-permuted:2 --team-formation learned:{out}/cobo,by=spectral"
    groups = arguments("cobo --rounds 10 --batch-size 200 weight_lr=3 device_lr=0.2", "{out}/cobo")
    found["teams/learned"] = [groups, arguments(learned, "{out}/permfl")]
    pack = ["data", "pack", "{out}/packed", "--data", "{files}/own.npz"]
    found["data/packed"] = [pack, arguments("permfl --data {out}/packed --workers 2", "{out}/run")]
    predict = ["predict", "{out}/run", "--data", "{files}/own.npz", "--device", "anna", "--out", "{out}/predicted.npz"]
    found["data/predict"] = [arguments("permfl --data {files}/own.npz", "{out}/run"), predict]
    return found | {name: [arguments(text)] for name, text in RAY.items()}


def write_files(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng, who = np.random.default_rng(0), np.arange(240) % 6
    names = np.array(["anna", "bert", "chen", "dora", "ella", "finn"])[who]
    whose = {"device": names, "team": np.array(["north", "south"])[who // 3]}
    images, points = rng.integers(0, 256, (240, 8, 8), dtype=np.uint8), rng.normal(size=(240, 5)).astype(np.float32)
    np.savez(folder / "own.npz", x=images, y=rng.integers(0, 4, 240), **whose)
    np.savez(folder / "regression.npz", x=points, y=points.sum(1) + points[:, 0], **whose)
    texts = {
        "schedule.csv": "id,join,leave\n0,1,3\n1,2,\n2,3,4\n",
        "several.toml": SEVERAL,
        "own_models.py": OWN_MODELS,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


# -- comparing ----------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    """A file as plain values and arrays."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "np") as file:
            about = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
            return {"metadata": about, **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def differences(where: str, before: Any, after: Any) -> Iterator[str]:
    """What `after` lacks or has otherwise; what it has in addition is fine."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (key for key in before if key not in TIMES):
            if key in after:
                yield from differences(f"{where} {key}", before[key], after[key])
            else:
                yield f"{where} {key}: {str(before[key])[:60]}, here missing"
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{where}: {len(before)} entries, here {len(after)}"
        for k, pair in enumerate(zip(before, after, strict=False)):
            yield from differences(f"{where} [{k}]", *pair)
    elif isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            yield f"{where}: {before.dtype} {before.shape}, here {after.dtype} {after.shape}"
        elif before.tobytes() != after.tobytes():
            old, new = (array.reshape(-1) for array in (before, after))
            size = old.itemsize
            unequal = (old.view(np.uint8).reshape(-1, size) != new.view(np.uint8).reshape(-1, size)).any(1)
            first = unequal.argmax()
            values = f"the first {old[first].item()!r}, here {new[first].item()!r}"
            yield f"{where}: {unequal.sum()} of {len(unequal)} values, {values}"
    elif repr(before) != repr(after):  # tells 0.0 from -0.0 and 1 from 1.0
        yield f"{where}: {before!r}, here {after!r}"


def compare(before: Path, after: Path) -> Iterator[str]:
    """The differences between two folders that are, or hold, run folders."""
    found = sorted({path.relative_to(before) for pattern in COMPARED for path in before.glob(f"**/{pattern}")})
    if not found:
        yield f"there is nothing to compare in {before}"
    for path in found:
        if (after / path).exists():
            yield from differences(str(path), read(before / path), read(after / path))
        else:
            yield f"{path}: here missing"


# -- a tree at work -----------------------------------------------------------------------------------


class Tree:
    """A process that has imported polytier from a tree and does what it is asked to."""

    def __init__(self, root: Path, name: str, results: Path) -> None:
        self.root, self.folder, self.files, self.log = root, results / name, results / "files", results / f"{name}.log"
        self.process: Any = None
        self.methods: dict[str, dict[str, float]] = {}  # the numbers among the fields of each, and their defaults

    def start(self) -> None:
        command, path = [sys.executable, __file__, "--work"], {"PYTHONPATH": str(self.root / "src")}
        ends: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stderr=log, env=os.environ | path, cwd=self.files, **ends)
        home, self.methods = self.answer()
        if not Path(home).is_relative_to(self.root / "src"):
            raise RuntimeError(f"polytier was to be imported from {self.root}; it came from {home}")

    def ask(self, **request: Any) -> Any:
        if self.process is None:
            self.start()
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            code, self.process = self.process.wait(), None
            raise RuntimeError(f"the process ended with {code}; see {self.log}")
        return json.loads(line)

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()  # it ends where its input ends
            self.process = None


def work() -> None:
    """The other side of `Tree`: a request a line, an answer a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what polytier prints goes to the log
    import polytier

    fields = {
        name: {each.name: each.default for each in dataclasses.fields(kind) if type(each.default) in (int, float)}
        for name, kind in polytier.ALGORITHMS.items()
    }
    print(json.dumps([polytier.__file__, fields]), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = measure(**request) if "work" in request else [outcome(args) for args in request["commands"]]
        print(json.dumps(answer), file=answers, flush=True)


def outcome(args: list[str]) -> Any:
    """The exit code of a command line, or what went wrong with it."""
    try:
        from polytier.cli.main import app
    except ImportError:  # version 0.1
        from polytier.cli import app

    print("polytier", shlex.join(args), file=sys.stderr, flush=True)
    try:
        return app(args, standalone_mode=False) or 0
    except SystemExit as error:
        return error.code or 0
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def run_setting(tree: Tree, name: str, commands: list[list[str]], rev: Path) -> list[Any]:
    """The outcome of each command."""
    out = tree.folder / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        return tree.ask(commands=[[w.format(out=out, files=tree.files, rev=rev) for w in words] for words in commands])
    except RuntimeError as error:
        return [str(error)]


def with_fields(words: list[str], methods: dict[str, dict[str, float]]) -> list[str]:
    """A command line that names the defaults of the fields of a method that it does not set."""
    command, method, *more = words
    if command != "run" or method not in methods:
        return words
    fields = methods["fedavg" if method.startswith("mfa") else method]  # the methods of several models are FedAvg
    given = {re.split("[.=]", word)[0] for word in more}  # FIELD=VALUE and FIELD.TIER=VALUE
    free = {name: value for name, value in fields.items() if name not in given}
    return [command, method, *chain.from_iterable(("--set", f"{k}={v}") for k, v in free.items()), *more]


def compare_bits(rev: Tree, here: Tree, settings: dict[str, list[list[str]]], jobs: int) -> bool:
    """Whether all settings are equal."""
    same = different = 0
    with ThreadPoolExecutor(jobs) as executor:
        for name, commands in settings.items():
            if name.startswith("method/") and name.removeprefix("method/") not in rev.methods:
                print(f"new here   {name}")
                continue
            started, trees = time.perf_counter(), (rev, here)
            commands = [with_fields(words, rev.methods) for words in commands]
            old, new = executor.map(run_setting, trees, [name] * 2, [commands] * 2, [rev.root] * 2)
            before, after = (tree.folder / name for tree in trees)
            if any(old) or any(new):
                found = [f"a command failed: {old}, here {new}; --keep DIR keeps the logs"]
            else:
                found = list(compare(before, after))
                whole = compare(after / "whole", after / "resumed") if (after / "resumed").exists() else ()
                found += [f"whole run and resumed one: {text}" for text in whole]
            print(f"{'DIFFERENT' if found else 'same':9}  {name}  ({time.perf_counter() - started:.1f} s)", flush=True)
            more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
            print(*(f"    {text}\n" for text in [*found[:SHOWN], *more]), sep="", end="")
            different, same = different + bool(found), same + (not found)
    print(f"{same} settings are the same, {different} differ")
    return not different


# -- speed --------------------------------------------------------------------------------------------

# those of `polytier bench`, with shorter rounds of permfl and cnn (there 10 team rounds, and 10 steps)
WORKS = {  # model, shape of a sample, devices, batch, batches of a device, steps, teams
    "common": ("mclr", (784,), 40, 32, 20, 20, 0),
    "synthetic": ("mclr", (60,), 100, 32, 20, 20, 0),
    "dnn": ("dnn:100", (784,), 40, 32, 20, 20, 0),
    "wide": ("dnn:500x200", (784,), 20, 20, 20, 20, 0),
    "permfl": ("mclr", (1, 28, 28), 40, 124, 10, 20, 4),
    "cnn": ("cnn-fmnist", (1, 28, 28), 8, 32, 10, 3, 0),
}
TEAM_ROUNDS = 3  # of PerMFL, where there are teams


@lru_cache(maxsize=1)
def random_data(work: str) -> Any:
    """A federation of random samples, all of them for training."""
    import polytier

    _, shape, devices, batch, batches, _, teams = WORKS[work]
    rng, owner = np.random.default_rng(0), np.repeat(np.arange(devices), batch * batches)
    size, y = (len(owner), *shape), rng.integers(0, 10, len(owner))
    x = rng.integers(0, 256, size, dtype=np.uint8) if len(shape) > 1 else rng.random(size, dtype=np.float32)
    team = owner * teams // devices if teams else None
    return polytier.Federation.from_arrays(x, y, owner, team=team, shares=(1, 0, 0), num_classes=10)


def measure(work: str, rounds: int, workers: int) -> tuple[float, float]:
    """Seconds of a typical round, without evaluation, and device steps a second. The first round traces: left out."""
    import polytier

    model, _, devices, batch, _, steps, teams = WORKS[work]
    method: Any = polytier.FedAvg(device_lr=0.01, device_steps=steps)
    if teams:
        method = polytier.PerMFL(device_lr=0.01, device_steps=steps, team_rounds=TEAM_ROUNDS)
    settings: dict[str, Any] = {"batch_size": batch, "eval_every": rounds, "workers": workers}
    run = polytier.train(method, random_data(work), model, rounds=rounds, **settings)
    seconds = statistics.median(record["seconds"] for record in run.history[1:])
    return seconds, devices * steps * (TEAM_ROUNDS if teams else 1) / seconds


def compare_speed(rev: Tree, here: Tree, works: list[str], repeat: int, workers: int) -> bool:
    """Whether this tree is fast enough. The trees take turns, and take turns to begin."""
    medians, loads, cores = [], [], os.cpu_count() or 1
    for work in works:
        seconds = max(tree.ask(work=work, rounds=4, workers=workers)[0] for tree in (rev, here))
        rounds = 1 + min(max(3, round(SECONDS / seconds)), 1000)
        speeds: dict[Tree, list[float]] = {rev: [], here: []}
        for turn in range(repeat):
            for tree in (rev, here) if turn % 2 == 0 else (here, rev):
                speeds[tree].append(tree.ask(work=work, rounds=rounds, workers=workers)[1])
        ratios = [new / old for old, new in zip(speeds[rev], speeds[here], strict=True)]
        medians.append(statistics.median(ratios))
        loads.append(os.getloadavg()[0])
        old, new = (statistics.median(speeds[tree]) for tree in (rev, here))
        result = f"{medians[-1]:.3f} (from {min(ratios):.3f} to {max(ratios):.3f})"
        print(f"speed/{work}: {old:,.0f} device steps a second, here {new:,.0f}; ratio {result}", flush=True)
    if max(loads) > cores:
        busy = f"load {max(loads):.1f} on {cores} cores"
        print(f"the machine was busy ({busy}), the ratios are uncertain: repeat --only 'speed/*' when it is idle")
    print(f"median of the ratios here / REV: {statistics.median(medians):.3f}; at least {SLOWEST} is accepted")
    return statistics.median(medians) >= SLOWEST


# -- the command --------------------------------------------------------------------------------------


@contextmanager
def worktree(rev: str) -> Iterator[Path]:
    """The tree of a revision, for a while."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="same-bits-tree-") as parent:
        folder = Path(parent).resolve() / "tree"
        if subprocess.run([*git, "add", "--quiet", "--detach", str(folder), rev]).returncode:
            sys.exit(f"{rev} cannot be checked out: name a commit, tag or branch")
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compare_trees(options: argparse.Namespace, settings: dict[str, list[list[str]]], works: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary, worktree(options.rev) as folder:
        results = (options.keep or Path(temporary)).resolve()
        write_files(results / "files")
        rev, here = Tree(folder, "rev", results), Tree(ROOT, "here", results)
        try:
            rev.start()
            without = [method for method in rev.methods if method not in METHODS]
            if without:
                print(f"methods of REV that no setting here covers: {', '.join(without)}")
            same = not settings or compare_bits(rev, here, settings, options.jobs)
            fast = not works or compare_speed(rev, here, works, options.speed_repeat, options.speed_workers)
            return same and fast and not without
        finally:
            rev.close()
            here.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev", metavar="REV", nargs="?", help="a commit, tag or branch")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="settings whose names fit, such as 'method/*'")
    parser.add_argument("--list", action="store_true", help="print the names and the command lines of the settings")
    parser.add_argument("--no-speed", action="store_true", help="compare the bits alone")
    parser.add_argument("--speed-repeat", metavar="N", type=int, default=5, help="measurements of each work and tree")
    parser.add_argument("--speed-workers", metavar="N", type=int, default=1, help="processes of each tree")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep run folders and logs here: DIR/rev, DIR/here")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, choices=(1, 2), help="2: both trees at a time")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return 0
    settings = {name: commands for name, commands in all_settings().items() if fnmatch(name, options.only)}
    works = [] if options.no_speed else [name for name in WORKS if fnmatch(f"speed/{name}", options.only)]
    if settings.keys() & RAY.keys() and importlib.util.find_spec("ray") is None:
        print("ray is not installed: the settings ray/* are left out")
        settings = {name: commands for name, commands in settings.items() if name not in RAY}
    if options.list:
        for name, commands in settings.items():
            print(f"{name}: {' && '.join(f'polytier {shlex.join(words)}' for words in commands)}")
        print(*(f"speed/{name}\n" for name in works), sep="", end="")
        return 0
    if options.rev is None or not (settings or works):
        parser.error("name a revision" if options.rev is None else f"no setting fits {options.only!r}; see --list")
    return 0 if compare_trees(options, settings, works) else 1


if __name__ == "__main__":
    sys.exit(main())
