"""A broker of MQTT as a process, with the settings that `polytier federation enrol broker/NAME` writes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from polytier.engines.network.keys import enrol
from polytier.engines.network.mqtt import write_broker_files

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
MOSQUITTO = shutil.which("mosquitto", path=PATH)
MISSING = "mosquitto is not installed (apt-get install mosquitto)"


class Mosquitto:
    """A running broker; use it in a `with` statement.

    Args:
        folder: Of the authority.
        host: Where it listens; a free port is taken.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder, self.host = folder / "broker-main", host
        if not self.folder.exists():
            enrol(folder, "broker/main")
        write_broker_files(self.folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        conf = self.folder / "mosquitto.conf"
        conf.write_text(conf.read_text().replace("listener 8883", f"listener {self.port} {host}") + "user root\n")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def via(self) -> str:
        return f"mqtts://{self.host}:{self.port}"

    def start(self) -> None:
        assert MOSQUITTO is not None
        with (self.folder / "log").open("ab") as out:
            self.process = subprocess.Popen(
                [MOSQUITTO, "-c", str(self.folder / "mosquitto.conf")], stdout=out, stderr=out
            )
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((self.host, self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < end, (self.folder / "log").read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Mosquitto:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
