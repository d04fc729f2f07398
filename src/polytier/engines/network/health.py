"""How a node is: /healthz, and /metrics for Prometheus, on a port of their own.

Both are plain HTTP without a password. They say names of nodes and numbers, nothing of samples or models. `--health`
binds where it is told: give an address that only the monitoring can reach.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from polytier._terminal import event
from polytier.engines.network.websocket import split_address

log = logging.getLogger("polytier")
SLOW = 10  # seconds for a request


def nobody() -> Collection[str]:
    """The children of a node that has none."""
    return ()


@dataclass
class Vitals:
    """What a node says of itself. The node writes it, and threads that answer requests read it.

    Args:
        node: Its address.
        children: Whether it is the parent of others.
        round: The last round that it took part in.
        seconds: How long that took: a round at the server, the last call at other nodes.
        saved: When its rows were last written to files (`time.time()`); None: not yet.
        expected: Number of its children in the tree of the run.
        absences: Lines of absences.csv at the server; at a team those of its last call.
        traffic: Bytes of messages, by the address of the other node and way ("down", "up").
        present: The children that can be called now.
        linked: Whether there is a link to the parent.
    """

    node: str
    children: bool = False
    round: int = 0
    seconds: float = 0.0
    saved: float | None = None
    expected: int = 0
    absences: int = 0
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    present: Callable[[], Collection[str]] = nobody
    linked: Callable[[], bool] = lambda: True

    @property
    def age(self) -> float | None:
        """Seconds since rows were last written."""
        return None if self.saved is None else max(0.0, time.time() - self.saved)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether this node can work (it has a link to its parent), and how it is."""
        linked, about = self.linked(), {"node": self.node, "round": self.round, "checkpoint_age": self.age}
        if self.children:
            present = sorted(self.present())
            about |= {"present": present, "absent": max(0, self.expected - len(present))}
        return linked, {"status": "ok" if linked else "no link to the parent", **about}

    def metrics(self) -> str:
        """The text that Prometheus reads."""
        lines = Metrics(self.node)
        lines.add("polytier_linked", "gauge", "1 if there is a link to the parent.", int(self.linked()))
        lines.add("polytier_round", "gauge", "The last round.", self.round)
        lines.add("polytier_round_seconds", "gauge", "Seconds of the last round, or call.", self.seconds)
        if self.children:
            there = len(self.present())
            lines.add("polytier_children_present", "gauge", "Children that can be called.", there)
            lines.add("polytier_children_absent", "gauge", "The other children.", max(0, self.expected - there))
            lines.add("polytier_absences", "gauge", "Calls that were not answered.", self.absences)
        if (age := self.age) is not None:
            lines.add("polytier_checkpoint_age_seconds", "gauge", "Seconds since rows were last written.", age)
        for (peer, way), size in sorted(dict(self.traffic).items()):
            text = "Bytes of messages by link."
            lines.add("polytier_link_bytes_total", "counter", text, size, peer=peer, way=way)
        return str(lines)


class Metrics:
    """Lines in the text format of Prometheus; every line names the node."""

    def __init__(self, node: str) -> None:
        self.node, self._lines, self._known = node, [], set()

    def add(self, name: str, kind: str, text: str, value: float, **labels: str) -> None:
        """Add a value; the first one of a name is preceded by what it means."""
        if name not in self._known:
            self._known.add(name)
            self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        marks = ",".join(f'{key}="{escaped(word)}"' for key, word in {"node": self.node, **labels}.items())
        self._lines.append(f"{name}{{{marks}}} {value}")

    def __str__(self) -> str:
        return "\n".join([*self._lines, ""])


def escaped(text: str) -> str:
    """A text between the quotes of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Handler(BaseHTTPRequestHandler):
    """Answers /healthz (200, or 503 without a link to the parent) and /metrics."""

    vitals: Vitals
    timeout = SLOW
    server_version, sys_version = "polytier", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            fine, about = self.vitals.health()
            self._answer(200 if fine else 503, json.dumps(about) + "\n", "application/json")
        elif path == "/metrics":
            self._answer(200, self.vitals.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._answer(404, "there are /healthz and /metrics\n", "text/plain")

    do_HEAD = do_GET

    def _answer(self, code: int, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: monitoring asks every few seconds."""


class QuietServer(ThreadingHTTPServer):
    """A server whose log has no lines about clients that went away."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for the health of this node failed", exc_info=True)


@contextmanager
def answering(listen: str | None, vitals: Vitals) -> Iterator[None]:
    """Answer requests inside this context; nothing if `listen` is None.

    Raises:
        ValueError: The address is none, or not free.
    """
    if listen is None:
        yield
        return
    try:
        server = QuietServer(split_address(listen), type("Own", (Handler,), {"vitals": vitals}))
    except OSError as error:
        raise ValueError(f"--health {listen}: {error.strerror or error}; give another HOST:PORT") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    log.info("health at %s:%d", *server.server_address[:2], extra=event("health"))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
