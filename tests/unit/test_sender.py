"""Proves that a trainer commits only what every worker voted for, and says what is left.

A real sender without a wire: the test is every worker, and looks at each command and at
each write into a slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import pytest
import torch
from support.stepping import SLOT_BYTES, WISH, Pairs, byte_pairs, hello, manifest_of

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import (
    BucketSyncError,
    EngineState,
    LoadError,
    LocalProtocolError,
    PeerLostError,
    RegionError,
    RemoteProtocolError,
    TransportError,
    UnsupportedError,
)
from vllm_bucketsync.handles import MAX_TEXT_CHARS, Handle, InprocHandle
from vllm_bucketsync.layout import Manifest, TensorMeta
from vllm_bucketsync.messages import (
    MAX_METAS,
    Abort,
    Aborted,
    Ack,
    Batch,
    Command,
    Deviate,
    Done,
    Error,
    Fallback,
    Finish,
    Hello,
    Metas,
    Open,
    Prepared,
    Ready,
    Region,
    Reply,
)
from vllm_bucketsync.route import Route
from vllm_bucketsync.sender import Sender
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.sources import Source
from vllm_bucketsync.transport.registry import Choice, Wish
from vllm_bucketsync.update import Phase, Update

UNCHANGED, TORN, COMMITTED, UNKNOWN = (
    EngineState.UNCHANGED,
    EngineState.TORN,
    EngineState.COMMITTED,
    EngineState.UNKNOWN,
)


class NotedSlots(Slots):
    """Slots without memory: what they would be made of and hold is taken note of."""

    def __init__(self, num_slots: int = 2) -> None:
        super().__init__(Settings(slot_size=SLOT_BYTES, num_slots=num_slots))
        self.prepared: list[tuple[str, int | None, list[int]]] = []
        self.writes: list[tuple[int, int, bytes]] = []
        self.flushes: list[tuple[int, int]] = []
        self.num_unlinks = 0
        self.errors: dict[str, BaseException] = {}

    @property
    def handles(self) -> tuple[Handle, ...]:
        return (InprocHandle(id=self.prepared[-1][0], num_bytes=1 << 20),)

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(Region(0, i * SLOT_BYTES, SLOT_BYTES) for i in range(self.num_slots))

    def prepare(
        self,
        kind: str,
        *,
        needed_bytes: int | None,
        hellos: Sequence[Hello],
        wish: Wish,
        is_at_once: bool = False,
    ) -> None:
        if kind in self.errors:
            raise self.errors[kind]
        self.prepared.append((kind, needed_bytes, [said.rank for said in hellos]))

    def write(self, batch: int, offset_bytes: int, data: torch.Tensor) -> None:
        self.writes.append((batch, offset_bytes, data.numpy().tobytes()))

    def flush(self, batch: int) -> None:
        self.flushes.append((batch, len(self.writes)))

    def unlink(self) -> None:
        self.num_unlinks += 1


class CountedSource:
    """Yields tensors, counts how many were asked for, and fails where it is told to."""

    def __init__(self, pairs: Pairs, fail_at: int | None = None) -> None:
        self.num_asked = 0
        self._pairs = pairs
        self._fail_at = fail_at
        self.error: BaseException = ValueError("the trainer's generator failed")

    def __iter__(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for index in range(len(self._pairs) + 1):
            self.num_asked += 1
            if index == self._fail_at:
                raise self.error
            if index < len(self._pairs):
                yield self._pairs[index]


class Trainer:
    """A sender, and what it has said to each worker."""

    def __init__(
        self,
        *,
        num_workers: int = 2,
        pairs: Pairs = (),
        declared: bool = True,
        num_slots: int = 2,
        fail_at: int | None = None,
        is_dry_run: bool = False,
    ) -> None:
        pairs = pairs or byte_pairs(300, 700, 8)
        self.pairs = pairs
        self.slots = NotedSlots(num_slots)
        self.tensors = CountedSource(pairs, fail_at)
        self.said: dict[bytes, list[Command]] = {}
        self.sender = Sender(
            update=Update(
                update_id="u",
                version="1",
                token="secret",  # noqa: S106 - of this test alone
                num_workers=(num_workers,),
                is_dry_run=is_dry_run,
            ),
            source=Source(
                declared=manifest_of(pairs) if declared else None, tensors=iter(self.tensors)
            ),
            slots=self.slots,
            route=Route(wish=WISH, slots=self.slots),
        )
        self.num_workers = num_workers

    @property
    def keys(self) -> list[bytes]:
        return [key_of(rank) for rank in range(self.num_workers)]

    def advance(self) -> list[tuple[bytes, Command]]:
        outgoing = self.sender.advance()
        for key, command in outgoing:
            self.said.setdefault(key, []).append(command)
        return outgoing

    def exhaust(self) -> None:
        """Advance until replies have to come first."""
        while self.advance():
            pass

    def greet(self, *ranks: int) -> None:
        for rank in ranks or range(self.num_workers):
            self.sender.receive(key_of(rank), hello(rank=rank))

    def reply(self, make: Reply, *ranks: int) -> None:
        for rank in ranks or range(self.num_workers):
            self.sender.receive(key_of(rank), make)

    def open(self) -> None:
        self.greet()
        self.exhaust()
        self.reply(Ready())

    def stream(self) -> None:
        """Go through all buckets, each acknowledged by every worker at once."""
        self.open()
        seen = 0
        while self.sender.phase is not Phase.FINISHING:
            self.advance()
            batches = self.batches(0)
            for batch in batches[seen:]:
                self.reply(Ack(seq=batch.seq))
            seen = len(batches)
        self.exhaust()

    def prepare(self) -> None:
        self.stream()
        self.reply(Prepared())

    def commit(self) -> None:
        self.prepare()
        assert self.sender.is_prepared
        self.sender.commit()
        self.exhaust()

    def reach(self, phase: Phase) -> None:
        match phase:
            case Phase.GREETING:
                self.greet(0)
            case Phase.OPENING:
                self.greet()
                self.exhaust()
            case Phase.STREAMING:
                self.open()
                self.exhaust()
            case Phase.FINISHING:
                self.stream()
            case Phase.COMMITTING:
                self.commit()
        assert self.sender.phase is phase

    def batches(self, rank: int) -> list[Batch]:
        return [c for c in self.said.get(key_of(rank), []) if isinstance(c, Batch)]

    def kinds(self, rank: int) -> list[str]:
        return [type(command).__name__ for command in self.said.get(key_of(rank), [])]


def key_of(rank: int) -> bytes:
    return b"worker %d" % rank


def failed(state: EngineState, code: str = "load") -> Error:
    return Error(code=code, message="does not fit", details={}, state=state)


ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_update_runs_whatever_the_order_in_which_workers_answer(order: Sequence[int]) -> None:
    trainer = Trainer(num_workers=3)
    for position, rank in enumerate(order):
        assert trainer.sender.phase is Phase.GREETING
        assert trainer.advance() == []
        trainer.greet(rank)
        is_last = position == 2
        assert bool(trainer.sender.advance() if not is_last else True) is is_last
    trainer.exhaust()
    for rank in order:
        assert trainer.batches(rank) == []
        trainer.reply(Ready(), rank)
    trainer.exhaust()
    for seq in range(3):
        for rank in order:
            trainer.reply(Ack(seq=seq), rank)
        trainer.exhaust()
    for position, rank in enumerate(order):
        assert not trainer.sender.is_prepared
        assert "Commit" not in trainer.kinds(rank)
        trainer.reply(Prepared(), rank)
        assert trainer.sender.is_prepared is (position == 2)
    trainer.sender.commit()
    trainer.exhaust()
    for rank in order:
        assert not trainer.sender.has_ended
        trainer.reply(Done(), rank)

    assert trainer.sender.has_ended
    assert trainer.sender.error is None
    assert trainer.sender.engine_state is COMMITTED
    expected = ["Open", "Metas", "Batch", "Batch", "Batch", "Finish", "Commit"]
    for rank in range(3):
        assert trainer.kinds(rank) == expected
    assert trainer.slots.num_unlinks == 1


def test_an_offer_names_what_comes_and_the_memory_it_comes_through() -> None:
    trainer = Trainer()
    manifest = manifest_of(trainer.pairs)
    trainer.sender.receive(key_of(0), hello(rank=0))
    trainer.sender.receive(key_of(1), hello(rank=1, manifests=(manifest.digest,)))
    trainer.exhaust()

    opened, metas = trainer.said[key_of(0)]
    assert isinstance(opened, Open)
    assert opened.handles == trainer.slots.handles
    assert opened.regions == trainer.slots.regions
    assert (opened.manifest, opened.num_metas, opened.is_declared) == (manifest.digest, 3, True)
    assert opened.num_workers == 2
    assert metas == Metas(metas=manifest.metas)
    # The other holds the manifest already.
    assert trainer.said[key_of(1)] == [msgspec.structs.replace(opened, num_metas=0)]
    assert trainer.slots.prepared == [("shm", manifest.aligned_bytes, [0, 1])]


def test_metas_are_cut_into_messages_of_a_bounded_number() -> None:
    meta = TensorMeta("t", "uint8", (0,), 0)
    pairs = [(msgspec.structs.replace(meta, name=f"t{i}"), torch.empty(0)) for i in range(9000)]
    trainer = Trainer(num_workers=1, pairs=pairs)
    trainer.greet()
    trainer.exhaust()

    counts = [len(c.metas) for c in trainer.said[key_of(0)] if isinstance(c, Metas)]
    assert counts == [MAX_METAS, 9000 - MAX_METAS]


def test_a_stream_is_offered_as_the_last_one_only_to_workers_that_all_know_it() -> None:
    known = manifest_of(byte_pairs(300, 700, 8))
    for is_known_to_all in (False, True):
        trainer = Trainer(declared=False)
        trainer.slots.last_manifest = known
        for rank in range(2):
            knows = is_known_to_all or rank == 0
            manifests = (known.digest,) if knows else ()
            trainer.sender.receive(key_of(rank), hello(rank=rank, manifests=manifests))
        trainer.exhaust()

        for rank in range(2):
            (opened,) = trainer.said[key_of(rank)]
            assert isinstance(opened, Open)
            assert opened.manifest == (known.digest if is_known_to_all else None)
            assert not opened.is_declared
        assert trainer.slots.prepared[0][1] is None


STRANGERS: dict[str, tuple[Hello, type[BucketSyncError], str]] = {
    "the same rank": (hello(rank=0, pid=7), RemoteProtocolError, "1 of them with the same rank"),
    "another protocol": (hello(rank=1, protocol=999), UnsupportedError, "protocol 999"),
    "another boot": (hello(rank=1, boot_id="elsewhere"), UnsupportedError, "boot elsewher"),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_worker_that_cannot_take_part_ends_the_update_for_all(what: str) -> None:
    said, kind, match = STRANGERS[what]
    trainer = Trainer(num_workers=3)
    trainer.greet(0)

    trainer.sender.receive(b"stranger", said)
    trainer.exhaust()

    with pytest.raises(kind, match=match):
        raise trainer.sender.error or AssertionError
    assert [trainer.kinds(0), [type(c).__name__ for c in trainer.said[b"stranger"]]] == [
        ["Abort"],
        ["Abort"],
    ]
    assert trainer.tensors.num_asked == 0
    # One that comes later is told as well.
    trainer.greet(2)
    trainer.exhaust()
    assert trainer.kinds(2) == ["Abort"]
    for key in (key_of(0), b"stranger", key_of(2)):
        assert not trainer.sender.has_ended
        trainer.sender.receive(key, Aborted(state=UNCHANGED))
    assert trainer.sender.has_ended
    assert trainer.sender.engine_state is UNCHANGED


@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.STREAMING, Phase.FINISHING])
def test_a_worker_too_many_ends_the_update_for_all(phase: Phase) -> None:
    trainer = Trainer()
    trainer.reach(phase)

    trainer.greet(2)
    trainer.exhaust()

    with pytest.raises(RemoteProtocolError, match="expected_workers"):
        raise trainer.sender.error or AssertionError
    assert [trainer.kinds(rank)[-1] for rank in range(3)] == ["Abort"] * 3


def test_a_worker_too_many_during_the_commit_is_sent_away_and_the_commit_goes_on() -> None:
    trainer = Trainer()
    trainer.commit()

    trainer.greet(2)
    trainer.exhaust()

    assert trainer.kinds(2) == ["Abort"]
    assert trainer.sender.phase is Phase.COMMITTING
    trainer.reply(Done())
    trainer.reply(Aborted(state=UNCHANGED), 2)
    assert trainer.sender.has_ended
    # The engine has one worker with the old weights.
    assert isinstance(trainer.sender.error, RemoteProtocolError)
    assert trainer.sender.engine_state is TORN
    assert [trainer.kinds(rank).count("Abort") for rank in range(2)] == [0, 0]


def test_a_replica_may_have_a_worker_of_the_same_rank() -> None:
    trainer = Trainer()
    trainer.sender.receive(b"first", hello(rank=0, dp_index=0))
    trainer.sender.receive(b"second", hello(rank=0, dp_index=1))
    trainer.exhaust()

    assert trainer.sender.error is None
    assert trainer.sender.phase is Phase.OPENING
    assert str(trainer.sender.peers[b"second"]) == "replica 1 rank 0 pid 1000"


@pytest.mark.parametrize("token", ["", "Secret", "secret2", "sécret"])
@pytest.mark.parametrize("phase", [Phase.GREETING, Phase.STREAMING, Phase.COMMITTING])
def test_who_does_not_know_the_token_is_sent_away_and_counts_for_nothing(
    phase: Phase, token: str
) -> None:
    trainer = Trainer()
    trainer.reach(phase)
    peers = list(trainer.sender.peers)

    trainer.sender.receive(b"stranger", hello(rank=1, token=token))
    assert not trainer.sender.has_ended
    outgoing = trainer.advance()

    assert [(key, type(command)) for key, command in outgoing] == [(b"stranger", Abort)]
    assert list(trainer.sender.peers) == peers
    assert trainer.sender.phase is phase
    assert trainer.sender.error is None
    # Whatever it says then is nobody's business either.
    for reply in (Aborted(state=TORN), failed(TORN), Ready(), Ack(seq=0), Done()):
        trainer.sender.receive(b"stranger", reply)
    trainer.sender.lose(b"stranger", PeerLostError("gone"))
    assert trainer.sender.error is None
    assert trainer.sender.phase is phase


def test_a_second_hello_of_one_worker_is_a_fault() -> None:
    trainer = Trainer()
    trainer.greet(0)
    trainer.greet(0)
    trainer.exhaust()

    assert isinstance(trainer.sender.error, RemoteProtocolError)
    assert trainer.kinds(0) == ["Abort"]


def choose(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Let these be the transports to try, whatever the machine is."""
    monkeypatch.setattr(
        "vllm_bucketsync.route.candidates",
        lambda wish, hellos: [Choice(kind, f"{kind} is here") for kind in kinds],
    )


