"""The terminal: output for users, logging, and interrupts by Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

log = logging.getLogger("polytier")


def say(text: str) -> None:
    """Print a line for the user on standard error."""
    print(text, file=sys.stderr)


class StderrHandler(logging.Handler):
    """A handler that looks up sys.stderr for every line, because a progress bar replaces it while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def set_up_logging(quiet: bool, verbose: bool) -> None:
    """Log to standard error: warnings only if `quiet`, debug messages too if `verbose`."""
    log.handlers = [StderrHandler()]
    log.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


def loading_torch(quiet: bool) -> None:
    """Tell a user at a terminal that the command has started, before torch is imported, which takes seconds."""
    if not quiet and sys.stderr is not None and sys.stderr.isatty() and "torch" not in sys.modules:
        say("polytier: loading torch ...")


@contextmanager
def silence() -> Iterator[None]:
    """Log nothing inside this context; the runs log the same messages themselves."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


class Interrupt:
    """The first Ctrl-C (or SIGTERM) lets the current round finish; the second one stops the command at once."""

    def __init__(self) -> None:
        self.asked, self._before = False, {}

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # signals can only be handled in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, *_: object) -> None:
        """Record the first signal; raise KeyboardInterrupt at the second."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # print is not safe here: the signal may have interrupted a print
        os.write(2, b"\npolytier: finishing this round; press Ctrl-C again to stop at once\n")


def wide_console() -> Console:
    """A console on standard output; 160 columns wide if that is not a terminal, so that tables are not cut."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
