"""Attacks either end with whatever the other may say, in any order and with any numbers.

A machine of hypothesis plays the enemy; the end that is attacked is the real one, with real
shared memory. It never raises, never looks outside of a slot, never grows, never claims what
is not so, and takes the next good update.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.golden_messages import GOLDEN
from support.stepping import (
    NUM_SLOTS,
    SLOT_BYTES,
    WISH,
    WatchedRegion,
    byte_pairs,
    commands_of,
    feed,
    greeted,
    hello,
    manifest_of,
    opening,
    shm_slots,
)
from support.thread_engine import KeepingSink

from vllm_bucketsync import codec, messages
from vllm_bucketsync.codec import encode
from vllm_bucketsync.errors import BucketSyncError, EngineState, RemoteProtocolError
from vllm_bucketsync.layout import Entry, TensorMeta
from vllm_bucketsync.messages import (
    Abort,
    Aborted,
    Ack,
    Batch,
    Busy,
    Command,
    Commit,
    Deviate,
    Done,
    Error,
    Fallback,
    Finish,
    Metas,
    Prepared,
    Ready,
    Region,
    Reply,
)
from vllm_bucketsync.retained import ReceiverMemory
from vllm_bucketsync.route import Route
from vllm_bucketsync.sender import Sender
from vllm_bucketsync.session import END_STATES, State
from vllm_bucketsync.sources import Source
from vllm_bucketsync.transport.registry import open_region
from vllm_bucketsync.update import Update

HUGE = 1 << 62
REGION_BYTES = NUM_SLOTS * SLOT_BYTES
# Small ones are nearly right, and large ones are what overflows.
NUMBERS = st.integers(0, 4) | st.sampled_from([255, 256, 257, SLOT_BYTES, REGION_BYTES, HUGE])
ENTRIES = st.lists(st.builds(Entry, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple)
METAS = st.lists(
    st.builds(
        TensorMeta,
        name=st.sampled_from(["a", "b", "", "x" * 2000]),
        dtype=st.sampled_from(["uint8", "float32", "float7"]),
        shape=st.lists(NUMBERS, max_size=3).map(tuple),
        num_bytes=NUMBERS,
    )
    | st.just(TensorMeta("a", "uint8", (8,), 8)),
    max_size=3,
).map(tuple)
PAIRS = byte_pairs(100, 700, 8)
STEPS = settings(max_examples=60, stateful_step_count=25, deadline=None)


class HostileTrainer(RuleBasedStateMachine):
    """Says to a worker whatever decodes, and much that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="bs-", dir="/dev/shm"))
        self.slots = shm_slots(self.directory)
        self.memory = ReceiverMemory()
        self.sink = KeepingSink()
        self.receiver = greeted(self.memory, self.sink)
        handle = self.slots.handles[0]
        self.region: Any = WatchedRegion(open_region("shm", handle, device=torch.device("cpu")))
        self.memory.regions[handle.id] = self.region
        self.num_batches = self.num_late = self.num_updates = 0

    def teardown(self) -> None:
        self.receiver.release()
        sink = KeepingSink()
        again = greeted(self.memory, sink)
        assert isinstance(feed(again, commands_of(self.slots, PAIRS))[-1], Done)
        assert {n: t.numpy().tobytes() for n, t in sink.tensors.items()} == {
            meta.name: data.numpy().tobytes() for meta, data in PAIRS
        }
        assert not self.memory.is_torn
        again.release()
        self.memory.release()
        self.slots.release()
        shutil.rmtree(self.directory)

    def say(self, command: Command) -> None:
        # Of one that has ended a little more is wanted, and then another.
        if self.num_late > 1:
            self.begin_again()
        had_ended, num_seen = self.receiver.session.has_ended, len(self.region.views)
        replies = self.receiver.step(command)
        for reply in replies:
            codec.decode_reply(encode(reply))
        self.num_late += had_ended
        if had_ended:
            assert [type(reply) for reply in replies] == [Error]
        self.num_batches += any(isinstance(reply, Ack) for reply in replies)
        if isinstance(command, Batch):
            self.check_views(self.region.views[num_seen:], command)

    def check_views(self, views: list[tuple[int, int]], batch: Batch) -> None:
        """See that nothing was looked at but what the bucket's own region has."""
        opened = self.receiver.opened
        for offset, size in views:
            assert opened is not None
            region = opened.regions[batch.region]
            end = region.offset_bytes + region.num_bytes
            assert region.offset_bytes <= offset <= offset + size <= min(end, REGION_BYTES)

    def begin_again(self) -> None:
        self.receiver.release()
        self.sink = KeepingSink()
        self.receiver = greeted(self.memory, self.sink)
        self.num_batches = self.num_late = 0
        self.num_updates += 1
        self.begin(is_known=self.num_updates % 4 == 0, is_declared=False, partial=False)

    @initialize(is_known=st.booleans(), is_declared=st.booleans(), partial=st.booleans())
    def begin(self, *, is_known: bool, is_declared: bool, partial: bool) -> None:
        manifest = manifest_of(PAIRS) if is_known else None
        self.say(
            opening(
                self.slots,
                manifest=manifest,
                is_declared=is_declared,
                partial=("*",) if partial else (),
            )
        )
        if manifest is not None:
            self.say(Metas(metas=manifest.metas))

    @rule(entries=st.none() | ENTRIES, metas=METAS, region=NUMBERS, is_next=st.booleans())
    def bucket(self, entries: Any, metas: Any, region: int, *, is_next: bool) -> None:
        seq = self.num_batches + (not is_next)
        self.say(Batch(seq=seq, region=region, entries=entries, metas=metas))

    @rule(
        several=st.lists(
            st.tuples(
                st.sampled_from([1, 256, 300, SLOT_BYTES, SLOT_BYTES + 1]),
                st.sampled_from([0, 1, 256, SLOT_BYTES]),
                st.sampled_from([0, 0, 0, 1, 256]),
                st.sampled_from([0, NUM_SLOTS - 1, NUM_SLOTS]),
            ),
            min_size=4,
            max_size=12,
        )
    )
    def buckets_that_may_be_good(self, several: list[tuple[int, int, int, int]]) -> None:
        for size, offset, first, region in several:
            meta = TensorMeta(f"good{self.num_batches}", "uint8", (size,), size)
            entry = Entry(self.num_batches, first, offset, size)
            self.say(Batch(seq=self.num_batches, region=region, entries=(entry,), metas=(meta,)))

    @rule(numbers=st.lists(NUMBERS, min_size=3, max_size=3))
    def finish(self, numbers: list[int]) -> None:
        self.say(
            Finish(
                num_batches=numbers[0], num_tensors=numbers[1], num_bytes=numbers[2], manifest="m"
            )
        )

    @rule(handle=NUMBERS, offset=NUMBERS, size=NUMBERS, num_metas=st.integers(0, 3))
    def offer(self, handle: int, offset: int, size: int, num_metas: int) -> None:
        regions = (Region(handle, offset, size),)
        self.say(opening(self.slots, regions=regions, num_metas=num_metas))

    @rule(
        command=st.sampled_from(
            [Commit(), Abort(reason="no"), Deviate(index=0), Deviate(index=HUGE)]
        )
        | st.builds(Busy, num_tensors=NUMBERS)
        | st.builds(Metas, metas=METAS)
    )
    def command(self, command: Command) -> None:
        self.say(command)

    @rule(data=st.data())
    def mutant(self, data: st.DataObject) -> None:
        raw = bytearray.fromhex(data.draw(st.sampled_from(GOLDEN))[1])
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        try:
            command = codec.decode_command(bytes(raw))
        except RemoteProtocolError:
            return
        self.say(command)

    @invariant()
    def nothing_is_committed_that_was_not_voted_for(self) -> None:
        if "commit" in self.sink.calls:
            assert self.sink.calls.index("prepare") < self.sink.calls.index("commit")

    @invariant()
    def what_it_holds_is_said_as_it_is(self) -> None:
        state = self.receiver.state
        assert (state is None) is (not self.receiver.session.has_ended)
        if state is EngineState.UNCHANGED:
            assert self.sink.tensors == {}
        assert (state is EngineState.COMMITTED) is (self.receiver.session.state is State.COMMITTED)