@pytest.mark.parametrize("num_fallbacks", [1, 2])
def test_the_next_transport_is_offered_in_the_same_update_with_nothing_consumed(
    num_fallbacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, "cuda_ipc", "shm")
    trainer = Trainer()
    trainer.greet()
    trainer.exhaust()
    for rank in range(2):
        assert trainer.advance() == []
        is_failing = rank < num_fallbacks
        answer = Fallback(transport="cuda_ipc", reason="no peer access") if is_failing else Ready()
        trainer.reply(answer, rank)
    trainer.exhaust()

    assert trainer.tensors.num_asked == 0
    assert trainer.slots.writes == []
    assert [kind for kind, _, _ in trainer.slots.prepared] == ["cuda_ipc", "shm"]
    for rank in range(2):
        offers = [c.transport for c in trainer.said[key_of(rank)] if isinstance(c, Open)]
        assert offers == ["cuda_ipc", "shm"]
    assert trainer.sender.route.choice.kind == "shm"
    for part in ("cuda_ipc failed", "rank 0 pid 1000: no peer access", "shm is here"):
        assert part in trainer.sender.route.choice.reason

    trainer.reply(Ready())
    trainer.exhaust()
    assert trainer.sender.phase is Phase.STREAMING
    assert trainer.slots.writes
    assert trainer.slots.num_unlinks == 1


