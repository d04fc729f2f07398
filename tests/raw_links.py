"""Links over which a test can send anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from polytier.engines.network.keys import tls
from polytier.engines.network.links import Closed
from polytier.engines.network.message import Message, Refused, decode
from polytier.engines.network.mqtt import tunnel_to
from polytier.engines.network.transport import MQTT
from polytier.engines.network.websocket import WebSocket, wait_for


class Raw:
    """A link over which anything can be sent."""

    def __init__(self, link: Any, send: Callable[[bytes | str], Any]) -> None:
        self._link, self._send = link, send

    def send(self, data: bytes | str) -> None:
        with suppress(ConnectionClosed, Closed):  # the other side may be quicker
            self._send(data)

    def receive(self) -> Message:
        return decode(self._link.receive(30), 1 << 20)


@contextmanager
def raw_link(place: str, keys: Path) -> Iterator[Raw]:
    """A link to HOST:PORT, or to mqtts://HOST:PORT/NAME."""
    if place.startswith(MQTT):
        via, _, name = place.removeprefix(MQTT).partition("/")
        with tunnel_to(name, MQTT + via, keys, 1 << 20, lambda: False) as tunnel:
            yield Raw(tunnel, lambda data: tunnel.send([memoryview(data.encode() if isinstance(data, str) else data)]))
        return
    # the client of websockets.sync reads and writes in two threads, which TLS of Python before 3.13 does not allow
    quiet: Any = {"compression": None, "proxy": None, "open_timeout": 60}
    connection = wait_for(opened(f"wss://{place}/", ssl=tls(keys, listens=False), **quiet))
    try:
        yield Raw(WebSocket(connection), lambda data: wait_for(connection.send(data)))
    finally:
        wait_for(connection.close())


async def opened(*to: Any, **settings: Any) -> Any:
    return await connect(*to, **settings)


def closed(socket: Raw) -> bool:
    try:
        while True:
            socket.receive()
    except (Closed, Refused):  # refused: it was closed because of what this side sent
        return True
