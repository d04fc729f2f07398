"""Damages every file of run folders in many ways, for every command that reads them.

A command has to give the right result, because it does not need the file or repairs it, or to end with exit code 2 or 3
and the name of the file. config.toml is for people to edit: what has changed in it is judged by `resume` alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults.cases import ROOT, RUN, TINY, command, finished, interrupted, results
from faults.inject import in_child
from polytier.cli.main import app
from polytier.files.read import Damaged, read_json
from polytier.runs import checkpoint
from polytier.runs.read import RunRecord
from polytier.runs.read_files import check_result, read_tiers
from polytier.runs.run import Run
from polytier.runs.spec import identity

CONFIG = "config.toml"
COBO = ("run", "cobo", "--data", "../flat.npz", *TINY[1:], "--teams", "0", "--rounds", "3", "--quiet")
SEVERAL = ("run", "../several.toml", "--quiet")
Outcome = tuple[int, str, str]  # exit code, what the command gives, its message


# -- damage --------------------------------------------------------------------------------------------


def ways(path: Path, other: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of damage, and functions that do it; `other` is the same file of another run."""
    data = path.read_bytes()
    size, rng = len(data), random.Random(path.name)
    for place in sorted({0, size - 1, *(rng.randrange(size) for _ in range(4))} if size else ()):
        bit = rng.randrange(8)
        yield f"bit {bit} of byte {place}", lambda p=place, b=bit: path.write_bytes(flipped(data, p, b))
    if size:
        start = size // 3
        zeros = data[:start] + bytes(min(64, size - start)) + data[start + 64 :]
        yield "half of it", lambda: path.write_bytes(data[: size // 2])
        yield "emptied", lambda: path.write_bytes(b"")
        yield "zeros", lambda: path.write_bytes(zeros)
    yield "deleted", path.unlink
    yield "garbage appended", lambda: path.write_bytes(data + b'\x00garbage\n{"')
    if other.is_file() and other.read_bytes() != data:
        yield "of another run", lambda: path.write_bytes(other.read_bytes())
    yield "a folder", lambda: (path.unlink(), path.mkdir())


def flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


# -- commands that read --------------------------------------------------------------------------------


def readers(several: bool) -> dict[str, tuple[str, ...]]:
    """The commands that read a run folder and change nothing in it."""
    of = ("--of", "first") if several else ()
    return {
        "show": ("show", "r"),
        "show several": ("show", "r", "../kept/other"),
        "report": ("report", "r", "-o", "../page.html"),
        "report several": ("report", "r", "../kept/other", "-o", "../page.html"),
        "predict": ("predict", "r", "--data", "../inputs.npz", "--out", "../y.npz", "--device", "0", *of),
        "export": ("export", "r", "-o", "../model.safetensors", "--device", "0", *of),
    }


def read_all(root: Path, several: bool) -> dict[str, Outcome]:
    """What all readers give, in one forked process."""
    store = root.parent / "outcomes"
    store.unlink(missing_ok=True)

    def work() -> None:
        found = {name: call(args, root.parent) for name, args in readers(several).items()}
        found["Run.load"] = load()
        store.write_bytes(pickle.dumps(found))

    ended = in_child(work, root)
    assert ended.code == 0, ended.err
    return pickle.loads(store.read_bytes())


def call(args: tuple[str, ...], home: Path) -> Outcome:
    """A command in this process: what it prints and writes."""
    for path in (home / "page.html", home / "y.npz", home / "model.safetensors"):
        path.unlink(missing_ok=True)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(list(args))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            code = 1
            traceback.print_exc()
    made = [path for path in (home / "page.html", home / "y.npz", home / "model.safetensors") if path.exists()]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in made]
    return code, out.getvalue() + " ".join(digests), err.getvalue()


def load() -> Outcome:
    """`Run.load` in Python: everything that it reads."""
    try:
        run = Run.load("r")
        parts = [[p.personal, p.team, p.global_, p.state, p.history, p.ledger.rounds] for p in run.parts]
        given = repr([parts, {k: v.weights.tolist() for k, v in run.collaboration.items()}, run.seconds])
        return 0, hashlib.sha256(given.encode()).hexdigest(), ""
    except (ValueError, OSError) as error:
        return 2, "", f"polytier: {error}"
    except BaseException:
        return 1, "", traceback.format_exc()


# -- the proof -----------------------------------------------------------------------------------------


class Proof:
    """Damages the files of one run folder; `more` rounds are asked of `resume` where the run is finished."""

    def __init__(self, name: str, kept: Path, other: Path, home: Path, tally: Any, mapped: bool = False) -> None:
        self.name, self.kept, self.other, self.root, self.tally, self.mapped = (
            name,
            kept,
            other,
            home / ROOT,
            tally,
            mapped,
        )
        self.several = (kept / "models" / "first").exists()
        self.reset()
        self.right = read_all(self.root, self.several)
        self.resumed: dict[tuple[str, ...], dict[str, Any]] = {}
        self.commands: list[tuple[str, ...]] = [("resume", "r", "--quiet")]
        if (kept / "summary.json").exists():
            self.commands.append(("resume", "r", "--rounds", "4", "--quiet"))
        for args in self.commands:
            self.reset()
            ended = command(self.root, args, mapped=mapped)
            assert ended.code == 0, ended.err
            self.resumed[args] = results(self.root)

    def reset(self) -> Path:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        return Path(shutil.copytree(self.kept, self.root / "r"))

    def prove(self, every: int) -> None:
        names = [p.relative_to(self.kept) for p in sorted(self.kept.rglob("*")) if p.is_file() and p.name != ".lock"]
        cases = [(name, way) for name in names for way, _ in ways(self.kept / name, self.other / name)]
        for number, (name, way) in enumerate(cases):
            if number % every == 0:
                self.tally.count(self.name, "damaged files")
                self.read(name, way)
                for args in self.commands if every == 1 else [self.commands[number // every % len(self.commands)]]:
                    self.resume(name, way, args)

    def damage(self, name: Path, way: str) -> None:
        folder = self.reset()
        dict(ways(folder / name, self.other / name))[way]()

    def read(self, name: Path, way: str) -> None:
        """All commands that read."""
        self.damage(name, way)
        for what, outcome in read_all(self.root, self.several).items():
            self.tally.count(self.name, "commands")
            self.judge(name, f"{way} of {name}: {what}", outcome, outcome[:2] == self.right[what][:2])

    def resume(self, name: Path, way: str, args: tuple[str, ...]) -> None:
        """`resume`, which may repair the file."""
        self.damage(name, way)
        judged = self.changed() if name.name == CONFIG else None
        ended = command(self.root, args, mapped=self.mapped)
        self.tally.count(self.name, "commands")
        same = ended.code == 0 and (judged == "may change" or results(self.root) == self.resumed[args])
        if judged == "must not change":
            same = False
        self.judge(name, f"{way} of {name}: {' '.join(args)}", (ended.code, "", ended.err), same)

    def changed(self) -> str:
        """Whether the settings in a damaged config.toml may be those of a resumed run."""
        try:
            now = tomllib.loads((self.root / "r" / CONFIG).read_text())
        except (OSError, ValueError):
            return "must not change"
        before = tomllib.loads((self.kept / CONFIG).read_text())
        return "may change" if identity(now) == identity(before) else "must not change"

    def judge(self, name: Path, where: str, outcome: Outcome, same: bool) -> None:
        """Right, or refused with the name of the file."""
        code, _, err = outcome
        if "Traceback" in err or code not in (0, 2, 3):
            self.tally.problem(self.name, "tracebacks", where, f"{code}: {err}")
        elif same:
            self.tally.count(self.name, "right results")
        elif code == 0 and not (name.name == CONFIG and "resume" not in where):
            self.tally.problem(self.name, "wrong results", where, err)
        elif code and not any(text in err for text in (name.name, str(name.with_suffix("")), any_process(name))):
            self.tally.problem(self.name, "file not named", where, err)
        else:
            self.tally.count(self.name, "refused with the name of the file")


def every_bit(kept: Path, home: Path, tally: Any, every: int) -> None:
    """Flip every bit of every small file, and one bit of every byte of the others: the reader of the file finds it."""
    folder = Path(shutil.copytree(kept, home / "bits"))
    newest = checkpoint.found(folder / "checkpoints")[0]
    read: dict[Path, Callable[[], Any]] = {
        **{folder / name: lambda p=folder / name: read_json(p) for name in ("state.json", "summary.json")},
        folder / "topology.json": lambda: read_tiers(folder),
        folder / "metrics.jsonl": lambda: RunRecord(folder).history,
        **{newest / name: lambda: checkpoint.read(newest) for name in ("facts.json", "rows.safetensors")},
    }
    for name in read_json(folder / "summary.json")["files"]:
        read.setdefault(folder / name, lambda n=name: check_result(folder, n))
    for path, reader in read.items():
        data = path.read_bytes()
        bits = range(8) if path.suffix in (".json", ".jsonl") else (3,)
        for place in range(0, len(data), every):
            for bit in bits:
                with path.open("r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), bytes([data[place] ^ 1 << bit]), place)
                tally.count("every bit", "flipped bits")
                try:
                    reader()
                except Damaged:
                    tally.count("every bit", "found")
                else:
                    where = f"bit {bit} of byte {place} of {path.relative_to(folder)}"
                    tally.problem("every bit", "wrong results", where, json.dumps(data[place : place + 9].hex()))
                with path.open("r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), data[place : place + 1], place)
    shutil.rmtree(folder)


def damage_all(home: Path, tally: Any, every: int) -> None:
    """The proofs for all kinds of run folders."""
    seed = ("--seed", "1")
    other = finished(home, "other", (*RUN, *seed))
    whole = finished(home, "whole", RUN)
    every_bit(whole, home, tally, every)
    mapped, other_mapped = finished(home, "m", RUN, True), finished(home, "om", (*RUN, *seed), True)
    kinds = [
        ("files of a finished run", whole, other, False),
        ("files of a killed run", interrupted(home, "cut", RUN, False), other, False),
        ("files of a finished run with rows in files", mapped, other_mapped, True),
        ("files of a killed run with rows in files", interrupted(home, "cm", RUN, True), other_mapped, True),
        (
            "files of a run that learns a collaboration",
            finished(home, "c", COBO),
            finished(home, "oc", (*COBO, *seed)),
            False,
        ),
        (
            "files of a run with several models",
            finished(home, "s", SEVERAL),
            finished(home, "os", (*SEVERAL, *seed)),
            False,
        ),
    ]
    for name, kept, another, in_files in kinds:
        Proof(name, kept, another, home, tally, in_files).prove(every)
        print(name, flush=True)


def any_process(name: Path) -> str:
    """log-2-* for the journal log-2-PID: if it was deleted, nobody knows the process that wrote it."""
    return f"{name.name.rpartition('-')[0]}-*" if name.name.startswith("log-") else name.name