@pytest.mark.parametrize("choices", [("shm",), ("cuda_ipc", "shm")])
def test_when_no_transport_is_left_nothing_was_written_and_every_reason_is_told(
    choices: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, *choices)
    trainer = Trainer()
    trainer.greet()
    for kind in choices:
        trainer.exhaust()
        trainer.reply(Fallback(transport=kind, reason=f"{kind} is full"), 1)
        trainer.reply(Ready(), 0)
    trainer.exhaust()

    assert type(trainer.sender.error) is TransportError
    text = str(trainer.sender.error)
    assert "transport shm does not work: rank 1 pid 1001: shm is full" in text
    assert trainer.tensors.num_asked == 0
    assert [trainer.kinds(rank).count("Abort") for rank in range(2)] == [1, 1]
    trainer.reply(Aborted(state=UNCHANGED))
    assert trainer.sender.has_ended
    assert trainer.sender.engine_state is UNCHANGED


@pytest.mark.parametrize(
    "phase", [Phase.OPENING, Phase.STREAMING, Phase.FINISHING], ids=lambda phase: phase.value
)
def test_the_error_of_one_worker_is_one_abort_for_each_of_the_others(phase: Phase) -> None:
    trainer = Trainer(num_workers=3)
    trainer.reach(phase)

    trainer.reply(failed(TORN), 1)
    trainer.exhaust()
    # Replies that were on their way cross the abort; so does another error.
    if phase is Phase.STREAMING:
        trainer.reply(Ack(seq=0), 0)
    trainer.reply(failed(UNCHANGED, code="unknown_tensor"), 2)
    trainer.exhaust()

    assert type(trainer.sender.error) is LoadError
    assert (trainer.sender.error.rank, str(trainer.sender.error)) == (1, "does not fit")
    assert [trainer.kinds(rank).count("Abort") for rank in range(3)] == [1, 0, 1]
    assert not trainer.sender.has_ended
    assert "Commit" not in trainer.kinds(0)
    trainer.reply(Aborted(state=UNCHANGED), 0)
    assert trainer.sender.has_ended
    assert trainer.sender.engine_state is TORN


