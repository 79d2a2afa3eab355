"""Proves what a sender says of its buckets, and when it asks for the next tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.stepping import SLOT_BYTES, Pairs, byte_pairs, manifest_of, shm_slots

from vllm_bucketsync import packing as packing_module
from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.layout import Entry, Manifest, TensorMeta
from vllm_bucketsync.messages import Batch, Busy, Command, Deviate
from vllm_bucketsync.packing import BUSY_S, Packing
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.sources import Source
from vllm_bucketsync.timeline import Timeline


class Clock:
    """Time that passes when the test says so."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(Timeline, "now", staticmethod(made))
    return made


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    made = shm_slots(tmp_path, num_slots=2)
    yield made
    made.release()


def pack(
    slots: Slots, pairs: Pairs, *, manifest: Manifest | None = None, is_declared: bool = False
) -> tuple[Packing, list[Command]]:
    declared = manifest if is_declared else None
    source = Source(declared=declared, tensors=iter(pairs))
    packing = Packing(source, manifest=manifest, slots=slots)
    steps = packing.batches(lambda: packing.num_batches)
    return packing, [command for step in steps for command in step]


def test_a_declared_source_says_nothing_of_what_both_ends_planned(slots: Slots) -> None:
    pairs = byte_pairs(300, 700, 0, 8)
    packing, commands = pack(slots, pairs, manifest=manifest_of(pairs), is_declared=True)

    assert commands == [Batch(seq=seq, region=seq % 2) for seq in range(3)]
    assert (packing.num_batches, packing.num_tensors, packing.num_bytes) == (3, 4, 1008)
    assert packing.digest() == manifest_of(pairs).digest
    assert slots.last_manifest is not None
    assert slots.last_manifest.metas == manifest_of(pairs).metas


def test_an_unknown_stream_describes_each_tensor_once_where_it_begins(slots: Slots) -> None:
    pairs = byte_pairs(300, 700, 0, 8)
    _, commands = pack(slots, pairs)

    first, second, third, fourth = (meta for meta, _ in pairs)
    assert commands == [
        Batch(seq=0, region=0, entries=(Entry(0, 0, 0, 300),), metas=(first,)),
        Batch(seq=1, region=1, entries=(Entry(1, 0, 0, 512),), metas=(second,)),
        Batch(
            seq=2,
            region=0,
            entries=(Entry(1, 512, 0, 188), Entry(2, 0, 256, 0), Entry(3, 0, 256, 8)),
            metas=(third, fourth),
        ),
    ]


def test_a_stream_that_leaves_its_manifest_says_so_before_it_describes(slots: Slots) -> None:
    known = byte_pairs(100, 8, 8)
    other = TensorMeta("other", "int16", (4,), 8)
    sent = [known[0], (other, torch.arange(4, dtype=torch.int16)), known[2]]

    packing, commands = pack(slots, sent, manifest=manifest_of(known))

    assert commands == [
        Deviate(index=1),
        Batch(seq=0, region=0, entries=(Entry(0, 0, 0, 100), Entry(1, 0, 256, 8)), metas=(other,)),
        Batch(seq=1, region=1, entries=(Entry(2, 0, 0, 8),), metas=(known[2][0],)),
    ]
    assert packing.digest() == manifest_of(sent).digest


@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_a_stream_that_is_shorter_or_longer_than_the_last_leaves_the_manifest_there(
    slots: Slots, num_sent: int
) -> None:
    known = byte_pairs(8, 8, 8)
    sent = known[:num_sent]
    packing, commands = pack(slots, sent, manifest=manifest_of(known))
    assert [c for c in commands if isinstance(c, Deviate)] == [Deviate(index=num_sent)]
    assert packing.digest() == manifest_of(sent).digest

    longer = [*known, *byte_pairs(8, prefix="more")]
    packing, commands = pack(slots, longer, manifest=manifest_of(known))
    assert [c for c in commands if isinstance(c, Deviate)] == [Deviate(index=3)]
    assert packing.digest() == manifest_of(longer).digest


def test_a_declared_source_that_is_another_is_refused_at_the_first_difference(
    slots: Slots,
) -> None:
    pairs = byte_pairs(300, 700)
    for sent in (pairs[:1], pairs[::-1], [*pairs, *byte_pairs(8, prefix="more")]):
        with pytest.raises(SourceError, match="2 tensors were declared"):
            pack(slots, sent, manifest=manifest_of(pairs), is_declared=True)


def test_a_slot_is_waited_for_before_the_next_tensor_is_asked_for(slots: Slots) -> None:
    asked: list[str] = []

    def tensors() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for meta, tensor in byte_pairs(512, 512, 512):
            asked.append(meta.name)
            yield meta, tensor

    acks = [0]
    packing = Packing(Source(declared=None, tensors=tensors()), manifest=None, slots=slots)
    steps = packing.batches(lambda: acks[0])
    for _ in range(2):
        assert len(next(steps)) == 1
    for _ in range(3):
        assert next(steps) == []
    assert asked == ["t0", "t1"]

    acks[0] = 1
    assert len(next(steps)) == 1
    assert asked == ["t0", "t1", "t2"]


def test_a_bucket_is_handed_over_as_soon_as_it_is_full(slots: Slots) -> None:
    asked: list[str] = []

    def tensors() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for meta, tensor in byte_pairs(256, 256, 8):
            asked.append(meta.name)
            yield meta, tensor

    packing = Packing(Source(declared=None, tensors=tensors()), manifest=None, slots=slots)
    next(packing.batches(lambda: 0))

    assert asked == ["t0", "t1"]


