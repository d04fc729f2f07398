"""Stores the finished runs of a reproduction as JSON files that say where they come from (papers/stored_runs.py)."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polytier.files.write import make_folder, write_text
from polytier.papers.plan import Item
from polytier.papers.stored_runs import FORMAT, figures_of, plain
from polytier.report.comparison import DONE
from polytier.runs.read import RunRecord
from polytier.runs.spec import versions
from polytier.studies.run_queue import Task
from polytier.studies.study_folder import slug


class Store:
    """Writes FOLDER/RUN-SEED.json for a finished run, unless it exists.

    Args:
        folder: Where the files are written.
        paper: The name of the paper.
        scale: "quick" or "full".
        items: The items whose runs are stored.
        more: Further words of the command that reproduces them.
    """

    def __init__(self, folder: Path, paper: str, scale: str, items: Sequence[Item], more: Sequence[str] = ()) -> None:
        self.folder, self.paper, self.scale, self.more = folder, paper, scale, more
        self.runs = {run.name: run for item in items for run in item.runs()}
        self.item = {run.name: item.name for item in reversed(items) for run in item.runs()}
        self.origin = origin()

    def __call__(self, task: Task) -> None:
        path = self.folder / f"{slug(task.method)}-{task.spec.seed}.json"
        if task.state != DONE or path.exists():
            return
        make_folder(self.folder)
        write_text(path, text_of(self.content(task)))

    def content(self, task: Task) -> dict[str, Any]:
        """The content of the file of a finished run."""
        name, seed = task.method, task.spec.seed
        again = ["polytier", "reproduce", f"{self.paper}/{self.item[name]}", "--scale", self.scale, *self.more]
        return {
            "format": FORMAT,
            "paper": self.paper,
            "scale": self.scale,
            "run": name,
            "seed": seed,
            "command": shlex.join([*again, "--only", name, "--seeds", str(seed + 1), "--data-dir", "DIR"]),
            **self.origin,
            "versions": RunRecord(task.folder).config.get("versions"),  # it may have been finished before
            "settings": plain(self.runs[name]),
            "figures": figures_of(task.folder),
        }


def text_of(content: dict[str, Any]) -> str:
    """JSON with one line per column of values."""
    figures = content["figures"]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "figures"]
    inner = [f"{json.dumps(key)}: {json.dumps(v)}" for key, v in figures.items() if key != "evaluated"]
    columns = [f"{json.dumps(name)}: {json.dumps(column)}" for name, column in figures["evaluated"].items()]
    table = '"evaluated": {\n   ' + ",\n   ".join(columns) + "\n  }"
    lines.append('"figures": {\n  ' + ",\n  ".join([*inner, table]) + "\n }")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def origin() -> dict[str, Any]:
    """What this process is: the commit of its source code, the machine and the versions of packages."""
    return {"commit": commit(), "machine": machine(), "versions": versions()}


def commit() -> str | None:
    """The commit of this source code; None if it is not in a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return found


def machine() -> dict[str, Any]:
    """The processor and the number of cores."""
    name = platform.processor() or platform.machine()
    about = Path("/proc/cpuinfo")
    if about.exists():
        lines = (line.partition(":") for line in about.read_text(encoding="utf-8").splitlines())
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), name)
    return {"processor": name, "cores": os.cpu_count()}
