"""What nodes need of a network, as four functions: ask, wait, forget and, for children, dial. And one in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

Handler = Callable[[bytes], bytes | None]  # a node's answer to a message of its parent; None: its process ended


class Hub(Protocol):
    """The links of a node to its children. A link belongs to one process, which may speak for several nodes."""

    def ask(self, address: str, data: bytes) -> str | None:
        """Send a message to a node.

        Returns:
            The link that it was sent over; None if there is none.
        """
        ...

    def wait(self, seconds: float) -> tuple[str, bytes | None] | None:
        """Wait for the next message from any child.

        Returns:
            The link, and what came over it, or None if the link was closed; None after `seconds`.
        """
        ...

    def forget(self, link: str, why: str) -> None:
        """Close a link. The process at its other end has to dial again."""
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

    def dial(self, address: str, handle: Handler) -> None:
        """Link a child: `handle` makes its answers."""
        self.children[address] = handle
        self.closed.pop(address, None)

    def ask(self, address: str, data: bytes) -> str | None:
        if self.link_of(address) is None:
            return None
        self._asked.append((address, data))
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
        self.children.pop(link, None)
        self.closed[link] = why

    def link_of(self, address: str) -> str | None:
        return address if address in self.children else None

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
