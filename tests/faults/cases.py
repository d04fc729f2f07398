"""The commands that are made to fail, what they start from, and what they have to give."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from faults.inject import Ended, Forked, Inline, Plan, in_child
from polytier.cli.main import app
from polytier.runs import callbacks
from polytier.studies import run_queue

ROOT = "work"  # the folder of a case in which operations count
DATA = "../data.npz"
TINY = (DATA, "--model", "mclr", "--batch-size", "4", "--workers", "1", "--batching", "eager")
CHOSEN = ("--set", "device_lr=0.1", "--set", "device_pull=0.5", "--set", "team_pull=1.5")  # without a search
METHOD = ("--set", "device_steps=1", "--set", "team_rounds=1", *CHOSEN, "--device-participation", "0.5")
RUN = ("run", "permfl", "--data", *TINY, *METHOD, "--rounds", "3", "--quiet")
STEPS = ("--set", "permfl.device_steps=1", "--set", "permfl.team_rounds=1", "--set", "fedavg.device_steps=1")
COMPARE = ("compare", "permfl,fedavg", "--data", *TINY, "--rounds", "2", "--jobs", "1", "--seeds", "1", *STEPS)
TUNE = (
    "tune",
    "fedavg",
    "--data",
    *TINY,
    "--split",
    "3:1:1",
    "--rounds",
    "2",
    "--over",
    "device_lr",
    "--trials",
    "2",
    "--set",
    "device_steps=1",
)
SEVERAL = """
algorithm = "mfa-rr"
rounds = 3
workers = 1
batching = "eager"
batch_size = 4
data = "../data.npz"

[models.first]
algorithm = "permfl"
set = { team_rounds = 1, device_steps = 1 }

[models.second]
algorithm = "fedavg"
model = "dnn:2"
set = { device_steps = 1 }
"""


def make_data(folder: Path) -> None:
    """The data of all cases, beside their roots."""
    rng, device = np.random.default_rng(1), np.repeat(np.arange(4), 10)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 3, 40)
    np.savez(folder / "data.npz", x=x, y=y, device=device, team=device // 2)
    np.savez(folder / "flat.npz", x=x, y=y, device=device)
    np.savez(folder / "inputs.npz", x=x[:5])
    (folder / "several.toml").write_text(SEVERAL)


@dataclass(frozen=True)
class Case:
    """A command in a folder.

    name   | for reports
    args   | the command; its output is `folder`
    again  | what continues it after a fault: by default the command itself
    start  | makes what the command starts from
    mapped | whether the rows of devices are kept in files
    """

    name: str
    args: tuple[str, ...]
    again: tuple[str, ...] = ()
    start: Callable[[Path], None] | None = None
    mapped: bool = False
    out: str = "r"

    def prepare(self, home: Path) -> Path:
        """The root of a new case, in a new folder below `home`."""
        root = home / ROOT
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        if self.start is not None:
            self.start(root)
        return root

    def run(self, root: Path, plan: Plan | None = None) -> Ended:
        """The command, with faults."""
        return command(root, self.args, plan, self.mapped)

    def repeat(self, root: Path) -> Ended:
        """What continues the command, without faults."""
        return command(root, self.again or self.args, None, self.mapped)


def command(root: Path, args: tuple[str, ...], plan: Plan | None = None, mapped: bool = False) -> Ended:
    """Call the command line in a forked process."""

    def work() -> int:
        callbacks.PATIENCE = 0  # a checkpoint after every round
        if mapped:
            callbacks.IN_FILES = 0
        inline: Any = Inline if plan is not None and plan.kind == "record" else Forked
        run_queue.start_process = inline
        app(list(args))
        return 0

    return in_child(work, root, plan)


# -- what commands start from --------------------------------------------------------------------------


def copy_of(source: Path, root: Path) -> None:
    shutil.copytree(source, root / "r")


def interrupted(home: Path, name: str, args: tuple[str, ...], mapped: bool) -> Path:
    """A run folder of a run that was killed in the middle of its last round but one checkpoint."""
    case = Case(name, (*args, "--out", "r"), mapped=mapped)
    plan = Plan(case.prepare(home))
    case.run(plan.root, plan)
    plan = Plan(case.prepare(home), "kill", plan.count * 6 // 10)
    assert case.run(plan.root, plan).code == -9
    return keep(home, name)


def finished(home: Path, name: str, args: tuple[str, ...], mapped: bool = False) -> Path:
    """The run folder of a complete run."""
    case = Case(name, (*args, "--out", "r"), mapped=mapped)
    ended = case.run(case.prepare(home))
    assert ended.code == 0, ended.err
    return keep(home, name)


def keep(home: Path, name: str) -> Path:
    place = home / "kept" / name
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(home / ROOT / "r", place)
    return place


def all_cases(home: Path) -> dict[str, Case]:
    """The commands; what they start from is made in `home`."""
    shorter = (*RUN, "--rounds", "2")
    cut, cut_mapped = interrupted(home, "cut", RUN, False), interrupted(home, "cut-mapped", RUN, True)
    short, short_mapped = finished(home, "short", shorter), finished(home, "short-mapped", shorter, True)
    out, resume, more = ("--out", "r"), ("resume", "r", "--quiet"), ("resume", "r", "--rounds", "3", "--quiet")
    listed = [
        Case("run", (*RUN, *out), resume),
        Case("resume", resume, start=partial(copy_of, cut)),
        Case("extend", more, start=partial(copy_of, short)),
        Case("run with rows in files", (*RUN, *out), resume, mapped=True),
        Case("resume with rows in files", resume, start=partial(copy_of, cut_mapped), mapped=True),
        Case("extend with rows in files", more, start=partial(copy_of, short_mapped), mapped=True),
        Case("compare", (*COMPARE, *out)),
        Case("tune", (*TUNE, *out, "--quiet")),
    ]
    return {case.name: case for case in listed}


# -- what they give ------------------------------------------------------------------------------------


def results(folder: Path) -> dict[str, Any]:
    """The results below a folder, without what depends on time: equal for equal bits."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.name.startswith(".") or {"checkpoints", "store"} & set(path.parts):
            continue
        if path.suffix == ".jsonl":
            found[name] = [timeless(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == "compare.csv" or path.suffix in (".png", ".html"):
            found[name] = "there"
        elif path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text()))
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def timeless(value: Any) -> Any:
    """A value without times, process numbers and checksums."""
    if isinstance(value, dict):
        gone = ("second", "pid", "sha256", "crc32")
        return {k: timeless(v) for k, v in value.items() if not any(word in k for word in gone)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def is_saved(folder: Path) -> bool:
    """Whether there is a checkpoint."""
    return any((folder / "checkpoints").glob("round-*"))


def warm_up(home: Path) -> None:
    """Import in this process what commands import when they run, so that forked processes start with it."""
    import torch

    torch.set_num_threads(1)  # a process with other threads must not fork
    before, run_queue.start_process = run_queue.start_process, cast(Any, Inline)
    root = home / ROOT
    root.mkdir()
    with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        more = ("resume", "r", "--rounds", "4", "--quiet")
        for args in ((*RUN, "--out", "r"), more, (*COMPARE, "--out", "c"), (*TUNE, "--out", "t"), ("show", "r")):
            app(list(args), standalone_mode=False)
        app(["report", "r", "c", "-o", "page.html"], standalone_mode=False)
    run_queue.start_process = before
    gc.collect()
    gc.freeze()
