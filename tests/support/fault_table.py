"""Every fault in every state at both ends: what has to come of it, or why there is no such case.

Driven by ``session.TRANSITIONS``: a state, or a message, that is added there has cases here
without another word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from support.striking import CALLS, every_message

from vllm_bucketsync.messages import Command, Message
from vllm_bucketsync.session import END_STATES, TRANSITIONS, Role, State

MESSAGES: dict[str, Message] = every_message()
FAULTS = ("kill", "stop", "silence", "cut", "loader", "source", "junk", "replay", "wrong")
# What is said, and not what happens to the process that says it.
SAID = frozenset({"junk", "replay", "wrong"})
WORKER, TRAINER = Role.RECEIVER, Role.SENDER
# States that only an update comes to which is going wrong already, and what is wrong first.
_FAILING_SOURCE = frozenset({State.ABORTING, State.ABORTED})
# Nothing that an end says in these is read any more, or changes what comes of it.
_DEAF = frozenset({State.COMMITTING, State.ABORTING, *END_STATES})

Codes = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault.

    Attributes:
        state: In which state, as the struck end's session has it.
        end: Which end is struck.
        fault: One of ``FAULTS``.
        message: Which message is the wrong one, for ``wrong``.
    """

    state: State
    end: Role
    fault: str
    message: str = ""

    def __str__(self) -> str:
        """Return what a test's name says of it."""
        who = "worker" if self.end is WORKER else "trainer"
        return "-".join(filter(None, (who, self.state.name, self.fault, self.message)))

    @property
    def has_failing_source(self) -> bool:
        """Whether the source has to fail for the state to be reached."""
        return self.state in _FAILING_SOURCE

    @property
    def has_failing_loader(self) -> bool:
        """Whether a loader has to fail before for the state to be reached."""
        return self.state is State.FAILED

    @property
    def is_quick(self) -> bool:
        """Whether it belongs to every run: each state, fault and end is there at least once."""
        if self.fault in {"stop", "silence"}:
            slow = {"stop": (State.READY, State.COMMITTING), "silence": (State.OPENING,)}
            return self.state in slow[self.fault]
        if self.fault == "wrong":
            return self.message == _first_wrong(self.state, self.end)
        return True


def reason_against(case: Case) -> str | None:
    """Return why there is no such case, or ``None`` where there is."""
    state, end, fault = case.state, case.end, case.fault
    is_said = fault in SAID
    against = {
        "only a worker has a loader": fault == "loader" and end is TRAINER,
        "no loader runs then": fault == "loader" and state not in CALLS.values(),
        "only a trainer has a source": fault == "source" and end is WORKER,
        "the source is only asked while buckets are sent": fault == "source"
        and state is not State.READY,
        "a trainer that has read no Hello knows nobody to talk to": end is TRAINER
        and state is State.GREETING
        and (is_said or fault == "cut"),
        "it has said nothing yet": end is TRAINER and state is State.GREETED and fault == "replay",
        "it is not connected yet, and has said nothing": end is WORKER
        and state is State.GREETING
        and fault in {"cut", "replay"},
        "the table allows it": fault == "wrong" and not is_wrong(case),
    }
    return next((reason for reason, is_so in against.items() if is_so), None)


def is_wrong(case: Case) -> bool:
    """Return whether the table, or the direction, forbids this end to say it then."""
    message = MESSAGES[case.message]
    is_own = isinstance(message, Command) == (case.end is TRAINER)
    return not is_own or type(message) not in TRANSITIONS[case.state]


def all_cases() -> Iterator[Case]:
    """Yield every state, end, fault and, of the wrong ones, message."""
    for state in State:
        for end in (WORKER, TRAINER):
            for fault in FAULTS:
                names = MESSAGES if fault == "wrong" else [""]
                for name in names:
                    yield Case(state=state, end=end, fault=fault, message=name)


def cases() -> list[Case]:
    """Return the cases that there are."""
    return [case for case in all_cases() if reason_against(case) is None]


def named() -> dict[Case, str]:
    """Return those that there are not, and why."""
    found = {case: reason_against(case) for case in all_cases()}
    return {case: reason for case, reason in found.items() if reason is not None}


def raised(case: Case) -> Codes:
    """Return what a push may raise whose worker is struck; empty text for nothing."""
    if case.has_failing_source:
        return frozenset({"GatherFailedError"})
    if case.fault in SAID:
        return _raised_of_what_is_said(case)
    if case.has_failing_loader:
        # Cut off, or dead, before its last words were on their way.
        return frozenset({"RemoteError", "PeerLostError"})
    is_over = case.state is State.COMMITTED
    late = "EngineBusyError" if is_over else "ChannelTimeoutError"
    lost = {"", "EngineUnreachableError", "PeerLostError"} if is_over else {"PeerLostError"}
    if case.fault == "kill" and case.state is State.GREETING:
        # Nobody knows it yet but the engine whose process it was.
        lost = {"EngineUnreachableError"}
    if case.state is State.GREETED:
        # It may have been read before, or not.
        lost |= {"EngineUnreachableError"} if case.fault == "kill" else {"ChannelTimeoutError"}
    of_fault = {"kill": lost, "cut": lost, "stop": {late}, "silence": {late}}
    return frozenset(of_fault.get(case.fault, {"RemoteError"}))


def _raised_of_what_is_said(case: Case) -> Codes:
    if case.has_failing_loader:
        return frozenset({"RemoteError"})
    if case.state is State.GREETING and case.fault == "wrong" and _is_reply(case):
        # As a stranger's: whoever has not said hello is not listened to.
        return frozenset({""})
    # What came too early may be read when it is no longer.
    is_early = case.state is State.PREPARED and case.message == "Done"
    if case.state is State.COMMITTED or is_early:
        return frozenset({"", "RemoteProtocolError"})
    return frozenset({"RemoteProtocolError"})


def answered(case: Case) -> Codes:
    """Return what workers may answer whose trainer is struck; empty text for no error."""
    is_over = case.state in _DEAF
    own = frozenset({"remote"}) if case.has_failing_loader else frozenset()
    match case.fault:
        case "source":
            return frozenset({""})
        case "kill" | "cut":
            # One that came after the others were cut off is told to go.
            is_told = is_over or case.fault == "cut"
            return own | frozenset({"peer_lost", *([""] if is_told else [])})
        case "stop" | "silence":
            # Who waits longest may hear from the trainer that another has given up.
            is_told = is_over or case.fault == "silence"
            return own | frozenset({"channel_timeout", *([""] if is_told else [])})
        case _:
            # The one that it was said to, and the others, which are told to forget it.
            return own | frozenset({"remote_protocol", ""})


def _is_reply(case: Case) -> bool:
    return not isinstance(MESSAGES[case.message], Command)


def _first_wrong(state: State, end: Role) -> str:
    for name, message in MESSAGES.items():
        case = Case(state=state, end=end, fault="wrong", message=name)
        is_own = isinstance(message, Command) == (end is TRAINER)
        if is_own and is_wrong(case):
            return name
    return ""