def test_an_error_after_the_vote_and_before_the_commit_stops_it() -> None:
    trainer = Trainer()
    trainer.prepare()
    assert trainer.sender.is_prepared

    trainer.reply(failed(TORN), 1)

    assert not trainer.sender.is_prepared
    trainer.exhaust()
    assert trainer.kinds(0)[-1] == "Abort"


def test_an_error_while_committing_aborts_nobody_and_leaves_the_engine_torn() -> None:
    trainer = Trainer(num_workers=3)
    trainer.commit()

    trainer.reply(failed(UNCHANGED), 1)
    trainer.exhaust()

    assert trainer.sender.phase is Phase.COMMITTING
    assert [trainer.kinds(rank)[-1] for rank in range(3)] == ["Commit"] * 3
    trainer.reply(Done(), 0, 2)
    assert trainer.sender.has_ended
    assert isinstance(trainer.sender.error, LoadError)
    assert trainer.sender.engine_state is TORN


def test_a_vote_that_is_missing_keeps_everyone_from_the_commit() -> None:
    trainer = Trainer(num_workers=3)
    trainer.stream()
    trainer.reply(Prepared(), 0, 2)
    trainer.exhaust()

    assert not trainer.sender.is_prepared
    assert [trainer.kinds(rank)[-1] for rank in range(3)] == ["Finish"] * 3
    with pytest.raises(LocalProtocolError):
        trainer.sender.commit()
    trainer.exhaust()
    assert [trainer.kinds(rank).count("Commit") for rank in range(3)] == [0, 0, 0]


