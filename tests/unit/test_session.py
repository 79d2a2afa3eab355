"""Proves that both ends move through one table, and that nothing else moves them."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import golden

from vllm_bucketsync.errors import EngineState, LocalProtocolError, RemoteProtocolError
from vllm_bucketsync.layout import TensorMeta
from vllm_bucketsync.messages import (
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
    Message,
    Metas,
    Prepared,
    Ready,
    Reply,
)
from vllm_bucketsync.session import END_STATES, TRANSITIONS, Role, Session, State

META = TensorMeta("a.weight", "float32", (2,), 8)
ERROR = Error(code="load", message="no", details={}, state=EngineState.UNCHANGED)
MESSAGES: list[Message] = [
    golden.HELLO,
    golden.OPEN,
    Metas(metas=(META,)),
    Ready(),
    Fallback(transport="shm", reason="full"),
    Batch(seq=0, region=0),
    Ack(seq=0),
    Deviate(index=0),
    Busy(num_tensors=1),
    Finish(num_batches=0, num_tensors=0, num_bytes=0, manifest="0"),
    Conclude(num_batches=0, num_tensors=0, num_bytes=0, manifest="0"),
    Prepared(),
    Commit(),
    Done(),
    Abort(reason="no"),
    Aborted(state=EngineState.UNCHANGED),
    ERROR,
]
CELLS = list(itertools.product(State, MESSAGES))


def session_in(state: State, role: Role, *, message: Message) -> Session:
    """Return a session whose numbers suit ``message``, so that only the table decides."""
    session = Session(role)
    session.state = state
    session.num_metas_due = isinstance(message, Metas)
    session.num_batches = isinstance(message, Ack)
    return session


def cell_id(value: object) -> str:
    return value.name if isinstance(value, State) else type(value).__name__


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("state", "message"), CELLS, ids=cell_id)
def test_a_message_moves_either_end_as_the_table_says_or_not_at_all(
    state: State, message: Message, role: Role
) -> None:
    session = session_in(state, role, message=message)
    is_mine = isinstance(message, Command) == (role is Role.SENDER)
    expected = TRANSITIONS[state].get(type(message))
    act = session.send if is_mine else session.receive

    if expected is None:
        fault = LocalProtocolError if is_mine else RemoteProtocolError
        with pytest.raises(fault, match=f"{type(message).__name__} is not allowed in state"):
            act(message)
        assert session.state is state
    else:
        act(message)
        assert session.state is expected


@pytest.mark.parametrize("message", MESSAGES, ids=cell_id)
def test_an_end_may_not_send_what_only_the_other_end_may_say(message: Message) -> None:
    wrong = Role.RECEIVER if isinstance(message, Command) else Role.SENDER
    for state in State:
        session = session_in(state, wrong, message=message)
        with pytest.raises(LocalProtocolError):
            session.send(message)
        assert session.state is state


def test_every_state_can_be_reached_and_end_states_cannot_be_left() -> None:
    reached = {State.GREETING}
    for _ in State:
        reached |= {to for state in reached for to in TRANSITIONS[state].values()}

    assert reached == set(State)
    assert {state for state in State if not TRANSITIONS[state]} == END_STATES


def test_a_worker_may_fail_in_every_state_that_is_not_an_end() -> None:
    assert all(Error in TRANSITIONS[state] for state in set(State) - END_STATES)


def test_nothing_aborts_a_commit() -> None:
    assert Abort not in TRANSITIONS[State.COMMITTING]


def test_numbers_that_do_not_follow_are_refused_and_change_nothing() -> None:
    ready = Session(Role.RECEIVER)
    ready.state, ready.num_batches, ready.num_acks = State.READY, 3, 1
    before = (ready.state, ready.num_batches, ready.num_acks)

    for seq in (0, 2, 4):
        with pytest.raises(RemoteProtocolError, match=f"bucket {seq}; expected 3"):
            ready.receive(Batch(seq=seq, region=0))
    for seq in (0, 2, 3):
        with pytest.raises(LocalProtocolError, match=f"bucket {seq}; expected 1"):
            ready.send(Ack(seq=seq))
    with pytest.raises(RemoteProtocolError, match="2 buckets; 3 were announced"):
        ready.receive(Finish(num_batches=2, num_tensors=1, num_bytes=1, manifest="0"))
    with pytest.raises(RemoteProtocolError, match="too late for another offer"):
        ready.receive(golden.OPEN)

    assert (ready.state, ready.num_batches, ready.num_acks) == before


def test_a_vote_needs_every_bucket_acknowledged() -> None:
    session = Session(Role.SENDER)
    session.state, session.num_batches, session.num_acks = State.FINISHING, 2, 1

    with pytest.raises(RemoteProtocolError, match="1 of 2 buckets are acknowledged"):
        session.receive(Prepared())


def test_a_stream_leaves_its_manifest_once() -> None:
    session = Session(Role.SENDER)
    session.state = State.READY
    session.send(Deviate(index=0))

    with pytest.raises(LocalProtocolError, match="has left the manifest before"):
        session.send(Deviate(index=1))


@pytest.mark.parametrize("count", [0, 3])
def test_metas_must_be_those_that_were_announced(count: int) -> None:
    session = Session(Role.RECEIVER)
    session.state, session.num_metas_due = State.OPENING, 2

    with pytest.raises(RemoteProtocolError, match=f"{count} metas; 2 are due"):
        session.receive(Metas(metas=(META,) * count))


def test_a_worker_is_not_ready_before_the_metas_came() -> None:
    session = Session(Role.RECEIVER)
    session.state, session.num_metas_due = State.OPENING, 1

    with pytest.raises(LocalProtocolError, match="1 metas are still due"):
        session.send(Ready())


class TwoEnds(RuleBasedStateMachine):
    """Random orders over a wire that keeps them: the ends may be apart, never at odds."""

    def __init__(self) -> None:
        super().__init__()
        self.sender, self.receiver = Session(Role.SENDER), Session(Role.RECEIVER)
        self.down: deque[Message] = deque()
        self.up: deque[Message] = deque()

    def _offer(self, session: Session, message: Message, wire: deque[Message]) -> None:
        try:
            session.send(message)
        except LocalProtocolError:
            return
        wire.append(message)

    @rule(message=st.sampled_from([m for m in MESSAGES if isinstance(m, Command)]))
    def command(self, message: Message) -> None:
        if isinstance(message, Batch):
            message = Batch(seq=self.sender.num_batches, region=0)
        if isinstance(message, Finish):
            message = Finish(
                num_batches=self.sender.num_batches, num_tensors=0, num_bytes=0, manifest="0"
            )
        self._offer(self.sender, message, self.down)

    @rule(message=st.sampled_from([m for m in MESSAGES if isinstance(m, Reply)]))
    def reply(self, message: Message) -> None:
        # A worker that was told more than it has read answers what it has read.
        if isinstance(message, Ack):
            message = Ack(seq=self.receiver.num_acks)
        self._offer(self.receiver, message, self.up)

    @precondition(lambda self: self.down)
    @rule()
    def deliver_command(self) -> None:
        message = self.down.popleft()
        if self.receiver.has_ended:
            return  # a worker that failed has left; nobody reads this
        if isinstance(message, Batch) and self.receiver.state is State.GREETED:
            # It cannot use the transport, and a sender in a hurry did not wait to hear that.
            with pytest.raises(RemoteProtocolError):
                self.receiver.receive(message)
            self._offer(self.receiver, next(m for m in MESSAGES if isinstance(m, Error)), self.up)
            return
        self.receiver.receive(message)

    @precondition(lambda self: self.up)
    @rule()
    def deliver_reply(self) -> None:
        self.sender.receive(self.up.popleft())

    @invariant()
    def an_end_is_an_end_for_both(self) -> None:
        if self.down or self.up:
            return
        if self.receiver.has_ended:
            assert self.sender.state is self.receiver.state


TwoEnds.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_two_ends_over_an_ordered_wire_never_disagree = TwoEnds.TestCase
