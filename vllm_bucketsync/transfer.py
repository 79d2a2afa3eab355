"""Drives one update from the trainer's side: sockets, deadlines, and the RPC's thread.

The decisions are the sender's; this file gives it time. Every wait ends: with a message,
with the death of a worker, with the end of the RPC, or with a deadline that names what
it waited for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from .asking import Asking, Progress, RpcCall, UpdateCall, early_end
from .channel import Listener, Lost
from .clients.base import Engine, UpdateAnswer
from .config import Settings
from .errors import (
    ChannelTimeoutError,
    PeerLostError,
    RemoteProtocolError,
)
from .link import register, unregister
from .messages import Command, Reply, decode_reply, encode
from .sender import Sender
from .update import Phase

# How often the RPC is looked at while no message comes.
WATCH_S = 0.05
# By how much workers wait longer than the sender at most.
WORKER_GRACE_S = 10.0
# For workers to answer an abort: they are between two commands, or in one load.
ABORT_TIMEOUT_S = 30.0
# For the RPC to return after the last worker's last message.
RETURN_TIMEOUT_S = 30.0


def run_remote(
    sender: Sender, *, engines: Sequence[Engine], listener: Listener, asking: Asking
) -> list[UpdateCall]:
    """Run an update whose workers live in other processes.

    Args:
        sender: The update. Its ``error`` says how it went.
        engines: Whom to ask.
        listener: Where the workers connect to.
        asking: How.

    Returns:
        The call of each engine. It may still run where a worker is stopped.
    """
    calls = [
        RpcCall(
            functools.partial(
                engine.update, asking.request(sender, endpoint=listener.endpoint, engine=index)
            )
        )
        for index, engine in enumerate(engines)
    ]
    watch = _Watch(sender, asking.settings)
    try:
        while not sender.has_ended:
            _step(sender, listener, calls, watch)
            _tell(sender, asking.progress)
    # Also Ctrl-C: the workers must not be left waiting.
    except BaseException as error:  # noqa: BLE001
        sender.fail(error)
        _drain(sender, listener)
    deadline_s = time.monotonic() + (RETURN_TIMEOUT_S if sender.error is None else 1.0)
    for call in calls:
        call.wait(max(0.0, deadline_s - time.monotonic()))
    return calls


def run_linked(sender: Sender, *, engine: Engine, asking: Asking) -> UpdateAnswer | None:
    """Run an update whose worker lives in this process, on this very thread.

    Returns:
        What the engine says, or ``None`` where it raised.
    """
    token = sender.update.token
    endpoint = register(token, _SenderLink(sender, asking.progress))
    answer = None
    try:
        answer = engine.update(asking.request(sender, endpoint=endpoint, engine=0))
        if not sender.has_ended:
            sender.fail(early_end(answer, None))
    except Exception as error:  # noqa: BLE001 - whatever vLLM raised, the sender has the verdict
        sender.fail(early_end(None, error))
    except BaseException as error:  # noqa: BLE001 - Ctrl-C, raised again by whoever asked
        sender.fail(error)
    finally:
        unregister(token)
    return answer


class _SenderLink:
    """What an in-process worker pulls its commands from. One worker: one key."""

    def __init__(self, sender: Sender, progress: Progress | None) -> None:
        self._sender = sender
        self._progress = progress

    def exchange(self, replies: list[Reply]) -> list[Command]:
        """See ``Link``: advance until there is something to do, or the session ended."""
        for reply in replies:
            self._sender.receive(b"", reply)
        if self._sender.is_prepared:
            self._sender.commit()
        # Nothing to send and nobody else to wait for is an end, whatever the session says.
        outgoing = self._sender.advance()
        _tell(self._sender, self._progress)
        return [command for _, command in outgoing]


class _Watch:
    """The deadline of whatever the sender is about, renewed by every progress."""

    def __init__(self, sender: Sender, settings: Settings) -> None:
        self._sender = sender
        self._settings = settings
        self._since_s = time.monotonic()
        self._phase = sender.phase

    def renew(self) -> None:
        """Begin to wait anew: something has happened."""
        self._since_s = time.monotonic()

    def check(self) -> None:
        """Raise once nothing has happened for too long.

        Raises:
            ChannelTimeoutError: The deadline of this phase has passed.
        """
        if self._sender.phase is not self._phase:
            self._phase = self._sender.phase
            self.renew()
        name, timeout_s = self._timeout()
        if time.monotonic() - self._since_s > timeout_s:
            raise ChannelTimeoutError(
                timeout_s=timeout_s,
                waiting_for=self._sender.waiting_for(),
                advice=f"see the engine's log; raise {name} if it needs longer",
            )

    def _timeout(self) -> tuple[str, float]:
        match self._sender.phase:
            case Phase.GREETING:
                return "connect_timeout_s", self._settings.connect_timeout_s
            case Phase.COMMITTING:
                return "commit_timeout_s", self._settings.commit_timeout_s
            case Phase.ABORTING:
                return "idle_timeout_s", min(ABORT_TIMEOUT_S, self._settings.idle_timeout_s)
            case _:
                return "idle_timeout_s", self._settings.idle_timeout_s


def _step(sender: Sender, listener: Listener, calls: Sequence[UpdateCall], watch: _Watch) -> None:
    """Send what can be sent, then take one message, or see why none comes."""
    if sender.is_prepared:
        sender.commit()
    outgoing = sender.advance()
    for key, command in outgoing:
        _send(sender, listener, key, command)
    done = [index for index, call in enumerate(calls) if call.is_done]
    event = listener.receive(0.0 if outgoing else WATCH_S)
    if event is None and not outgoing:
        for index in done:
            if not sender.has_ended_on(index):
                sender.fail(early_end(calls[index].result, calls[index].error))
                if sender.phase is Phase.COMMITTING:
                    _give_up(sender, "the engine's call ended")
        watch.check()
        return
    watch.renew()
    if event is None:
        return
    if isinstance(event, Lost):
        peer = sender.peers.get(event.peer)
        sender.lose(
            event.peer,
            PeerLostError(
                f"worker {peer or ''} (pid {event.pid}) is gone, while the sender waited for "
                f"{sender.waiting_for()}; see the engine's log",
                pid=event.pid,
            ),
        )
        return
    try:
        reply = decode_reply(event.data)
    except RemoteProtocolError as error:
        # Also from a worker that has not said hello: of another version, most likely.
        sender.fail(error)
        sender.lose(event.peer, error)
        return
    sender.receive(event.peer, reply)


def _send(sender: Sender, listener: Listener, key: bytes, command: Command) -> None:
    try:
        listener.send(key, encode(command))
    except PeerLostError as error:
        sender.lose(key, error)


def _drain(sender: Sender, listener: Listener) -> None:
    """Give workers a moment to hear of the abort, and to say what they hold."""
    deadline_s = time.monotonic() + 2.0
    while not sender.has_ended and time.monotonic() < deadline_s:
        for key, command in sender.advance():
            _send(sender, listener, key, command)
        event = listener.receive(WATCH_S)
        if isinstance(event, Lost):
            sender.lose(event.peer, PeerLostError("gone", pid=event.pid))
        elif event is not None:
            sender.receive(event.peer, decode_reply(event.data))
    _give_up(sender, "no answer to the abort")


def _give_up(sender: Sender, reason: str) -> None:
    for key, peer in sender.peers.items():
        if not peer.has_ended:
            sender.lose(key, PeerLostError(f"{peer}: {reason}", pid=peer.hello.pid))


def _tell(sender: Sender, progress: Progress | None) -> None:
    is_packing = sender.phase in {Phase.STREAMING, Phase.FINISHING}
    if progress is not None and sender.packing is not None and is_packing:
        declared = sender.source.declared
        progress(sender.packing.num_bytes, None if declared is None else declared.num_bytes)
