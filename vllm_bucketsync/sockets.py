"""The two kinds of socket underneath a channel: ZeroMQ's, watched, and the kernel's.

This is the only file that calls ZeroMQ, so that each of its errors becomes one of ours.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from .codec import MAX_MESSAGE_BYTES
from .errors import ConfigError, LocalProtocolError, PeerLostError, TransportError

SCHEME = "ipc://"
# The kernel's limit for the path of a socket, less the zero byte that ends it.
MAX_PATH_BYTES = 107

# Of a context: one for input and output, and one that closes sockets.
_NUM_THREADS = 2
# Of a context with a socket, its monitor, and a connection; a few are to spare.
_NUM_FDS = 16
_MONITOR = "inproc://monitor"
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
_MAX_WAIT_S = 86_400.0
# Never, in effect. With -1 libzmq would throw away what a dead peer had sent.
_RECONNECT_IVL_MS = 86_400_000
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class MonitoredSocket:
    """A ZeroMQ socket in a context of its own, and the monitor of its connections.

    Only ``wait`` and ``close`` block. Its owner closes it.

    Attributes:
        is_closed: Whether ``close`` was called.
    """

    def __init__(self, kind: int, *, heartbeat_timeout_s: float) -> None:
        """Open it, bound and connected to nothing.

        Args:
            kind: ``zmq.ROUTER`` or ``zmq.DEALER``.
            heartbeat_timeout_s: Seconds without a sign of life after which a
                connection is closed.

        Raises:
            TransportError: ZeroMQ has no resources left.
        """
        self.is_closed = False
        _check_resources()
        with _zmq_errors("open a socket"):
            self._context = zmq.Context()
            self._socket = self._context.socket(kind)
            self._monitor = self._context.socket(zmq.PAIR)
            # Unlimited: a full monitor would stop libzmq's thread, a full socket would
            # lose the end of what a dead peer had sent.
            self._monitor.set(zmq.RCVHWM, 0)
            for option, value in _options(kind, heartbeat_timeout_s).items():
                self._socket.set(option, value)
            self._socket.monitor(_MONITOR, _EVENTS)
            self._monitor.connect(_MONITOR)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def bind(self, path: Path) -> Path:
        """Listen.

        Args:
            path: Where the socket's file is made.

        Returns:
            ``path``.

        Raises:
            ConfigError: The path is too long.
            OSError: The kernel's own, for the path.
        """
        size = len(os.fsencode(path))
        if size > MAX_PATH_BYTES:
            raise ConfigError(
                f"the socket's path {str(path)!r} has {size} bytes; the kernel allows "
                f"{MAX_PATH_BYTES}; set dir= or VLLM_BUCKETSYNC_DIR to a shorter directory"
            )
        try:
            self._socket.bind(f"{SCHEME}{path}")
        except zmq.ZMQError as error:
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
        # Whatever the umask is: nobody else gets into the directory, nor would here.
        path.chmod(0o600)
        return path

    def connect(self, endpoint: str) -> None:
        """Begin to connect. That it failed is a ``CLOSED`` event."""
        with _zmq_errors(f"connect to {endpoint}"):
            self._socket.connect(endpoint)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message; ``False`` where there is nobody to send it to.

        Raises:
            LocalProtocolError: The last frame is larger than any message may be.
        """
        self._check_open()
        if len(frames[-1]) > MAX_MESSAGE_BYTES:
            raise LocalProtocolError(
                f"a message of {len(frames[-1])} bytes was to be sent; at most "
                f"{MAX_MESSAGE_BYTES} are allowed"
            )
        with _zmq_errors("send a message"):
            try:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
            except zmq.ZMQError as error:
                if error.errno in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                    return False
                raise
        return True

    def receive(self) -> list[bytes] | None:
        """Return the next message, or ``None`` if every one that arrived was read.

        Never as ``zmq.Frame``: Python's signal handlers also run where pyzmq frees one,
        and what they raise there, as Ctrl-C does, is printed and lost.
        """
        self._check_open()
        with _zmq_errors("receive a message"):
            try:
                return self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return None

    def receive_from(
        self, is_known: Callable[[bytes], bool]
    ) -> tuple[list[bytes], int | None] | None:
        """Return a ROUTER's next message and, of a peer that is not known, its descriptor.

        Args:
            is_known: Whether a peer's connection is known by now. Only of others the
                descriptor is looked up, since that takes a frame; see ``receive``.

        Returns:
            The frames, the peer's name first, and the descriptor that they came over or
            ``None``, see ``source_fd``; ``None`` if every message was read.
        """
        self._check_open()
        with _zmq_errors("receive a message"):
            try:
                frames = [self._socket.recv(zmq.DONTWAIT)]
            except zmq.Again:
                return None
            fd = None
            if not is_known(frames[0]) and self._socket.get(zmq.RCVMORE):
                frame = self._socket.recv(zmq.DONTWAIT, copy=False)
                fd = source_fd(frame)
                frames.append(frame.bytes)
            while self._socket.get(zmq.RCVMORE):
                frames.append(self._socket.recv(zmq.DONTWAIT))
        return frames, fd

    def monitor_events(self) -> Iterator[tuple[int, int]]:
        """Yield each new event of a connection and the descriptor that it was about."""
        self._check_open()
        while True:
            with _zmq_errors("read the monitor"):
                try:
                    message = self._monitor.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    return
            parsed = parse_monitor_message(message)
            yield parsed["event"], parsed["value"]

    def can_reach(self, peer: bytes) -> bool:
        """Return whether a ROUTER's peer is connected; sends it an empty message."""
        with _zmq_errors("look at the socket's state"):
            # Makes libzmq take note of what its own thread has reported by now.
            self._socket.get(zmq.EVENTS)
        return self.send([peer, b""])

    def wait(self, deadline: float) -> bool:
        """Wait until something arrives, a message or an event.

        Args:
            deadline: In the seconds of ``time.monotonic``.

        Returns:
            ``False`` if the deadline has passed.
        """
        remaining_s = min(deadline - time.monotonic(), _MAX_WAIT_S)
        if remaining_s <= 0:
            return False
        with _zmq_errors("wait"):
            # Rounded up, or the last millisecond would be spent in a busy loop.
            self._poller.poll(int(remaining_s * 1000) + 1)
        return True

    def close(self, *, linger_s: float) -> None:
        """Hand over what was sent, for ``linger_s`` seconds at most. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        with _zmq_errors("close a socket"):
            self._monitor.close(0)
            self._socket.close(int(linger_s * 1000))
            self._context.term()

    def _check_open(self) -> None:
        if self.is_closed:
            raise LocalProtocolError("the channel was used after it was closed")


def _check_resources() -> None:
    """Confirm that libzmq will get its threads and descriptors: it ends the process without.

    Raises:
        TransportError: There are too few.
    """
    is_over = threading.Event()
    fds: list[int] = []
    try:
        for _ in range(_NUM_THREADS):
            _thread.start_new_thread(is_over.wait, ())
        fds.extend(os.eventfd(0) for _ in range(_NUM_FDS))
    except (RuntimeError, OSError) as error:
        raise TransportError(
            f"no socket can be opened: {error}; this process needs {_NUM_THREADS} more threads "
            f"and {_NUM_FDS} more descriptors; look at its limits (ulimit -u, ulimit -n), and at "
            f"its container's limit of pids"
        ) from error
    finally:
        is_over.set()
        for fd in fds:
            os.close(fd)


def _options(kind: int, heartbeat_timeout_s: float) -> dict[int, int]:
    timeout_ms = max(int(heartbeat_timeout_s * 1000), 3)
    options: dict[int, int] = {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        # Asked every third of the time, so that the answer may take the rest of it.
        zmq.HEARTBEAT_IVL: timeout_ms // 3,
        zmq.HEARTBEAT_TIMEOUT: timeout_ms - timeout_ms // 3,
        zmq.RECONNECT_IVL: _RECONNECT_IVL_MS,
    }
    if kind == zmq.ROUTER:
        options[zmq.ROUTER_MANDATORY] = 1
    return options


def source_fd(frame: zmq.Frame) -> int | None:
    """Return the descriptor that a frame came over.

    Returns:
        ``None`` for a peer that speaks ZeroMQ's first protocol. To libzmq, that is any
        peer that speaks none at all.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def peer_credentials(fd: int) -> tuple[int | None, int | None]:
    """Return pid and uid of the process at the other end of a Unix socket.

    Args:
        fd: Somebody else's socket; it stays open.

    Returns:
        ``None`` for what cannot be known: ``fd`` was closed, or the process is in a
        PID namespace that we cannot see.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return None, None
    try:
        connected = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None, None
    with connected:
        return _credentials(connected)


def probe_listener(path: Path) -> int | None:
    """Make sure that somebody whom we trust listens on a Unix socket.

    Returns:
        The listener's pid, or ``None`` where it is in another PID namespace.

    Raises:
        PeerLostError: Nobody listens, or it is neither us nor root.
    """
    advice = "the trainer has ended or was restarted; push again"
    try:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode):
            raise PeerLostError(f"{path} is not a socket; {advice}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            # A full backlog means that somebody listens, but is slow.
            with contextlib.suppress(BlockingIOError):
                probe.connect(str(path))
            pid, uid = _credentials(probe)
    except OSError as error:
        if isinstance(error, PeerLostError):
            raise
        reason = error.strerror or str(error)
        raise PeerLostError(f"nobody can be reached at {path}: {reason}; {advice}") from error
    for owner in (found.st_uid, uid):
        if not is_trusted(owner):
            raise PeerLostError(
                f"{path} belongs to uid {owner}; expected {os.geteuid()} or root", pid=pid
            )
    return pid


def is_trusted(uid: int | None) -> bool:
    """Return whether a peer may talk to us: we ourselves, root, or one who is gone.

    Of one who was gone before the kernel could be asked nothing is known. It had got
    into a directory that only its owner and root can enter.
    """
    return uid is None or uid in {0, os.geteuid()}


def _credentials(connected: socket.socket) -> tuple[int | None, int | None]:
    try:
        data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(data)
    except OSError:
        return None, None
    # Not connected: the kernel answers with pid 0 and uid -1.
    return pid or None, None if uid == -1 else uid


@contextlib.contextmanager
def _zmq_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise TransportError(f"ZeroMQ could not {doing}: {error}") from error
