"""ZeroMQ between one trainer process and its workers: endpoints, deadlines, peer death.

Bytes in, bytes out: nothing here knows what a message means. A ``Listener`` (ROUTER)
is the trainer's end, a ``Dialer`` (DEALER) a worker's. Everything is synchronous, and
an object is used by one thread at a time.

The rules of both ends:

- Nothing blocks but ``receive``, up to its deadline, and ``close``, up to its linger.
- A peer that dies is seen by the socket monitor in milliseconds. A peer that is stopped
  is seen by heartbeats; a peer that is merely busy, or holds its GIL, answers those.
- What a peer had sent before it was lost is delivered before the loss is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

from .connections import Connection, Connections
from .errors import ConfigError, PeerLostError
from .rundir import SOCKET_SUFFIX, create_file, remove_dir_if_empty
from .sockets import (
    SCHEME,
    MonitoredSocket,
    is_trusted,
    peer_credentials,
    probe_listener,
)

HEARTBEAT_TIMEOUT_S = 15.0
LINGER_S = 1.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived.

    Attributes:
        peer: Who sent it: a name that no other peer of this listener has had.
        data: The message.
        fd: The accepted socket that it came over.
    """

    peer: bytes
    data: bytes
    fd: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer is gone, and everything that it had sent was delivered.

    Attributes:
        peer: Who.
        pid: Its process id as the kernel knows it, where it could be asked.
    """

    peer: bytes
    pid: int | None


Event = Received | Lost


class Listener:
    """The trainer's end: any number of peers over one fresh private endpoint.

    Its owner closes it; ``with`` does.

    Attributes:
        endpoint: What a ``Dialer`` needs: ``ipc://`` and a path.
    """

    def __init__(self, directory: str, *, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        """Bind an endpoint that nobody has used before.

        Args:
            directory: Setting ``dir``; the socket lies in the private directory in it.
            heartbeat_timeout_s: After so many seconds without a sign of life a peer
                counts as lost.

        Raises:
            ConfigError: The directory cannot be used.
            TransportError: ZeroMQ has no resources left.
        """
        self._directory = directory
        self._connections = Connections()
        self._lost: deque[Lost] = deque()
        self._socket = MonitoredSocket(zmq.ROUTER, heartbeat_timeout_s=heartbeat_timeout_s)
        try:
            self._path = create_file(directory, SOCKET_SUFFIX, self._socket.bind)
        except BaseException:
            self._socket.close(linger_s=0.0)
            raise
        self.endpoint = f"{SCHEME}{self._path}"

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._socket.is_closed

    @property
    def can_be_found(self) -> bool:
        """Whether the endpoint's file is there; who cleans a directory may have taken it."""
        return self._path.exists()

    def send(self, peer: bytes, data: bytes) -> None:
        """Queue a message for a peer. Never blocks.

        Raises:
            PeerLostError: The peer is gone.
        """
        if not self._socket.send([peer, data]):
            pid = self.peer_pid(peer)
            raise PeerLostError(f"the peer (pid {pid or 'unknown'}) is gone", pid=pid)

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event, or ``None`` if there was none before the deadline.

        Args:
            timeout_s: Seconds to wait at most; 0 takes only what is there.

        Raises:
            TransportError: ZeroMQ failed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._next_event()
            if event is not None or not self._socket.wait(deadline):
                return event

    def peers(self) -> frozenset[bytes]:
        """Return who has spoken by now, and was not reported lost."""
        return self._connections.peers()

    def peer_pid(self, peer: bytes) -> int | None:
        """Return a peer's process id as the kernel knows it; ``None`` if it is gone."""
        connection = self._connections.find(peer)
        return None if connection is None else connection.pid

    def close(self, linger_s: float = LINGER_S) -> None:
        """Hand over what was sent, for ``linger_s`` seconds at most. Idempotent."""
        if self._socket.is_closed:
            return
        # First, so that a late worker finds nothing instead of nobody.
        self._path.unlink(missing_ok=True)
        remove_dir_if_empty(self._directory)
        self._socket.close(linger_s=linger_s)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    def _next_event(self) -> Event | None:
        self._watch()
        while (message := self._socket.receive_from(self._knows)) is not None:
            received = self._admit(*message)
            if received is not None:
                return received
        self._lost.extend(
            Lost(connection.peer, connection.pid)
            for connection in self._connections.settle()
            if connection.peer is not None and is_trusted(connection.uid)
        )
        return self._lost.popleft() if self._lost else None

    def _knows(self, peer: bytes) -> bool:
        return self._connections.find(peer) is not None

    def _admit(self, frames: list[bytes], fd: int | None) -> Received | None:
        peer = frames[0]
        connection = self._connections.find(peer)
        if len(frames) != 2 or (connection is None and fd is None):
            logger.warning("ignoring a message that is none of a dialer's on %s", self.endpoint)
            return None
        if connection is None and fd is not None:
            self._watch()
            connection = self._connections.identify(
                peer, fd, is_reachable=lambda: self._socket.can_reach(peer)
            )
            if not is_trusted(connection.uid):
                logger.warning(
                    "ignoring pid %s of uid %s on %s: neither ours nor root's",
                    connection.pid,
                    connection.uid,
                    self.endpoint,
                )
        if connection is None or not is_trusted(connection.uid):
            return None
        return Received(peer, frames[1], connection.fd)

    def _watch(self) -> None:
        """Read the monitor dry, and ask the kernel who the newcomers are."""
        asked: list[Connection] = []
        while True:
            fresh = []
            for event, fd in self._socket.monitor_events():
                if event == zmq.Event.ACCEPTED:
                    fresh.append(self._connections.accepted(fd))
                elif event == zmq.Event.DISCONNECTED:
                    self._connections.closed(fd)
            for connection in asked:
                if not connection.is_open:
                    # Closed while we asked: the answer may be about somebody else.
                    connection.pid = connection.uid = None
            if not fresh:
                return
            asked = [connection for connection in fresh if connection.is_open]
            for connection in asked:
                connection.pid, connection.uid = peer_credentials(connection.fd)


