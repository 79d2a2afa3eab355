"""A planned bucket is viewed once, and comes again as the same object; no other does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.bytes_of import bytes_of
from support.stepping import byte_pairs, commands_of, feed, greeted, manifest_of, shm_slots
from support.thread_engine import KeepingSink, ThreadEngine

from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.messages import Error
from vllm_bucketsync.retained import MAX_MANIFESTS, ReceiverMemory
from vllm_bucketsync.sinks import Bucket
from vllm_bucketsync.sync import WeightSync


class NotingSink(KeepingSink):
    """Takes note of the buckets themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: list[Bucket] = []

    def load(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        super().load(bucket)


def update(memory: ReceiverMemory, slots: Any, pairs: Any, **options: Any) -> NotingSink:
    sink = NotingSink()
    replies = feed(greeted(memory, sink), commands_of(slots, pairs, **options))
    assert not any(isinstance(reply, Error) for reply in replies)
    assert {name: bytes_of(one) for name, one in sink.tensors.items()} == {
        meta.name: bytes_of(one) for meta, one in pairs
    }
    return sink


def test_buckets_of_a_planned_update_come_again(tmp_path: Path) -> None:
    memory, slots = ReceiverMemory(), shm_slots(tmp_path)
    manifest = manifest_of(byte_pairs(300, 700, 8))
    first = update(memory, slots, byte_pairs(300, 700, 8), manifest=manifest)
    for bucket in first.buckets:
        bucket.prepared = f"made ready for {bucket.seq}"

    second = update(memory, slots, byte_pairs(300, 700, 8), manifest=manifest)

    assert len(first.buckets) > 2
    assert all(bucket.is_kept for bucket in first.buckets)
    assert all(a is b for a, b in zip(first.buckets, second.buckets, strict=True))
    assert second.buckets[1].prepared == "made ready for 1"
    slots.release()
    memory.release()


def test_other_manifests_and_other_memory_have_buckets_of_their_own(tmp_path: Path) -> None:
    memory, slots = ReceiverMemory(), shm_slots(tmp_path)
    pairs, others = byte_pairs(300, 8), byte_pairs(300, 8, prefix="u")
    first = update(memory, slots, pairs, manifest=manifest_of(pairs))

    other = update(memory, slots, others, manifest=manifest_of(others))
    elsewhere = shm_slots(tmp_path)
    moved = update(memory, elsewhere, pairs, manifest=manifest_of(pairs))

    assert not set(first.buckets) & set(other.buckets)
    assert not set(first.buckets) & set(moved.buckets)
    for one in (slots, elsewhere):
        one.release()
    memory.release()


def test_a_stream_without_a_plan_keeps_nothing(tmp_path: Path) -> None:
    memory, slots = ReceiverMemory(), shm_slots(tmp_path)

    sink = update(memory, slots, byte_pairs(300, 8))

    assert not any(bucket.is_kept for bucket in sink.buckets)
    assert not memory.buckets
    slots.release()
    memory.release()


def test_kept_buckets_end_with_their_memory_and_are_few(tmp_path: Path) -> None:
    memory, slots = ReceiverMemory(), shm_slots(tmp_path)
    for number in range(MAX_MANIFESTS + 2):
        pairs = byte_pairs(300, prefix=f"t{number}.")
        update(memory, slots, pairs, manifest=manifest_of(pairs))
    assert len(memory.buckets) == MAX_MANIFESTS

    slots.release()
    memory.drop_dead_regions()

    assert not memory.buckets
    assert not memory.regions


def test_a_release_drops_kept_buckets(tmp_path: Path) -> None:
    memory, slots = ReceiverMemory(), shm_slots(tmp_path)
    pairs = byte_pairs(300)
    update(memory, slots, pairs, manifest=manifest_of(pairs))
    assert memory.buckets

    memory.release()

    assert not memory.buckets
    slots.release()


def test_references_are_never_kept() -> None:
    engine = ThreadEngine(is_in_process=True, make=NotingSink)
    tensors = {"a": torch.ones(3), "none": torch.zeros(0), "b": torch.arange(5)}
    with WeightSync(engine) as sync:
        for version in range(2):
            sync.push(tensors, version=version)

    for sink in engine.sinks:
        # All exist at once, so they are handed over at once.
        assert [len(bucket.pieces) for bucket in sink.buckets] == [3]
        assert not sink.buckets[0].is_kept
        assert {n: bytes_of(t) for n, t in sink.tensors.items()} == {
            n: bytes_of(t) for n, t in tensors.items()
        }
    assert not engine.workers[0].memory.buckets
    engine.close()


def test_references_to_a_stream_are_handed_over_one_by_one() -> None:
    engine = ThreadEngine(is_in_process=True, make=NotingSink)
    buffer = torch.zeros(4)

    def reusing() -> Any:
        for number in range(3):
            yield f"t{number}", buffer.fill_(number)

    with WeightSync(engine) as sync:
        for version, source in enumerate([{"a": torch.ones(3), "b": torch.ones(1)}, reusing()]):
            sync.push(source, version=version)

    last = engine.sinks[-1]
    assert [len(bucket.pieces) for bucket in last.buckets] == [1, 1, 1]
    assert last.tensors["t2"].view(torch.float32).tolist() == [2.0] * 4
    assert last.tensors["t0"].view(torch.float32).tolist() == [0.0] * 4
    engine.close()


def test_a_plan_says_how_far_an_update_is_before_each_bucket(tmp_path: Path) -> None:
    slots = shm_slots(tmp_path)
    pairs = byte_pairs(300, 700, 8, 0)
    plan = manifest_of(pairs).plan(slots.layout)

    whole = plan.progress[-1]
    assert (whole.num_tensors, whole.num_bytes, whole.open_bytes) == (4, 1008, 0)
    assert [one.open_bytes for one in plan.progress].count(512) == 1
    assert Manifest(manifest_of(pairs).metas).plan(slots.layout) == plan
    slots.release()
