"""The terminal: output for users, logging, and interrupts by Ctrl-C."""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

log = logging.getLogger("polytier")


class JsonLines(logging.Formatter):
    """A line of the log as a JSON object: time, level, event, node, peer and text.

    `log.info(text, extra=event("ready", "device/ann"))` says what happened, and with whom.

    Args:
        node: The node whose log this is.
    """

    def __init__(self, node: str) -> None:
        super().__init__()
        self.node = node

    def format(self, record: logging.LogRecord) -> str:
        about = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "message"),
            "node": self.node,
            "peer": getattr(record, "peer", None),
            "text": super().format(record),
        }
        return json.dumps(about, ensure_ascii=False)


def event(name: str, peer: str | None = None) -> dict[str, str | None]:
    """What a line of the log is about, for `extra=`: what happened, and which other node it concerns."""
    return {"event": name, "peer": peer}


class StderrHandler(logging.Handler):
    """A handler that looks up sys.stderr for every line, because a progress bar replaces it while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def say(text: str, level: int = logging.INFO, event: str = "message") -> None:
    """Print a line for the user on standard error, whatever the level of the log is; in a log of JSON an object."""
    lines = log.handlers[0].formatter if log.handlers else None
    if isinstance(lines, JsonLines):
        record = log.makeRecord(log.name, level, "", 0, text, (), None, extra={"event": event})
        text = lines.format(record)
    print(text, file=sys.stderr)


def set_up_logging(quiet: bool, verbose: bool, lines: logging.Formatter | None = None) -> None:
    """Log to standard error: warnings only if `quiet`, debug messages too if `verbose`; as `lines` formats them."""
    log.handlers = [StderrHandler()]
    log.handlers[0].setFormatter(lines)
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
