"""Runs of a comparison or a reproduction, each a process of its own: started, resumed, stopped together.

Beside every run folder lies FOLDER.toml, what was asked for: the same again goes on where it ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar

from polytier._terminal import BAD_INPUT, Interrupt, say
from polytier._terminal import INTERRUPTED as EXIT_INTERRUPTED
from polytier.engines.process_start import start_process, unblock_interrupts
from polytier.report import comparison
from polytier.report.comparison import DIVERGED, DONE, FAILED, INTERRUPTED, NOT_APPLICABLE, RUNNING, WAITING
from polytier.runs.config import Config, check_config, read_toml, to_toml
from polytier.runs.read import read_summary

ENDS = {0: DONE, BAD_INPUT: NOT_APPLICABLE, EXIT_INTERRUPTED: INTERRUPTED}
TICK = 0.5  # seconds from one look at the runs to the next


@dataclass
class Task:
    """A run, and how it goes."""

    method: str
    config: Config
    folder: Path
    state: str = WAITING
    reason: str = ""  # why it is not done
    notes: list[str] = field(default_factory=list)  # what the run had to say

    @property
    def asked(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.toml")

    def entry(self) -> dict[str, Any]:
        """What its record begins with."""
        names = {"method": self.method, "seed": self.config.seed, "folder": self.folder.name}
        return {**names, "rounds": self.config.rounds, "state": self.state, "reason": self.reason}

    def look(self) -> None:
        """Whether it is done already."""
        if (read_summary(self.folder) or {}).get("rounds", 0) >= self.config.rounds:
            self.state = DONE


def check_same(tasks: Sequence[Task]) -> None:
    """Folders that are there must be of the same runs."""
    for task in tasks:
        before = check_config(read_toml(task.asked)) if task.asked.exists() else task.config
        names = [name for name in Config.model_fields if getattr(before, name) != getattr(task.config, name)]
        if names:
            now = ", ".join(f"{n} {getattr(before, n)} (now {getattr(task.config, n)})" for n in names)
            raise ValueError(f"{task.folder} was made with {now}; repeat that, or name another --out")
        if task.folder.exists() and not task.asked.exists():
            raise ValueError(f"{task.folder} was not made by this command; name another --out")


def run_tasks(tasks: Sequence[Task], out: Path, jobs: int, show: bool) -> None:
    """Run all that is not finished; with `show`, a table on a terminal and lines elsewhere."""
    console = Console(stderr=True)
    live = Live(console=console, transient=True) if show and console.is_terminal else None
    noted: set[str] = set()
    with (
        tempfile.TemporaryDirectory(prefix="polytier-") as logs,
        Interrupt() as interrupt,
        live or nullcontext(),
        closing(ends(tasks, jobs, interrupt, Path(logs))) as ended,
    ):
        for task in ended:
            if live is not None:
                ended_now = sum(t.state not in (WAITING, RUNNING) for t in tasks)
                bar = ProgressBar(total=len(tasks), completed=ended_now, width=40)
                live.update(Group(bar, comparison.progress_table(out, [t.entry() for t in tasks])))
            if task is None or not show:
                continue
            for note in task.notes:
                # one run speaks for all of its algorithm that say the same with other numbers
                kind = f"{task.config.algorithm}: {note.partition(':')[0]}"
                if kind not in noted:
                    noted.add(kind)
                    say(f"{task.method}: {note}")
            if live is None:
                how = comparison.progress(task.folder, task.state, task.config.rounds)
                how += f": {task.reason}" if task.reason else ""
                left = sum(t.state in (WAITING, RUNNING) for t in tasks)
                say(f"{task.method}, seed {task.config.seed}: {how} ({left} to go)")


def ends(tasks: Sequence[Task], jobs: int, stop: Callable[[], bool], logs: Path) -> Generator[Task | None]:
    """Run what is not finished, `jobs` at a time; yields each task when it ends, and None while time goes by."""
    waiting = [task for task in tasks if task.state == WAITING]
    running: list[tuple[Task, BaseProcess, Path]] = []
    asked = False
    try:
        while running or (waiting and not asked):
            while waiting and len(running) < jobs and not stop():
                task = waiting.pop(0)
                task.asked.write_text(to_toml(task.config.model_dump()), encoding="utf-8")
                said = logs / task.folder.name
                running.append((task, start_process(work, command(task), said), said))
                task.state = RUNNING
            if stop() and not asked:
                asked = True
                tell(running)
            yield None
            over = [each for each in running if each[1].exitcode is not None]
            for each in over:
                running.remove(each)
                end(each, asked)
                yield each[0]
            if not over:
                wait([process.sentinel for _, process, _ in running], TICK)
    finally:
        tell(running)  # the second time: they stop at once
        for each in running:
            each[1].join()
            end(each, True)


def command(task: Task) -> list[str]:
    """What starts the run, or goes on with it."""
    if any((task.folder / "checkpoints").glob("round-*")):
        how = ["resume", str(task.folder)]
    else:
        shutil.rmtree(task.folder, ignore_errors=True)  # killed before its first checkpoint
        how = ["run", str(task.asked), "--out", str(task.folder)]
    return [*how, "--quiet"]


# -- processes ----------------------------------------------------------------------------------------


def work(args: Sequence[str], said: Path) -> None:
    """What the process does."""
    from polytier.cli.main import app

    set_apart(said)
    app(args)


def set_apart(said: Path) -> None:
    """A group of its own: Ctrl-C comes to it from who started it, and once."""
    for name, number in ((os.devnull, 1), (said, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    if sys.platform != "win32":
        os.setpgid(0, 0)
    unblock_interrupts()


def tell(running: Sequence[tuple[Task, BaseProcess, Path]]) -> None:
    for _, process, _ in running:
        with suppress(ProcessLookupError):  # over in the meantime
            assert process.pid
            os.kill(process.pid, signal.SIGINT)


def end(run: tuple[Task, BaseProcess, Path], asked: bool) -> None:
    """How a run ended, and what it said."""
    task, process, file = run
    code, text = process.exitcode or 0, file.read_text(errors="replace") if file.exists() else ""
    said = [line for line in text.splitlines() if line.strip()]
    task.state = INTERRUPTED if asked and code else ENDS.get(code, FAILED)
    if task.state == DONE:
        task.notes = said
    elif task.state != INTERRUPTED:
        last = next((line for line in reversed(said) if line.startswith("polytier: ")), "".join(said[-1:]))
        task.reason = last.removeprefix("polytier: ") or f"exit code {code}"
        if task.reason.startswith("diverged "):
            task.state, task.reason = DIVERGED, task.reason.removeprefix("diverged ")
