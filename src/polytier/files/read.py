"""Reads files that may be damaged, or may come from somebody else: regular files alone, checked by their digests."""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from polytier._errors import short
from polytier.files.write import CHUNK

LONGEST = 255  # bytes of the name of a file
UNSEALED = (0, 1, 2)  # formats of run folders (0: not given) whose files have no digests
SEALED = re.compile(r',\n  "sha256": "([0-9a-f]{64})"\n}\n\Z')
CHECKED_LINE = re.compile(r'(.*), "crc32": "([0-9a-f]{8})"}', re.DOTALL)


class Damaged(ValueError):
    """A file does not have the content that was written to it."""


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


class NoFile(ValueError):
    """A file that a user names does not exist."""


def no_file(path: Path) -> NoFile:
    """The error for a file that does not exist. It names the most similar file of the same folder."""
    if not path.parent.is_dir():
        return NoFile(f"there is no file {path}: the folder {path.parent} does not exist")
    listed = path.parent.iterdir() if os.access(path.parent, os.R_OK) else ()
    near = difflib.get_close_matches(path.name, [other.name for other in listed if other.suffix == path.suffix], 1)
    hint = f"; did you mean {path.with_name(near[0])}?" if near else f" in {path.parent.resolve()}"
    return NoFile(f"there is no file {path if near else path.name}{hint}")


@contextmanager
def reading(path: Path | str, what: str, advice: str = "get the file again") -> Iterator[None]:
    """Turn every error that is raised while a file is read into a ValueError that names the file.

    Args:
        path: the file, or another name of what is read.
        what: what it should be, such as "an idx file".
        advice: what the user can do.
    """
    try:
        yield
    except NoFile:
        raise
    except Exception as error:  # a broken pickle or archive can raise nearly anything
        text = " ".join(str(error).split())
        reason = text if isinstance(error, ValueError) else f"{type(error).__name__} {text}"
        raise ValueError(f"{path} cannot be read as {what}: {reason}; {advice}") from error


def check_file(path: str | Path) -> None:
    """Raise an error unless this is a regular file: to read a pipe or a device may never end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise no_file(Path(path)) from None
    except OSError as error:
        raise ValueError(f"{error.strerror or error}") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file (a pipe or a device)"
        raise ValueError(f"it is {what}")


def open_regular(path: Path) -> int:
    """Open a regular file for reading. A pipe or a device, on which a read might wait for ever, is refused.

    Raises:
        OSError: The file cannot be opened.
        Damaged: It is not a regular file.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Damaged(f"{path} is not a regular file; give a file")
    return file


def read_bytes(path: Path) -> bytes:
    """The content of a regular file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def version(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does, also if two changes have the same time; None if there is no such file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def digest_of(path: Path) -> str:
    """The SHA-256 digest of a regular file."""
    digest = sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, without its digest. Files of earlier formats have none.

    Raises:
        Damaged: The file cannot be read, is no object, or does not have the content that was written.
    """
    try:
        text = read_bytes(path).decode()
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path} is damaged: it contains {type(found).__name__} instead of an object")
    sealed = SEALED.search(text)
    if sealed is not None:
        if sha256(text[: sealed.start()].encode()).hexdigest() != sealed[1]:
            raise Damaged(f"{path} is damaged: its content does not match its digest")
        del found["sha256"]
    elif "sha256" in found or found.get("format", 0) not in UNSEALED:
        raise Damaged(f"{path} is damaged: its digest is missing")
    return found


def refuse_links(folder: Path) -> None:
    """Raise an error if a folder contains links, pipes or devices, through which a writer could change other files.

    Raises:
        ValueError: There is one. The message names it.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                refuse_links(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "not a regular file"
                advice = "run folders contain regular files only: replace or remove it"
                raise ValueError(f"{entry.path} is {kind}; {advice}")


def read_line(line: str, checked: bool, owner: str = "") -> dict[str, Any]:
    """A record that `json_line` wrote.

    Args:
        line: The line without its end.
        checked: Whether it has to have a checksum; version 0.1 wrote lines without one.
        owner: As given to `json_line`.

    Raises:
        Damaged: It is no object, or does not match its checksum.
    """
    found = CHECKED_LINE.fullmatch(line)
    if found is not None:
        text = found[1].encode("utf-8", "surrogateescape")
        if f"{zlib.crc32(text, zlib.crc32(owner.encode())):08x}" != found[2]:
            raise Damaged("it does not match its checksum")
    if found is None and checked:
        raise Damaged("its checksum is missing")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Damaged(str(error)) from None
    if not isinstance(record, dict):
        raise Damaged("it is not an object")
    record.pop("crc32", None)
    return record
