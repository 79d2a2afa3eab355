"""Drives one update from the trainer's side: sockets, deadlines, and the RPC's thread.

The decisions are the sender's; this file gives it time. Every wait ends: with a message,
with the death of a worker, with the end of the RPC, or with a deadline that names what
it waited for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from .asking import (
    FAILED_RETURN_TIMEOUT_S,
    Asking,
    Progress,
    RpcCall,
    UpdateCall,
    early_end,
    has_failed,
)
from .channel import Event, Listener, Lost, Received
from .clients.base import Engine, UpdateAnswer
from .codec import decode_reply, encode
from .config import Settings
from .errors import (
    ChannelTimeoutError,
    EngineState,
    PeerLostError,
    RemoteProtocolError,
)
from .link import register, unregister
from .messages import Command, Hello, Reply
from .sender import Sender
from .timeline import RETURNING
from .update import Phase, Update

# How often the RPC is looked at while no message comes.
WATCH_S = 0.05
# For workers to answer an abort: they are between two commands, or in one load.
ABORT_TIMEOUT_S = 30.0
# For workers to answer the abort of an update that is given up.
DRAIN_TIMEOUT_S = 2.0
# For the last words of workers whose RPC has returned: on a busy machine they are late.
LAST_WORDS_TIMEOUT_S = 5.0
# For the RPC to return after the last worker's last message.
RETURN_TIMEOUT_S = 30.0
# For a socket to tell which worker is dead, where the RPC has failed of it.
DEATH_TIMEOUT_S = 0.25


def ask_for_update(
    update: Update,
    *,
    engines: Sequence[Engine],
    endpoint: str,
    asking: Asking,
    calls: list[UpdateCall],
    is_ahead: bool = False,
) -> None:
    """Ask engines whose workers live in other processes.

    Args:
        update: What is asked for.
        engines: Whom to ask.
        endpoint: Where the workers connect to.
        asking: How.
        calls: Takes the call of each, as soon as it is made: for ``run_remote``, and for
            whoever waits for its end, if something interrupts this.
        is_ahead: The source is still to be looked at.
    """
    for index, engine in enumerate(engines):
        request = asking.request(update, endpoint=endpoint, engine=index, is_ahead=is_ahead)
        call = RpcCall(functools.partial(engine.update, request))
        calls.append(call)
        call.start()


def run_remote(
    sender: Sender, *, calls: Sequence[UpdateCall], listener: Listener, asking: Asking
) -> None:
    """Run an update whose workers live in other processes.

    A second Ctrl-C, while the first is dealt with, is raised as it is.

    Args:
        sender: The update. Its ``error`` says how it went.
        calls: What engines were asked. They may still run where a worker is stopped.
        listener: Where the workers connect to.
        asking: How they were.
    """
    run = _Run(sender, listener=listener, calls=calls, settings=asking.settings)
    try:
        while not sender.has_ended:
            run.step()
            _tell(sender, asking.progress)
    # Also Ctrl-C: the workers must not be left waiting.
    except BaseException as error:  # noqa: BLE001
        sender.fail(error)
        run.drain()
    sender.timeline.enter(RETURNING)
    if sender.error is None:
        deadline_s = time.monotonic() + RETURN_TIMEOUT_S
        for call in calls:
            call.wait(max(0.0, deadline_s - time.monotonic()))
    else:
        run.cut_off()
        run.see_off()


def run_linked(sender: Sender, *, engine: Engine, asking: Asking) -> UpdateAnswer | None:
    """Run an update whose worker lives in this process, on this very thread.

    Returns:
        What the engine says, or ``None`` where it raised.
    """
    token = sender.update.token
    endpoint = register(token, _SenderLink(sender, asking.progress))
    answer = None
    try:
        answer = engine.update(asking.request(sender.update, endpoint=endpoint, engine=0))
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
        try:
            _tell(self._sender, self._progress)
        # The user's: raised again by push, once the worker has been told to stop.
        except BaseException as error:  # noqa: BLE001
            self._sender.fail(error)
            outgoing += self._sender.advance()
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
        if self._sender.num_silent and self._sender.phase is not Phase.ABORTING:
            return "connect_timeout_s", self._settings.connect_timeout_s
        match self._sender.phase:
            case Phase.COMMITTING:
                return "commit_timeout_s", self._settings.commit_timeout_s
            case Phase.ABORTING:
                return "idle_timeout_s", min(ABORT_TIMEOUT_S, self._settings.idle_timeout_s)
            case _:
                return "idle_timeout_s", self._settings.idle_timeout_s


class _Run:
    """One update over sockets: turns events into the sender's, and its commands into bytes."""

    def __init__(
        self,
        sender: Sender,
        *,
        listener: Listener,
        calls: Sequence[UpdateCall],
        settings: Settings,
    ) -> None:
        self._sender = sender
        self._listener = listener
        self._calls = calls
        self._watch = _Watch(sender, settings)
        self._unreachable: dict[bytes, PeerLostError] = {}
        self._done_since_s: dict[int, float] = {}
        # Of an earlier update: what they still have to say is not about this one.
        self._former = listener.peers()

    def step(self) -> None:
        """Send what can be sent, then take one message, or see why none comes.

        Raises:
            ChannelTimeoutError: The deadline of what is being done has passed.
        """
        if self._sender.is_prepared:
            self._sender.commit()
        has_sent = self._send()
        done = [index for index, call in enumerate(self._calls) if call.is_done]
        event = self._listener.receive(0.0 if has_sent else WATCH_S)
        if event is not None:
            self._take(event)
            if event.peer in self._sender.peers:
                self._watch.renew()
            else:
                # Whoever has not said hello keeps no deadline away.
                self._watch.check()
        elif has_sent:
            self._watch.renew()
        else:
            self._look(done)

    def drain(self) -> None:
        """Give workers a moment to hear of the abort, and to say what they hold."""
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while not self._sender.has_ended and time.monotonic() < deadline_s:
            self._send()
            event = self._listener.receive(WATCH_S)
            if event is not None:
                self._take(event)
        self._give_up("it did not answer the abort")

    def cut_off(self) -> None:
        """Let no worker that comes late take up what was sent before it said hello."""
        self._take_what_came()
        if not self._sender.has_silent_guess:
            return
        self._listener.close(linger_s=0.0)
        deadline_s = time.monotonic() + FAILED_RETURN_TIMEOUT_S
        for call in self._calls:
            call.wait(max(0.0, deadline_s - time.monotonic()))
        self._sender.is_unsure = not all(map(_has_touched_nothing, self._calls))

    def see_off(self) -> None:
        """Give the calls a moment to return, and tell workers that come late to go."""
        if self._listener.is_closed:
            return
        deadline_s = time.monotonic() + FAILED_RETURN_TIMEOUT_S
        while not all(call.is_done for call in self._calls) and time.monotonic() < deadline_s:
            self._send()
            event = self._listener.receive(WATCH_S)
            if event is not None:
                self._take(event)
        # A worker says what it holds before its call returns.
        self._take_what_came()

    def _take_what_came(self) -> None:
        while (event := self._listener.receive(0.0)) is not None:
            self._take(event)

    def _send(self) -> bool:
        outgoing = self._sender.advance()
        for key, command in outgoing:
            try:
                self._listener.send(key, encode(command))
            except PeerLostError as error:
                # What it said last says more than that it is gone, and may be on its way.
                self._unreachable[key] = error
        return any(key in self._sender.peers for key, _ in outgoing)

    def _take(self, event: Event) -> None:
        if isinstance(event, Lost):
            peer = self._sender.peers.get(event.peer)
            text = (
                f"worker {peer or ''} (pid {event.pid}) is gone, while the sender waited for "
                f"{self._sender.waiting_for()}; see the engine's log"
            )
            self._unreachable.pop(event.peer, None)
            self._sender.lose(event.peer, PeerLostError(text, pid=event.pid))
            return
        if event.peer in self._former and not self._begins(event):
            return
        self._former -= {event.peer}
        try:
            reply = decode_reply(event.data)
        except RemoteProtocolError as found:
            peer = self._sender.peers.get(event.peer)
            pid = self._listener.peer_pid(event.peer)
            strange = RemoteProtocolError(f"pid {pid}, which has not said hello, sent {found}")
            error = strange if peer is None else peer.blamed(found)
            # From a worker that has not said hello: of another version, most likely. Later
            # nobody else is expected, and what a stranger says is no reason to end it.
            if event.peer in self._sender.peers or self._sender.phase is Phase.GREETING:
                self._sender.fail(error)
            self._sender.lose(event.peer, error)
            return
        self._sender.receive(event.peer, reply)

    def _begins(self, event: Received) -> bool:
        """Whether a worker of an earlier update says hello to this one."""
        try:
            reply = decode_reply(event.data)
        except RemoteProtocolError:
            return False
        return isinstance(reply, Hello) and self._sender.has_token(reply)

    def _look(self, done: Sequence[int]) -> None:
        """See why nothing comes."""
        while self._unreachable:
            key, lost = self._unreachable.popitem()
            self._sender.lose(key, lost)
        for index in done:
            call = self._calls[index]
            if not self._sender.has_ended_on(index) and not self._may_still_speak(index):
                self._sender.fail(early_end(call.result, call.error))
                if self._sender.phase is Phase.COMMITTING:
                    self._give_up("the engine's call ended")
        self._watch.check()

    def _may_still_speak(self, index: int) -> bool:
        """Whether the workers of an engine, all of which came, are well and not heard yet."""
        call = self._calls[index]
        if has_failed(call.result) or not self._sender.has_all_of(index):
            return False
        since_s = self._done_since_s.setdefault(index, time.monotonic())
        timeout_s = LAST_WORDS_TIMEOUT_S if call.error is None else DEATH_TIMEOUT_S
        return time.monotonic() - since_s < timeout_s

    def _give_up(self, reason: str) -> None:
        for key, peer in self._sender.peers.items():
            if not peer.has_ended:
                lost = PeerLostError(f"{peer}: {reason}", pid=peer.hello.pid)
                self._sender.lose(key, lost)


def _has_touched_nothing(call: UpdateCall) -> bool:
    """Whether a call has returned, and no worker says that it holds anything new."""
    results = [] if call.result is None else call.result.results
    states = [result.get("state") for result in results if isinstance(result, dict)]
    return call.is_done and all(state in {None, EngineState.UNCHANGED} for state in states)


def _tell(sender: Sender, progress: Progress | None) -> None:
    is_packing = sender.phase in {Phase.STREAMING, Phase.FINISHING}
    if progress is not None and sender.packing is not None and is_packing:
        declared = sender.source.declared
        progress(sender.packing.num_bytes, None if declared is None else declared.num_bytes)
