"""A local web server that shows runs while they are training."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polytier.report.blocks import Text
from polytier.report.grouping import below
from polytier.report.page import POLICY, render
from polytier.report.page_contents import page_of
from polytier.runs.read_files import PRESENT

HOST = "127.0.0.1"
NAMES = (HOST, "localhost", "[::1]")  # what a browser on this machine calls it
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = ("config.toml", "metrics.jsonl", PRESENT, "summary.json")  # summary.json is written after all other files


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
            title, subtitle, blocks = page_of([self.folder], live=True)
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
    with make_server(folder, port) as server:
        # not KeyboardInterrupt: raised inside a callback of the garbage collector, it would be lost
        before = signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=server.shutdown).start())
        try:
            ready(f"http://{HOST}:{server.server_address[1]}/")
            server.serve_forever(poll_interval=0.2)
        finally:
            signal.signal(signal.SIGINT, before)


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """The server of the page of a folder. It listens; the caller lets it answer."""
    handler = type("PageHandler", (Handler,), {"watched": Watched(folder)})
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise ValueError(f"port {port} is not free ({error.strerror}); try --port {port + 1}, or --port 0") from None


class Handler(BaseHTTPRequestHandler):
    """Answers requests that name this machine; a page of another site cannot read the answers.

    A site may let its own name resolve to 127.0.0.1 (DNS rebinding). Requests of its pages then arrive here, with that
    name as `Host`, and are refused.
    """

    watched: Watched
    server_version, sys_version = "polytier", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if refusal := self.refusal():
            self.answer(*refusal)
        elif path == "/":
            self.answer(200, self.watched.page(), "text/html")
        elif path == "/version":
            self.answer(200, self.watched.version())
        else:
            self.answer(404, "there is nothing here; the page is /")

    do_HEAD = do_GET

    def not_allowed(self) -> None:
        self.answer(405, "this server answers GET and HEAD", allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = not_allowed

    def refusal(self) -> tuple[int, str] | None:
        """The code and the text for a request that comes from elsewhere."""
        port = self.server.server_address[1]  # type: ignore[misc]
        hosts = [f"{name}:{port}" for name in NAMES] + (list(NAMES) if port == 80 else [])
        host = [value.lower() for value in self.headers.get_all("Host", [])]
        if len(host) != 1 or host[0] not in hosts:
            return 421, f"this server does not answer for that host; open http://{HOST}:{port}/"
        if any(value.lower() != f"http://{host[0]}" for value in self.headers.get_all("Origin", [])):
            return 403, f"pages of other sites are not answered; open http://{HOST}:{port}/"
        return None

    def answer(self, code: int, text: str, kind: str = "text/plain", allow: str = "") -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the page was closed meanwhile
                self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page asks for its version every second."""