# What the workers hold, as letters: unchanged, torn, committed, and nobody knows.
LETTERS = {"u": UNCHANGED, "t": TORN, "c": COMMITTED, "?": UNKNOWN}
ENGINE_STATES = {
    "": UNCHANGED,
    "u": UNCHANGED,
    "uu": UNCHANGED,
    "c": COMMITTED,
    "cc": COMMITTED,
    "t": TORN,
    "tt": TORN,
    "?": UNKNOWN,
    "??": UNKNOWN,
    "ut": TORN,
    "uc": TORN,
    "u?": UNKNOWN,
    "tc": TORN,
    "t?": TORN,
    "c?": UNKNOWN,
    "utc": TORN,
    "ut?": TORN,
    "uc?": TORN,
    "tc?": TORN,
    "utc?": TORN,
}


def test_every_combination_of_what_workers_hold_is_in_the_table() -> None:
    sets = {frozenset(letters) for letters in ENGINE_STATES}

    assert len(sets) == 2 ** len(LETTERS)


@pytest.mark.parametrize("letters", ENGINE_STATES)
def test_the_engine_holds_no_more_than_all_its_workers_say(letters: str) -> None:
    for order in set(itertools.permutations(letters)):
        trainer = Trainer(num_workers=max(1, len(order)))
        for rank, letter in enumerate(order):
            trainer.greet(rank)
            trainer.sender.peers[key_of(rank)].state = LETTERS[letter]

        assert trainer.sender.engine_state is ENGINE_STATES[letters]


