"""Tensors that are read where they lie: what both ends derive, and what is not believed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import OPEN

from vllm_bucketsync.arrivals import Arrivals
from vllm_bucketsync.codec import decode_command, encode
from vllm_bucketsync.errors import RemoteProtocolError
from vllm_bucketsync.handles import CudaBlock, CudaBlocksHandle, ShmHandle
from vllm_bucketsync.layout import (
    NOT_PLACED,
    BucketLayout,
    Entry,
    Manifest,
    Placed,
    TensorMeta,
    packed,
)
from vllm_bucketsync.messages import Batch, Open

LAYOUT = BucketLayout(512)
LEASE = ShmHandle(id="r", path="/r.seg", num_bytes=256, canary=bytes(32))


def manifest_of(*sizes: int) -> Manifest:
    return Manifest([TensorMeta(f"t{i}", "uint8", (n,), n) for i, n in enumerate(sizes)])


tensors = st.lists(
    st.tuples(st.integers(0, 1500), st.one_of(st.just(NOT_PLACED), st.integers(0, 10_000))),
    min_size=1,
    max_size=20,
)


@settings(max_examples=200)
@given(tensors)
def test_every_byte_is_named_once_in_order_in_a_slot_or_where_it_lies(
    found: list[tuple[int, int]],
) -> None:
    sizes, offsets = [size for size, _ in found], [offset for _, offset in found]
    manifest, placed = manifest_of(*sizes), Placed(7, packed(offsets))

    plan = manifest.plan(LAYOUT, placed)

    entries = [entry for bucket in plan.buckets for entry in bucket]
    assert [e.index for e in entries] == sorted(e.index for e in entries)
    for index, size in enumerate(sizes):
        parts = [e for e in entries if e.index == index]
        ends = [0, *(e.first_byte + e.num_bytes for e in parts)]
        assert [e.first_byte for e in parts] == ends[:-1]
        assert ends[-1] == size
    for bucket, is_placed, used in zip(plan.buckets, plan.is_placed, plan.used_bytes, strict=True):
        assert {offsets[e.index] != NOT_PLACED for e in bucket} == {is_placed}
        if is_placed:
            assert all(e.offset_bytes == offsets[e.index] for e in bucket)
        assert used <= LAYOUT.slot_size_bytes
    assert plan.progress[-1].num_tensors == len(sizes)
    assert plan.progress[-1].num_bytes == sum(sizes)
    assert len(plan.progress) == len(plan.buckets) + 1


def test_a_receiver_takes_what_was_planned_in_the_region_where_it_is() -> None:
    manifest = manifest_of(100, 200, 300)
    placed = Placed(2, packed([40, NOT_PLACED, 80]))
    arrivals = Arrivals(manifest, layout=LAYOUT, placed=placed)

    for seq, region in enumerate((2, 1, 2)):
        found = arrivals.accept_planned(Batch(seq=seq, region=region), capacity_bytes=512)
        assert found is not None
        assert [(e.index, e.offset_bytes, meta.name) for e, meta in found] == [
            (seq, (40, 0, 80)[seq], f"t{seq}")
        ]
    assert (arrivals.num_tensors, arrivals.num_bytes) == (3, 600)


@pytest.mark.parametrize("region", [0, 1, 3])
def test_a_placed_bucket_in_a_slot_is_refused(region: int) -> None:
    arrivals = Arrivals(manifest_of(100), layout=LAYOUT, placed=Placed(2, packed([0])))
    with pytest.raises(RemoteProtocolError, match="where its tensors are not"):
        arrivals.accept_planned(Batch(seq=0, region=region), capacity_bytes=512)


def test_a_bucket_of_a_slot_among_placed_tensors_is_refused() -> None:
    arrivals = Arrivals(manifest_of(100), layout=LAYOUT, placed=Placed(2, packed([NOT_PLACED])))
    with pytest.raises(RemoteProtocolError, match="where its tensors are not"):
        arrivals.accept_planned(Batch(seq=0, region=2), capacity_bytes=512)


def test_entries_of_the_senders_own_choice_are_refused_among_placed_tensors() -> None:
    arrivals = Arrivals(manifest_of(100), layout=LAYOUT, placed=Placed(2, packed([0])))
    batch = Batch(seq=0, region=2, entries=(Entry(0, 0, 0, 100),))
    with pytest.raises(RemoteProtocolError):
        arrivals.accept(batch, capacity_bytes=512)


@pytest.mark.parametrize("num_offsets", [0, 1, 3])
def test_places_of_another_number_of_tensors_are_refused(num_offsets: int) -> None:
    with pytest.raises(RemoteProtocolError, match="manifest of 2"):
        manifest_of(1, 2).plan(LAYOUT, Placed(0, packed([0] * num_offsets)))


def test_half_an_offset_is_refused() -> None:
    for num_bytes in (15, 17):
        with pytest.raises(RemoteProtocolError, match="manifest of 2"):
            manifest_of(1, 2).plan(LAYOUT, Placed(0, bytes(num_bytes)))


def test_handles_of_blocks_survive_the_wire_and_others_do_not() -> None:
    blocks = (CudaBlock(bytes(64), 100), CudaBlock(bytes(range(64)), 28))
    handle = CudaBlocksHandle(id="i", lease=LEASE, boot_id="b", blocks=blocks)
    assert handle.num_bytes == 128
    placed = Placed(0, packed([5]))
    opened = msgspec.structs.replace(OPEN, handles=(handle,), placed=placed)
    found = decode_command(encode(opened))
    assert isinstance(found, Open)
    assert found == opened
    for wrong in ((), (CudaBlock(bytes(63), 1),), (CudaBlock(bytes(64), -1),)):
        spoiled = msgspec.structs.replace(handle, blocks=wrong)
        with pytest.raises(RemoteProtocolError):
            decode_command(encode(msgspec.structs.replace(opened, handles=(spoiled,))))
