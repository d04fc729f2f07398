"""Errors that are advice: what came, what is allowed, what to try."""

from __future__ import annotations

import difflib
import os
import reprlib
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

LONGEST = 255  # bytes of the name of a file
BAD_INPUT, FAULT, INTERRUPTED = 2, 3, 130  # exit codes of the command line


class Stopped(Exception):
    """A command ended before its work was done.

    Args:
        text: What happened, and how to go on.
        code: The exit code.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def unknown(kind: str, name: str, known: Collection[str]) -> ValueError:
    """The error for a name that does not exist. It names the nearest known name and lists all of them."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"no {kind} {name!r}; {hint}available: {', '.join(known)}")


def short(value: Any) -> str:
    """A value as Python writes it; what is long is cut in the middle.

    Example:
        >>> short("x" * 1000)
        "'xxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxxx'"
    """
    cut = reprlib.Repr()
    cut.maxstring = cut.maxother = cut.maxlong = 62
    return cut.repr(value)


def check_path(text: str | Path, what: str) -> None:
    """Raise an error if no file or folder can have this path; `what` names it in the message."""
    if not str(text) or "\0" in str(text):
        raise ValueError(f"{what} {str(text)!r} is no path; give the name of a file or folder")
    longest = max((part for part in Path(text).parts), key=len, default="")
    if len(os.fsencode(longest)) > LONGEST:
        raise ValueError(f"{what} {short(str(text))} cannot be used: a name in it is longer than {LONGEST} bytes")
    try:
        os.stat(text)
    except FileNotFoundError:
        return
    except OSError as error:  # the name is too long, a folder on the way is a file, or links form a loop
        raise ValueError(f"{what} {short(str(text))} cannot be used: {error.strerror}; give another path") from None


def check_file(path: str | Path) -> None:
    """Raise an error unless this is a regular file: to read a pipe or a device may never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ValueError(f"{error.strerror or error}") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file (a pipe or a device)"
        raise ValueError(f"it is {what}")


def missing(extra: str) -> ValueError:
    return ValueError(f'{extra} is not installed; get it by: pip install "polytier[{extra}]"')
