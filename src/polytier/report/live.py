"""The page of runs that go on, served on this machine alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polytier.report.blocks import Text
from polytier.report.page import render
from polytier.report.runs import below
from polytier.report.study import page_of

HOST = "127.0.0.1"
FILES = ("config.toml", "metrics.jsonl", "summary.json")  # the last one is written when all else is there


class Watched:
    """The page of a folder, made anew when its runs have moved on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self._made: tuple[str, str] = ("", "")

    def version(self) -> str:
        """Changes with the files that runs write; never empty."""
        seen: list[Any] = []
        for run in below(self.folder):
            for path in (run / name for name in FILES):
                try:
                    stat = path.stat()
                except OSError:
                    continue  # not there yet
                seen.append((str(path), stat.st_size, stat.st_mtime_ns))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def page(self) -> str:
        with self._lock:
            version = self.version()
            if version != self._made[0]:
                self._made = (version, self._make(version))
            return self._made[1]

    def _make(self, version: str) -> str:
        try:
            title, subtitle, blocks = page_of([self.folder])
        except (OSError, ValueError) as error:  # nothing there yet, or a file is just being written
            title, subtitle, blocks = str(self.folder), "waiting for a run", [Text(str(error))]
        return render(title, blocks, subtitle, version)


def serve(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Until Ctrl-C; `ready` is told the address."""
    watched = Watched(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/":
                self.answer(200, "text/html", watched.page())
            elif path == "/version":
                self.answer(200, "text/plain", watched.version())
            else:
                self.answer(404, "text/plain", "there is nothing here; the page is /")

        def answer(self, code: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with suppress(ConnectionError):  # the page was closed meanwhile
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Every look of the page would be a line."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ValueError(f"port {port} is not free ({error.strerror}); try --port {port + 1}, or --port 0") from None
    with server:
        ready(f"http://{HOST}:{server.server_address[1]}/")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return