def test_a_tensor_is_let_go_before_the_next_one_is_asked_for(slots: Slots) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def tensors() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for index in range(3):
            gc.collect()
            assert [ref() for ref in alive] == [None] * index
            tensor = torch.full((8,), index, dtype=torch.uint8)
            alive.append(weakref.ref(tensor))
            yield TensorMeta(f"t{index}", "uint8", (8,), 8), tensor
            del tensor

    source = Source(declared=None, tensors=tensors())
    packing = Packing(source, manifest=None, slots=slots)

    found = [one for commands in packing.batches(lambda: packing.num_batches) for one in commands]
    assert len([one for one in found if isinstance(one, Batch)]) == 2
    assert len(alive) == 3


def test_how_far_it_has_come_is_told_with_the_last_tensor(slots: Slots) -> None:
    pairs = byte_pairs(300, 700)
    manifest = manifest_of(pairs)
    source = Source(declared=manifest, tensors=iter(pairs))
    packing = Packing(source, manifest=manifest, slots=slots)
    assert packing.describe() == "bucket 0 of 3 (tensor 0 of 2)"

    list(packing.batches(lambda: packing.num_batches))
    assert packing.describe() == "bucket 3 of 3 (tensor 2 of 2, t1)"
    streamed, _ = pack(slots, pairs)
    assert streamed.describe() == "bucket 3 (tensor 2, t1)"


@pytest.mark.parametrize("is_declared", [False, True])
def test_making_tensors_is_counted_within_the_packing_of_a_source_that_makes_them(
    slots: Slots, clock: Clock, is_declared: bool
) -> None:
    def tensors() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for pair in byte_pairs(300, 700, 8):
            clock.now_ns += 1_000_000
            yield pair

    manifest = manifest_of(byte_pairs(300, 700, 8)) if is_declared else None
    timeline = Timeline("streaming")
    source = Source(declared=manifest, tensors=tensors())
    packing = Packing(source, manifest=manifest, slots=slots, timeline=timeline)
    for _ in packing.batches(lambda: packing.num_batches):
        # What others do meanwhile is not the source's.
        clock.now_ns += 50_000_000

    assert timeline.stages_ms()["making tensors"] == 3.0
    # Each bucket is full with what one more tensor brings.
    assert [span.end_ns - span.begin_ns for span in timeline.spans] == [1_000_000] * 3
    assert timeline.stages_ms()["packing"] == 3.0


def test_a_wait_for_a_slot_is_no_packing(slots: Slots, clock: Clock) -> None:
    acks = [0]
    timeline = Timeline("streaming")
    source = Source(declared=None, tensors=iter(byte_pairs(512, 512, 512, 8)))
    packing = Packing(source, manifest=None, slots=slots, timeline=timeline)
    for step in packing.batches(lambda: acks[0]):
        if not step:
            clock.now_ns += 7_000
            acks[0] += 1

    found = [(span.name, span.bucket, span.end_ns - span.begin_ns) for span in timeline.spans]
    assert found == [
        *(("packing", 0, 0), ("packing", 1, 0)),
        *(("waiting for a slot", 2, 7_000), ("packing", 2, 0)),
        *(("waiting for a slot", 3, 7_000), ("packing", 3, 0)),
    ]
    assert [span.region for span in timeline.spans if span.name == "packing"] == [0, 1, 0, 1]


def test_a_bucket_is_flushed_between_its_last_byte_and_its_announcement(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    write = slots.write

    def noted_write(batch: int, offset_bytes: int, data: torch.Tensor) -> None:
        events.append(("write", batch))
        write(batch, offset_bytes, data)

    monkeypatch.setattr(slots, "write", noted_write)
    monkeypatch.setattr(slots, "flush", lambda batch: events.append(("flush", batch)))
    source = Source(declared=None, tensors=iter(byte_pairs(300, 700, 0, 8)))
    packing = Packing(source, manifest=None, slots=slots)
    for step in packing.batches(lambda: packing.num_batches):
        events += [("say", command.seq) for command in step if isinstance(command, Batch)]

    assert {number for _, number in events} == {0, 1, 2}
    for number in range(3):
        kinds = [kind for kind, batch in events if batch == number]
        assert kinds[-2:] == ["flush", "say"]
        assert set(kinds[:-2]) == {"write"}


def test_a_slow_source_is_told_of_between_two_tensors_of_one_bucket(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(packing_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    def tensors() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        nonlocal now_s
        for took_s, pair in zip((0.1, 0.1, 0.1, 3.0, 0.2), byte_pairs(0, 0, 0, 0, 0), strict=True):
            now_s += took_s
            yield pair

    packing = Packing(Source(declared=None, tensors=tensors()), manifest=None, slots=slots)
    said = [one for commands in packing.batches(lambda: 0) for one in commands]

    assert said[:-1] == [Busy(num_tensors=3), Busy(num_tensors=4)]
    assert isinstance(said[-1], Batch)
    assert packing.source_s == pytest.approx(0.2)


def test_of_a_source_that_is_fast_enough_no_more_is_said_than_its_buckets(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(packing_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    def tensors() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        nonlocal now_s
        for pair in byte_pairs(*[SLOT_BYTES] * 8):
            now_s += 0.9 * BUSY_S
            yield pair

    packing = Packing(Source(declared=None, tensors=tensors()), manifest=None, slots=slots)
    said = [one for commands in packing.batches(lambda: 100) for one in commands]

    assert [type(one) for one in said] == [Batch] * 8
