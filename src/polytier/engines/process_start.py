"""Starting processes quickly. On Linux all are forked from one process that has imported torch and computed nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

# modules that every process needs: importing these takes longer than a small run
PRELOADED = [
    "polytier.cli",
    "polytier.engines.workers",
    "polytier.runs.loop",
    "polytier.runs.callbacks",
]


def start_process(target: Callable[..., Any], *args: Any, daemon: bool = False) -> BaseProcess:
    """Start a process that calls `target(*args)`.

    Except on Windows, the process does not receive SIGINT (Ctrl-C) until it calls `unblock_interrupts`.

    Args:
        target: A function that can be imported by its name.
        *args: Its arguments, which have to be picklable.
        daemon: Whether the process ends with this one.

    Returns:
        The process.
    """
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=args, daemon=daemon)
    with safe_path(), interrupts_blocked():
        process.start()
    return process


@contextmanager
def safe_path() -> Iterator[None]:
    """Let processes that are started in the block search installed packages only, until they get `sys.path` from here.

    They would otherwise import torch and others from the current folder first, as `python -c` does.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay SIGINT until the end of the block; processes that are started in the block inherit the blocked signal."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # starting it inside the block would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_interrupts() -> None:
    """Receive SIGINT again: Ctrl-C and `kill -INT`."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
