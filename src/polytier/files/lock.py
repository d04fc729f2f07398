"""One writer per folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FILE = ".lock"


class FolderLock:
    """The right to write to a folder. The operating system releases it when the process ends, however it ends.

    Args:
        folder: An existing folder.
        made: The folders that the caller created for it, the innermost first.

    Raises:
        ValueError: Another process, or another run of this process, has the lock. The message names the process.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with FolderLock(folder):
        ...     FolderLock(folder)
        Traceback (most recent call last):
        ValueError: ... is in use by process ...; wait until it ends, or give another folder
    """

    def __init__(self, folder: Path, made: Sequence[Path] = ()) -> None:
        self.folder, self.made = folder, made
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        self._file: int | None = os.open(folder / FILE, flags, 0o666)
        try:
            take(self._file)
        except OSError:
            owner = os.pread(self._file, 200, 0).decode(errors="replace").strip() if hasattr(os, "pread") else ""
            self.release()
            who = f"process {owner}" if owner else "another process"
            raise ValueError(f"{folder} is in use by {who}; wait until it ends, or give another folder") from None
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would let two processes lock different files."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the file is closed all the same, and its content matters to nobody
                os.close(file)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(folder: Path) -> bool:
    """Whether a process has the lock of a folder. Nothing is written."""
    try:
        file = os.open(folder / FILE, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        take(file, shared=True)
        return False
    except OSError:
        return True
    finally:
        os.close(file)


def take(file: int, shared: bool = False) -> None:
    """Lock an open file, or raise OSError if it is locked; several processes may have a shared lock."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
