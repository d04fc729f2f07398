"""Writes files so that a reader finds the old content or the new one, also after a crash or a loss of power.

A file is written under a random name in its folder, synced to the disk and renamed. Every operation is a call of a
function of `os`, so that tests can make each of them fail.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from polytier._errors import DISK_ADVICE

PARTIAL = ".partial"  # ending of files that are not complete
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
CHUNK = 8 << 20  # bytes per system call


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name; it gets its name once it is complete and on the disk.

    Args:
        path: The file. If it is a link, the link is replaced and the file it points to stays as it is.

    Yields:
        The temporary path, an empty file.
    """
    partial = partial_name(path)
    os.close(os.open(partial, NEW, 0o666))
    try:
        yield partial
        sync_file(partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(path.parent)


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file that does not exist yet and sync it.

    Returns:
        The SHA-256 digest of the content.
    """
    digest, file = sha256(), os.open(path, NEW, 0o666)
    try:
        for piece in pieces:
            digest.update(piece)
            write_all(file, piece)
        os.fsync(file)
    finally:
        os.close(file)
    return digest.hexdigest()


def write_bytes(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file atomically from pieces of its content; returns its digest."""
    partial = partial_name(path)
    try:
        digest = write_new(partial, pieces)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(path.parent)
    return digest


def write_text(path: Path, text: str) -> str:
    """Write a text file atomically; returns its digest."""
    return write_bytes(path, [text.encode()])


def write_all(file: int, piece: bytes | memoryview) -> None:
    """Write all bytes: a single system call may write fewer."""
    left = memoryview(piece).cast("B")
    while len(left):
        left = left[os.write(file, left[:CHUNK]) :]


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    file = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk. Windows cannot open folders and needs no sync."""
    if os.name == "nt":
        return
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and those above it that do not exist.

    Returns:
        The folders that were created, the innermost first.

    Raises:
        ValueError: They cannot be created there.
        OSError: The disk is full or broken.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        os.makedirs(folder, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
    except OSError as error:
        if error.errno in DISK_ADVICE:  # no fault of the path
            raise
        raise ValueError(f"the folder {folder} cannot be created: {error.strerror}; give another one") from None
    return missing


def next_folder(parent: Path, stem: str) -> Path:
    """Create parent/stem-N with the first number that is free. Several processes get different folders."""
    make_folder(parent)
    number = 1
    while True:
        try:
            os.mkdir(parent / f"{stem}-{number}")
            return parent / f"{stem}-{number}"
        except FileExistsError:
            number += 1


def remove_partials(folder: Path) -> None:
    """Remove what a killed writer left behind in a folder. Only the holder of its lock may do this."""
    for path in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def partial_name(path: Path) -> Path:
    """A name beside `path` that nobody can know in advance."""
    return path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}{PARTIAL}")


class Appended:
    """A file to which text is appended. It notices if somebody else removes or changes the file.

    Args:
        path: The file.
        text: Its content at the start, written atomically.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self._size = path, len(text.encode())
        write_text(path, text)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))

    @property
    def intact(self) -> bool:
        """Whether the path still names the same file, with the size it should have."""
        try:
            seen = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(seen, os.fstat(self._file)) and seen.st_size == self._size

    def append(self, text: str) -> None:
        """Append a text. It is synced by `close`."""
        write_all(self._file, text.encode())
        self._size += len(text.encode())

    def close(self) -> None:
        """Sync and close the file."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


# -- sealed documents: JSON that contains its own digest ----------------------------------------------


def seal(digest: str) -> str:
    """The end of a JSON object whose text before this has the given digest."""
    return f',\n  "sha256": "{digest}"\n}}\n'


def write_sealed(path: Path, pieces: Iterable[str]) -> None:
    """Write a JSON object that ends with its own digest.

    Args:
        path: The file.
        pieces: The text of an object with at least one key, without the closing brace.
    """

    def sealed() -> Iterator[bytes]:
        digest = sha256()
        for piece in pieces:
            digest.update(piece.encode())
            yield piece.encode()
        yield seal(digest.hexdigest()).encode()

    write_bytes(path, sealed())


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as a sealed JSON file; NaN and infinity become null."""
    write_sealed(path, [json.dumps(json_ready(value), indent=2).removesuffix("\n}")])


def json_line(record: dict[str, Any], owner: str = "") -> str:
    """A record as one line of JSON that ends with its own checksum, which also depends on the owner of the file."""
    text = json.dumps(json_ready(record))[:-1]
    return f'{text}, "crc32": "{zlib.crc32(text.encode(), zlib.crc32(owner.encode())):08x}"}}\n'


def json_ready(value: Any) -> Any:
    """The same value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {k: json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
