"""A team of a method without teams: it passes on what its devices and the server say to each other.

Each link of a device has a link of its own to the parent. Messages are passed on as they are, so the server computes
the same bits as if the devices had dialled it. A device's hello gets one more fact, `via`: the certificates on its way,
the device's own first. The server checks that they are those of the device and of the teams above it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

from polytier._terminal import event
from polytier.engines.network.links import FIRST_MESSAGE, OPEN, Closed, Socket
from polytier.engines.network.message import Refused, buffers, decode
from polytier.engines.network.websocket import WebSocketHub, WebSocketUplink

log = logging.getLogger("polytier")
VIA = "via"


class Size(NamedTuple):
    """In place of a gate: a relay lets in whoever has a certificate of the federation, and the server decides."""

    largest: int


class Onward(WebSocketUplink):
    """A link to the parent for one link of a device; it is not dialled again."""

    def _keep(self) -> None:
        """Do nothing: the relay reads and writes this link."""


class Relay(WebSocketHub):
    """The links of a team that relays.

    Args:
        listen: HOST:PORT; see `WebSocketHub`.
        keys: Folder with the key and certificates of this node.
        parent: HOST:PORT of the parent.
        largest: Largest message of a device in bytes.
        longest: Largest message of the parent in bytes.
    """

    def __init__(self, listen: str, keys: Path, parent: str, largest: int, longest: int) -> None:
        self.parent, self._longest = parent, longest
        self._passing: dict[int, tuple[str, threading.Thread]] = {}
        gate: Any = Size(largest)
        super().__init__(listen, keys, gate)

    def present(self) -> list[str]:
        """The certificates of the links that are open."""
        return sorted(name for name, _ in list(self._passing.values()))

    def stop(self, text: str) -> None:
        """Wait until the server has told everybody that the run is over, then close."""
        for _, thread in list(self._passing.values()):
            thread.join(OPEN)
        self.close()

    def follow(self, socket: Socket) -> None:
        """The thread of a link: it passes on what the parent says, and a second thread what the device says."""
        (certificate, serial), key = socket.peer, threading.get_ident()
        self._passing[key] = certificate, threading.current_thread()
        try:
            if serial in self._revoked:
                raise Refused("its certificate was revoked")
            hello = decode(socket.receive(OPEN), FIRST_MESSAGE)
            if hello.kind != "hello" or not isinstance(hello.facts.setdefault(VIA, []), list):
                raise Refused(f"it begins with a message {hello.kind}")
            hello.facts[VIA].append(certificate)
            with Onward(self.parent, self._keys, hello, self._longest)._open() as above:
                if above.peer[0].partition("/")[0].rstrip("0123456789") not in ("server", "team"):
                    raise Closed("the parent is neither a server nor a team")
                above.send(buffers(hello))
                log.info("%s is passed on", certificate, extra=event("ready", certificate))
                up = threading.Thread(target=self._pass, args=(socket, above, certificate, "up"), daemon=True)
                up.start()
                self._pass(above, socket, certificate, "down", serial)
        except Refused as error:
            self._refuse(socket, None, error)
        except Exception as error:  # the link was closed, or the parent is away
            log.debug("%s: link lost: %s", certificate or "unknown", error or type(error).__name__)
        finally:
            del self._passing[key]
            socket.close()
            log.info("%s has gone", certificate, extra=event("gone", certificate))

    def _pass(self, source: Socket, target: Socket, certificate: str, way: str, serial: int | None = None) -> None:
        """Pass messages on until a link ends; a certificate that is revoked meanwhile ends it too."""
        with contextlib.suppress(Closed, Refused):
            while True:
                data = source.receive()
                if serial is not None and serial in self._revoked:
                    log.warning("%s: its certificate was revoked; its link is closed", certificate)
                    break
                self.traffic[certificate, way] += len(data)
                target.send([memoryview(data)])
        source.close()
        target.close()
