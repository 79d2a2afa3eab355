"""The update protocol as a state machine that does no I/O.

Both ends run the same table. Whatever moves the state lives in this file, and this
file knows nothing of sockets, tensors, devices or clocks. A sender keeps one session
for each receiver.

    GREETING --Hello--> GREETED --Open--> OPENING --Ready--> READY --Finish--> FINISHING
                           ^                 |                |  Batch, Ack,       |
                           `----Fallback-----'                |  Deviate       Prepared
                                     ^                        |                   |
                                     `----------Open----------'  (before a Batch) v
       ABORTED <--Aborted-- ABORTING <--Abort--  any of these               PREPARED
                                                                                | Commit
       FAILED  <--Error---  any but an end state    COMMITTED <--Done-- COMMITTING

An ``Abort`` may cross replies that were already on their way: ABORTING takes them and
stays. Nothing aborts a commit.
"""

from __future__ import annotations

from enum import Enum

from .errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from .messages import (
    Abort,
    Aborted,
    Ack,
    Batch,
    Command,
    Commit,
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
        **_LEAVE,
    },
    State.READY: {
        Open: State.OPENING,
        Batch: State.READY,
        Ack: State.READY,
        Deviate: State.READY,
        Finish: State.FINISHING,
        **_LEAVE,
    },
    State.FINISHING: {Ack: State.FINISHING, Prepared: State.PREPARED, **_LEAVE},
    State.PREPARED: {Commit: State.COMMITTING, **_LEAVE},
    State.COMMITTING: {Done: State.COMMITTED, Error: State.FAILED},
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
        problem = self._count(message)
        if problem:
            raise fault(f"{name} in state {self.state.name}: {problem}")
        self.state = state

    def _count(self, message: Message) -> str | None:
        """Keep the numbers, or return what is wrong with them."""
        match message:
            case Open(num_metas=num_metas):
                if self.num_batches:
                    return f"{self.num_batches} buckets were sent; it is too late for another offer"
                self.num_metas_due = num_metas
            case Metas(metas=metas):
                if not 0 < len(metas) <= self.num_metas_due:
                    return f"{len(metas)} metas; {self.num_metas_due} are due"
                self.num_metas_due -= len(metas)
            case Ready() if self.num_metas_due and self.state is State.OPENING:
                return f"{self.num_metas_due} metas are still due"
            case Batch(seq=seq):
                if seq != self.num_batches:
                    return f"bucket {seq}; expected {self.num_batches}"
                self.num_batches += 1
            case Ack(seq=seq):
                if seq != self.num_acks or seq >= self.num_batches:
                    return f"bucket {seq}; expected {self.num_acks} of {self.num_batches} sent"
                self.num_acks += 1
            case Deviate():
                if self.has_deviated:
                    return "the stream has left the manifest before"
                self.has_deviated = True
            case Finish(num_batches=num_batches) if num_batches != self.num_batches:
                return f"{num_batches} buckets; {self.num_batches} were announced"
            case Prepared() if self.num_acks != self.num_batches and self.state is State.FINISHING:
                return f"{self.num_acks} of {self.num_batches} buckets are acknowledged"
        return None
