"""Links over an MQTT broker. All nodes dial the broker; a parent needs no address of its own.

What node A sends to its parent B has the topic polytier/from/A/up/B/LINK, in which LINK is chosen by the child. Names
are those of certificates, such as device/ann, so a broker can let every node write under its own name alone and read
what is for it alone: see `ACL`. What travels under these topics is a TLS connection of the two nodes, with the same
certificates as over WebSocket: the broker sees who talks to whom and how much, and both ends check certificates.

    polytier/from/CHILD/up/PARENT/LINK      pieces of the TLS connection; an empty piece, also as last will, closes it
    polytier/from/PARENT/down/CHILD/LINK    the same in the other direction
    polytier/from/NODE/alive                nobody reads it: the answer to a ping waits behind a large message
    polytier/from/PARENT/all                retained: who listens (a number chosen at its start); with "-" as last will
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket as sockets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from polytier._errors import missing
from polytier.engines.network.keys import certificate_name, peer, tls
from polytier.engines.network.links import OPEN, RETRY, Closed, Gate, LinkHub, Socket, Uplink
from polytier.engines.network.message import Message, Refused, chunks
from polytier.engines.network.transport import MQTT
from polytier.engines.network.websocket import split_address

log = logging.getLogger("polytier")
ROOT = "polytier/from"
KEEPALIVE = 45  # seconds; a broker that hears nothing for one and a half times as long sends the last will
QOS = 1  # of who listens and of last wills
PIECES = 0  # of pieces: one that is lost or comes twice ends the TLS connection, and the child dials again
WINDOW = 8  # pieces of one link that wait to be written
HANDSHAKE = b"\x16"  # how the first piece of a TLS connection begins; later ones of a link that was closed are left out
RECORDS = 64 << 10  # bytes that are decrypted at a time
CONF = """# Settings of the broker mosquitto for a federation; start it by: mosquitto -c {folder}/mosquitto.conf
listener 8883
cafile {folder}/ca.pem
certfile {folder}/cert.pem
keyfile {folder}/key.pem
tls_version tlsv1.3
require_certificate true
use_identity_as_username true
allow_anonymous false
acl_file {folder}/acl
set_tcp_nodelay true
persistence false
max_queued_messages 0
"""
ACL = """# A node writes under its own name, and reads what is for it or for all. %u is the name in its certificate.
pattern write polytier/from/%u/#
pattern read polytier/from/+/up/%u/+
pattern read polytier/from/+/+/up/%u/+
pattern read polytier/from/+/down/%u/+
pattern read polytier/from/+/+/down/%u/+
pattern read polytier/from/+/all
pattern read polytier/from/+/+/all
"""


def write_broker_files(folder: Path) -> None:
    """Write the settings and the access list of a broker into the folder with its key."""
    (folder / "mosquitto.conf").write_text(CONF.format(folder=folder.absolute()))
    (folder / "acl").write_text(ACL)


class Broker:
    """A connection to a broker.

    Args:
        via: mqtts://HOST:PORT.
        keys: Folder with the key and certificates of this node.
        will: Topic and content of the last will.
        came: Called with topic and content of everything that comes.
        lost: Called when the connection has ended.

    Raises:
        Closed: The broker does not let this node in.
    """

    def __init__(
        self,
        via: str,
        keys: Path,
        will: tuple[str, bytes],
        came: Callable[[str, bytes], None],
        lost: Callable[[], None],
    ) -> None:
        try:
            from paho.mqtt.client import Client
            from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
        except ImportError:
            raise missing("mqtt") from None
        host, port = split_address(via.removeprefix(MQTT))
        self.lost, self._answered = threading.Event(), queue.SimpleQueue()
        settings: Any = {"protocol": MQTTProtocolVersion.MQTTv5, "reconnect_on_failure": False}
        self._client = client = Client(CallbackAPIVersion.VERSION2, secrets.token_hex(8), **settings)
        client.tls_set_context(tls(keys, listens=False))
        client.tls_insecure_set(True)  # the name in the certificate is checked below
        client.will_set(*will, qos=QOS, retain=True)
        client.on_socket_open = lambda c, u, s: no_delay(s)
        alive, last = f"{ROOT}/{certificate_name(keys)}/alive", time.monotonic()

        def on_message(_client: Any, _data: Any, message: Any) -> None:
            nonlocal last
            if time.monotonic() - last > KEEPALIVE / 3:  # so that no ping is needed while much comes in
                last = time.monotonic()
                client.publish(alive, b"", qos=PIECES)
            came(message.topic, message.payload)

        client.on_message = on_message
        client.on_connect = lambda c, u, flags, reason, properties: self._answered.put([reason])
        client.on_subscribe = lambda c, u, mid, reasons, properties: self._answered.put(reasons)

        def on_disconnect(*_: Any) -> None:
            self._answered.put([])
            if not self.lost.is_set():
                self.lost.set()
                lost()

        client.on_disconnect = on_disconnect
        client.connect(host, port, keepalive=KEEPALIVE)
        name = peer(client.socket())[0]
        client.loop_start()
        try:
            self._check("connect")
            if name.partition("/")[0] != "broker":
                raise Closed(f"{via} has the certificate of {name!r}, which is no broker")
        except Closed:
            self.close()
            raise

    def _check(self, what: str) -> None:
        """Wait for the answer of the broker."""
        try:
            reasons = self._answered.get(timeout=OPEN)
        except queue.Empty:
            raise Closed("the broker does not answer") from None
        bad = [str(reason) for reason in reasons if reason.is_failure]
        if bad or not reasons:
            raise Closed(f"the broker does not let this node {what} ({', '.join(bad) or 'the link was lost'})")

    def subscribe(self, *topics: str) -> None:
        """Ask for everything with these topics."""
        self._client.subscribe([(topic, QOS) for topic in topics])  # type: ignore[arg-type]
        self._check("subscribe")

    def publish(self, topic: str, data: bytes, retain: bool = False) -> Any:
        """Send something."""
        return self._client.publish(topic, data, qos=QOS if retain else PIECES, retain=retain)

    def sent(self, information: Any) -> None:
        """Wait until something that was published is written (retained: until the broker has it); raises `Closed`."""
        try:
            while not information.is_published():
                if self.lost.is_set():
                    raise Closed("the broker has gone")
                information.wait_for_publish(1.0)
        except (RuntimeError, ValueError) as error:  # it was published without a connection
            raise Closed(str(error)) from None

    def close(self) -> None:
        """End the connection."""
        self.lost.set()
        self._client.disconnect()
        self._client.loop_stop()


def no_delay(socket: Any) -> None:
    """Send small pieces at once."""
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)


class Tunnel:
    """One side of a link: a TLS connection in pieces that a broker carries. A message is its length and its bytes.

    Args:
        broker: That carries it.
        to: Topic of the pieces that this side sends.
        context: Settings of TLS.
        listens: Whether this is the side of the parent.
        largest: Largest message in bytes.
        done: Called when the link is closed.
    """

    def __init__(
        self, broker: Broker, to: str, context: ssl.SSLContext, listens: bool, largest: int, done: Callable[[], Any]
    ) -> None:
        self._broker, self._to, self._largest, self._done = broker, to, largest, done
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=listens)
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending, self._using = threading.Lock(), threading.Lock()
        self._ended = False
        self.peer = ("", 0)

    def feed(self, piece: bytes) -> None:
        """Take a piece that came; an empty one closes the link."""
        self._pieces.put(piece or None)

    def handshake(self) -> None:
        """Check the certificate of the other side, and show it this one's."""
        end = time.monotonic() + OPEN
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._next(end)
            except ssl.SSLError:
                self._flush()  # the other side is told why
                raise
        self._flush()
        self.peer = peer(self._tls)

    def send(self, pieces: list[memoryview]) -> None:
        length = sum(map(len, pieces)).to_bytes(8, "little")
        waiting: deque[Any] = deque()
        with self._sending:
            for chunk in chunks([memoryview(length), *pieces]):
                with self._using:
                    if self._ended:
                        raise Closed("closed")
                    self._tls.write(chunk)
                    data = self._out.read()
                waiting.append(self._broker.publish(self._to, data))
                if len(waiting) > WINDOW:
                    self._broker.sent(waiting.popleft())
        for information in waiting:
            self._broker.sent(information)

    def receive(self, timeout: float | None = None) -> bytearray:
        end = None if timeout is None else time.monotonic() + timeout
        length = int.from_bytes(self._read(8, end), "little")
        if length > self._largest:
            raise Refused(f"a message has {length} bytes; allowed are 9 to {self._largest}")
        return self._read(length, end)

    def close(self, why: str = "") -> None:
        with self._using:
            if self._ended:
                return
            self._ended = True
        self._broker.publish(self._to, b"")
        self._pieces.put(None)
        self._done()

    def _read(self, length: int, end: float | None) -> bytearray:
        data = bytearray()
        while len(data) < length:
            try:
                with self._using:
                    data += self._tls.read(min(length - len(data), RECORDS))
            except ssl.SSLWantReadError:
                self._next(end)
            except ssl.SSLError as error:
                raise Closed(f"the connection is damaged ({error.reason})") from None
        return data

    def _next(self, end: float | None) -> None:
        """Wait for the next piece."""
        try:
            piece = self._pieces.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise Closed("nothing came in time") from None
        if piece is None:
            raise Closed("the other side has closed the link")
        with self._using:
            self._in.write(piece)

    def _flush(self) -> None:
        with self._sending, self._using:
            if data := self._out.read():
                self._broker.publish(self._to, data)


