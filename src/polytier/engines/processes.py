"""Processes that start in a moment: where forks are safe, all come from one that has imported torch and no more."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

# what all need, and what the first gradient imports (torch.func.grad): that takes longer than a small run
LOADED = ["polytier.cli", "polytier.engines.workers", "polytier.runs.loop", "polytier.runs.callbacks", "torch._dynamo"]


def start(target: Callable[..., Any], *args: Any, daemon: bool = False) -> BaseProcess:
    """A process that calls `target`, found by its name. Except on Windows it does not hear Ctrl-C (until `hear`)."""
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=target, args=args, daemon=daemon)
    with deaf():
        process.start()
    return process


@contextmanager
def deaf() -> Iterator[None]:
    """Ctrl-C waits, and what is started meanwhile never hears of it."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # to start it inside would end the waiting
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear() -> None:
    """Ctrl-C and `kill -INT` come through again."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
