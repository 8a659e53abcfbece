"""One connection of the control plane: non-blocking, and quick to notice that the other host is gone."""

from __future__ import annotations

import selectors
import socket
import threading
import time

from hkd_hpc.comm.control.wire import Message, Unpacker, pack


class Link:
    """One connection: non-blocking, with a buffer for what the network does not take at once. Both threads send."""

    def __init__(self, link: socket.socket, selector: selectors.BaseSelector, peer: int) -> None:
        self._socket, self._selector, self._peer = link, selector, peer
        self._unpacker, self._unsent, self._open = Unpacker(), bytearray(), True
        self._lock = threading.Lock()
        link.setblocking(False)
        _detect_dead_hosts(link)
        selector.register(link, selectors.EVENT_READ, peer)

    def send(self, message: Message | bytes) -> None:
        """Send now or later, never block; what a closed connection does not take is lost. bytes: a message that is
        packed.
        """
        data = message if isinstance(message, bytes) else pack(message)
        with self._lock:
            self._unsent += data
            self._flush()

    def receive(self) -> tuple[list[Message], bool]:
        """The messages that have arrived, and whether the connection is still open."""
        with self._lock:
            self._flush()
        try:
            data = self._socket.recv(1 << 16)
            return self._unpacker.feed(data), bool(data)
        except BlockingIOError:
            return [], True
        except (OSError, ValueError):
            return [], False

    def drain(self, deadline_s: float) -> None:
        """Send what is left, until the deadline."""
        while self._open and self._unsent and time.monotonic() < deadline_s:
            with self._lock:
                self._flush()
            time.sleep(0.005 * bool(self._unsent))

    def close(self) -> None:
        """Close; twice is fine."""
        self._open = False
        self._socket.close()

    def _flush(self) -> None:
        if not self._open:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the reading side will see that it is closed
        writes = selectors.EVENT_WRITE if self._unsent else 0
        if self._open and self._selector.get_key(self._socket).events != selectors.EVENT_READ | writes:
            self._selector.modify(self._socket, selectors.EVENT_READ | writes, self._peer)


def _detect_dead_hosts(link: socket.socket) -> None:
    """A host that loses its power closes nothing: let TCP find out within seconds."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15000)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
