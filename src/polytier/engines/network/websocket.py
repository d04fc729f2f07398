"""Links over WebSocket with TLS. Children dial out; a parent listens where it is told.

A link starts with messages about who is there:

    child   hello     the names that it speaks for, protocol and versions
    parent  welcome   the job; or refused, with advice
    child   ready     the sizes of its devices
    parent  world     the trees and sizes of the nodes that it speaks for, as soon as they are settled
    child   ready     it can be called; calls and answers follow
    parent  stop      the run is over
"""

from __future__ import annotations

import logging
import queue
import secrets
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polytier._errors import missing
from polytier._terminal import event
from polytier.engines.network.keys import REVOKED, peer, revoked, tls
from polytier.engines.network.message import Message, Refused, decode, encode

log = logging.getLogger("polytier")
PING, PONG = 15, 45  # seconds: slow links need long ones
FIRST_MESSAGE = 1 << 20  # largest hello in bytes
OPEN = 10  # seconds for a handshake, and for a hello
RETRY = (0.2, 5.0)  # seconds between attempts to dial, at first and at most
BAD_FRAMES = (1002, 1003, 1007, 1009)  # how a link is closed over which something else than a message came
BUSY = 64  # messages of a link that may wait
QUIET = logging.getLogger("polytier.websockets")  # what the library reports about single connections
QUIET.setLevel(logging.CRITICAL)


class Gate(Protocol):
    """What a parent does with those who dial."""

    largest: int

    def admit(self, certificate: str, hello: Message) -> Message:
        """Welcome a child; raises `Refused` with advice if it may not come."""
        ...

    def ready(self, names: list[str], message: Message) -> None:
        """Note what a child says of itself; raises `Refused`."""
        ...

    def world(self, names: list[str]) -> Message | None:
        """The world of a child; None if it is not settled yet."""
        ...


@dataclass
class Link:
    """A link to a child."""

    name: str
    certificate: str
    serial: int
    names: list[str]
    socket: Any
    callable: bool = False  # whether the child is ready for calls
    world_sent: bool = False
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    writer: threading.Thread | None = None  # a child that does not read must not hold up the others

    def send(self, data: bytes) -> None:
        """Send a message as soon as those before it are sent."""
        self.outbox.put(data)

    def start(self) -> None:
        """Start to send."""
        self.writer = threading.Thread(target=self._write, daemon=True)
        self.writer.start()

    def flush(self) -> None:
        """Send what waits, and nothing after it."""
        self.outbox.put(None)
        if self.writer is not None:
            self.writer.join(OPEN)

    def _write(self) -> None:
        while (data := self.outbox.get()) is not None:
            try:
                self.socket.send(data)
            except Exception:  # the reader of this link notices and reports it
                return


