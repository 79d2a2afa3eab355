"""What goes wrong, made to happen in a process of its own at one state of the protocol.

Sessions and sockets are watched from outside: what is struck is the real code of either
end. A strike comes once its session is in the state and the other end is as well: at once
where a message has arrived, and behind what was to be sent where one leaves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from vllm_bucketsync import messages
from vllm_bucketsync.channel import Dialer, Listener
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.session import Role, Session, State
from vllm_bucketsync.sinks import Bucket, SinkReport

# Of what is not answered: longer than any deadline of the tests.
SILENCE_S = 2.5
# In the middle of the stream, and not before it.
NUM_BATCHES_BEFORE = 2
# Which of a sink's calls runs in which state.
CALLS = {
    "open": State.OPENING,
    "load": State.READY,
    "prepare": State.FINISHING,
    "commit": State.COMMITTING,
    "abort": State.ABORTING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault.

    Attributes:
        state: When, as the session of the end that is struck has it.
        fault: What: ``kill``, ``stop``, ``silence``, ``cut``, ``loader``, ``say`` or ``replay``;
            nothing but what ``then`` says where it is empty.
        data: What is said, for ``say``.
        then: A call of the sink that fails before, so that the state is reached.
        stamp: The file that takes the time of the strike.
    """

    state: State
    fault: str
    stamp: str
    data: bytes = b""
    then: str = ""


class _Watched:
    """This process's sockets, and what waits to be done to them."""

    strike: ClassVar[Strike | None] = None
    is_due: ClassVar[bool] = False
    say: ClassVar[Callable[[bytes], None] | None] = None
    last: ClassVar[bytes] = b""
    path: ClassVar[str] = ""
    failing: ClassVar[str] = ""


def arm(strike: Strike | None) -> None:
    """Strike once; ``None`` forgets a strike that did not come."""
    _Watched.strike, _Watched.is_due = strike, False
    _Watched.failing = "" if strike is None else strike.then


def fails(call: str) -> bool:
    """Return whether a call of the sink is to raise."""
    if call == _Watched.failing:
        _Watched.failing = ""
        return True
    strike = _Watched.strike
    if strike is None or strike.fault != "loader" or CALLS[call] is not strike.state:
        return False
    _done(strike)
    return True


def watch(role: Role) -> None:
    """Watch the sessions and sockets of this process. Once in its life."""
    _watch_sessions(role)
    (_watch_listeners if role is Role.SENDER else _watch_dialers)()


def _watch_sessions(role: Role) -> None:
    begin, send, receive = Session.__init__, Session.send, Session.receive

    def beginning(self: Session, own: Role) -> None:
        begin(self, own)
        # A worker has no socket yet, and a sender nobody to talk to.
        _arrive(self, is_due=False, only={"kill", "stop", "silence"})

    def sending(self: Session, message: Any) -> None:
        send(self, message)
        _arrive(self, is_due=True)

    def receiving(self: Session, message: Any) -> None:
        receive(self, message)
        _arrive(self, is_due=False)

    for name, method in (("__init__", beginning), ("send", sending), ("receive", receiving)):
        setattr(Session, name, method)


