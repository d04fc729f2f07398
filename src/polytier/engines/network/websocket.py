"""Links over WebSocket with TLS. Children dial out; a parent listens where it is told.

Connections are read and written by one thread with an event loop, so that a side that sends a large message still
reads: two sides that send at the same time would otherwise wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from polytier._errors import missing
from polytier.engines.network.keys import peer, tls
from polytier.engines.network.links import OPEN, Closed, Gate, LinkHub, Socket, Uplink
from polytier.engines.network.message import CHUNK, Message, Refused, chunks

log = logging.getLogger("polytier")
PING, PONG = 15, 45  # seconds: slow links need long ones
BAD_FRAMES = (1002, 1003, 1007, 1009)  # how a link is closed over which something else than a message came
BUSY = 16  # chunks of a link that may wait
QUIET = logging.getLogger("polytier.websockets")  # what the library reports about single connections
QUIET.setLevel(logging.CRITICAL)
SETTINGS: dict[str, Any] = {
    "compression": None,
    "open_timeout": OPEN,
    "ping_interval": PING,
    "ping_timeout": PONG,
    "max_queue": BUSY,
    "write_limit": CHUNK,
    "logger": QUIET,
}


STARTING = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, in a thread of its own."""
    with STARTING:
        return _event_loop()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def wait_for(work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
    """Run a coroutine in the event loop and wait for its result; raises `Closed` if the time is over."""
    future = asyncio.run_coroutine_threadsafe(work, event_loop())
    try:
        return future.result(timeout)
    except TimeoutError:
        future.cancel()
        raise Closed("nothing came in time") from None


class WebSocket:
    """One side of a link.

    Args:
        connection: Of the library.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.peer = peer(connection.transport.get_extra_info("ssl_object"))

    def send(self, pieces: list[memoryview]) -> None:
        wait_for(self._send(pieces))

    def receive(self, timeout: float | None = None) -> bytearray:
        return wait_for(self._receive(), timeout)

    def close(self, why: str = "") -> None:
        asyncio.run_coroutine_threadsafe(self._connection.close(1008 if why else 1000, why[:60]), event_loop())

    async def _send(self, pieces: list[memoryview]) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            if sum(map(len, pieces)) <= CHUNK:
                await self._connection.send(b"".join(pieces))
            else:
                await self._connection.send(chunks(pieces))
        except ConnectionClosed as error:
            raise Closed(str(error)) from None

    async def _receive(self) -> bytearray:
        from websockets.exceptions import ConnectionClosed

        data = bytearray()
        try:
            async for piece in self._connection.recv_streaming():
                if isinstance(piece, str):
                    raise Refused("a message is a text and not bytes")
                data += piece
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code in BAD_FRAMES:
                raise Refused(f"it sends what is no message ({error})") from None
            raise Closed(str(error)) from None
        return data


class WebSocketHub(LinkHub):
    """The links of a node to its children.

    Args:
        listen: HOST:PORT; port 0 takes a free one, which `address` then has.
        keys: Folder with the key and certificates of this node.
        gate: Who may come, and what they are told.
    """

    def __init__(self, listen: str, keys: Path, gate: Gate) -> None:
        super().__init__(keys, gate)
        host, port = split_address(listen)
        context = tls(keys, listens=True)
        try:
            self._server = wait_for(self._listen(host, port, context))
        except OSError as error:
            raise ValueError(f"cannot listen at {listen}: {error.strerror or error}; give another HOST:PORT") from None
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    async def _listen(self, host: str, port: int, context: Any) -> Any:
        try:
            from websockets.asyncio.server import ServerConnection, serve
        except ImportError:
            raise missing("network") from None

        class Connection(ServerConnection):
            """A connection whose handshake is one line in the log if it fails."""

            async def handshake(self, *args: Any, **settings: Any) -> None:
                try:
                    await super().handshake(*args, **settings)
                finally:
                    if self.protocol.handshake_exc is not None or self.protocol.state.name != "OPEN":
                        name = peer(self.transport.get_extra_info("ssl_object"))[0]
                        log.warning(
                            "%s was refused: it does not speak WebSocket (%s)",
                            name or "unknown",
                            self.protocol.handshake_exc,
                        )

        return await serve(
            self._accept,
            host,
            port,
            ssl=context,
            max_size=self.gate.largest,
            server_header=None,
            create_connection=Connection,
            **SETTINGS,
        )

    async def _accept(self, connection: Any) -> None:
        socket = WebSocket(connection)
        threading.Thread(target=self.follow, args=(socket,), daemon=True).start()
        await connection.wait_closed()

    def _shut(self) -> None:
        with contextlib.suppress(Closed):
            wait_for(self._end(), OPEN)

    async def _end(self) -> None:
        self._server.close()
        await self._server.wait_closed()


class WebSocketUplink(Uplink):
    """The link of a node, or of several, to their parent.

    Args:
        parent: HOST:PORT.
        keys: Folder with the key and certificates of this node.
        hello: What to say first.
        largest: Largest message in bytes.
    """

    def __init__(self, parent: str, keys: Path, hello: Message, largest: int) -> None:
        self._tls = tls(keys, listens=False)
        self._host, self._port = split_address(parent)
        super().__init__(parent, keys, hello, largest)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Socket]:
        connection = wait_for(self._connect())
        try:
            yield WebSocket(connection)
        finally:
            wait_for(connection.close(), 2 * OPEN)

    async def _connect(self) -> Any:
        try:
            from websockets.asyncio.client import connect
        except ImportError:
            raise missing("network") from None

        host = f"[{self._host}]" if ":" in self._host else self._host
        return await connect(
            f"wss://{host}:{self._port}/",
            ssl=self._tls,
            max_size=self.largest,
            user_agent_header=None,
            proxy=None,
            **SETTINGS,
        )


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        ValueError: It is no such text.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is no address; give HOST:PORT, such as 127.0.0.1:8750")
    return host.strip("[]"), int(port)