HostileTrainer.TestCase.settings = STEPS
test_a_worker_withstands_whatever_a_trainer_says = HostileTrainer.TestCase


class HostileWorkers(RuleBasedStateMachine):
    """Two workers, and strangers, that say whatever decodes to a trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="bs-", dir="/dev/shm"))
        self.slots = shm_slots(self.directory, num_slots=2)
        self.num_asked = 0
        self.sender = Sender(
            update=Update(update_id="u", version="1", token="secret", num_workers=(2,)),  # noqa: S106
            source=Source(declared=manifest_of(PAIRS), tensors=self.source()),
            slots=self.slots,
            route=Route(wish=WISH, slots=self.slots),
        )
        self.said: list[tuple[bytes, Command]] = []

    def source(self) -> Any:
        for pair in PAIRS:
            self.num_asked += 1
            yield pair

    def teardown(self) -> None:
        self.sender.fail(RuntimeError("the test is over"))
        self.advance()
        self.slots.release()
        shutil.rmtree(self.directory)

    def advance(self) -> None:
        for key, command in self.sender.advance():
            codec.decode_command(encode(command))
            self.said.append((key, command))

    @rule(rank=st.integers(0, 2), is_good=st.booleans(), data=st.data())
    def greet(self, rank: int, data: st.DataObject, *, is_good: bool) -> None:
        wrong: list[dict[str, Any]] = [
            {"token": "another"},
            {"protocol": 2},
            {"protocol": HUGE},
            {"boot_id": "another"},
            {"engine": HUGE},
            {"transports": ()},
            {"world_size": HUGE, "dp_index": HUGE},
        ]
        changes = {} if is_good else data.draw(st.sampled_from(wrong))
        self.sender.receive(b"%d" % rank, hello(rank=rank, **changes))
        self.advance()

    @rule(num_rounds=st.integers(1, 12))
    def good_rounds(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for rank in range(2):
                if b"%d" % rank in self.sender.peers:
                    self.good_answer(rank)
                else:
                    self.sender.receive(b"%d" % rank, hello(rank=rank))
                    self.advance()

    @rule(rank=st.integers(0, 2))
    def good_answer(self, rank: int) -> None:
        peer = self.sender.peers.get(b"%d" % rank)
        if peer is None:
            return
        answers: dict[State, Reply] = {
            State.OPENING: Ready(),
            State.READY: Ack(seq=peer.session.num_acks),
            State.FINISHING: Prepared(),
            State.COMMITTING: Done(),
            State.ABORTING: Aborted(state=EngineState.UNCHANGED),
        }
        if peer.session.state is State.FINISHING:
            missing = peer.session.num_acks < peer.session.num_batches
            answers[State.FINISHING] = Ack(seq=peer.session.num_acks) if missing else Prepared()
        reply = answers.get(peer.session.state)
        if reply is not None:
            self.sender.receive(b"%d" % rank, reply)
        if self.sender.is_prepared:
            self.sender.commit()
        self.advance()

    @rule(
        rank=st.integers(0, 3),
        reply=st.sampled_from(
            [Ready(), Prepared(), Done(), Fallback(transport="shm", reason="no"), Ack(seq=HUGE)]
        )
        | st.builds(Ack, seq=NUMBERS)
        | st.builds(Aborted, state=st.sampled_from(EngineState))
        | st.builds(
            Error,
            code=st.sampled_from(["load", "", "error", "no such code", "remote"]),
            message=st.text(max_size=20),
            details=st.dictionaries(
                st.sampled_from(["name", "problems", "rank", "__class__"]),
                st.none() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=2),
                max_size=3,
            ),
            state=st.sampled_from(EngineState),
        ),
    )
    def anything(self, rank: int, reply: Reply) -> None:
        self.sender.receive(b"%d" % rank, reply)
        self.advance()

    @rule(rank=st.integers(0, 3))
    def vanish(self, rank: int) -> None:
        self.sender.lose(b"%d" % rank, BucketSyncError("gone"))
        self.advance()

    @invariant()
    def nobody_commits_alone(self) -> None:
        commits = [key for key, command in self.said if isinstance(command, Commit)]
        if commits:
            # Who comes later than that is one too many, and is told to go.
            assert len(commits) == len(set(commits)) == 2

    @invariant()
    def the_source_is_asked_only_when_every_worker_is_ready(self) -> None:
        if self.num_asked:
            sent = [command for _, command in self.said if isinstance(command, messages.Open)]
            assert len(sent) >= 2

    @invariant()
    def it_is_committed_only_where_every_worker_has_said_so(self) -> None:
        if self.sender.engine_state is EngineState.COMMITTED:
            states = {peer.session.state for peer in self.sender.peers.values()}
            # One that fails when it has committed says so.
            assert states <= {State.COMMITTED, State.FAILED}

    @invariant()
    def an_end_is_an_end(self) -> None:
        if self.sender.has_ended and self.sender.error is None:
            assert all(p.session.state in END_STATES for p in self.sender.peers.values())


HostileWorkers.TestCase.settings = STEPS
test_a_trainer_withstands_whatever_workers_say = HostileWorkers.TestCase


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in _leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for i, one in enumerate(value) for leaf in _leaves(one, (*path, i))]
    return [path]


def test_no_value_in_the_place_of_another_gets_past_the_decoder_but_as_what_it_may_be() -> None:
    values: list[Any] = [
        None,
        True,
        -1,
        HUGE,
        (1 << 64) - 1,
        1.5,
        float("nan"),
        "",
        "x" * 70_000,
        b"x",
    ]
    values += [[], {}, [[]] * 9000, {"a": 1}, [None], "\x00", "../../etc/passwd"]
    num_refused = num_taken = 0
    for message, golden in GOLDEN:
        decode = codec.decode_reply if isinstance(message, Reply) else codec.decode_command
        plain = msgspec.msgpack.decode(bytes.fromhex(golden))
        for *path, last in _leaves(plain):
            for value in values:
                changed = msgspec.msgpack.decode(bytes.fromhex(golden))
                place = changed
                for key in path:
                    place = place[key]
                place[last] = value
                try:
                    arrived = decode(msgspec.msgpack.encode(changed))
                except RemoteProtocolError:
                    num_refused += 1
                    continue
                num_taken += 1
                # What was let in is within the limits again on its way out.
                assert encode(decode(encode(arrived))) == encode(arrived)
    assert num_refused > 5 * num_taken > 0
