"""Links between nodes, whatever carries them: who is let in, and what they are told.

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
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polytier._terminal import event
from polytier.engines.network.keys import Revocations
from polytier.engines.network.message import Message, Refused, buffers, decode

log = logging.getLogger("polytier")
FIRST_MESSAGE = 1 << 20  # largest hello in bytes
OPEN = 10  # seconds for a handshake, and for a hello
COUNTS = "counts"  # what a child says first when it is ready
RETRY = (0.2, 5.0)  # seconds between attempts to dial, at first and at most


class Closed(Exception):
    """A link has ended."""


class Socket(Protocol):
    """One side of a link: what a transport provides.

    Attributes:
        peer: The name and the serial number in the certificate of the other side.
    """

    peer: tuple[str, int]

    def send(self, pieces: list[memoryview]) -> None:
        """Send a message, given in pieces; raises `Closed`."""
        ...

    def receive(self, timeout: float | None = None) -> bytearray:
        """Wait for a message; raises `Closed`, or `Refused` if something else came."""
        ...

    def close(self, why: str = "") -> None:
        """Close the link; returns at once."""
        ...


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
    socket: Socket
    callable: bool = False  # whether the child is ready for calls
    counted: bool = False  # whether it has told the sizes of its devices
    world_sent: bool = False
    cut: bool = False  # whether this side has closed it
    outbox: queue.SimpleQueue[list[memoryview] | None] = field(default_factory=queue.SimpleQueue)
    writer: threading.Thread | None = None  # a child that does not read must not hold up the others

    def send(self, message: Message) -> int:
        """Send a message as soon as those before it are sent; returns its bytes."""
        pieces = buffers(message)
        self.outbox.put(pieces)
        return sum(map(len, pieces))

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
        while (pieces := self.outbox.get()) is not None:
            try:
                self.socket.send(pieces)
            except Exception:  # the reader of this link notices and reports it
                return


class LinkHub:
    """The links of a node to its children. A subclass accepts them and calls `follow` in a thread for each.

    Args:
        keys: Folder with the key and certificates of this node.
        gate: Who may come, and what they are told.
    """

    address: str  # where children can reach this node

    def __init__(self, keys: Path, gate: Gate) -> None:
        self.gate, self._keys = gate, keys
        self._links: dict[str, Link] = {}
        self._by_name: dict[str, Link] = {}
        self._came: queue.SimpleQueue[tuple[str, bytearray | None]] = queue.SimpleQueue()
        self._guard = threading.RLock()
        self._revoked = Revocations(keys)
        self.traffic: Counter[tuple[str, str]] = Counter()  # bytes of messages by certificate and way ("down", "up")
        self._stopped = False

    def _shut(self) -> None:
        """Accept no more links, and close those that are open."""
        raise NotImplementedError

    # -- the functions of a hub -----------------------------------------------------------------------

    def ask(self, address: str, message: Message) -> str | None:
        with self._guard:
            link = self._by_name.get(address)
        if link is None or not link.callable:
            return None
        if link.serial in self._revoked:
            self.forget(link.name, "its certificate was revoked")
            return None
        self.traffic[link.certificate, "down"] += link.send(message)
        return link.name

    def wait(self, seconds: float) -> tuple[str, bytearray | None] | None:
        try:
            return self._came.get(timeout=seconds) if seconds > 0 else self._came.get_nowait()
        except queue.Empty:
            return None

    def forget(self, link: str, why: str) -> None:
        with self._guard:
            found = self._links.get(link)
        if found is not None and not found.cut:
            log.warning("%s: %s; its link is closed", found.certificate, why, extra=event("closed", found.certificate))
            found.callable, found.cut = False, True
            found.socket.close(why)

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
            link.send(Message("stop", {"text": text[:1000]}))
        for link in links:
            link.flush()
        self.close()

    def close(self) -> None:
        """Close all links, and accept no more."""
        self._stopped = True
        self._shut()

    def _send_world(self, link: Link) -> None:
        with self._guard:
            world = self.gate.world(link.names) if link.counted and not link.world_sent else None
            link.world_sent = link.world_sent or world is not None
        if world is not None:
            link.send(world)

    def follow(self, socket: Socket) -> None:
        """The thread of a link: it greets, then passes on what comes."""
        link: Link | None = None
        certificate = socket.peer[0]
        try:
            link = self._greet(socket)
            while True:
                data = socket.receive()
                self.traffic[certificate, "up"] += len(data)
                if link.callable:
                    self._came.put((link.name, data))
                else:
                    self._prepare(link, decode(data, self.gate.largest))
        except Refused as error:
            self._refuse(socket, link, error)
        except Exception as error:  # the link was closed, or lost
            log.debug("%s: link lost: %s", certificate or "unknown", error or type(error).__name__)
        finally:
            if link is not None:
                self._drop(link)
            socket.close()

    def _prepare(self, link: Link, message: Message) -> None:
        """Take a message of a child that cannot be called yet."""
        if message.kind != "ready":
            raise Refused(f"it sends a message {message.kind} before it is ready")
        if COUNTS in message.tensors:  # a team may count again, when more of its devices have come
            self.gate.ready(link.names, message)
            link.counted = True
            self._send_world(link)
        elif link.world_sent:
            link.callable = True
            log.info("%s is ready", ", ".join(link.names[:5]), extra=event("ready", link.certificate))
        else:
            raise Refused("it is ready, and does not count its samples")

    def _refuse(self, socket: Socket, link: Link | None, error: Refused) -> None:
        """Tell a child why its link is closed."""
        log.warning("%s was refused: %s", socket.peer[0] or "unknown", error, extra=event("refused", socket.peer[0]))
        message = Message("refused", {"text": str(error)[:1000]})
        try:
            if link is None:
                socket.send(buffers(message))
            else:
                link.send(message)
                link.flush()
        except Exception as failed:
            log.debug("%s: %s", socket.peer[0], failed)

    def _greet(self, socket: Socket) -> Link:
        certificate, serial = socket.peer
        if serial in self._revoked:
            raise Refused("its certificate was revoked")
        hello = decode(socket.receive(OPEN), FIRST_MESSAGE)
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
            old.socket.close("another link of this node")
        link.start()
        link.send(welcome)
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
    """The link of a node, or of several, to their parent. It dials again whenever it is lost. A subclass opens it.

    Args:
        parent: Where the parent is.
        keys: Folder with the key and certificates of this node.
        hello: What to say first.
        largest: Largest message in bytes.
    """

    def __init__(self, parent: str, keys: Path, hello: Message, largest: int) -> None:
        self.parent, self.hello, self.largest = parent, hello, largest
        self._keys, self._revoked = keys, Revocations(keys)
        self._came: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._waiting: dict[str, int] = {}  # by node: the number of the newest question
        self._seen: set[int] = set()  # numbers of all questions over this link
        self._socket: Socket | None = None
        self._turn = 0  # counts the links
        self.sent = self.received = 0  # bytes of messages
        self.ended: Exception | str | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _open(self) -> AbstractContextManager[Socket]:
        """A link to the parent."""
        raise NotImplementedError

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

    def answer(self, turn: int, message: Message) -> None:
        """Send an answer, unless its question came over an earlier link."""
        socket, pieces = self._socket, buffers(message)
        if socket is not None and turn == self._turn:
            try:
                socket.send(pieces)
                self.sent += sum(map(len, pieces))
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
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(why)

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
                if self._turn and self._socket is not None:
                    pause, told = RETRY[0], False
                if not told and self.ended is None:
                    why, extra = error or type(error).__name__, event("unreachable", self.parent)
                    log.info("no link to %s (%s); trying again", self.parent, why, extra=extra)
                    told = True
            self._socket = None
            if self.ended is None:
                time.sleep(pause)
            pause = min(2 * pause, RETRY[1])

    def _dial(self) -> None:
        with self._open() as socket:
            name, serial = socket.peer
            if serial in self._revoked:
                raise Refused("its certificate was revoked")
            if name.partition("/")[0].rstrip("0123456789") not in ("server", "team"):
                raise Refused(f"its certificate is that of {name!r}, which is neither a server nor a team")
            self._waiting, self._seen = {}, set()
            self._turn += 1
            self._socket = socket
            socket.send(buffers(self.hello))
            while self.ended is None:
                data = socket.receive()
                self.received += len(data)
                self._take(decode(data, self.largest))

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