class WebSocketHub:
    """The links of a node to its children.

    Args:
        listen: HOST:PORT; port 0 takes a free one, which `address` then has.
        keys: Folder with the key and certificates of this node.
        gate: Who may come, and what they are told.
    """

    def __init__(self, listen: str, keys: Path, gate: Gate) -> None:
        try:
            from websockets.sync.server import serve
        except ImportError:
            raise missing("network") from None
        host, port = split_address(listen)
        self.gate, self._keys = gate, keys
        self._links: dict[str, Link] = {}
        self._by_name: dict[str, Link] = {}
        self._came: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._guard = threading.RLock()
        self._revoked: tuple[float, set[int]] = (0.0, set())
        self._tls = tls(keys, listens=True)
        self._stopped = False
        try:
            self._server = serve(
                self._follow,
                host,
                port,
                ssl=self._tls,
                compression=None,
                ping_interval=PING,
                ping_timeout=PONG,
                open_timeout=OPEN,
                max_size=gate.largest,
                max_queue=BUSY,
                server_header=None,
                logger=QUIET,
            )
        except OSError as error:
            raise ValueError(f"cannot listen at {listen}: {error.strerror or error}; give another HOST:PORT") from None
        self.address = "{}:{}".format(*self._server.socket.getsockname()[:2])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    # -- the four functions ---------------------------------------------------------------------------

    def ask(self, address: str, data: bytes) -> str | None:
        with self._guard:
            link = self._by_name.get(address)
        if link is None or not link.callable:
            return None
        if link.serial in self._revocations():
            self.forget(link.name, "its certificate was revoked")
            return None
        link.send(data)
        return link.name

    def wait(self, seconds: float) -> tuple[str, bytes | None] | None:
        try:
            return self._came.get(timeout=seconds) if seconds > 0 else self._came.get_nowait()
        except queue.Empty:
            return None

    def forget(self, link: str, why: str) -> None:
        with self._guard:
            found = self._links.get(link)
        if found is not None:
            log.warning("%s: link closed: %s", found.certificate, why, extra=event("closed", found.certificate))
            found.callable = False
            threading.Thread(target=found.socket.close, args=(1008, why[:60]), daemon=True).start()

    def link_of(self, address: str) -> str | None:
        with self._guard:
            link = self._by_name.get(address)
        return link.name if link is not None and link.callable else None

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    # -- links ---------------------------------------------------------------------------------------

    def send_worlds(self) -> None:
        """Tell everybody who is there what their world is; later ones are told when they come."""
        with self._guard:
            links = list(self._links.values())
        for link in links:
            try:
                self._send_world(link)
            except Refused as error:
                self.forget(link.name, str(error))

    def present(self) -> list[str]:
        """The addresses of all nodes that can be called now."""
        with self._guard:
            return sorted(name for name, link in self._by_name.items() if link.callable)

    def stop(self, text: str) -> None:
        """Tell all children that the run is over, and close."""
        self._stopped = True
        with self._guard:
            links = list(self._links.values())
        for link in links:
            link.send(encode(Message("stop", {"text": text[:1000]})))
        for link in links:
            link.flush()
        self.close()

    def close(self) -> None:
        """Close all links, and stop to listen."""
        self._server.shutdown()
        with self._guard:
            links = list(self._links.values())
        for link in links:
            link.socket.close()

    def _revocations(self) -> set[int]:
        path = self._keys / REVOKED
        changed = path.stat().st_mtime if path.exists() else 0.0
        if changed != self._revoked[0]:
            self._revoked = changed, revoked(path)
        return self._revoked[1]

    def _send_world(self, link: Link) -> None:
        with self._guard:
            world = None if link.world_sent else self.gate.world(link.names)
            link.world_sent = link.world_sent or world is not None
        if world is not None:
            link.send(encode(world))

    def _follow(self, socket: Any) -> None:
        """The thread of a link: it greets, then passes on what comes."""
        link: Link | None = None
        certificate, serial = peer(socket.socket)
        try:
            link = self._greet(socket, certificate, serial)
            while True:
                data = socket.recv()
                if link.callable:
                    self._came.put((link.name, data))
                    continue
                message = decode(data, self.gate.largest)
                if message.kind != "ready":
                    raise Refused(f"it sends a message {message.kind} before it is ready")
                if link.world_sent:
                    link.callable = True
                    log.info("%s is ready", ", ".join(link.names[:5]), extra=event("ready", link.certificate))
                else:
                    self.gate.ready(link.names, message)
                    self._send_world(link)
        except Refused as error:
            log.warning("%s was refused: %s", certificate, error, extra=event("refused", certificate))
            try:
                socket.send(encode(Message("refused", {"text": str(error)[:1000]})))
                socket.close(1008)
            except Exception as failed:
                log.debug("%s: %s", certificate, failed)
        except Exception as error:  # the link was closed, or lost
            ours = getattr(getattr(error, "sent", None), "code", 0) in BAD_FRAMES
            level, extra = logging.WARNING if ours else logging.DEBUG, event("lost", certificate)
            log.log(level, "%s: link lost: %s", certificate or "unknown", error, extra=extra)
        finally:
            if link is not None:
                self._drop(link)

    def _greet(self, socket: Any, certificate: str, serial: int) -> Link:
        if serial in self._revocations():
            raise Refused("its certificate was revoked")
        hello = decode(socket.recv(timeout=OPEN), FIRST_MESSAGE)
        if hello.kind != "hello":
            raise Refused(f"it begins with a message {hello.kind}")
        welcome = self.gate.admit(certificate, hello)
        link = Link(secrets.token_hex(8), certificate, serial, hello.fact("names", list), socket)
        with self._guard:
            before = {self._by_name[name].name: self._by_name[name] for name in link.names if name in self._by_name}
            self._links[link.name] = link
            self._by_name |= dict.fromkeys(link.names, link)
        for old in before.values():  # the newest link of a node counts
            old.callable = False
            threading.Thread(target=old.socket.close, daemon=True).start()
        link.start()
        link.send(encode(welcome))
        return link

    def _drop(self, link: Link) -> None:
        link.outbox.put(None)
        with self._guard:
            self._links.pop(link.name, None)
            for name in link.names:
                if self._by_name.get(name) is link:
                    del self._by_name[name]
        self._came.put((link.name, None))
        if not self._stopped:
            log.info("%s has gone", ", ".join(link.names[:5]), extra=event("gone", link.certificate))


# -- the side that dials ------------------------------------------------------------------------------


