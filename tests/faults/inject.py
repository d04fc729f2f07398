"""Makes file operations fail: counts them, kills the process before one, lets one fail, and models a loss of power.

The functions of `os` that change files are replaced in a forked process. An operation counts if its path is inside the
root of the case. Files that are opened by `open` count once, when they are opened; mapped files are seen by the model
of a disk through their content.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import pickle
import signal
import stat
import struct
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATHS = ("mkdir", "rmdir", "unlink", "remove", "truncate")
MOVES = ("replace", "rename")
FILES = ("write", "fsync", "ftruncate", "posix_fallocate", "close")
GROWING = ("open", "write", "mkdir", "posix_fallocate", "ftruncate", "io.open")  # what needs room on the disk
NUMBER = struct.Struct("q")
SECTOR = 512
REAL: dict[str, Any] = {name: getattr(os, name) for name in (*PATHS, *MOVES, *FILES, "open")} | {"io.open": io.open}


@dataclass
class Plan:
    """What happens at which operation.

    kind    | count, kill, fail (once), full (every operation that needs room from then on), short (counts writes),
              read (counts files that are opened for reading) or record
    at      | the number of the operation, from 1
    error   | the number of the error
    parents | for `kill`: whether the process that started this one is killed too
    store   | for `record`: where the images are written at the end
    """

    root: Path
    kind: str = "count"
    at: int = 0
    error: int = errno.EIO
    parents: bool = False
    store: Path | None = None
    images: list[Image] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = Path(os.path.realpath(self.root))
        self._counter = mmap.mmap(-1, NUMBER.size)  # shared with forked processes
        self._first, self._disk = os.getpid(), None

    @property
    def count(self) -> int:
        return NUMBER.unpack(self._counter[:])[0]

    def begin(self) -> None:
        """Called in the process whose operations count."""
        self._first = os.getpid()
        if self.kind == "record":
            self._disk = Disk(self.root)
        install(self)

    def operation(self, name: str, path: str, do: Callable[[], Any], reads: bool = False) -> Any:
        """Do an operation, or what is planned instead."""
        inside = path == str(self.root) or path.startswith(f"{self.root}{os.sep}")
        if not inside or reads != (self.kind == "read") or (self.kind == "short" and name != "write"):
            return do()
        self._counter[:] = NUMBER.pack(self.count + 1)
        due = self.count == self.at
        if self._disk is not None:
            self._disk.look(self.images, f"before {self.count} {name}")
        if due and self.kind == "kill":
            if self.parents and os.getpid() != self._first:
                os.kill(self._first, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        fails = due and self.kind in ("fail", "read")
        if fails or (self.kind == "full" and self.count >= self.at and name in GROWING):
            if name == "close":
                do()  # the file is closed, whatever close says
            raise OSError(self.error, os.strerror(self.error), path)
        return do()

    def synced(self, file: int) -> None:
        if self._disk is not None:
            self._disk.sync(file)

    def end(self) -> None:
        """Called after the last operation."""
        if self._disk is not None:
            self._disk.look(self.images, "at the end")
            assert self.store is not None
            with REAL["io.open"](self.store, "wb") as file:
                pickle.dump(self.images, file)


def name_of(file: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""


def full_path(path: Any, dir_fd: int | None = None) -> str:
    if isinstance(path, int):
        return name_of(path)
    base = name_of(dir_fd) if dir_fd is not None else os.getcwd()
    text = os.path.join(base, os.fsdecode(path))
    return os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))


def install(plan: Plan) -> None:
    """Replace the functions of `os` in this process."""
    for name in PATHS:
        setattr(os, name, of_path(plan, name))
    for name in MOVES:
        setattr(os, name, of_move(plan, name))
    for name in FILES:
        setattr(os, name, of_file(plan, name))
    os.open = opening(plan)
    io.open = builtins.open = opening_stream(plan)


def of_path(plan: Plan, name: str) -> Any:
    def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
        own = more if dir_fd is None else {**more, "dir_fd": dir_fd}
        return plan.operation(name, full_path(path, dir_fd), lambda: REAL[name](path, *args, **own))

    return call


def of_move(plan: Plan, name: str) -> Any:
    def call(source: Any, target: Any, **more: Any) -> Any:
        return plan.operation(name, full_path(target), lambda: REAL[name](source, target, **more))

    return call


def of_file(plan: Plan, name: str) -> Any:
    def call(file: int, *args: Any) -> Any:
        if name == "write" and plan.kind == "short" and plan.count + 1 == plan.at and len(args[0]) > 1:
            args = (bytes(args[0])[: len(args[0]) // 2],)
        found = plan.operation(name, name_of(file), lambda: REAL[name](file, *args))
        if name == "fsync":
            plan.synced(file)
        return found

    return call


def opening(plan: Plan) -> Any:
    def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def do() -> int:
            return REAL["open"](path, flags, mode, dir_fd=dir_fd)

        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        name = "open" if flags & os.O_CREAT else "reopen"
        return plan.operation(name, full_path(path, dir_fd), do, reads=not writes)

    return call


def opening_stream(plan: Plan) -> Any:
    def call(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        def do() -> Any:
            return REAL["io.open"](file, mode, *args, **more)

        if isinstance(file, int):
            return do()
        return plan.operation("io.open", full_path(file), do, reads=not set(mode) & set("wax+"))

    return call


# -- a disk that forgets what was not synced -----------------------------------------------------------


@dataclass
class Image:
    """The content of the root after a loss of power: folders, and the content of files."""

    where: str
    kind: str
    folders: list[str]
    files: dict[str, bytes]

    def write(self, root: Path) -> None:
        for folder in self.folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (root / name).write_bytes(data)


class Disk:
    """What of a folder is certainly on the disk: entries of folders and content of files, each by its last fsync."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[int, dict[str, int]] = {}  # folder: name: file or folder, as inodes
        self.content: dict[int, bytes] = {}
        self._held: dict[int, int] = {}  # open files, so that inodes are not used again
        self._seen: set[int] = set()
        for folder, _, names in os.walk(root):
            self._sync_folder(folder)
            for name in names:
                path = os.path.join(folder, name)
                self.content[self._hold(path)] = read(path)

    def _hold(self, path: str) -> int:
        number = os.lstat(path).st_ino
        if number not in self._held:
            self._held[number] = REAL["open"](path, os.O_RDONLY)
        return number

    def _sync_folder(self, folder: str) -> None:
        number = self._hold(folder)
        self.entries[number] = {name: self._hold(os.path.join(folder, name)) for name in os.listdir(folder)}

    def sync(self, file: int) -> None:
        path = name_of(file)
        if not path.startswith(str(self.root)) and path != str(self.root):
            return
        if stat.S_ISDIR(os.fstat(file).st_mode):
            self._sync_folder(path)
        else:
            self.content[self._hold(path)] = read(path)

    def look(self, images: list[Image], where: str) -> None:
        """Add what may be found if the power fails now, unless the same was added before."""
        for kind, names, data in (
            ("all lost", False, "lost"),
            ("names kept", True, "lost"),
            ("data kept", False, "kept"),
            ("sectors mixed", True, "mixed"),
            ("sectors mixed, names lost", False, "mixed"),
        ):
            image = Image(where, kind, [], {})
            self._gather(image, str(self.root), "", names, data)
            mark = hash((tuple(sorted(image.folders)), tuple(sorted(image.files.items()))))
            if mark not in self._seen:
                self._seen.add(mark)
                images.append(image)

    def _gather(self, image: Image, path: str, name: str, names: bool, data: str) -> None:
        number = self._hold(path) if names else self._number(name)
        if not stat.S_ISDIR(os.fstat(self._held[number]).st_mode):
            image.files[name] = self._data(number, name, data)
            return
        if name:
            image.folders.append(name)
        inside = os.listdir(path) if names else self.entries.get(number, {})
        for each in inside:
            self._gather(image, os.path.join(path, each), os.path.join(name, each), names, data)

    def _number(self, name: str) -> int:
        """The inode of a name by what is on the disk."""
        number = os.lstat(self.root).st_ino
        for part in Path(name).parts:
            number = self.entries[number][part]
        return number

    def _data(self, number: int, name: str, data: str) -> bytes:
        before = self.content.get(number, b"")
        if data == "lost":
            return before
        now = read(f"/proc/self/fd/{self._held[number]}")
        if data == "kept" or now == before:
            return now
        before = before[: len(now)].ljust(len(now), b"\0")
        pieces = []
        for start in range(0, len(now), SECTOR):
            new = (start // SECTOR + zlib.crc32(Path(name).suffix.encode())) % 2
            pieces.append((now if new else before)[start : start + SECTOR])
        return b"".join(pieces)


def read(path: str) -> bytes:
    with REAL["io.open"](path, "rb") as file:
        return file.read()


# -- processes -----------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a process ended: its exit code (negative: the signal) and its output."""

    code: int
    out: str
    err: str

    @property
    def traced(self) -> bool:
        return "Traceback" in self.err or "Traceback" in self.out


def in_child(work: Callable[[], Any], folder: Path, plan: Plan | None = None) -> Ended:
    """Fork, call `work` in `folder` and wait for it and all that it starts."""
    sys.stdout.flush()
    files = [os.memfd_create("out"), os.memfd_create("err")]
    over, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(over)
            os.setpgid(0, 0)
            code = child(work, folder, files, plan)
        finally:
            os._exit(code)
    os.close(held)
    _, status = os.waitpid(pid, 0)
    os.read(over, 1)  # returns when the last process that was started has ended
    os.close(over)
    texts = [os.pread(file, 1 << 24, 0).decode(errors="replace") for file in files]
    for file in files:
        os.close(file)
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def child(work: Callable[[], Any], folder: Path, files: list[int], plan: Plan | None) -> int:
    """In the forked process: the exit code of `work`."""
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)
    os.chdir(folder)
    code = 1
    try:
        if plan is not None:
            plan.begin()
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    if plan is not None:
        plan.end()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


class Forked:
    """In place of a process that the fork server starts: forked here, so that its operations count too."""

    def __init__(self, target: Callable[..., Any], *args: Any, daemon: bool = False) -> None:
        self._code: int | None = None
        self.sentinel, held = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                target(*args)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        REAL["close"](held)

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def join(self) -> None:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Inline(Forked):
    """In place of a process: a call in this one, for the model of a disk."""

    def __init__(self, target: Callable[..., Any], *args: Any, daemon: bool = False) -> None:
        from polytier.studies import run_queue

        assert target is run_queue.work
        self.pid, self._code = 0, run_queue.attempt(*args)
        self.sentinel, held = os.pipe()
        REAL["close"](held)
