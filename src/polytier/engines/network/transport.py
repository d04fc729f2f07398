"""What nodes need of a network, as four functions: ask, wait, forget and, for children, dial. And one in memory.

The other networks are `websocket.py` (children dial HOST:PORT) and `mqtt.py` (all dial a broker).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polytier.engines.network.message import Message, encode

if TYPE_CHECKING:
    from polytier.engines.network.links import Gate, LinkHub, Uplink

log = logging.getLogger("polytier")
MQTT = "mqtts://"  # how the address of a broker begins

Handler = Callable[[bytes], bytes | None]  # a node's answer to a message of its parent; None: its process ended


class Hub(Protocol):
    """The links of a node to its children. A link belongs to one process, which may speak for several nodes."""

    def ask(self, address: str, message: Message) -> str | None:
        """Send a message to a node. Its tensors must not change afterwards.

        Returns:
            The link that it was sent over; None if there is none.
        """
        ...

    def wait(self, seconds: float) -> tuple[str, bytes | bytearray | None] | None:
        """Wait for the next message from any child.

        Returns:
            The link, and what came over it, or None if the link was closed; None after `seconds`.
        """
        ...

    def forget(self, link: str, why: str) -> None:
        """Close a link, with a line in the log. The process at its other end has to dial again."""
        ...

    def link_of(self, address: str) -> str | None:
        """The link over which a node can be reached now; None if there is none."""
        ...

    def now(self) -> float:
        """The time in seconds, by which deadlines are measured."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...


class InMemory:
    """A hub whose children are in this process. They compute when their answer is waited for, which takes no time.

    Args:
        lose: Called with the address and the data of each answer; if it returns True, the answer arrives late: it is
            what `wait(0)` returns.
    """

    def __init__(self, lose: Callable[[str, bytes], bool] = lambda address, data: False) -> None:
        self.children: dict[str, Handler] = {}
        self.lose = lose
        self.closed: dict[str, str] = {}
        self.time = 0.0
        self._asked: deque[tuple[str, bytes]] = deque()
        self._late: deque[tuple[str, bytes]] = deque()

    def hang_up(self) -> None:
        """Forget all that is on its way, as when the process of the parent ends."""
        self._asked.clear()
        self._late.clear()

    def dial(self, address: str, handle: Handler) -> None:
        """Link a child: `handle` makes its answers."""
        self.children[address] = handle
        self.closed.pop(address, None)

    def ask(self, address: str, message: Message) -> str | None:
        if self.link_of(address) is None:
            return None
        self._asked.append((address, encode(message)))
        return address

    def wait(self, seconds: float) -> tuple[str, bytes | None] | None:
        if not seconds and self._late:
            return self._late.popleft()
        if not seconds or not self._asked:
            self.time += seconds
            return None
        address, data = self._asked.popleft()
        if address not in self.children:
            return address, None
        answer = self.children[address](data)
        if answer is not None and self.lose(address, answer):
            self._late.append((address, answer))
            return None
        return address, answer

    def forget(self, link: str, why: str) -> None:
        if self.children.pop(link, None) is not None:
            log.warning("%s: %s; its link is closed", link, why)
        self.closed[link] = why

    def link_of(self, address: str) -> str | None:
        return address if address in self.children else None

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def open_hub(listen: str, keys: Path, gate: Gate) -> LinkHub:
    """The links of a node to its children.

    Args:
        listen: HOST:PORT to listen at, or mqtts://HOST:PORT of a broker.
        keys: Folder with the key and certificates of this node.
        gate: Who may come, and what they are told.
    """
    if listen.startswith(MQTT):
        from polytier.engines.network.mqtt import MqttHub

        return MqttHub(listen, keys, gate)
    from polytier.engines.network.websocket import WebSocketHub

    return WebSocketHub(listen, keys, gate)


def open_uplink(parent: str, keys: Path, hello: Message, largest: int) -> Uplink:
    """The link of a node to its parent.

    Args:
        parent: HOST:PORT, or mqtts://HOST:PORT/NAME of a parent behind a broker.
        keys: Folder with the key and certificates of this node.
        hello: What to say first.
        largest: Largest message in bytes.
    """
    if parent.startswith(MQTT):
        from polytier.engines.network.mqtt import MqttUplink

        return MqttUplink(parent, keys, hello, largest)
    from polytier.engines.network.websocket import WebSocketUplink

    return WebSocketUplink(parent, keys, hello, largest)


def check_address(text: str) -> None:
    """Raise an error unless this is where a node can listen, or a broker."""
    from polytier.engines.network.websocket import split_address

    split_address(text.removeprefix(MQTT))
