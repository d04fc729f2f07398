"""Runs of a comparison or a reproduction, one process per run: started, resumed and stopped together.

FOLDER.toml beside every run folder contains the requested settings, so that repeating the command continues the run.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar

from polytier._errors import BAD_INPUT, outcome
from polytier._errors import INTERRUPTED as EXIT_INTERRUPTED
from polytier._terminal import Interrupt, log, say
from polytier.engines.process_start import start_process, unblock_interrupts
from polytier.files.write import write_text
from polytier.report import comparison
from polytier.report.comparison import DIVERGED, DONE, FAILED, INTERRUPTED, NOT_APPLICABLE, RUNNING, WAITING
from polytier.report.heatmap import draw_beside
from polytier.runs import checkpoint
from polytier.runs.folder import reopen
from polytier.runs.launch import run_in_folder
from polytier.runs.loop import Loop
from polytier.runs.read_files import CHECKPOINTS, finished_rounds, read_config, read_state
from polytier.runs.resume import resumed_loop, spec_of_folder
from polytier.runs.spec import RunSpec, check_spec, read_toml, to_toml
from polytier.runs.trust import check_trusted, named_code
from polytier.theory.stability import warnings

ENDS = {0: DONE, BAD_INPUT: NOT_APPLICABLE, EXIT_INTERRUPTED: INTERRUPTED}
NOTE, REASON = "note", "reason"  # kinds of messages from the process of a run
TICK = 0.5  # seconds between checks of the runs


@dataclass
class Task:
    """A run and its state."""

    method: str
    spec: RunSpec
    folder: Path
    state: str = WAITING
    reason: str = ""  # why it is not finished
    notes: list[str] = field(default_factory=list)  # messages logged by the run

    @property
    def asked(self) -> Path:
        """The file with the requested settings."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    def entry(self) -> dict[str, Any]:
        """The first fields of its record."""
        names = {"method": self.method, "seed": self.spec.seed, "folder": self.folder.name}
        return {**names, "rounds": self.spec.rounds, "state": self.state, "reason": self.reason}

    def look(self) -> None:
        """Check whether the run is already finished."""
        if self.folder.is_dir() and finished_rounds(self.folder, self.spec.rounds) is not None:
            self.state = DONE


def check_same(tasks: Sequence[Task]) -> None:
    """Raise an error if an existing folder belongs to a run with other settings, or names code that this one does not.

    The names in the specification of a task are the user's choice; the process of the run does not check them again.
    """
    for task in tasks:
        before = check_spec(read_toml(task.asked)) if task.asked.exists() else task.spec
        names = [name for name in RunSpec.model_fields if getattr(before, name) != getattr(task.spec, name)]
        if names:
            now = ", ".join(f"{n} {getattr(before, n)} (now {getattr(task.spec, n)})" for n in names)
            raise ValueError(f"{task.folder} was made with {now}; use the same settings, or give another --out")
        if task.folder.exists() and not task.asked.exists():
            raise ValueError(f"{task.folder} was not made by this command; give another --out")
        config = task.folder / "config.toml"
        if task.state == WAITING and config.exists():  # it may be resumed
            own = [name for _, name in named_code(task.spec.model_dump())]
            advice = f"finish that run with `polytier resume {task.folder} --trust`, or else give another --out"
            check_trusted(read_config(task.folder), config, advice, own)


def run_tasks(
    tasks: Sequence[Task], out: Path, jobs: int, show: bool, after: Callable[[Task], None] = lambda task: None
) -> None:
    """Run all unfinished tasks; with `show`, print a table on a terminal and lines elsewhere.

    `after` is called with each task when it has ended.
    """
    console = Console(stderr=True)
    live = Live(console=console, transient=True) if show and console.is_terminal else None
    noted: set[str] = set()
    with Interrupt() as interrupt, live or nullcontext(), closing(ends(tasks, jobs, interrupt)) as ended:
        for task in ended:
            if task is not None:
                after(task)
            if live is not None:
                ended_now = sum(t.state not in (WAITING, RUNNING) for t in tasks)
                bar = ProgressBar(total=len(tasks), completed=ended_now, width=40)
                live.update(Group(bar, comparison.progress_table(out, [t.entry() for t in tasks])))
            if task is None or not show:
                continue
            for note in task.notes:
                # messages of one algorithm that differ only in numbers are printed once
                kind = f"{task.spec.algorithm}: {note.partition(':')[0]}"
                if kind not in noted:
                    noted.add(kind)
                    say(f"{task.method}: {note}")
            if live is None:
                how = comparison.progress(task.folder, task.state, task.spec.rounds)
                how += f": {task.reason}" if task.reason else ""
                left = sum(t.state in (WAITING, RUNNING) for t in tasks)
                say(f"{task.method}, seed {task.spec.seed}: {how} ({left} left)")


