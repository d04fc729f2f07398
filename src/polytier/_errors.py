"""Errors that are advice: what came, what is allowed, what to try."""

from __future__ import annotations

import difflib
from collections.abc import Collection

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


def missing(extra: str) -> ValueError:
    return ValueError(f'{extra} is not installed; get it by: pip install "polytier[{extra}]"')