class Uplink:
    """The link of a node, or of several, to their parent. It dials again whenever it is lost.

    Args:
        parent: HOST:PORT.
        keys: Folder with the key and certificates of this node.
        hello: What to say first.
        largest: Largest message in bytes.
    """

    def __init__(self, parent: str, keys: Path, hello: Message, largest: int) -> None:
        self.parent, self.hello, self.largest = parent, hello, largest
        self._tls = tls(keys, listens=False)
        self._host, self._port = split_address(parent)
        self._came: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._waiting: dict[str, int] = {}  # by node: the number of the newest question
        self._seen: set[int] = set()  # numbers of all questions over this link
        self._socket: Any = None
        self._turn = 0  # counts the links
        self.sent = self.received = 0  # bytes of messages
        self.ended: Exception | str | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def next(self) -> tuple[int, Message] | None:
        """A message of the parent, with the number of its link; None when the run is over.

        Questions to a node that has been asked something else since are left out.

        Raises:
            ValueError: The parent refused this node.
        """
        while True:
            try:
                turn, message = self._came.get(timeout=0.2)
            except queue.Empty:
                if isinstance(self.ended, Exception):
                    raise self.ended from None
                if self.ended is not None:
                    return None
                continue
            if not self.is_old(turn, message):
                return turn, message

    def answer(self, turn: int, data: bytes) -> None:
        """Send an answer, unless its question came over an earlier link."""
        socket = self._socket
        if socket is not None and turn == self._turn:
            try:
                socket.send(data)
                self.sent += len(data)
            except Exception as error:
                log.debug("an answer could not be sent: %s", error)

    @property
    def linked(self) -> bool:
        """Whether there is a link now."""
        return self._socket is not None

    def is_old(self, turn: int, message: Message) -> bool:
        """Whether a message no longer counts: its link is gone, or the node has been asked something else since."""
        newest = self._waiting.get(message.facts.get("node", ""))
        newer = message.kind in ("call", "measure") and newest != message.facts.get("number")
        return newer or turn != self._turn or self._socket is None

    def cut(self, why: str) -> None:
        """Close the link, because what came over it is not valid; it dials again."""
        log.warning("the parent at %s: %s; the link is closed", self.parent, why, extra=event("closed", self.parent))
        socket = self._socket
        if socket is not None:
            socket.close(1008, why[:60])

    def close(self) -> None:
        """Close the link for good."""
        self.ended = self.ended or "closed"
        socket = self._socket
        if socket is not None:
            socket.close()

    def _keep(self) -> None:
        pause, told = RETRY[0], False
        while self.ended is None:
            try:
                self._dial()
                pause, told = RETRY[0], False
            except ssl.SSLCertVerificationError as error:
                self.ended = ValueError(
                    f"the parent at {self.parent} has no certificate of this federation ({error.verify_message}); "
                    "check the address and ca.pem"
                )
            except Refused as error:
                extra = event("closed", self.parent)
                log.warning("the parent at %s: %s; the link is closed", self.parent, error, extra=extra)
            except Exception as error:
                if not told:
                    why, extra = error or type(error).__name__, event("unreachable", self.parent)
                    log.info("no link to %s (%s); trying again", self.parent, why, extra=extra)
                    told = True
            self._socket = None
            time.sleep(pause)
            pause = min(2 * pause, RETRY[1])

    def _dial(self) -> None:
        from websockets.sync.client import connect

        address = f"wss://{self._host}:{self._port}/"
        quiet: Any = {"compression": None, "user_agent_header": None, "proxy": None, "logger": QUIET}
        with connect(
            address,
            ssl=self._tls,
            open_timeout=OPEN,
            ping_interval=PING,
            ping_timeout=PONG,
            max_size=self.largest,
            max_queue=BUSY,
            **quiet,
        ) as socket:
            name = peer(socket.socket)[0]
            if name.partition("/")[0].rstrip("0123456789") not in ("server", "team"):
                raise Refused(f"its certificate is that of {name!r}, which is neither a server nor a team")
            self._waiting, self._seen = {}, set()
            self._turn += 1
            self._socket = socket
            socket.send(encode(self.hello))
            for data in socket:
                self.received += len(data)
                self._take(decode(data, self.largest))
                if self.ended is not None:
                    return

    def _take(self, message: Message) -> None:
        if message.kind == "stop":
            self.ended = str(message.facts.get("text"))[:1000]
        elif message.kind == "refused":
            text = str(message.facts.get("text"))[:1000]
            self.ended = ValueError(f"the parent at {self.parent} refused this node: {text}")
        elif message.kind in ("welcome", "world"):
            self._came.put((self._turn, message))
        elif message.kind in ("call", "measure"):
            name, number = message.fact("node", str), message.whole("number", least=1)
            if number in self._seen:
                raise Refused("it sends a message a second time")
            self._seen.add(number)
            self._waiting[name] = number
            self._came.put((self._turn, message))
        else:
            raise Refused(f"it sends a message {message.kind}")


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        ValueError: It is no such text.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is no address; give HOST:PORT, such as 127.0.0.1:8750")
    return host.strip("[]"), int(port)