class Dialer:
    """A worker's end: one peer, which listens already. Its owner closes it.

    Attributes:
        peer_pid: The trainer's process id, as the kernel knows it.
    """

    def __init__(self, endpoint: str, *, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        """Connect, after making sure that somebody trustworthy listens.

        Args:
            endpoint: A ``Listener``'s.
            heartbeat_timeout_s: After so many seconds without a sign of life the peer
                counts as lost.

        Raises:
            ConfigError: It is no endpoint of ours.
            PeerLostError: Nobody listens there, or somebody whom we do not trust.
            TransportError: ZeroMQ has no resources left.
        """
        self.endpoint = endpoint
        path = Path(endpoint.removeprefix(SCHEME))
        if not endpoint.startswith(SCHEME) or not path.is_absolute():
            raise ConfigError(f"{endpoint!r} is not an endpoint; expected {SCHEME} and a path")
        self.peer_pid = probe_listener(path)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._was_lost = False
        self._socket = MonitoredSocket(zmq.DEALER, heartbeat_timeout_s=heartbeat_timeout_s)
        try:
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.close(linger_s=0.0)
            raise

    @property
    def is_lost(self) -> bool:
        """Whether the trainer is gone, as far as was seen by now."""
        self._watch()
        return self._was_lost

    def send(self, data: bytes) -> None:
        """Queue a message. Never blocks.

        Raises:
            PeerLostError: The trainer is gone. What it had sent can still be received.
        """
        if self.is_lost or not self._socket.send([data]):
            raise self._lost()

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, or ``None`` if there was none before the deadline.

        Args:
            timeout_s: Seconds to wait at most; 0 takes only what is there.

        Raises:
            PeerLostError: The trainer is gone, and everything that it had sent was
                delivered.
            TransportError: ZeroMQ failed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._watch()
            while (frames := self._socket.receive()) is not None:
                # An empty frame is how a listener finds out whether we are reachable.
                if frames[-1]:
                    return frames[-1]
            if self._was_lost:
                raise self._lost()
            if not self._socket.wait(deadline):
                return None

    def close(self, linger_s: float = LINGER_S) -> None:
        """Hand over what was sent, for ``linger_s`` seconds at most. Idempotent."""
        if not self._socket.is_closed:
            # What was sent to one who is gone is handed over to nobody.
            self._watch()
        self._socket.close(linger_s=0.0 if self._was_lost else linger_s)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    def _watch(self) -> None:
        for _ in self._socket.monitor_events():
            # A dialer has one connection, and hears only of its end.
            self._was_lost = True

    def _lost(self) -> PeerLostError:
        return PeerLostError(
            f"the trainer (pid {self.peer_pid or 'unknown'}) is gone from {self.endpoint}: it "
            f"closed the connection, died, or gave no sign of life for "
            f"{self._heartbeat_timeout_s:g} s",
            pid=self.peer_pid,
        )