@pytest.mark.parametrize(
    "phase",
    [Phase.GREETING, Phase.OPENING, Phase.STREAMING, Phase.FINISHING, Phase.COMMITTING],
    ids=lambda phase: phase.value,
)
def test_a_worker_that_is_lost_in_any_phase_ends_the_update(phase: Phase) -> None:
    trainer = Trainer()
    trainer.reach(phase)
    lost = PeerLostError("gone", pid=1000)

    trainer.sender.lose(key_of(0), lost)
    trainer.sender.lose(key_of(0), PeerLostError("gone again"))
    trainer.exhaust()

    assert trainer.sender.error is lost
    assert lost.rank == 0
    assert trainer.kinds(0).count("Abort") == 0
    if phase is Phase.GREETING:
        assert trainer.sender.has_ended
        return
    assert not trainer.sender.has_ended
    if phase is Phase.COMMITTING:
        assert trainer.kinds(1)[-1] == "Commit"
        trainer.reply(Done(), 1)
    else:
        assert trainer.kinds(1).count("Abort") == 1
        trainer.reply(Aborted(state=UNCHANGED), 1)
    assert trainer.sender.has_ended
    assert trainer.sender.engine_state is UNKNOWN


def test_a_worker_that_had_ended_cannot_be_lost() -> None:
    trainer = Trainer()
    trainer.commit()
    trainer.reply(Done())

    trainer.sender.lose(key_of(0), PeerLostError("gone"))
    trainer.sender.lose(b"nobody", PeerLostError("gone"))

    assert trainer.sender.error is None
    assert trainer.sender.engine_state is COMMITTED


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, GeneratorExit, StopIteration])
@pytest.mark.parametrize("fail_at", range(4))
def test_a_source_that_raises_anywhere_aborts_every_worker_once(
    fail_at: int, stop: type[BaseException], declared: bool
) -> None:
    trainer = Trainer(fail_at=fail_at, declared=declared, num_slots=64)
    trainer.tensors.error = stop("enough")
    trainer.open()

    trainer.exhaust()

    error = trainer.sender.error
    # A generator that raises StopIteration is a RuntimeError, not the end of it.
    assert isinstance(error, RuntimeError if stop is StopIteration else stop)
    assert trainer.sender.phase is Phase.ABORTING
    for rank in range(2):
        assert "Finish" not in trainer.kinds(rank)
        assert trainer.kinds(rank).count("Abort") == 1
        abort = trainer.said[key_of(rank)][-1]
        assert isinstance(abort, Abort)
        assert abort.reason
    assert trainer.tensors.num_asked == fail_at + 1
    trainer.reply(Aborted(state=UNCHANGED))
    assert trainer.sender.has_ended


@pytest.mark.parametrize("text", ["", "x" * 100_000, "no file \udc80"], ids=["empty", "long", "?"])
def test_the_reason_of_an_abort_can_always_be_sent(text: str) -> None:
    trainer = Trainer(fail_at=0)
    trainer.tensors.error = ValueError(text)
    trainer.open()
    trainer.exhaust()

    abort = trainer.said[key_of(0)][-1]
    assert isinstance(abort, Abort)
    assert 0 < len(abort.reason) <= MAX_TEXT_CHARS
    assert msgspec.msgpack.encode(abort)


def test_the_reason_can_be_sent_to_a_worker_that_comes_late_too() -> None:
    trainer = Trainer()
    trainer.greet(0)
    trainer.sender.fail(ValueError("no file \udc80"))
    trainer.exhaust()

    trainer.greet(1)
    trainer.exhaust()

    (abort,) = trainer.said[key_of(1)]
    assert isinstance(abort, Abort)
    assert msgspec.msgpack.encode(abort)