def _watch_listeners() -> None:
    begin, send, receive = Listener.__init__, Listener.send, Listener.receive

    def beginning(self: Listener, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        _Watched.path = self.endpoint

    def sending(self: Listener, peer: bytes, data: bytes) -> None:
        _Watched.say = lambda junk: send(self, peer, junk)
        _Watched.last = data
        send(self, peer, data)
        _strike_if_due()

    def receiving(self: Listener, timeout_s: float) -> Any:
        event = receive(self, timeout_s)
        if event is not None:
            _Watched.say = lambda junk: send(self, event.peer, junk)
        return event

    for name, method in (("__init__", beginning), ("send", sending), ("receive", receiving)):
        setattr(Listener, name, method)


def _watch_dialers() -> None:
    begin, send = Dialer.__init__, Dialer.send

    def beginning(self: Dialer, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        _Watched.path = self.endpoint
        _Watched.say = lambda junk: send(self, junk)
        _Watched.last = b""
        strike = _Watched.strike
        if strike is not None and strike.state is State.GREETING:
            _hit()

    def sending(self: Dialer, data: bytes) -> None:
        _Watched.last = data
        send(self, data)
        _strike_if_due()

    Dialer.__init__, Dialer.send = beginning, sending  # type: ignore[method-assign]


def _arrive(session: Session, *, is_due: bool, only: set[str] | None = None) -> None:
    strike = _Watched.strike
    if strike is None or strike.fault == "loader" or session.state is not strike.state:
        return
    if only is not None and strike.fault not in only:
        return
    if session.state is State.READY and session.num_batches < NUM_BATCHES_BEFORE:
        return
    if is_due:
        _Watched.is_due = True
    else:
        _hit()


def _strike_if_due() -> None:
    if _Watched.is_due:
        _hit()


def _done(strike: Strike) -> None:
    arm(None)
    Path(strike.stamp).write_text(str(time.monotonic()), encoding="ascii")


def _hit() -> None:
    strike = _Watched.strike
    if strike is None or not strike.fault:
        return
    _done(strike)
    match strike.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "silence":
            time.sleep(SILENCE_S)
        case "cut":
            _cut(_Watched.path.removeprefix("ipc://"))
        case "say" if _Watched.say is not None:
            _Watched.say(strike.data)
        case "replay" if _Watched.say is not None and _Watched.last:
            _Watched.say(_Watched.last)


def _cut(path: str) -> None:
    """Break every connection of this process over a socket's path, once there is one."""
    deadline_s = time.monotonic() + 1.0
    while not _cut_now(path) and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _cut_now(path: str) -> bool:
    num_cut = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if not os.readlink(link).startswith("socket:"):  # noqa: PTH115 - no path of a file
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connected:
                if path in {connected.getpeername(), connected.getsockname()}:
                    connected.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
    return num_cut > 0


class LiveSink:
    """Writes into tensors that are in use, as loading into a running model does."""

    live: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self) -> None:
        self._has_written = False

    def _may(self, call: str) -> None:
        if fails(call):
            raise RuntimeError(f"this loader cannot {call}")

    def open(self, manifest: Manifest | None) -> None:
        self._may("open")

    def deviate(self, index: int) -> None:
        pass

    def load(self, bucket: Bucket) -> None:
        self._may("load")
        self._has_written = True
        for piece in bucket.pieces:
            if piece.meta.name not in self.live:
                self.live[piece.meta.name] = torch.zeros(
                    piece.meta.num_bytes, dtype=torch.uint8, device=piece.data.device
                )
            end = piece.first_byte + piece.data.numel()
            self.live[piece.meta.name][piece.first_byte : end] = piece.data

    def prepare(self) -> None:
        self._may("prepare")

    def commit(self) -> SinkReport:
        self._may("commit")
        return SinkReport()

    def abort(self) -> EngineState:
        self._may("abort")
        return EngineState.TORN if self._has_written else EngineState.UNCHANGED

    def release(self) -> None:
        pass

    @classmethod
    def hashes(cls) -> dict[str, str]:
        """Return a hash of each live tensor's bytes, by name."""
        return hashes_of(cls.live)


def hashes_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return a hash of each tensor's bytes, by name."""
    return {
        name: hashlib.blake2b(data.cpu().numpy().tobytes(), digest_size=16).hexdigest()
        for name, data in tensors.items()
    }


def held() -> dict[str, int]:
    """Return how much of what can be leaked this process has."""
    names = [
        Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8", errors="replace")
        for task in os.listdir("/proc/self/task")  # noqa: PTH208 - names are wanted
    ]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - as above
        "segments": Path("/proc/self/maps").read_text(encoding="utf-8").count(".seg"),
        "threads": sum(name.startswith("ZMQ") for name in names),
        "children": sum(map(_num_children, os.listdir("/proc/self/task"))),  # noqa: PTH208
    }


def _num_children(task: str) -> int:
    try:
        children = Path(f"/proc/self/task/{task}/children").read_text(encoding="ascii")
    except FileNotFoundError:
        # A thread that has ended meanwhile.
        return 0
    return len(children.split())


def every_message() -> dict[str, messages.Message]:
    """Return a message of each kind, by its name."""
    from support.golden_messages import GOLDEN

    return {type(message).__name__: message for message, _ in GOLDEN}
