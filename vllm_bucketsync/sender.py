"""Trainer side of one update: a stepper over one session per worker.

Replies in (``receive``), commands out (``advance``). The source is consumed only inside
``advance``, on the thread that calls it. Sockets, deadlines and the RPC are in
``transfer.py``; how tensors become buckets is in ``packing.py``.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import guess
from .errors import (
    BucketSyncError,
    EngineState,
    LocalProtocolError,
    RemoteProtocolError,
    UnsupportedError,
)
from .handles import MAX_TEXT_CHARS
from .identity import HOST
from .layout import Manifest
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    Aborted,
    Command,
    Commit,
    Conclude,
    Done,
    Error,
    Fallback,
    Finish,
    Hello,
    Open,
    Reply,
)
from .opening import opening_of
from .packing import Packing
from .peers import Peer, held_by, place_of
from .route import Route
from .session import Role, Session, State
from .slots import Slots
from .sources import Source
from .texts import utf8
from .timeline import Timeline
from .update import Phase, Update
from .versions import check_newer
from .wire_errors import from_wire

Outgoing = tuple[bytes, Command]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Sender:
    """One update, seen from the trainer.

    Attributes:
        update: What is sent.
        source: Where the tensors come from.
        slots: The shared memory, kept between updates.
        route: Which transport carries it.
        known: What workers that stayed connected will say, by socket identity.
        peers: The workers that said hello, or will, by socket identity.
        phase: What is being done.
        error: The first failure.
        packing: What was packed so far; ``None`` before the first bucket.
        timeline: What was done when.
        is_unsure: A call may still run that reaches workers of which nothing was heard.
    """

    update: Update
    source: Source
    slots: Slots
    route: Route
    known: guess.Known = field(default_factory=dict)
    peers: dict[bytes, Peer] = field(default_factory=dict)
    phase: Phase = Phase.GREETING
    error: BaseException | None = None
    packing: Packing | None = None
    timeline: Timeline = field(default_factory=Timeline)
    is_unsure: bool = False
    _is_hurried: bool = False
    # Places of workers that were sent something, have left, and have not come again.
    _forgotten: set[tuple[int, int, int]] = field(default_factory=set)
    _opened: Open | None = None
    _manifest: str = ""
    _outbox: list[Outgoing] = field(default_factory=list)
    _stream: Iterator[list[Command]] | None = None

    @property
    def num_workers(self) -> int:
        """How many workers have to take part."""
        return sum(self.update.num_workers)

    @property
    def has_ended(self) -> bool:
        """Whether every worker that said hello has ended."""
        is_late = self.phase in {Phase.ABORTING, Phase.COMMITTING}
        return is_late and not self._outbox and all(p.has_ended for p in self.peers.values())

    @property
    def num_silent(self) -> int:
        """How many workers have not said hello."""
        return self.num_workers - sum(not peer.is_guessed for peer in self.peers.values())

    @property
    def is_prepared(self) -> bool:
        """Whether every worker voted for the commit."""
        return self.phase is Phase.FINISHING and self._all_in(State.PREPARED)

    @property
    def engine_state(self) -> EngineState:
        """What the engines as a whole hold, as far as the workers said."""
        state = held_by(peer for peer in self.peers.values() if not peer.is_guessed)
        # Whatever the others hold repairs no torn one.
        is_unsure = self.is_unsure and state is not EngineState.TORN
        return EngineState.UNKNOWN if is_unsure else state

    def kept(self) -> guess.Known:
        """Return what each worker will say in the next update; nothing if one has left."""
        return guess.what_is_known(self.peers, self._opened, self._manifest)

    @property
    def has_silent_guess(self) -> bool:
        """Whether something was sent to a worker that has not said hello, nor come anew."""
        return bool(self._forgotten) or any(peer.is_guessed for peer in self.peers.values())

    def has_ended_on(self, engine: int) -> bool:
        """Return whether every worker of one engine has come and ended."""
        return self.has_all_of(engine) and all(p.has_ended for p in self._peers_of(engine))

    def has_all_of(self, engine: int) -> bool:
        """Return whether every worker of one engine has come."""
        return len(self._peers_of(engine)) == self.update.num_workers[engine]

    def _peers_of(self, engine: int) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.hello.engine == engine]

    def advance(self) -> list[Outgoing]:
        """Do the next piece of work and return what is to be sent.

        Returns:
            Commands, each for one worker; empty where replies have to come first. A
            failure of the source is kept as ``error`` and aborts the update.
        """
        phase = None
        try:
            while not self._outbox and phase is not self.phase:
                phase = self.phase
                self._work()
        # The user's source may raise anything; it must not leave workers waiting.
        except BaseException as error:  # noqa: BLE001
            self.fail(error)
        outbox, self._outbox = self._outbox, []
        return outbox

    def receive(self, key: bytes, reply: Reply) -> None:
        """Take in what a worker said.

        Args:
            key: Which worker: the identity of its socket.
            reply: What it said.
        """
        try:
            if isinstance(reply, Hello) and key not in self.peers:
                self._greet(key, reply)
            elif isinstance(reply, Hello) and self.peers[key].is_guessed:
                self._confirm(self.peers[key], reply)
            else:
                self._listen(key, reply)
        except BucketSyncError as error:
            self.fail(error)

    def lose(self, key: bytes, error: BucketSyncError) -> None:
        """Take note that a worker is gone, and abort unless it had ended."""
        peer = self.peers.get(key)
        if peer is None or peer.has_ended:
            return
        if peer.is_guessed:
            self._forget(key)
            return
        peer.is_lost = True
        error.rank = peer.hello.rank
        self.fail(error)

    def commit(self) -> None:
        """Let every worker commit.

        Raises:
            LocalProtocolError: Not all of them are prepared. Nobody was told anything.
        """
        if not self.is_prepared:
            raise LocalProtocolError(f"a commit needs every vote; missing is {self.waiting_for()}")
        self._enter(Phase.COMMITTING)
        self._send_all(Commit())

    def fail(self, error: BaseException) -> None:
        """Keep the first failure, and abort on every worker where that is possible."""
        if self.error is None:
            self.error = error
        if self.phase is not Phase.COMMITTING:
            self._enter(Phase.ABORTING)
        self._abort_all(_told(error))

    def waiting_for(self) -> str:
        """Return what has to happen next, for messages."""
        late = ", ".join(str(peer) for peer in self.peers.values() if not self._is_on_time(peer))
        if self.num_silent and self.phase is not Phase.ABORTING:
            return f"{self.num_silent} of {self.num_workers} workers that have not said hello"
        match self.phase:
            case Phase.STREAMING if self.packing is not None:
                return f"{self.packing.describe()}, acknowledgement from {late}"
            case Phase.OPENING:
                return f"the answer to opening from {late}"
            case _:
                after = "" if self.packing is None else f", after {self.packing.describe()}"
                return f"the answer to {self.phase.value} from {late}{after}"

    def _is_on_time(self, peer: Peer) -> bool:
        if self.phase is Phase.STREAMING and self.packing is not None:
            return peer.session.num_acks == self.packing.num_batches
        if self.phase is Phase.OPENING:
            return peer.session.state is not State.OPENING
        if self.phase is Phase.FINISHING:
            return peer.session.state is State.PREPARED
        return peer.has_ended

    def _greet(self, key: bytes, hello: Hello) -> None:
        if not self.has_token(hello):
            # Somebody whom an earlier, expired offer sent here.
            self._outbox.append((key, Abort(reason="this offer has expired")))
            return
        place = place_of(hello)
        for other, peer in list(self.peers.items()):
            if peer.is_guessed and peer.place == place:
                self._forget(other)
        self._forgotten.discard(place)
        session = Session(Role.SENDER)
        session.receive(hello)
        taken = [peer for peer in self.peers.values() if peer.place == place]
        peer = self.peers[key] = Peer(hello, session)
        if hello.protocol != PROTOCOL_VERSION or hello.boot_id != HOST.boot_id:
            raise UnsupportedError(
                f"{peer} speaks protocol {hello.protocol} (vllm_bucketsync "
                f"{hello.plugin_version}) on boot {hello.boot_id[:8]}; here it is protocol "
                f"{PROTOCOL_VERSION} on boot {HOST.boot_id[:8]}; run one version on one host"
            )
        known = hello.engine < len(self.update.num_workers)
        expected = self.update.num_workers[hello.engine] if known else 0
        num_before = len(self._peers_of(hello.engine)) - 1
        if taken or num_before >= expected:
            raise RemoteProtocolError(
                f"{peer} said hello, but {num_before} of {expected} expected workers had, "
                f"{len(taken)} of them with the same rank; check expected_workers"
            )
        if self.phase is Phase.ABORTING:
            self._abort_all(_told(self.error))

    def has_token(self, hello: Hello) -> bool:
        """Return whether a worker was asked for this update."""
        return hmac.compare_digest(hello.token.encode(), self.update.token.encode())

    def _confirm(self, peer: Peer, hello: Hello) -> None:
        """Take a worker at its word, which was known before it came."""
        if self._opened is None or not self.has_token(hello):
            raise RemoteProtocolError(f"{peer} answered another offer; push again")
        guess.check(peer, hello, self._opened)
        peer.hello, peer.is_guessed = hello, False
        if self.phase is Phase.ABORTING:
            # It was given up, and has come after all: it says what it holds.
            peer.is_lost = False
            self._abort_all(_told(self.error))

    def _forget(self, key: bytes) -> None:
        """Wait for the hello of a worker that was guessed, and has left or come anew."""
        self._forgotten.add(self.peers.pop(key).place)
        self._stream, self._is_hurried = None, False
        if self.phase is not Phase.ABORTING:
            self._enter(Phase.GREETING)

    def _listen(self, key: bytes, reply: Reply) -> None:
        peer = self.peers.get(key)
        if peer is None:
            return
        try:
            peer.session.receive(reply)
        except RemoteProtocolError as error:
            raise peer.blamed(error) from None
        match reply:
            case Fallback(reason=reason):
                if self._is_hurried:
                    raise RemoteProtocolError(f"{peer} lost what it had: {reason}; push again")
                peer.fallback = reason
            case Done():
                peer.done, peer.state = reply, EngineState.COMMITTED
            case Aborted(state=EngineState.COMMITTED):
                raise peer.blamed(RemoteProtocolError("Aborted cannot leave anything committed"))
            case Aborted(state=state):
                peer.state = state
            case Error(code=code, message=message, details=details, state=state):
                peer.state = state
                raise from_wire(code, message, dict(details), rank=peer.hello.rank)

    def _enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.timeline.enter(phase.value)

    def _work(self) -> None:
        if self.phase is Phase.GREETING and len(self.known) == self.num_workers:
            self.peers, self.known = guess.peers_of(self.known), {}
        match self.phase:
            case Phase.GREETING if self._have_all_come():
                if self.update.require_newer:
                    self._check_newer()
                self.route.choose(self._hellos())
                self._offer()
            case Phase.OPENING if not self._any_in(State.OPENING):
                self._decide()
            case Phase.STREAMING if self._stream is not None:
                commands = next(self._stream, None)
                if commands is None and not self._any_in(State.OPENING):
                    self._finish()
                for command in commands or ():
                    self._send_all(command)
            case _:
                pass

    def _check_newer(self) -> None:
        """Refuse to replace what is as new as the update, engine by engine."""
        for engine in range(len(self.update.num_workers)):
            held = [peer.holds(self.update.adapter) for peer in self._peers_of(engine)]
            check_newer(self.update.version, held)

    def _offer(self) -> None:
        """Offer the first of the transports that are left."""
        declared = self.source.declared
        hellos = self._hellos()
        if not self.update.is_dry_run:
            is_just_opened = all(peer.is_guessed for peer in self.peers.values())
            self.route.prepare(hellos, source=self.source, is_just_opened=is_just_opened)
        manifest = declared or self._last_manifest(hellos)
        self.packing = Packing(
            self.source,
            manifest=manifest,
            slots=self.slots,
            timeline=self.timeline,
            verify=self.update.verify,
        )
        for key, peer in self.peers.items():
            opened, metas = opening_of(
                self.update,
                slots=self.slots,
                choice=self.route.choice,
                manifest=manifest,
                is_declared=declared is not None,
                known=peer.hello.manifests,
            )
            self._opened = opened
            for command in (opened, *metas):
                self._send(key, command)
        # A source that can be read but once is not begun before its worker has come.
        can_begin_again = self.source.ready is not None
        self._is_hurried = can_begin_again and guess.may_hurry(list(self.peers.values()), opened)
        if self._is_hurried:
            self._start_streaming()
        else:
            self._enter(Phase.OPENING)

    def _last_manifest(self, hellos: Sequence[Hello]) -> Manifest | None:
        """Return what the last stream was, if it is worth taking for what this one will be."""
        last = self.slots.last_manifest
        if last is None:
            return None
        if self._opened is not None:
            # A worker that came anew is told what the others were promised.
            return last if self._opened.manifest is not None else None
        return last if all(last.digest in hello.manifests for hello in hellos) else None

    def _decide(self) -> None:
        """Go on, or fall back, once every worker has answered the offer."""
        reasons = [f"{peer}: {peer.fallback}" for peer in self.peers.values() if peer.fallback]
        if reasons:
            self.route.fall_back("; ".join(reasons), self._hellos())
            for peer in self.peers.values():
                peer.fallback = None
            self._offer()
        elif self.update.is_dry_run:
            self._enter(Phase.ABORTING)
            self._abort_all("dry run")
        else:
            self._start_streaming()

    def _start_streaming(self) -> None:
        self.slots.unlink()
        self._enter(Phase.STREAMING)
        self._stream = self._packing().batches(self._num_acks)

    def _hellos(self) -> list[Hello]:
        return [peer.hello for peer in self.peers.values()]

    def _finish(self) -> None:
        packing, is_alone = self._packing(), self._is_hurried
        self._manifest = packing.digest()
        self._enter(Phase.COMMITTING if is_alone else Phase.FINISHING)
        self._send_all(
            (Conclude if is_alone else Finish)(
                num_batches=packing.num_batches,
                num_tensors=packing.num_tensors,
                num_bytes=packing.num_bytes,
                manifest=self._manifest,
            )
        )

    def _packing(self) -> Packing:
        if self.packing is None:
            raise RemoteProtocolError("no worker has said hello yet")
        return self.packing

    def _num_acks(self) -> int:
        return min(peer.session.num_acks for peer in self.peers.values())

    def _have_all_come(self) -> bool:
        # One that was offered something has to answer before it is offered it again.
        return len(self.peers) == self.num_workers and not self._any_in(State.OPENING)

    def _any_in(self, state: State) -> bool:
        return any(peer.session.state is state for peer in self.peers.values())

    def _all_in(self, state: State) -> bool:
        return all(peer.session.state is state for peer in self.peers.values())

    def _send(self, key: bytes, command: Command) -> None:
        self.peers[key].session.send(command)
        self._outbox.append((key, command))

    def _send_all(self, command: Command) -> None:
        for key in self.peers:
            self._send(key, command)

    def _abort_all(self, reason: str) -> None:
        for key, peer in self.peers.items():
            # Nothing aborts a commit, but a worker too many may come while others do.
            is_bound = peer.session.state in {State.ABORTING, State.COMMITTING}
            if peer.is_guessed:
                # Whoever has not come is not waited for; it will find nobody.
                peer.is_lost = True
            elif not peer.has_ended and not is_bound:
                self._send(key, Abort(reason=reason[:MAX_TEXT_CHARS]))


def _told(error: BaseException | None) -> str:
    """Return an error as a message can carry it."""
    return utf8(str(error)) or type(error).__name__