def address_of(topic: str) -> tuple[str, str]:
    """The sender of a topic polytier/from/A/up/B/LINK, and LINK."""
    parts = topic.removeprefix(f"{ROOT}/").split("/")
    return "/".join(parts[: parts.index("up")]), parts[-1]


class MqttHub(LinkHub):
    """The links of a node to its children.

    Args:
        via: mqtts://HOST:PORT of the broker.
        keys: Folder with the key and certificates of this node.
        gate: Who may come, and what they are told.
    """

    def __init__(self, via: str, keys: Path, gate: Gate) -> None:
        super().__init__(keys, gate)
        self._via, self._name, self._context = via, certificate_name(keys), tls(keys, listens=True)
        self._all, self._token = f"{ROOT}/{self._name}/all", secrets.token_hex(8).encode()
        self._tunnels: dict[tuple[str, str], Tunnel] = {}
        self._broker: Broker | None = None
        self._lost = threading.Event()
        self._dial()
        self.address = f"{via} as {self._name}"
        threading.Thread(target=self._keep, daemon=True).start()

    def _dial(self) -> None:
        """Connect to the broker; a broker that is not there is no error."""
        self._lost.clear()
        try:
            broker = Broker(self._via, self._keys, (self._all, b"-" + self._token), self._take, self._lost.set)
            self._broker = broker
            inbox = f"up/{self._name}/+"
            broker.subscribe(f"{ROOT}/+/{inbox}", f"{ROOT}/+/+/{inbox}", self._all)
            broker.publish(self._all, self._token, retain=True)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(
                f"the broker at {self._via} has no certificate of this federation ({error.verify_message}); check the "
                "address and ca.pem"
            ) from None
        except (OSError, Closed) as error:
            if self._broker is not None:
                self._broker.close()
            if self._broker is None or not self._stopped:
                log.info("no link to %s (%s); trying again", self._via, error)
            self._lost.set()

    def _keep(self) -> None:
        pause = RETRY[0]
        while not self._stopped:
            self._lost.wait()
            for tunnel in list(self._tunnels.values()):
                tunnel.feed(b"")
            self._tunnels = {}
            time.sleep(pause)
            pause = min(2 * pause, RETRY[1])
            if not self._stopped:
                with contextlib.suppress(ValueError):
                    self._dial()
            if not self._lost.is_set():
                pause = RETRY[0]

    def _take(self, topic: str, data: bytes) -> None:
        """Pass a piece to its link, in the thread of the broker; the first piece of a link opens it."""
        if topic == self._all:
            if data[:1] == b"-" and data[1:] != self._token and self._broker is not None:
                self._broker.publish(self._all, self._token, retain=True)  # the last will of an earlier process
            return
        key = address_of(topic)
        tunnel = self._tunnels.get(key)
        if tunnel is None and data[:1] == HANDSHAKE and self._broker is not None:
            to = f"{ROOT}/{self._name}/down/{key[0]}/{key[1]}"
            done = lambda: self._tunnels.pop(key, None)  # noqa: E731
            tunnel = Tunnel(self._broker, to, self._context, True, self.gate.largest, done)
            self._tunnels[key] = tunnel
            threading.Thread(target=self._accept, args=(tunnel, key[0]), daemon=True).start()
        if tunnel is not None:
            tunnel.feed(data)

    def _accept(self, tunnel: Tunnel, name: str) -> None:
        """The thread of a link."""
        try:
            tunnel.handshake()
            if tunnel.peer[0] != name:
                raise Closed(f"the broker says that {name} sends, the certificate {tunnel.peer[0]!r}")
        except (Closed, OSError) as error:
            if not isinstance(error, OSError):  # that of a handshake is in the log already
                log.warning("%s was refused: %s", name, error)
            tunnel.close()
            return
        self.follow(tunnel)

    def _shut(self) -> None:
        self._lost.set()
        if self._broker is not None:
            for tunnel in list(self._tunnels.values()):
                tunnel.close()
            with contextlib.suppress(Closed):
                self._broker.sent(self._broker.publish(self._all, b"-" + self._token, retain=True))
            self._broker.close()