@dataclass
class Job:
    """The process of a task, and the pipe on which it reports why it was rejected or failed."""

    task: Task
    process: BaseProcess
    pipe: Connection
    heard: list[tuple[str, str]] = field(default_factory=list)  # kind of message, text

    def hear(self) -> None:
        """Read the messages that the process has sent so far."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                self.heard.append(self.pipe.recv())


def ends(tasks: Sequence[Task], jobs: int, stop: Callable[[], bool]) -> Generator[Task | None]:
    """Run unfinished tasks, `jobs` at a time. Yields each task when it ends, and None while waiting."""
    waiting = [task for task in tasks if task.state == WAITING]
    running: list[Job] = []
    asked = False
    try:
        while running or (waiting and not asked):
            while waiting and len(running) < jobs and not stop():
                running.append(begin(waiting.pop(0)))
            if stop() and not asked:
                asked = True
                interrupt(running)
            yield None
            for job in running:
                job.hear()
            over = [job for job in running if job.process.exitcode is not None]
            for job in over:
                running.remove(job)
                end(job, asked)
                yield job.task
            if not over:
                wait([job.process.sentinel for job in running], TICK)
    finally:
        interrupt(running)  # the second interrupt stops the runs at once
        for job in running:
            job.process.join()
            end(job, True)


def begin(task: Task) -> Job:
    """Start or resume the run."""
    write_text(task.asked, to_toml(task.spec.model_dump()))
    resumed = bool(checkpoint.found(task.folder / CHECKPOINTS))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    job = Job(task, start_process(work, task.spec, task.folder, resumed, theirs), ours)
    theirs.close()
    task.state = RUNNING
    return job


def interrupt(running: Sequence[Job]) -> None:
    """Send SIGINT to the processes of these jobs."""
    for job in running:
        with suppress(ProcessLookupError):  # the process has already ended
            assert job.process.pid
            os.kill(job.process.pid, signal.SIGINT)


def end(job: Job, asked: bool) -> None:
    """Record how a run ended: from its exit code, its state file or, if nothing was written, its messages."""
    job.hear()
    job.pipe.close()
    task, code = job.task, job.process.exitcode or 0
    task.state = INTERRUPTED if asked and code else ENDS.get(code, FAILED)
    if task.state == DONE:
        task.notes = [text for kind, text in job.heard if kind == NOTE]
    elif task.state != INTERRUPTED:
        state = read_state(task.folder) if task.folder.is_dir() else {"state": ""}
        told = next((text for kind, text in reversed(job.heard) if kind == REASON), f"exit code {code}")
        task.reason = told
        if state["state"] == DIVERGED:
            task.state, task.reason = DIVERGED, state["reason"].removeprefix("diverged ")


# -- in the process of a run --------------------------------------------------------------------------


class Notes(logging.Handler):
    """Sends log messages to the process that started this one."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.WARNING)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self.pipe.send((NOTE, self.format(record)))


def work(spec: RunSpec, folder: Path, resumed: bool, pipe: Connection) -> None:
    """The main function of the process of a run."""
    set_apart()
    sys.exit(attempt(spec, folder, resumed, pipe))


def attempt(spec: RunSpec, folder: Path, resumed: bool, pipe: Connection) -> int:
    """Run, and send log messages and the reason for the end; returns the exit code."""
    log.handlers = [Notes(pipe)]
    try:
        with Interrupt() as stop:
            run(spec, folder, resumed, stop)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        code, text = outcome(error)
        if code is not None:
            pipe.send((REASON, text))
            return code
        log.debug("the error was raised here:", exc_info=error)
        pipe.send((REASON, f"{type(error).__name__}: {error}"))
        return 1


def run(spec: RunSpec, folder: Path, resumed: bool, stop: Callable[[], bool]) -> None:
    """Run or resume one task and write its folder."""
    if resumed:
        with reopen(folder) as lock, resumed_loop(spec_of_folder(folder), folder) as loop:
            run_in_folder(loop, folder, stop=stop, resumed=lock)
    else:
        with Loop.of(spec) as loop:
            for text in warnings(loop):
                log.warning("%s", text)
            run_in_folder(loop, folder, stop=stop)
    draw_beside(folder)


def set_apart() -> None:
    """Make a new process group without output, so that Ctrl-C reaches it only through the starting process."""
    for number in (1, 2):
        file = os.open(os.devnull, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    if sys.platform != "win32":
        os.setpgid(0, 0)
    unblock_interrupts()
