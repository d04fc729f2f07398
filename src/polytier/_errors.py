"""Errors that are advice: what came, what is allowed, what to try. And the exit code that belongs to each error."""

from __future__ import annotations

import difflib
import errno
import reprlib
from collections.abc import Collection
from typing import Any

BAD_INPUT, FAULT, INTERRUPTED = 2, 3, 130  # exit codes of the command line
DISK_ADVICE = {
    errno.ENOSPC: ": make room on this disk",
    errno.EDQUOT: ": make room on this disk",
    errno.EIO: ": check this disk, then try again",
}


class Stopped(Exception):
    """A command ended before its work was done.

    Args:
        text: What happened, and how to continue.
        code: The exit code.
    """

    def __init__(self, text: str, code: int = FAULT) -> None:
        super().__init__(text)
        self.code = code


class Fault(RuntimeError):
    """Something outside the program stopped a run, or training failed. The run can be continued or repeated."""


def outcome(error: BaseException) -> tuple[int | None, str]:
    """The exit code of an error and its text for people; the code is None for an error in the program itself."""
    if isinstance(error, Stopped):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, Fault):
        return FAULT, str(error)
    if is_out_of_memory(error):
        return FAULT, "memory is insufficient: use fewer --workers, a smaller --tile or a smaller model"
    if isinstance(error, ValueError):
        return BAD_INPUT, str(error)
    if isinstance(error, OSError):
        return FAULT, f"{error}{DISK_ADVICE.get(error.errno or 0, ': correct this, then try again')}"
    if isinstance(error, EOFError):
        return FAULT, "a process of the run ended unexpectedly"
    return None, str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory, for tensors or for loading a library."""
    words = {RuntimeError: "allocate memory", ImportError: "failed to map segment"}
    return isinstance(error, MemoryError) or any(
        isinstance(error, k) and text in str(error) for k, text in words.items()
    )


def unknown(kind: str, name: str, known: Collection[str]) -> ValueError:
    """The error for a name that does not exist. It names the nearest known name and lists all of them."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"no {kind} {name!r}; {hint}available: {', '.join(known)}")


def short(value: Any) -> str:
    """A value as Python writes it; what is long is cut in the middle.

    Examples:
        >>> short("x" * 1000)
        "'xxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxxx'"
    """
    cut = reprlib.Repr()
    cut.maxstring = cut.maxother = cut.maxlong = 62
    return cut.repr(value)


def missing(extra: str) -> ValueError:
    """The error for a package that is not installed, named like the extra that installs it."""
    return ValueError(f'{extra} is not installed; get it by: pip install "polytier[{extra}]"')