class MqttUplink(Uplink):
    """The link of a node, or of several, to their parent.

    Args:
        parent: mqtts://HOST:PORT/NAME, with the broker and the name of the parent.
        keys: Folder with the key and certificates of this node.
        hello: What to say first.
        largest: Largest message in bytes.
    """

    def __init__(self, parent: str, keys: Path, hello: Message, largest: int) -> None:
        host, _, self._above = parent.removeprefix(MQTT).partition("/")
        self._via = MQTT + host
        split_address(host)
        certificate_name(keys)
        tls(keys, listens=False)
        super().__init__(parent, keys, hello, largest)

    def _open(self) -> AbstractContextManager[Socket]:
        return tunnel_to(self._above, self._via, self._keys, self.largest, lambda: self.ended is not None)


@contextlib.contextmanager
def tunnel_to(parent: str, via: str, keys: Path, largest: int, ended: Callable[[], bool]) -> Iterator[Tunnel]:
    """A link to a parent behind a broker; waits until the parent is there, or `ended`."""
    name, link, here = certificate_name(keys), secrets.token_hex(8), threading.Event()
    to, back = f"{ROOT}/{name}/up/{parent}/{link}", f"{ROOT}/{parent}/down/{name}/{link}"
    there: list[bytes] = []  # who listens, as it was when this link was opened
    tunnels: list[Tunnel] = []

    def came(topic: str, data: bytes) -> None:
        if topic == back:
            feed(data)
        elif data[:1] != b"-" and not there:
            there.append(data)
            here.set()
        elif there and data != there[0]:
            feed(b"")  # the parent has gone, or another process has taken its place

    def feed(data: bytes) -> None:
        for tunnel in tunnels:
            tunnel.feed(data)

    broker = Broker(via, keys, (to, b""), came, lambda: feed(b""))
    try:
        tunnel = Tunnel(broker, to, tls(keys, listens=False), False, largest, tunnels.clear)
        tunnels.append(tunnel)
        broker.subscribe(back, f"{ROOT}/{parent}/all")
        while not here.wait(0.2):
            if ended() or broker.lost.is_set():
                raise Closed("closed" if ended() else "the broker has gone")
        tunnel.handshake()
        if tunnel.peer[0] != parent:
            raise Refused(f"its certificate is that of {tunnel.peer[0]!r}, not of {parent}")
        try:
            yield tunnel
        finally:
            tunnel.close()
    finally:
        broker.close()
