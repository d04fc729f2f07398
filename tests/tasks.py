"""What the tests of worker processes let them do; found by name in another process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from polytier.method.context import Context


def compute(context: Context, call: Any) -> Any:
    """A call is a function and what it is given."""
    function, *given = call
    return function(context, *given)


def echo(context: Context, value: Any) -> Any:
    return value


def after(context: Context, path: Path, value: Any) -> Any:
    """The value, as soon as there is such a file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return value


def meet(context: Context, mine: Path, other: Path) -> int:
    """Where this runs, when another one runs at the same time."""
    mine.touch()
    after(context, other, None)
    return os.getpid()


def touch(context: Context, path: Path, value: Any) -> Any:
    path.touch()
    return value


def fail(context: Context, error: Exception) -> None:
    raise error


def die(context: Context) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


class Locked(Exception):
    """Holds what cannot be sent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Forgetful(Exception):
    """Can be sent but not be made again from what arrives."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(f"{text} {number}")


def fail_by(context: Context, kind: type[Exception], *given: Any) -> None:
    raise kind(*given)


def samples_of(context: Context, device: int) -> Any:
    return context.batches.federation.device(device)


def remember(context: Context, device: int) -> None:
    context.memory.write(1, "model", torch.tensor([device]), torch.full((1, 3), float(device)))
