"""Nodes as processes in network namespaces: each has an address, a folder and, where possible, a user of its own.

Where namespaces are not allowed, all nodes are on the loopback interface and have the user of the caller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

PREFIX = f"pt{os.getpid()}-"  # of the namespaces of this process
BRIDGE = f"{PREFIX}switch"
FIRST_USER = 20000
SOURCE = str(Path(__file__).parents[2] / "src")


def quiet(*words: str) -> bool:
    """Run a command of the system; returns whether it succeeded."""
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    return False


def allowed() -> bool:
    """Whether namespaces and links between them can be made here."""
    if os.geteuid() != 0 or not quiet("ip", "netns", "add", f"{PREFIX}try"):
        return False
    works = quiet("ip", "-n", f"{PREFIX}try", "link", "add", "ve0", "type", "veth", "peer", "name", "ve1")
    quiet("ip", "netns", "del", f"{PREFIX}try")
    return works


class Spaces:
    """A switch and one namespace per node; use it in a `with` statement.

    Args:
        folder: Under which every node gets a folder.
        names: The nodes; a broker may be one of them.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names, self.real = folder, names, allowed()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.number = {name: k + 1 for k, name in enumerate(names)}
        self._wire: subprocess.Popen[bytes] | None = None
        self.users, self.python = False, sys.executable
        self.packages = ""
        for name in names:
            self.home(name).mkdir(parents=True, exist_ok=True)
        if self.real:
            self._connect()
            self.users = self._can_drop(names[0])

    def _connect(self) -> None:
        self._remove()
        quiet("ip", "netns", "add", BRIDGE)
        quiet("ip", "-n", BRIDGE, "link", "add", "br0", "type", "bridge")
        quiet("ip", "-n", BRIDGE, "link", "set", "br0", "up")
        for name, k in self.number.items():
            space = f"{PREFIX}{k}"
            quiet("ip", "netns", "add", space)
            quiet("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"v{k}", "netns", BRIDGE)
            quiet("ip", "-n", BRIDGE, "link", "set", f"v{k}", "master", "br0", "up")
            quiet("ip", "-n", space, "addr", "add", f"{self.host(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                quiet("ip", "-n", space, "link", "set", device, "up")

    def _can_drop(self, name: str) -> bool:
        """Whether another user can run this Python, or one of the system with the same packages.

        The files of this Python may be in a folder that is closed to others.
        """
        packages = sysconfig.get_paths()["purelib"]
        same = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        for self.python, self.packages in ((sys.executable, ""), (same, f":{packages}")):
            if quiet(*self._prefix(name, True), self.python, "-c", "import polytier, torch"):
                return True
        self.python, self.packages = sys.executable, ""
        return False

    def _remove(self) -> None:
        for space in (BRIDGE, *(f"{PREFIX}{k}" for k in self.number.values())):
            quiet("ip", "netns", "del", space)

    def home(self, name: str) -> Path:
        return self.folder / name.replace("/", "-")

    def host(self, name: str) -> str:
        return f"10.77.0.{self.number[name]}" if self.real else "127.0.0.1"

    def user(self, name: str) -> int:
        return FIRST_USER + self.number[name] if self.users else os.geteuid()

    def own(self) -> None:
        """Give every node its folder, which nobody else may open."""
        for name in self.names:
            for path in (self.home(name), *self.home(name).rglob("*")):
                os.chown(path, self.user(name), self.user(name) if self.users else -1, follow_symlinks=False)
            self.home(name).chmod(0o700)

    def _prefix(self, name: str, drop: bool) -> list[str]:
        words = ["ip", "netns", "exec", f"{PREFIX}{self.number[name]}"] if self.real else []
        if drop:
            user = str(FIRST_USER + self.number[name])
            words += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
        settings = {
            "PYTHONPATH": SOURCE + self.packages,
            "HOME": "/nonexistent",
            "USER": "node",
            "OMP_NUM_THREADS": "1",
        }
        return [*words, "env", "PYTHONDONTWRITEBYTECODE=1", *(f"{k}={v}" for k, v in settings.items())]

    def start(self, name: str, *words: str) -> None:
        """Start a command in the folder of a node; its output goes to FOLDER/log."""
        home = self.home(name)
        with (home / "log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [*self._prefix(name, self.users), *words], cwd=home, stdout=out, stderr=out
            )

    def run(self, name: str, *words: str) -> Any:
        """Run a command as a node, and wait for it."""
        return subprocess.run(
            [*self._prefix(name, self.users), *words], capture_output=True, text=True, check=False, timeout=60
        )

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def link(self, name: str, up: bool) -> None:
        """Cut the cable of a node, or put it back."""
        quiet("ip", "-n", BRIDGE, "link", "set", f"v{self.number[name]}", "up" if up else "down")

    def slow(self, name: str) -> bool:
        """Give a node a slow cable (see `wire.py`); returns whether that is possible."""
        if not self.real or not Path("/dev/net/tun").exists():
            return False
        space, ends = f"{PREFIX}{self.number[name]}", ("ptwire0", "ptwire1")
        self._wire = subprocess.Popen([sys.executable, "-m", "network_full.wire", *ends])
        while not all((Path("/sys/class/net") / end).exists() for end in ends):
            assert self._wire.poll() is None, "the cable cannot be made"
            time.sleep(0.05)
        quiet("ip", "-n", space, "link", "del", "eth0")
        for end, where in zip(ends, (BRIDGE, space), strict=True):
            quiet("ip", "link", "set", end, "netns", where)
        quiet("ip", "-n", BRIDGE, "link", "set", ends[0], "master", "br0", "up")
        quiet("ip", "-n", space, "link", "set", ends[1], "name", "eth0")
        quiet("ip", "-n", space, "addr", "add", f"{self.host(name)}/24", "dev", "eth0")
        return quiet("ip", "-n", space, "link", "set", "eth0", "up")

    def capture(self, path: Path) -> subprocess.Popen[bytes]:
        """Write everything that passes the switch to a file."""
        words = ["ip", "netns", "exec", BRIDGE] if self.real else []
        device = "br0" if self.real else "lo"
        return subprocess.Popen(
            [*words, "tcpdump", "-i", device, "-U", "-w", str(path), "-Z", "root", "tcp"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Spaces:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.send(name, signal.SIGCONT)
            self.kill(name)
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        if self.real:
            self._remove()
