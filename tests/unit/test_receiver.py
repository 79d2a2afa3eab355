"""Proves that no sender, broken or hostile, makes a worker raise, lie or read out of bounds.

A real receiver and real shared memory; the sender is the test. Whatever it says, the
reply is an ``Error`` that names the fault and what the worker holds, the sink is aborted
once, and the next update works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.stepping import (
    SLOT_BYTES,
    Pairs,
    WatchedRegion,
    byte_pairs,
    bytes_by_name,
    commands_of,
    feed,
    greeted,
    hello,
    kept_by,
    manifest_of,
    opening,
    shm_slots,
)
from support.thread_engine import KeepingSink

from vllm_bucketsync.codec import decode_command, decode_reply, encode
from vllm_bucketsync.config import Verify
from vllm_bucketsync.errors import EngineState, LoadError, RegionError, RemoteProtocolError
from vllm_bucketsync.handles import MAX_TEXT_CHARS, InprocHandle, ShmHandle
from vllm_bucketsync.layout import BucketLayout, Entry, Manifest, TensorMeta
from vllm_bucketsync.messages import (
    MAX_NOTES,
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
    Metas,
    Open,
    Prepared,
    Ready,
    Region,
    Reply,
)
from vllm_bucketsync.receiver import Receiver
from vllm_bucketsync.retained import MAX_MANIFESTS, ReceiverMemory
from vllm_bucketsync.sinks import DiscardSink, Piece, SinkReport
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.transport.inproc import InprocRegion
from vllm_bucketsync.transport.registry import open_region

HUGE = 1 << 62
# A tensor of each kind that hostile buckets are about: short, split, tiny, empty.
SHORT, LONG, TINY, EMPTY = byte_pairs(300, 700, 8, 0, prefix="hostile")


class World:
    """A worker's memory, its sink, and a sender's slots."""

    def __init__(self, directory: Path) -> None:
        self.slots = shm_slots(directory)
        self.memory = ReceiverMemory()
        self.sink = KeepingSink()
        self.receiver = greeted(self.memory, self.sink)

    def watch(self) -> WatchedRegion:
        handle = self.slots.handles[0]
        region: Any = WatchedRegion(open_region("shm", handle, device=torch.device("cpu")))
        self.memory.regions[handle.id] = region
        return region  # type: ignore[no-any-return]

    def begin(self, *, loaded: bool, **changes: Any) -> int:
        """Open a stream, and load one good bucket where asked; return the next number."""
        feed(self.receiver, [opening(self.slots, **changes)])
        if not loaded:
            return 0
        good = TensorMeta("good", "uint8", (8,), 8)
        replies = feed(self.receiver, [Batch(seq=0, region=0, entries=(E(0, 8),), metas=(good,))])
        assert replies == [Ack(seq=0)]
        return 1

    def close(self) -> None:
        self.receiver.release()
        self.memory.release()
        self.slots.release()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def E(index: int, num_bytes: int, *, first: int = 0, at: int = 0) -> Entry:  # noqa: N802
    """Return an entry; tables of them are read, not written."""
    return Entry(index, first, at, num_bytes)


def check_refused(
    world: World,
    replies: Sequence[Reply],
    *,
    match: str,
    state: EngineState,
    code: str = "remote_protocol",
) -> None:
    """Check the one reply to a fault, all that it leaves, and that the next update works."""
    error = replies[-1]
    assert isinstance(error, Error)
    assert (error.code, error.state) == (code, state)
    assert match in error.message
    assert world.receiver.error == error
    assert world.receiver.state is state
    assert world.receiver.session.has_ended

    again = feed(world.receiver, [Abort(reason="late"), Batch(seq=0, region=0)])
    assert [type(reply) for reply in again] == [Error, Error]
    assert world.receiver.error == error

    world.receiver.release()
    world.receiver.release()
    if world.sink.calls:
        assert world.sink.calls[-2:] == ["abort", "release"]
        assert world.sink.calls.count("abort") == world.sink.calls.count("release") == 1
        assert "commit" not in world.sink.calls
    check_next_update_works(world.memory, world.slots)


def check_next_update_works(memory: ReceiverMemory, slots: Slots) -> None:
    pairs = byte_pairs(100, 1500, 0, 3, prefix="next")
    sink = KeepingSink()
    receiver = greeted(memory, sink)

    replies = feed(receiver, commands_of(slots, pairs, manifest=manifest_of(pairs)))

    assert isinstance(replies[-1], Done)
    assert receiver.state is EngineState.COMMITTED
    assert kept_by(sink) == bytes_by_name(pairs)
    assert not memory.is_torn
    receiver.release()


def meta_of(pair: tuple[TensorMeta, torch.Tensor], **changes: Any) -> TensorMeta:
    return msgspec.structs.replace(pair[0], **changes)


def batch(pairs: Pairs, *entries: Entry, region: int = 0) -> Callable[[int], Batch]:
    """Return what makes a bucket of a stream, told how many tensors came before."""

    def make(base: int) -> Batch:
        return Batch(
            seq=base,
            region=region,
            entries=tuple(
                Entry(e.index + base, e.first_byte, e.offset_bytes, e.num_bytes)
                if e.index < HUGE
                else e
                for e in entries
            ),
            metas=tuple(meta for meta, _ in pairs),
        )

    return make


HOSTILE_BUCKETS: dict[str, tuple[Callable[[int], Batch], str]] = {
    "past the region": (batch([LONG], E(0, 300, at=256)), "within 512 bytes"),
    "a byte past the region": (batch([LONG], E(0, 257, at=256)), "within 512 bytes"),
    "far past the region": (batch([SHORT], E(0, 300, at=HUGE)), "within 512 bytes"),
    "larger than the region": (batch([LONG], E(0, 700)), "within 512 bytes"),
    "misaligned": (batch([TINY], E(0, 8, at=8)), "aligned"),
    "overlapping": (batch([SHORT, TINY], E(0, 300), E(1, 8, at=256)), "at or after byte 300"),
    "backwards": (batch([TINY, TINY], E(0, 8, at=256), E(1, 8)), "at or after byte 264"),
    "out of order": (batch([SHORT, TINY], E(1, 8), E(0, 300, at=256)), "expected tensor"),
    "skipping bytes": (batch([LONG], E(0, 256), E(0, 200, first=300, at=256)), "to be next"),
    "from the middle": (batch([SHORT], E(0, 100, first=8)), "byte 0 of 300"),
    "a fragment twice": (batch([LONG], E(0, 256), E(0, 200, at=256)), "byte 256 of 700"),
    "a tensor twice": (batch([TINY], E(0, 8), E(0, 8, at=256)), "expected tensor"),
    "an empty tensor twice": (batch([EMPTY], E(0, 0), E(0, 0)), "expected tensor"),
    "an empty fragment": (batch([SHORT], E(0, 0)), "byte 0 of 300"),
    "an empty fragment at the end": (batch([LONG], E(0, 256), E(0, 0, first=256)), "aligned"),
    "more than the tensor has": (batch([TINY], E(0, 9)), "byte 0 of 8"),
    "something of an empty tensor": (batch([EMPTY], E(0, 1)), "byte 0 of 0"),
    "past the tensor's end": (batch([LONG], E(0, 256), E(0, 256, first=HUGE, at=256)), "to be"),
    "the next before the last is whole": (
        batch([LONG, TINY], E(0, 256), E(1, 8, at=256)),
        "expected tensor",
    ),
    "without its description": (batch([], E(0, 8)), "expected tensor"),
    "beyond the descriptions": (batch([TINY], E(0, 8), E(1, 8, at=256)), "expected tensor"),
    "an index beyond everything": (batch([TINY], Entry(HUGE, 0, 0, 8)), "expected tensor"),
    "region out of range": (batch([TINY], E(0, 8), region=64), "region 64 of 64"),
    "region far out of range": (batch([TINY], E(0, 8), region=HUGE), f"region {HUGE} of 64"),
}


@pytest.mark.parametrize("loaded", [False, True], ids=["at first", "after a load"])
@pytest.mark.parametrize("what", HOSTILE_BUCKETS)
def test_a_bucket_that_does_not_carry_on_is_refused_before_a_byte_is_viewed(
    world: World, what: str, loaded: bool
) -> None:
    region = world.watch()
    make, match = HOSTILE_BUCKETS[what]
    base = world.begin(loaded=loaded)
    before = list(region.views)

    replies = feed(world.receiver, [make(base)])

    assert region.views == before
    assert world.sink.calls.count("load") == base
    expected = EngineState.TORN if loaded else EngineState.UNCHANGED
    check_refused(world, replies, match=match, state=expected)


def test_a_stream_that_says_nothing_of_what_a_bucket_holds_is_refused(world: World) -> None:
    world.begin(loaded=False)

    replies = feed(world.receiver, [Batch(seq=0, region=0, metas=(TINY[0],))])

    check_refused(world, replies, match="nothing of what it holds", state=EngineState.UNCHANGED)


HOSTILE_METAS: dict[str, tuple[TensorMeta, str]] = {
    "no dtype of torch": (meta_of(TINY, dtype="float7"), "does not have"),
    "no dtype at all": (meta_of(TINY, dtype="nn"), "does not have"),
    "quantised": (meta_of(TINY, dtype="qint8"), "does not have"),
    "a long dtype": (meta_of(TINY, dtype="x" * 2000), "out of bounds"),
    "fewer bytes than the shape": (meta_of(TINY, shape=(9,)), "takes 9 bytes"),
    "more bytes than the shape": (meta_of(TINY, shape=(7,)), "takes 7 bytes"),
    "bytes of another dtype": (meta_of(TINY, dtype="int16"), "takes 16 bytes"),
    "bytes without elements": (meta_of(EMPTY, num_bytes=1), "announced were 1"),
    "a shape beyond counting": (
        meta_of(TINY, shape=(HUGE, HUGE), num_bytes=0),
        "announced were 0",
    ),
    "beyond counting, with its bytes": (
        meta_of(TINY, shape=(1 << 31, 1 << 31), num_bytes=HUGE),
        "announced were",
    ),
    "beyond counting but for a zero": (
        meta_of(TINY, shape=(HUGE, 0, HUGE), num_bytes=0),
        "announced were 0",
    ),
    "a negative dimension": (meta_of(TINY, shape=(-8,), num_bytes=-8), "out of bounds"),
    "two negative dimensions": (meta_of(TINY, shape=(-8, -1)), "out of bounds"),
    "too many dimensions": (meta_of(TINY, shape=(*[1] * 64, 8)), "65 dimensions"),
    "no name": (meta_of(TINY, name=""), "name of 0 bytes"),
    "a long name": (meta_of(TINY, name="n" * 1025), "name of 1025 bytes"),
}


@pytest.mark.parametrize("loaded", [False, True], ids=["at first", "after a load"])
@pytest.mark.parametrize("what", HOSTILE_METAS)
def test_a_description_that_no_tensor_can_have_is_refused_in_a_stream(
    world: World, what: str, loaded: bool
) -> None:
    meta, match = HOSTILE_METAS[what]
    base = world.begin(loaded=loaded)

    replies = feed(
        world.receiver, [Batch(seq=base, region=0, entries=(E(base, 8),), metas=(meta,))]
    )

    expected = EngineState.TORN if loaded else EngineState.UNCHANGED
    check_refused(world, replies, match=match, state=expected)


@pytest.mark.parametrize("what", HOSTILE_METAS)
def test_a_description_that_no_tensor_can_have_is_refused_in_a_manifest(
    world: World, what: str
) -> None:
    meta, match = HOSTILE_METAS[what]
    manifest = Manifest([TINY[0], meta])

    replies = feed(
        world.receiver, [opening(world.slots, manifest=manifest), Metas(metas=manifest.metas)]
    )

    assert world.sink.calls == []
    assert world.memory.manifests == {}
    check_refused(world, replies, match=match, state=EngineState.UNCHANGED)


def offers(slots: Slots) -> dict[str, tuple[list[Command], str]]:
    """Return offers that must not be believed, each with what the refusal says."""
    handle = slots.handles[0]
    size = handle.num_bytes
    manifest, other = manifest_of([SHORT]), manifest_of([LONG])
    past = "reaches past the shared memory"
    return {
        "a region of no handle": ([opening(slots, regions=(Region(1, 0, 256),))], past),
        "no handles": ([opening(slots, handles=())], past),
        "a region past its handle": ([opening(slots, regions=(Region(0, 256, size),))], past),
        "a region far past its handle": (
            [opening(slots, regions=(Region(0, HUGE, HUGE),))],
            past,
        ),
        "a region too long": ([opening(slots, regions=(Region(0, 0, size + 1),))], past),
        "another manifest's digest": (
            [
                msgspec.structs.replace(opening(slots, manifest=manifest), manifest=other.digest),
                Metas(metas=manifest.metas),
            ],
            "announced was",
        ),
        "a manifest that is not known": (
            [opening(slots, manifest=manifest, num_metas=0)],
            "is not known here",
        ),
        "metas out of order": (
            [
                opening(slots, manifest=manifest_of([SHORT, LONG])),
                Metas(metas=(LONG[0], SHORT[0])),
            ],
            "announced was",
        ),
        "more metas than announced": (
            [opening(slots, manifest=manifest), Metas(metas=(SHORT[0], SHORT[0]))],
            "1 are due",
        ),
        "a bucket before the metas": (
            [opening(slots, manifest=manifest), Batch(seq=0, region=0)],
            "1 metas are still due",
        ),
        "an end before the metas": (
            [
                opening(slots, manifest=manifest),
                Finish(num_batches=0, num_tensors=0, num_bytes=0, manifest=""),
            ],
            "not allowed in state OPENING",
        ),
        "a commit before anything": ([Commit()], "not allowed in state GREETED"),
        "a bucket before anything": ([Batch(seq=0, region=0)], "not allowed in state GREETED"),
    }


OFFER_NAMES = [
    "a region of no handle",
    "no handles",
    "a region past its handle",
    "a region far past its handle",
    "a region too long",
    "another manifest's digest",
    "a manifest that is not known",
    "metas out of order",
    "more metas than announced",
    "a bucket before the metas",
    "an end before the metas",
    "a commit before anything",
    "a bucket before anything",
]


def test_every_bad_offer_is_tried(world: World) -> None:
    assert list(offers(world.slots)) == OFFER_NAMES


@pytest.mark.parametrize("what", OFFER_NAMES)
def test_an_offer_that_cannot_be_kept_is_refused_before_the_sink_is_made(
    world: World, what: str
) -> None:
    commands, match = offers(world.slots)[what]

    replies = feed(world.receiver, commands)

    assert len(replies) == 1
    assert world.sink.calls == []
    check_refused(world, replies, match=match, state=EngineState.UNCHANGED)


def test_a_region_that_is_not_aligned_is_refused_at_the_first_bucket(world: World) -> None:
    region = world.watch()
    feed(world.receiver, [opening(world.slots, regions=(Region(0, 8, SLOT_BYTES),))])

    replies = feed(world.receiver, [batch([TINY], E(0, 8))(0)])

    assert region.views == [(8, 8)]  # asked for, and refused by the region
    check_refused(world, replies, match="multiple of 256", state=EngineState.UNCHANGED)


def test_a_region_known_by_its_id_is_no_longer_than_it_was_when_opened(world: World) -> None:
    world.begin(loaded=True)
    world.receiver.release()
    world.receiver = greeted(world.memory, world.sink)
    handle = world.slots.handles[0]
    assert isinstance(handle, ShmHandle)
    longer = msgspec.structs.replace(handle, num_bytes=HUGE)
    end_bytes = handle.num_bytes

    replies = feed(
        world.receiver,
        [
            opening(world.slots, handles=(longer,), regions=(Region(0, end_bytes, SLOT_BYTES),)),
            batch([TINY], E(0, 8))(0),
        ],
    )

    assert isinstance(replies[-1], Error)
    assert "not within a region" in replies[-1].message


def test_shared_memory_that_cannot_be_opened_is_a_fallback_and_never_an_error(
    world: World,
) -> None:
    handle = world.slots.handles[0]
    assert isinstance(handle, ShmHandle)
    replace = msgspec.structs.replace
    unusable: list[dict[str, Any]] = [
        {"transport": "cuda_ipc"},
        {"transport": "inproc"},
        {"transport": ""},
        {"handles": (InprocHandle(id="x", num_bytes=HUGE),)},
        {"handles": (InprocHandle(id="x", num_bytes=HUGE),), "transport": "inproc"},
        {"handles": (replace(handle, path="/nowhere/x.seg"),)},
        {"handles": (replace(handle, path="/dev/null"),)},
        {"handles": (replace(handle, path="a\0b"),)},
        {"handles": (replace(handle, path=""),)},
        {"handles": (replace(handle, canary=bytes(32)),)},
        {"handles": (replace(handle, num_bytes=handle.num_bytes - 256),), "regions": ()},
        {"handles": (replace(handle, num_bytes=0),), "regions": ()},
        {"handles": (replace(handle, num_bytes=HUGE),)},
        {"handles": (handle, replace(handle, id="second", path="/nowhere/x.seg"))},
    ]
    for changes in unusable:
        opened = opening(world.slots, **changes)
        replies = feed(world.receiver, [opened])

        assert [type(reply) for reply in replies] == [Fallback], changes
        assert replies[0].transport == opened.transport  # type: ignore[attr-defined]
        assert replies[0].reason  # type: ignore[attr-defined]
        assert world.sink.calls == []

    pairs = byte_pairs(100, 900)
    replies = feed(world.receiver, commands_of(world.slots, pairs))
    assert isinstance(replies[-1], Done)
    assert kept_by(world.sink) == bytes_by_name(pairs)
    assert world.sink.calls.count("open") == 1


def test_a_file_without_room_for_data_is_not_opened(world: World, tmp_path: Path) -> None:
    path = tmp_path / "empty.seg"
    path.write_bytes(bytes(4096))
    handle = ShmHandle(id="empty", path=str(path), num_bytes=0, canary=bytes(32))

    replies = feed(world.receiver, [opening(world.slots, handles=(handle,), regions=())])

    assert [type(reply) for reply in replies] == [Fallback]


def test_another_offer_for_the_same_update_keeps_the_sink_that_was_opened(world: World) -> None:
    pairs = byte_pairs(100, 900)
    manifest = manifest_of(pairs)
    inproc = InprocRegion.create(1 << 20)
    first = opening(
        world.slots,
        manifest=manifest,
        transport="inproc",
        handles=(inproc.handle,),
        regions=(Region(0, 0, 1 << 20),),
        layout=BucketLayout(1 << 20, max_entries=1),
    )

    replies = feed(world.receiver, [first, Metas(metas=manifest.metas)])
    assert replies == [Ready()]
    replies = feed(world.receiver, commands_of(world.slots, pairs, manifest=manifest))

    assert isinstance(replies[-1], Done)
    assert kept_by(world.sink) == bytes_by_name(pairs)
    assert world.sink.calls.count("open") == 1
    inproc.close()


@pytest.mark.parametrize(
    "change",
    [
        {"manifest": manifest_of([LONG])},
        {"manifest": None},
        {"partial": ("*",)},
        {"kind": "discard"},
        {"update_id": "another"},
        {"version": "2"},
        {"is_declared": True},
        {"is_atomic": True},
        {"verify": Verify.DIGEST},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_offer_may_not_promise_something_else(world: World, change: dict[str, Any]) -> None:
    manifest = manifest_of([SHORT])
    offered = opening(world.slots, manifest=manifest)
    feed(world.receiver, [offered, Metas(metas=manifest.metas)])

    replies = feed(world.receiver, [opening(world.slots, **{"manifest": manifest, **change})])

    check_refused(world, replies, match="promises something else", state=EngineState.UNCHANGED)


def test_no_offer_comes_after_the_stream_has_left_its_manifest(world: World) -> None:
    manifest = manifest_of([SHORT])
    offered = opening(world.slots, manifest=manifest)
    feed(world.receiver, [offered, Metas(metas=manifest.metas), Deviate(index=0)])

    replies = feed(world.receiver, [offered])

    check_refused(world, replies, match="has left the manifest", state=EngineState.UNCHANGED)


FINISHES: list[dict[str, Any]] = [
    {"num_batches": 4},
    {"num_batches": 0},
    {"num_tensors": 3},
    {"num_tensors": 1},
    {"num_bytes": 999},
    {"num_bytes": HUGE},
    {"manifest": "0" * 64},
    {"manifest": ""},
]


@pytest.mark.parametrize("is_planned", [False, True], ids=["stream", "manifest"])
@pytest.mark.parametrize("change", FINISHES, ids=str)
def test_an_end_that_says_other_numbers_is_refused(
    world: World, change: dict[str, Any], is_planned: bool
) -> None:
    pairs = byte_pairs(300, 700)
    manifest = manifest_of(pairs) if is_planned else None
    *commands, finish, _ = commands_of(world.slots, pairs, manifest=manifest)
    feed(world.receiver, commands)

    replies = feed(world.receiver, [msgspec.structs.replace(finish, **change)])

    assert "prepare" not in world.sink.calls
    check_refused(world, replies, match="", state=EngineState.TORN)


def test_an_end_in_the_middle_of_a_tensor_or_before_the_last_is_refused(tmp_path: Path) -> None:
    pairs = byte_pairs(300, 700)
    for num_kept, num_tensors, num_bytes in ((1, 1, 300), (2, 1, 812)):
        world = World(tmp_path)
        manifest = manifest_of(pairs)
        commands = commands_of(world.slots, pairs, manifest=manifest)
        feed(world.receiver, commands[: 2 + num_kept])

        finish = Finish(
            num_batches=num_kept,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            manifest=manifest.digest,
        )
        replies = feed(world.receiver, [finish])

        check_refused(world, replies, match="were sent, but", state=EngineState.TORN)
        world.close()


def test_a_commit_without_a_vote_is_refused(world: World) -> None:
    *commands, _, commit = commands_of(world.slots, byte_pairs(300))
    feed(world.receiver, commands)

    replies = feed(world.receiver, [commit])

    check_refused(world, replies, match="not allowed in state READY", state=EngineState.TORN)


@pytest.mark.parametrize(
    ("num_batches", "index", "match"),
    [
        (0, 3, "0 of 2 have begun"),
        (0, HUGE, "0 of 2 have begun"),
        (1, 0, "1 of 2 have begun"),
        (2, 1, "2 of 2 have begun"),
        (3, 1, "2 of 2 have begun"),
    ],
)
def test_a_manifest_cannot_be_left_where_it_was_followed_or_does_not_reach(
    world: World, num_batches: int, index: int, match: str
) -> None:
    pairs = byte_pairs(300, 700)
    commands = commands_of(world.slots, pairs, manifest=manifest_of(pairs))
    feed(world.receiver, commands[: 2 + num_batches])

    replies = feed(world.receiver, [Deviate(index=index)])

    assert not [call for call in world.sink.calls if call.startswith("deviate")]
    state = EngineState.TORN if num_batches else EngineState.UNCHANGED
    check_refused(world, replies, match=match, state=state)


def test_a_manifest_is_left_once_and_only_where_there_is_one(tmp_path: Path) -> None:
    manifest = manifest_of(byte_pairs(300, 700))
    cases: list[tuple[list[Command], str]] = [
        ([Deviate(index=0)], "leaves the manifest"),
        ([Metas(metas=manifest.metas), Deviate(index=1), Deviate(index=1)], "has left"),
    ]
    for commands, match in cases:
        world = World(tmp_path)
        is_known = len(commands) > 1
        opened = opening(world.slots, manifest=manifest if is_known else None)
        replies = feed(world.receiver, [opened, *commands])
        check_refused(world, replies, match=match, state=EngineState.UNCHANGED)
        world.close()


def test_a_declared_manifest_is_a_promise(world: World) -> None:
    manifest = manifest_of([SHORT])
    feed(
        world.receiver,
        [opening(world.slots, manifest=manifest, is_declared=True), Metas(metas=manifest.metas)],
    )

    replies = feed(world.receiver, [Deviate(index=0)])

    assert world.sink.calls == ["open", "abort"]
    check_refused(world, replies, match="was declared", state=EngineState.UNCHANGED)


def test_a_bucket_without_entries_is_refused_once_the_manifest_was_left(world: World) -> None:
    manifest = manifest_of([SHORT])
    commands = [opening(world.slots, manifest=manifest), Metas(metas=manifest.metas)]
    feed(world.receiver, [*commands, Deviate(index=0)])

    replies = feed(world.receiver, [Batch(seq=0, region=0)])

    check_refused(world, replies, match="nothing of what it holds", state=EngineState.UNCHANGED)


def test_a_planned_bucket_brings_no_metas_and_does_not_come_after_the_last(
    tmp_path: Path,
) -> None:
    manifest = manifest_of([SHORT])
    planned = Batch(seq=0, region=0)
    cases: list[tuple[list[Command], str]] = [
        ([Batch(seq=0, region=0, metas=(TINY[0],))], "that the manifest has"),
        ([Batch(seq=0, region=0, entries=(E(0, 300),), metas=(SHORT[0],))], "manifest has"),
        ([planned, Batch(seq=1, region=0)], "nothing of what it holds"),
        ([Batch(seq=0, region=0, entries=(E(0, 300),)), Batch(seq=1, region=0)], "not the next"),
        ([Batch(seq=1, region=0)], "expected 0"),
        ([planned, planned], "expected 1"),
    ]
    for commands, match in cases:
        world = World(tmp_path)
        offer = [opening(world.slots, manifest=manifest), Metas(metas=manifest.metas)]
        replies = feed(world.receiver, [*offer, *commands])
        state = EngineState.TORN if len(commands) > 1 else EngineState.UNCHANGED
        check_refused(world, replies, match=match, state=state)
        world.close()


def test_a_plan_of_larger_slots_than_there_are_is_refused(world: World) -> None:
    manifest = manifest_of([LONG])
    opened = opening(world.slots, manifest=manifest, layout=BucketLayout(1 << 20))

    replies = feed(world.receiver, [opened, Metas(metas=manifest.metas), Batch(seq=0, region=0)])

    check_refused(world, replies, match="within 512 bytes", state=EngineState.UNCHANGED)


def test_a_buffer_of_the_wire_that_is_no_command_ends_the_update_as_data(world: World) -> None:
    world.begin(loaded=True)
    with pytest.raises(RemoteProtocolError) as caught:
        decode_command(b"\x80\x04junk")

    error = world.receiver.fail(caught.value)

    check_refused(world, [error], match="no command", state=EngineState.TORN)


CALLS = ["open", "deviate 1", "load", "prepare", "commit"]


class FailingSink(KeepingSink):
    """Raises what it is told to at one call; its abort may raise as well."""

    def __init__(
        self, call: str, error: BaseException, *, abort: BaseException | None = None
    ) -> None:
        super().__init__()
        self._call = call
        self._error = error
        self._abort_error = abort

    def _note(self, call: str, pieces: Sequence[Piece] = ()) -> None:
        super()._note(call, pieces)
        if call == self._call:
            raise self._error

    def abort(self) -> EngineState:
        state = super().abort()
        if self._abort_error is not None:
            raise self._abort_error
        return state


def all_calls(slots: Slots) -> list[Command]:
    """Return an update in which a sink is called in every way: a stream that deviates."""
    known, pairs = byte_pairs(300, 700), byte_pairs(300, 701)
    return commands_of(slots, pairs, manifest=manifest_of(known))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no"), "remote"), (LoadError("no", name="t"), "load"), (OSError("no"), "remote")],
    ids=["ValueError", "LoadError", "OSError"],
)
def test_a_sink_that_raises_is_aborted_once_and_its_error_is_the_reply(
    world: World, call: str, error: Exception, code: str
) -> None:
    world.sink = FailingSink(call, error)
    world.receiver = greeted(world.memory, world.sink)

    replies = feed(world.receiver, all_calls(world.slots))

    first = next(reply for reply in replies if isinstance(reply, Error))
    assert not [reply for reply in replies if isinstance(reply, Done)]
    assert world.sink.calls.count("abort") == 1
    assert world.sink.calls[-2:] == [call, "abort"]
    # One bucket comes before the stream is known to leave its manifest.
    was_written = bool(world.sink.tensors)
    assert first.state is (EngineState.TORN if was_written else EngineState.UNCHANGED)
    assert was_written == (call in {"deviate 1", "prepare", "commit"})
    assert first.code == code
    assert "no" in first.message
    assert world.memory.is_torn == was_written
    world.receiver.release()
    assert world.sink.calls[-1] == "release"
    check_next_update_works(world.memory, world.slots)


@pytest.mark.parametrize("call", CALLS)
def test_a_sink_that_cannot_be_aborted_leaves_the_worker_torn(world: World, call: str) -> None:
    world.sink = FailingSink(call, ValueError("no"), abort=RuntimeError("cannot undo"))
    world.receiver = greeted(world.memory, world.sink)

    replies = feed(world.receiver, all_calls(world.slots))

    first = next(reply for reply in replies if isinstance(reply, Error))
    assert (first.state, world.memory.is_torn) == (EngineState.TORN, True)
    assert "no" in first.message
    assert world.sink.calls.count("abort") == 1
    world.receiver.release()
    check_next_update_works(world.memory, world.slots)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_exception_passes_through_and_is_still_undone_once(
    world: World, call: str, stop: type[BaseException]
) -> None:
    world.sink = FailingSink(call, stop())
    world.receiver = greeted(world.memory, world.sink)

    with pytest.raises(stop) as caught:
        feed(world.receiver, all_calls(world.slots))
    assert not world.receiver.session.has_ended
    error = world.receiver.fail(caught.value)
    again = world.receiver.fail(caught.value)

    assert error.code == "remote"
    assert stop.__name__ in error.message
    assert again.state is error.state
    assert world.receiver.error == error
    assert world.sink.calls.count("abort") == 1
    world.receiver.release()
    check_next_update_works(world.memory, world.slots)


def test_a_second_interrupt_in_the_abort_leaves_the_worker_torn_and_aborted_once(
    world: World,
) -> None:
    world.sink = FailingSink("load", KeyboardInterrupt(), abort=KeyboardInterrupt())
    world.receiver = greeted(world.memory, world.sink)
    with pytest.raises(KeyboardInterrupt) as caught:
        feed(world.receiver, commands_of(world.slots, byte_pairs(300)))
    with pytest.raises(KeyboardInterrupt):
        world.receiver.fail(caught.value)

    error = world.receiver.fail(caught.value)

    assert error.state is EngineState.TORN
    assert world.memory.is_torn
    assert world.sink.calls.count("abort") == 1


def test_a_sink_that_cannot_be_made_changes_nothing(world: World) -> None:
    def make(opened: Open) -> KeepingSink:
        raise LoadError("this engine has no weights")

    receiver = Receiver(memory=world.memory, make_sink=make)
    receiver.greet(hello())
    replies = feed(receiver, [opening(world.slots)])

    assert isinstance(replies[0], Error)
    assert (replies[0].code, replies[0].state) == ("load", EngineState.UNCHANGED)
    check_next_update_works(world.memory, world.slots)


def test_a_sink_that_cannot_be_released_does_not_change_the_verdict(world: World) -> None:
    class Clinging(KeepingSink):
        def release(self) -> None:
            super().release()
            raise RuntimeError("cannot let go")

    world.sink = Clinging()
    world.receiver = greeted(world.memory, world.sink)
    feed(world.receiver, commands_of(world.slots, byte_pairs(300)))

    world.receiver.release()
    world.receiver.release()

    assert world.receiver.state is EngineState.COMMITTED
    assert world.sink.calls.count("release") == 1


def test_an_error_whose_text_is_no_utf8_reaches_the_wire(world: World) -> None:
    world.sink = FailingSink("open", OSError("no file \udc80"))
    world.receiver = greeted(world.memory, world.sink)

    replies = feed(world.receiver, [opening(world.slots)])

    assert b"no file ?" in encode(replies[0])


def test_an_error_text_without_end_is_cut_to_what_a_message_may_hold(world: World) -> None:
    world.sink = FailingSink("open", ValueError("x" * 1_000_000))
    world.receiver = greeted(world.memory, world.sink)

    replies = feed(world.receiver, [opening(world.slots)])

    assert isinstance(replies[0], Error)
    assert len(replies[0].message) <= MAX_TEXT_CHARS


class LeavingSink(KeepingSink):
    """Says that a pattern of ``partial`` was needed."""

    def commit(self) -> SinkReport:
        super().commit()
        return SinkReport(left_as_is=("*.bias",))


@pytest.mark.parametrize("is_complete", [True, False])
def test_torn_stays_torn_until_a_commit_that_leaves_nothing_as_it_was(
    world: World, is_complete: bool
) -> None:
    world.memory.is_torn = True
    # Nothing is written by any of these, and the worker is torn all the same.
    for commands in (
        [Abort(reason="no")],
        [opening(world.slots), Abort(reason="no")],
        [Commit()],
        [opening(world.slots), Batch(seq=7, region=0)],
    ):
        receiver = greeted(world.memory)
        replies = feed(receiver, commands)
        last = replies[-1]
        assert isinstance(last, Aborted | Error)
        assert last.state is EngineState.TORN
        assert receiver.state is EngineState.TORN

    # That something may be left says nothing: it may have come all the same.
    make = KeepingSink if is_complete else LeavingSink
    receiver = greeted(world.memory, make())
    replies = feed(receiver, commands_of(world.slots, byte_pairs(300), partial=("*.bias",)))

    assert isinstance(replies[-1], Done)
    assert receiver.state is EngineState.COMMITTED
    assert receiver.left_as_is == replies[-1].left_as_is == (() if is_complete else ("*.bias",))
    assert world.memory.is_torn is not is_complete
    if not is_complete:
        check_next_update_works(world.memory, world.slots)


@pytest.mark.parametrize("num_commands", range(7))
def test_an_abort_is_answered_in_every_state_with_what_the_worker_holds(
    world: World, num_commands: int
) -> None:
    pairs = byte_pairs(300, 700)
    commands = commands_of(world.slots, pairs, manifest=manifest_of(pairs))[:num_commands]
    feed(world.receiver, commands)

    replies = feed(world.receiver, [Abort(reason="enough")])

    was_written = num_commands > 2
    expected = EngineState.TORN if was_written else EngineState.UNCHANGED
    assert replies == [Aborted(state=expected)]
    assert world.receiver.error is None
    assert world.sink.calls.count("abort") == (1 if num_commands > 1 else 0)
    world.receiver.release()
    check_next_update_works(world.memory, world.slots)


def test_a_committed_update_keeps_its_outcome_whatever_comes_after(world: World) -> None:
    feed(world.receiver, commands_of(world.slots, byte_pairs(300)))

    replies = feed(world.receiver, [Abort(reason="late"), Commit()])
    late = world.receiver.fail(RuntimeError("late"))

    assert [type(reply) for reply in replies] == [Error, Error]
    assert late.state is EngineState.COMMITTED
    assert world.receiver.state is EngineState.COMMITTED
    assert world.receiver.error is None
    assert "abort" not in world.sink.calls


def test_what_a_sink_notes_can_always_be_said_after_the_commit(world: World) -> None:
    class Talkative(DiscardSink):
        def commit(self) -> SinkReport:
            return SinkReport(notes=("é" * 100_000, *["note"] * MAX_NOTES))

    receiver = greeted(world.memory, Talkative())
    done = feed(receiver, commands_of(world.slots, byte_pairs(300, 700)))[-1]

    said = decode_reply(encode(done))
    assert isinstance(said, Done)
    assert [len(note) for note in said.notes] == [MAX_TEXT_CHARS] + [4] * (MAX_NOTES - 1)


def test_a_report_of_the_sink_is_what_the_worker_says_at_the_end(world: World) -> None:
    class Reporting(DiscardSink):
        def commit(self) -> SinkReport:
            return SinkReport(cloned_bytes=7, skipped=("rope",), notes=("cast",))

    receiver = greeted(world.memory, Reporting())
    done = feed(receiver, commands_of(world.slots, byte_pairs(300, 700)))[-1]

    assert isinstance(done, Done)
    assert (done.cloned_bytes, done.skipped, done.notes) == (7, ("rope",), ("cast",))
    assert set(done.stages_ms) == {"waiting", "opening", "loading", "preparing", "committing"}
    assert min(done.stages_ms.values()) > 0
    assert done.spans == ()


def test_an_atomic_update_is_staged_and_not_loaded_until_the_commit(world: World) -> None:
    pairs = byte_pairs(300, 700)
    commands = commands_of(
        world.slots, pairs, manifest=manifest_of(pairs), is_declared=True, is_atomic=True
    )

    done = feed(greeted(world.memory), commands)[-1]

    assert isinstance(done, Done)
    assert set(done.stages_ms) == {"waiting", "opening", "staging", "preparing", "committing"}


def test_only_the_manifests_used_last_are_kept_and_a_warm_update_needs_no_metas(
    world: World,
) -> None:
    used = [byte_pairs(100 + i) for i in range(MAX_MANIFESTS + 1)]
    for pairs in used[:MAX_MANIFESTS]:
        feed(greeted(world.memory), commands_of(world.slots, pairs, manifest=manifest_of(pairs)))
    first = manifest_of(used[0])
    sink = KeepingSink()
    warm = commands_of(world.slots, used[0], manifest=first, num_metas=0)
    assert isinstance(warm.pop(1), Metas)

    replies = feed(greeted(world.memory, sink), warm)

    assert [type(r) for r in replies] == [Ready, Ack, Prepared, Done]
    assert kept_by(sink) == bytes_by_name(used[0])
    feed(greeted(world.memory), commands_of(world.slots, used[-1]))
    kept = [manifest_of(pairs).digest for pairs in (*used[2:MAX_MANIFESTS], used[0], used[-1])]
    assert list(world.memory.manifests) == kept


def test_memory_of_a_dead_owner_is_let_go_and_release_is_idempotent(world: World) -> None:
    world.begin(loaded=False)
    assert len(world.memory.regions) == 1
    world.memory.drop_dead_regions()
    assert len(world.memory.regions) == 1

    world.slots.release()
    world.memory.drop_dead_regions()
    assert world.memory.regions == {}

    world.memory.release()
    world.memory.release()


def test_the_writes_of_a_slot_are_awaited_once_before_it_is_viewed(world: World) -> None:
    region = world.watch()
    world.begin(loaded=False)
    for seq, slot in enumerate((3, 0)):
        metas = tuple(TensorMeta(f"{seq} {i}", "uint8", (8,), 8) for i in range(2))
        entries = tuple(E(2 * seq + i, 8, at=256 * i) for i in range(2))
        bucket = Batch(seq=seq, region=slot, entries=entries, metas=metas)
        assert feed(world.receiver, [bucket]) == [Ack(seq=seq)]

    assert region.awaited == [(3, 0), (0, 2)]
    assert len(region.views) == 4


def test_a_region_is_opened_for_the_worker_s_own_device(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, torch.device]] = []

    def refuse(kind: str, handle: Any, *, device: torch.device) -> Any:
        asked.append((kind, device))
        raise RegionError("no peer access")

    monkeypatch.setattr("vllm_bucketsync.receiver.open_region", refuse)
    receiver = Receiver(memory=world.memory, make_sink=lambda opened: world.sink, device="cuda:3")
    receiver.greet(hello())

    (reply,) = feed(receiver, [opening(world.slots)])

    assert reply == Fallback(transport="shm", reason="no peer access")
    assert asked == [("shm", torch.device("cuda", 3))]
    (record,) = caplog.records
    assert "transport shm does not work here: no peer access" in record.getMessage()
    receiver.release()
