"""Which peer speaks over which accepted socket, and which peers are gone.

Knows nothing of ZeroMQ. It is told what a socket monitor sees (a descriptor was
accepted, was closed) and what a message says (this peer, over that descriptor), in the
order in which its owner reads them. The two orders differ: a message may be read long
after its sender died, when the kernel has given the descriptor to somebody else.

Three facts make the answers right. A descriptor is accepted before any of its messages
can be read. What a dead peer had sent is readable before its descriptor is seen closed.
A descriptor has one open connection at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(slots=True)
class Connection:
    """One accepted socket, from its acceptance until its peer is reported lost.

    Attributes:
        fd: Its descriptor. Another connection may have it once this one is closed.
        peer: The peer's name; ``None`` until its first message was read.
        pid: The peer's process id as the kernel knows it; ``None`` where it was gone
            before the kernel could be asked, or is in a namespace that we cannot see.
        uid: The peer's user id, likewise.
        is_open: Whether it was not seen closed.
    """

    fd: int
    peer: bytes | None = None
    pid: int | None = None
    uid: int | None = None
    is_open: bool = True


class Connections:
    """All connections of one listener."""

    def __init__(self) -> None:
        """Begin with none."""
        self._open: dict[int, Connection] = {}
        self._by_peer: dict[bytes, Connection] = {}
        # Closed, but messages of theirs may still be unread.
        self._closed: list[Connection] = []

    def accepted(self, fd: int) -> Connection:
        """Take note of a new connection."""
        self.closed(fd)
        self._open[fd] = Connection(fd)
        return self._open[fd]

    def closed(self, fd: int) -> None:
        """Take note that the connection that has ``fd`` was closed."""
        connection = self._open.pop(fd, None)
        if connection is not None:
            connection.is_open = False
            self._closed.append(connection)

    def find(self, peer: bytes) -> Connection | None:
        """Return the connection of a peer, or ``None`` before its first message."""
        return self._by_peer.get(peer)

    def peers(self) -> frozenset[bytes]:
        """Return the peers whose connection is known."""
        return frozenset(self._by_peer)

    def identify(self, peer: bytes, fd: int, *, is_reachable: Callable[[], bool]) -> Connection:
        """Return the connection that a peer's first message came over.

        Everything that the monitor has seen must have been told before.

        Args:
            peer: A name that ``find`` does not know.
            fd: The descriptor that the message came over.
            is_reachable: Whether the peer can still be sent to. Asked only where the
                descriptor was used more than once lately.
        """
        current = self._open.get(fd)
        former = [item for item in self._closed if item.fd == fd and item.peer is None]
        if current is not None and current.peer is None and not former:
            connection = current
        elif current is not None and is_reachable():
            connection = current
            if current.peer is not None:
                # It was taken for the peer of this connection in the instant in which
                # it was closed, but could still be reached.
                self._closed.append(replace(current, is_open=False))
                self._by_peer[current.peer] = self._closed[-1]
        elif former:
            connection = former[0]
        else:
            connection = Connection(fd, is_open=False)
            self._closed.append(connection)
        connection.peer = peer
        self._by_peer[peer] = connection
        return connection

    def settle(self) -> list[Connection]:
        """Forget closed connections, and return those of known peers.

        No message may be left unread that was there when the monitor was last read.
        """
        lost = [connection for connection in self._closed if connection.peer is not None]
        for connection in lost:
            if connection.peer is not None:
                self._by_peer.pop(connection.peer, None)
        self._closed.clear()
        return lost
