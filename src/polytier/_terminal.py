"""What the commands say to people, and how people stop them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

log = logging.getLogger("polytier")
BAD_INPUT, FAULT, INTERRUPTED = 2, 3, 130


def say(text: str) -> None:
    print(text, file=sys.stderr)


def fail(text: str, code: int) -> typer.Exit:
    say(f"polytier: {text}")
    return typer.Exit(code)


class StderrHandler(logging.Handler):
    """Looks for sys.stderr anew each time: a progress bar takes its place while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def set_up_logging(quiet: bool, verbose: bool) -> None:
    log.handlers = [StderrHandler()]
    log.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


@contextmanager
def silence() -> Iterator[None]:
    """Nothing is logged: what would be said will be said by somebody else."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


class Interrupt:
    """The first Ctrl-C (or SIGTERM) lets the round end; the second one stops at once."""

    def __init__(self) -> None:
        self.asked, self._before = False, {}

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be caught
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # not print, which may be at work at this very moment
        os.write(2, b"\npolytier: finishing this round; once more stops at once\n")


def wide_console() -> Console:
    """Standard output; where nobody watches, tables are not squeezed."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
