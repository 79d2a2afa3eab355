"""The update protocol as a state machine that does no I/O.

Both ends run the same table. Whatever moves the state lives in this file, and this
file knows nothing of sockets, tensors, devices or clocks. A sender keeps one session
for each receiver.

    GREETING --Hello--> GREETED --Open--> OPENING --Ready--> READY --Finish--> FINISHING
                           ^                 |                |  Batch, Ack,       |
                           `----Fallback-----'                |  Deviate, Busy Prepared
                                     ^                        |                   |
                                     `----------Open----------'  (before a Batch) v
       ABORTED <--Aborted-- ABORTING <--Abort--  any of these               PREPARED
                                                                                | Commit
       FAILED  <--Error---  any but an end state    COMMITTED <--Done-- COMMITTING

An ``Abort`` may cross replies that were already on their way: ABORTING takes them and
stays. Nothing aborts a commit.

A sender in a hurry (``sender.py``) does not wait for the Ready: its Batches cross it, and
OPENING takes them and stays. Where nobody else votes, READY --Conclude--> COMMITTING.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from .errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from .messages import (
    Abort,
    Aborted,
    Ack,
    Batch,
    Busy,
    Command,
    Commit,
    Conclude,
    Deviate,
    Done,
    Error,
    Fallback,
    Finish,
    Hello,
    Message,
    Metas,
    Open,
    Prepared,
    Ready,
    Reply,
)


class Role(Enum):
    """Which end of the session this process is."""

    SENDER = "sender"
    RECEIVER = "receiver"


class State(Enum):
    """How far an update has come."""

    GREETING = "greeting"
    GREETED = "greeted"
    OPENING = "opening"
    READY = "ready"
    FINISHING = "finishing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    FAILED = "failed"


END_STATES = frozenset({State.COMMITTED, State.ABORTED, State.FAILED})

_LEAVE: dict[type[Message], State] = {Abort: State.ABORTING, Error: State.FAILED}

TRANSITIONS: dict[State, dict[type[Message], State]] = {
    State.GREETING: {Hello: State.GREETED, Error: State.FAILED},
    State.GREETED: {Open: State.OPENING, **_LEAVE},
    State.OPENING: {
        Metas: State.OPENING,
        Ready: State.READY,
        Fallback: State.GREETED,
        Batch: State.OPENING,
        **_LEAVE,
    },
    State.READY: {
        Open: State.OPENING,
        Batch: State.READY,
        Ack: State.READY,
        Deviate: State.READY,
        Busy: State.READY,
        Finish: State.FINISHING,
        Conclude: State.COMMITTING,
        **_LEAVE,
    },
    State.FINISHING: {Ack: State.FINISHING, Prepared: State.PREPARED, **_LEAVE},
    State.PREPARED: {Commit: State.COMMITTING, **_LEAVE},
    State.COMMITTING: {Ack: State.COMMITTING, Done: State.COMMITTED, Error: State.FAILED},
    State.ABORTING: {
        Ready: State.ABORTING,
        Fallback: State.ABORTING,
        Ack: State.ABORTING,
        Prepared: State.ABORTING,
        Aborted: State.ABORTED,
        Error: State.FAILED,
    },
    State.COMMITTED: {},
    State.ABORTED: {},
    State.FAILED: {},
}


class Session:
    """One update between a sender and one receiver, seen from either end.

    Attributes:
        state: How far it has come.
        num_batches: Buckets announced.
        num_acks: Buckets acknowledged, in order.
        num_metas_due: Metas that are still to follow the ``Open``.
        has_deviated: The stream has left the manifest.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self.state = State.GREETING
        self.num_batches = 0
        self.num_acks = 0
        self.num_metas_due = 0
        self.has_deviated = False

    @property
    def has_ended(self) -> bool:
        """Whether no further message is allowed."""
        return self.state in END_STATES

    def send(self, message: Message) -> None:
        """Take note of a message that this end is about to send.

        Raises:
            LocalProtocolError: It is not allowed now. The session is as it was.
        """
        kind = Command if self._role is Role.SENDER else Reply
        self._apply(message, allowed=kind, fault=LocalProtocolError)

    def receive(self, message: Message) -> None:
        """Take note of a message that arrived.

        Raises:
            RemoteProtocolError: It is not allowed now. The session is as it was.
        """
        kind = Reply if self._role is Role.SENDER else Command
        self._apply(message, allowed=kind, fault=RemoteProtocolError)

    def _apply(
        self, message: Message, *, allowed: type[Message], fault: type[ProtocolError]
    ) -> None:
        name = type(message).__name__
        state = TRANSITIONS[self.state].get(type(message))
        if state is None or not isinstance(message, allowed):
            raise fault(f"{name} is not allowed in state {self.state.name}")
        count = _COUNTS.get(type(message))
        problem = None if count is None else count(self, message)
        if problem:
            raise fault(f"{name} in state {self.state.name}: {problem}")
        self.state = state


# Keep the numbers, each for one kind of message; or return what is wrong with them.


def _count_open(session: Session, message: Open) -> str | None:
    if session.num_batches:
        return f"{session.num_batches} buckets were sent; it is too late for another offer"
    if session.has_deviated:
        return "the stream has left the manifest; it is too late for another offer"
    session.num_metas_due = message.num_metas
    return None


def _count_metas(session: Session, message: Metas) -> str | None:
    if not 0 < len(message.metas) <= session.num_metas_due:
        return f"{len(message.metas)} metas; {session.num_metas_due} are due"
    session.num_metas_due -= len(message.metas)
    return None


def _count_ready(session: Session, _: Ready) -> str | None:
    if session.num_metas_due and session.state is State.OPENING:
        return f"{session.num_metas_due} metas are still due"
    return None


def _count_batch(session: Session, message: Batch) -> str | None:
    if session.num_metas_due and session.state is State.OPENING:
        return f"{session.num_metas_due} metas are still due"
    if message.seq != session.num_batches:
        return f"bucket {message.seq}; expected {session.num_batches}"
    session.num_batches += 1
    return None


def _count_ack(session: Session, message: Ack) -> str | None:
    if message.seq != session.num_acks or message.seq >= session.num_batches:
        return f"bucket {message.seq}; expected {session.num_acks} of {session.num_batches} sent"
    session.num_acks += 1
    return None


def _count_deviate(session: Session, _: Deviate) -> str | None:
    if session.has_deviated:
        return "the stream has left the manifest before"
    session.has_deviated = True
    return None


def _count_finish(session: Session, message: Finish) -> str | None:
    if message.num_batches != session.num_batches:
        return f"{message.num_batches} buckets; {session.num_batches} were announced"
    return None


def _count_done(session: Session, _: Done) -> str | None:
    if session.num_acks != session.num_batches:
        return f"{session.num_acks} of {session.num_batches} buckets are acknowledged"
    return None


def _count_prepared(session: Session, _: Prepared) -> str | None:
    if session.num_acks != session.num_batches and session.state is State.FINISHING:
        return f"{session.num_acks} of {session.num_batches} buckets are acknowledged"
    return None


_COUNTS: dict[type[Message], Callable[[Session, Any], str | None]] = {
    Open: _count_open,
    Metas: _count_metas,
    Ready: _count_ready,
    Batch: _count_batch,
    Ack: _count_ack,
    Deviate: _count_deviate,
    Finish: _count_finish,
    Conclude: _count_finish,
    Prepared: _count_prepared,
    Done: _count_done,
}