def test_memory_that_cannot_be_had_aborts_before_anything_is_offered() -> None:
    trainer = Trainer()
    trainer.slots.errors["shm"] = RegionError("full")
    trainer.greet()
    trainer.exhaust()

    assert trainer.sender.error is trainer.slots.errors["shm"]
    assert [trainer.kinds(rank) for rank in range(2)] == [["Abort"], ["Abort"]]
    assert trainer.tensors.num_asked == 0


def test_a_source_that_is_not_what_it_declared_is_an_error_and_not_a_deviation() -> None:
    pairs = byte_pairs(300, 700, 8)
    for sent in (pairs[:2], [*pairs, *byte_pairs(8, prefix="more")], [pairs[1], pairs[0]]):
        trainer = Trainer(pairs=pairs, num_slots=64)
        trainer.sender.source = Source(declared=manifest_of(pairs), tensors=iter(sent))
        trainer.open()
        trainer.exhaust()

        with pytest.raises(BucketSyncError, match="3 tensors were declared"):
            raise trainer.sender.error or AssertionError
        assert "Deviate" not in trainer.kinds(0)
        assert trainer.kinds(0)[-1] == "Abort"


OUT_OF_TURN: dict[Phase, Iterable[Reply]] = {
    Phase.OPENING: (Ack(seq=0), Prepared(), Done(), Aborted(state=UNCHANGED)),
    Phase.STREAMING: (Ready(), Ack(seq=1), Ack(seq=9), Prepared(), Done()),
    Phase.FINISHING: (Ready(), Ack(seq=3), Fallback(transport="shm", reason=""), Done()),
}


@pytest.mark.parametrize("phase", OUT_OF_TURN, ids=lambda phase: phase.value)
def test_a_worker_that_speaks_out_of_turn_ends_the_update(phase: Phase) -> None:
    for reply in OUT_OF_TURN[phase]:
        trainer = Trainer()
        trainer.reach(phase)

        trainer.reply(reply, 1)
        trainer.exhaust()

        assert isinstance(trainer.sender.error, RemoteProtocolError), reply
        assert [trainer.kinds(rank)[-1] for rank in range(2)] == ["Abort", "Abort"]


def test_a_commit_is_not_believed_twice() -> None:
    trainer = Trainer()
    trainer.commit()
    trainer.reply(Done(), 0)

    trainer.reply(Done(), 0)

    assert isinstance(trainer.sender.error, RemoteProtocolError)
    assert trainer.sender.peers[key_of(0)].state is COMMITTED


def test_a_dry_run_ends_when_every_worker_is_ready_with_nothing_made_or_consumed() -> None:
    trainer = Trainer(is_dry_run=True)
    trainer.greet()
    trainer.exhaust()
    trainer.reply(Ready(), 0)
    assert trainer.advance() == []
    trainer.reply(Ready(), 1)
    trainer.exhaust()

    assert [trainer.kinds(rank) for rank in range(2)] == [["Open", "Metas", "Abort"]] * 2
    opened = trainer.said[key_of(0)][0]
    assert isinstance(opened, Open)
    assert (opened.handles, opened.regions) == ((), ())
    assert trainer.slots.prepared == []
    assert trainer.tensors.num_asked == 0
    trainer.reply(Aborted(state=UNCHANGED))
    assert trainer.sender.has_ended
    assert trainer.sender.error is None


def test_what_is_waited_for_names_bucket_tensor_rank_and_pid() -> None:
    trainer = Trainer(num_slots=1)
    sender = trainer.sender
    assert sender.waiting_for() == "2 of 2 workers that have not said hello"
    trainer.greet(1)
    assert sender.waiting_for() == "1 of 2 workers that have not said hello"
    trainer.greet(0)
    trainer.exhaust()
    trainer.reply(Ready(), 0)
    assert sender.waiting_for() == "the answer to opening from rank 1 pid 1001"
    trainer.reply(Ready(), 1)
    trainer.exhaust()
    trainer.reply(Ack(seq=0), 1)
    assert sender.waiting_for() == (
        "bucket 1 of 3 (tensor 1 of 3, t0), acknowledgement from rank 0 pid 1000"
    )
    trainer.reply(Ack(seq=0), 0)
    trainer.exhaust()
    assert sender.waiting_for() == (
        "bucket 2 of 3 (tensor 2 of 3, t1), acknowledgement from rank 1 pid 1001, rank 0 pid 1000"
    )
    for seq in (1, 2):
        trainer.reply(Ack(seq=seq))
        trainer.exhaust()
    trainer.reply(Prepared(), 1)
    sent = "after bucket 3 of 3 (tensor 3 of 3, t2)"
    assert sender.waiting_for() == f"the answer to finishing from rank 0 pid 1000, {sent}"
    trainer.reply(Prepared(), 0)
    sender.commit()
    trainer.exhaust()
    trainer.reply(Done(), 0)
    assert sender.waiting_for() == f"the answer to committing from rank 1 pid 1001, {sent}"
    trainer.reply(failed(TORN), 1)
    assert sender.waiting_for() == f"the answer to committing from , {sent}"


