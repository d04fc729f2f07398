"""A local web server that shows runs while they are training."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polytier.report.blocks import Text
from polytier.report.grouping import below
from polytier.report.page import render
from polytier.report.page_contents import page_of

HOST = "127.0.0.1"
FILES = ("config.toml", "metrics.jsonl", "summary.json")  # summary.json is written after all other files


class Watched:
    """The page of a folder, rendered again when files of its runs have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self._made: tuple[str, str] = ("", "")

    def version(self) -> str:
        """A text that changes with the files that runs write; never empty."""
        seen: list[Any] = []
        for run in below(self.folder):
            for path in (run / name for name in FILES):
                try:
                    stat = path.stat()
                except OSError:
                    continue  # not written yet
                seen.append((str(path), stat.st_size, stat.st_mtime_ns))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def page(self) -> str:
        """The current page."""
        with self._lock:
            version = self.version()
            if version != self._made[0]:
                self._made = (version, self._make(version))
            return self._made[1]

    def _make(self, version: str) -> str:
        """Render the page; while no run can be read, it shows the reason."""
        try:
            title, subtitle, blocks = page_of([self.folder])
        except (OSError, ValueError) as error:  # nothing there yet, or a file is just being written
            title, subtitle, blocks = str(self.folder), "waiting for a run", [Text(str(error))]
        return render(title, blocks, subtitle, version)


def serve(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, on this machine only.

    Args:
        folder: A run folder, or a folder that holds some.
        port: 0 for any free port.
        ready: Called with the address once the server listens.
    """
    watched = Watched(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/":
                self.answer(200, "text/html", watched.page())
            elif path == "/version":
                self.answer(200, "text/plain", watched.version())
            else:
                self.answer(404, "text/plain", "not found; the page is at /")

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
            """Log nothing: the page asks for its version every second."""

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