def test_what_is_waited_for_while_aborting_names_who_has_not_answered() -> None:
    trainer = Trainer()
    trainer.reach(Phase.STREAMING)
    trainer.reply(failed(TORN), 0)
    trainer.exhaust()

    assert trainer.sender.waiting_for() == (
        "the answer to aborting from rank 1 pid 1001, after bucket 2 of 3 (tensor 2 of 3, t1)"
    )


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_slot_is_written_again_only_when_every_worker_has_acknowledged_it(
    num_workers: int, num_slots: int
) -> None:
    pairs = byte_pairs(*[400, 600, 8, 0, 256, 1300] * 3)
    trainer = Trainer(num_workers=num_workers, num_slots=num_slots, pairs=pairs)
    trainer.open()
    acks = [0] * num_workers
    # Whoever is behind acknowledges last: the slowest decides.
    turns = itertools.cycle([0, *range(num_workers), num_workers - 1])
    while trainer.sender.phase is not Phase.FINISHING:
        seen = len(trainer.slots.writes)
        trainer.exhaust()
        for batch, _, _ in trainer.slots.writes[seen:]:
            assert batch < min(acks) + num_slots
        num_sent = len(trainer.batches(0))
        assert num_sent <= min(acks) + num_slots
        assert [b.region for b in trainer.batches(0)] == [s % num_slots for s in range(num_sent)]
        rank = next(turns)
        if acks[rank] < num_sent:
            trainer.reply(Ack(seq=acks[rank]), rank)
            acks[rank] += 1

    finish = trainer.said[key_of(0)][-1]
    if not isinstance(finish, Finish):
        trainer.exhaust()
        finish = trainer.said[key_of(0)][-1]
    assert isinstance(finish, Finish)
    assert finish.num_tensors == len(pairs)
    assert finish.num_bytes == sum(meta.num_bytes for meta, _ in pairs)
    assert b"".join(data for _, _, data in trainer.slots.writes) == b"".join(
        tensor.numpy().tobytes() for _, tensor in pairs
    )


def test_no_tensor_is_asked_for_while_all_slots_are_in_use() -> None:
    trainer = Trainer(num_workers=1, num_slots=2, pairs=byte_pairs(512, 512, 512, 512))
    trainer.open()
    trainer.exhaust()
    assert (trainer.tensors.num_asked, len(trainer.slots.writes)) == (2, 2)

    trainer.reply(Ack(seq=0))
    trainer.exhaust()
    assert (trainer.tensors.num_asked, len(trainer.slots.writes)) == (3, 3)


def test_a_stream_leaves_the_manifest_for_all_workers_at_the_first_difference() -> None:
    known = manifest_of(byte_pairs(300, 701, 8))
    trainer = Trainer(declared=False, num_slots=64)
    trainer.slots.last_manifest = known
    for rank in range(2):
        trainer.sender.receive(key_of(rank), hello(rank=rank, manifests=(known.digest,)))
    trainer.exhaust()
    trainer.reply(Ready())
    trainer.exhaust()

    for rank in range(2):
        said = trainer.said[key_of(rank)]
        assert [type(c) for c in said] == [Open, Batch, Deviate, Batch, Batch, Finish]
        assert said[1] == Batch(seq=0, region=0)
        assert said[2] == Deviate(index=1)
    sent = Manifest([meta for meta, _ in trainer.pairs])
    assert trainer.slots.last_manifest is not None
    assert trainer.slots.last_manifest.digest == sent.digest
