"""Proves that both halves of the layout agree, and that nothing is believed that differs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stepping import Pairs, byte_pairs, manifest_of

from vllm_bucketsync.arrivals import (
    MAX_ELEMENTS,
    Arrivals,
    check_manifest,
    check_meta,
    check_tensor_meta,
)
from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import RemoteProtocolError
from vllm_bucketsync.layout import (
    MAX_DIMS,
    MAX_NAME_BYTES,
    BucketLayout,
    Entry,
    Manifest,
    TensorMeta,
)
from vllm_bucketsync.messages import Batch, Deviate, Finish
from vllm_bucketsync.packing import Packing
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.sources import Source
from vllm_bucketsync.tensors import DTYPE_NAMES

LAYOUT = BucketLayout(512)
Write = tuple[int, int, int]


class NotedSlots(Slots):
    """Slots of any layout that take note of where bytes were put, and of which."""

    def __init__(self, layout: BucketLayout) -> None:
        super().__init__(Settings())
        self.layout = layout
        self.writes: dict[int, list[tuple[int, bytes]]] = {}

    def write(self, batch: int, offset_bytes: int, data: torch.Tensor) -> None:
        self.writes.setdefault(batch, []).append((offset_bytes, data.numpy().tobytes()))


layouts = st.builds(
    BucketLayout,
    st.integers(1, 8).map(lambda n: n * 256),
    max_entries=st.sampled_from([1, 2, 3, 8192]),
)
sizes = st.lists(
    st.one_of(st.sampled_from([0, 1, 255, 256, 257, 512, 1024, 2048]), st.integers(0, 5000)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150)
@given(layout=layouts, sizes=sizes, data=st.data())
def test_what_a_receiver_derives_is_where_the_sender_has_put_it(
    layout: BucketLayout, sizes: list[int], data: st.DataObject
) -> None:
    pairs = byte_pairs(*sizes)
    known, is_declared = data.draw(st.sampled_from([(len(pairs), True), (None, False)]))
    if not is_declared:
        known = data.draw(st.one_of(st.none(), st.integers(0, len(pairs))))
    manifest = None if known is None else manifest_of([*pairs[:known], *byte_pairs(9, prefix="k")])
    manifest = manifest_of(pairs) if is_declared else manifest
    slots = NotedSlots(layout)
    source = Source(declared=manifest if is_declared else None, tensors=iter(pairs))
    packing = Packing(source, manifest=manifest, slots=slots)
    arrivals = Arrivals(manifest, layout=layout)

    arrived: dict[str, bytes] = {}
    for commands in packing.batches(lambda: packing.num_batches):
        for command in commands:
            if isinstance(command, Deviate):
                assert not is_declared
                arrivals.deviate(command.index)
                continue
            assert isinstance(command, Batch)
            accepted = arrivals.accept(command, capacity_bytes=layout.slot_size_bytes)
            written = slots.writes[command.seq]
            assert [(e.offset_bytes, e.num_bytes) for e, _ in accepted] == [
                (offset, len(found)) for offset, found in written
            ]
            assert len(accepted) <= layout.max_entries
            for (_, meta), (_, found) in zip(accepted, written, strict=True):
                arrived[meta.name] = arrived.get(meta.name, b"") + found

    assert arrived == {meta.name: tensor.numpy().tobytes() for meta, tensor in pairs}
    finish = Finish(
        num_batches=packing.num_batches,
        num_tensors=packing.num_tensors,
        num_bytes=packing.num_bytes,
        manifest=packing.digest(),
    )
    assert arrivals.finish(finish).metas == manifest_of(pairs).metas


def planned(pairs: Pairs) -> Arrivals:
    return Arrivals(manifest_of(pairs), layout=LAYOUT)


def accept_all(arrivals: Arrivals, num_batches: int) -> None:
    for seq in range(num_batches):
        arrivals.accept(Batch(seq=seq, region=0), capacity_bytes=512)


def finish_of(pairs: Pairs, num_batches: int) -> Finish:
    manifest = manifest_of(pairs)
    return Finish(
        num_batches=num_batches,
        num_tensors=len(manifest),
        num_bytes=manifest.num_bytes,
        manifest=manifest.digest,
    )


def test_a_split_tensor_counts_once_and_only_when_it_is_whole() -> None:
    arrivals = planned(byte_pairs(1100, 8))
    seen: list[tuple[int, int]] = []
    for seq in range(3):
        arrivals.accept(Batch(seq=seq, region=0), capacity_bytes=512)
        seen.append((arrivals.num_tensors, arrivals.num_bytes))

    assert seen == [(0, 512), (0, 1024), (2, 1108)]


def test_the_manifest_of_what_arrived_is_the_one_that_was_known() -> None:
    pairs = byte_pairs(300, 700)
    manifest = manifest_of(pairs)
    arrivals = Arrivals(manifest, layout=LAYOUT)
    accept_all(arrivals, 3)

    assert arrivals.finish(finish_of(pairs, 3)) is manifest


@pytest.mark.parametrize("index", [2, 3])
def test_a_manifest_that_was_left_is_finished_with_what_came_instead(index: int) -> None:
    known = byte_pairs(300, 700, 8)
    sent = [*known[:index], *byte_pairs(16, prefix="new")]
    arrivals = planned(known)
    accept_all(arrivals, 2)
    # In the middle of the second tensor: what has begun is carried on.
    arrivals.deviate(index)
    entries = [Entry(1, 512, 0, 188)]
    if index == 3:
        entries.append(Entry(2, 0, 256, 8))
    arrivals.accept(Batch(seq=2, region=0, entries=tuple(entries)), capacity_bytes=512)
    last = Batch(seq=3, region=0, entries=(Entry(index, 0, 0, 16),), metas=(sent[-1][0],))
    arrivals.accept(last, capacity_bytes=512)

    assert arrivals.finish(finish_of(sent, 4)).metas == manifest_of(sent).metas


def test_a_manifest_is_not_left_in_the_middle_of_a_tensor_that_it_names() -> None:
    arrivals = planned(byte_pairs(300, 700, 8))
    accept_all(arrivals, 2)

    with pytest.raises(RemoteProtocolError, match="at tensor 1, but 2 of 3 have begun"):
        arrivals.deviate(1)


def test_descriptions_without_a_tensor_are_found_at_the_end() -> None:
    pairs = byte_pairs(8, 16)
    arrivals = Arrivals(None, layout=LAYOUT)
    batch = Batch(
        seq=0, region=0, entries=(Entry(0, 0, 0, 8),), metas=tuple(meta for meta, _ in pairs)
    )
    arrivals.accept(batch, capacity_bytes=512)

    with pytest.raises(RemoteProtocolError, match="2 tensors of 24 bytes were sent, but 1 of 8"):
        arrivals.finish(finish_of(pairs, 1))
    with pytest.raises(RemoteProtocolError, match="were sent, but"):
        arrivals.finish(finish_of(pairs[:1], 1))


def test_an_update_of_nothing_is_nothing() -> None:
    arrivals = Arrivals(None, layout=LAYOUT)

    assert arrivals.accept(Batch(seq=0, region=0, entries=()), capacity_bytes=0) == []
    assert len(arrivals.finish(finish_of([], 1))) == 0


@pytest.mark.parametrize("name", sorted(DTYPE_NAMES.values()))
def test_every_dtype_that_can_be_sent_is_taken_and_only_with_its_bytes(name: str) -> None:
    size = getattr(torch, name).itemsize

    check_tensor_meta(TensorMeta("t", name, (2, 3), 6 * size))
    check_tensor_meta(TensorMeta("t", name, (2, 0), 0))
    check_tensor_meta(TensorMeta("t", name, (), size))
    for wrong in (0, 6 * size - 1, 6 * size + 1):
        with pytest.raises(RemoteProtocolError, match=f"takes {6 * size} bytes"):
            check_tensor_meta(TensorMeta("t", name, (2, 3), wrong))


def shapes_at_the_limit() -> Iterator[tuple[tuple[int, ...], bool]]:
    yield (MAX_ELEMENTS - 1,), True
    yield (MAX_ELEMENTS,), False
    yield (1 << 30, 1 << 30), False
    yield (1 << 30, (1 << 30) - 1), True
    yield (0, MAX_ELEMENTS), False
    yield (0, MAX_ELEMENTS - 1), True


@pytest.mark.parametrize(("shape", "is_countable"), list(shapes_at_the_limit()))
def test_a_shape_that_torch_could_not_count_is_refused(
    shape: tuple[int, ...], is_countable: bool
) -> None:
    num_bytes = 1
    for size in shape:
        num_bytes *= size
    meta = TensorMeta("t", "uint8", shape, num_bytes)
    if not is_countable:
        with pytest.raises(RemoteProtocolError):
            check_tensor_meta(meta)
        return
    check_tensor_meta(meta)
    if not num_bytes:
        assert torch.empty(0, dtype=torch.uint8).view(shape).shape == shape


def test_a_manifest_is_the_one_that_was_announced_or_none() -> None:
    metas = [meta for meta, _ in byte_pairs(8, 16)]
    digest = Manifest(metas).digest

    assert check_manifest(metas, digest=digest).metas == tuple(metas)
    for other in (metas[::-1], metas[:1], [*metas, metas[0]], []):
        with pytest.raises(RemoteProtocolError, match="announced was"):
            check_manifest(other, digest=digest)


def test_a_bucket_without_entries_is_the_one_that_was_planned_next_or_refused() -> None:
    manifest = manifest_of(byte_pairs(200, 200, 200, 200, 200))
    layout = BucketLayout(512)
    plan = manifest.plan(layout)
    assert len(plan.buckets) == 3
    part, whole = plan.buckets[0][:1], plan.buckets[0]

    for entries, is_next in [(part, False), (whole, True)]:
        arrivals = Arrivals(manifest, layout=layout)
        arrivals.accept(Batch(seq=0, region=0, entries=entries), capacity_bytes=512)
        batch = Batch(seq=1, region=1)
        if is_next:
            assert len(arrivals.accept(batch, capacity_bytes=512)) == 2
        else:
            with pytest.raises(RemoteProtocolError, match="not the next of the 3"):
                arrivals.accept(batch, capacity_bytes=512)
        assert arrivals.num_tensors == (4 if is_next else 1)


@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta("", "uint8", (), 1),
        TensorMeta("x" * (MAX_NAME_BYTES + 1), "uint8", (), 1),
        TensorMeta("é" * (MAX_NAME_BYTES // 2 + 1), "uint8", (), 1),
        TensorMeta("a", "d" * (MAX_NAME_BYTES + 1), (), 1),
        TensorMeta("a", "uint8", (1,) * (MAX_DIMS + 1), 1),
        TensorMeta("a", "uint8", (2, -1), 1),
        TensorMeta("a", "uint8", (), -1),
    ],
    ids=["no name", "long name", "long in UTF-8", "long dtype", "dims", "shape", "bytes"],
)
def test_a_description_out_of_bounds_is_refused(meta: TensorMeta) -> None:
    with pytest.raises(RemoteProtocolError, match="description is out of bounds"):
        check_meta(meta)


def test_a_description_at_the_bounds_is_accepted() -> None:
    check_meta(TensorMeta("x" * MAX_NAME_BYTES, "uint8", (1,) * MAX_DIMS, 1))
    check_meta(TensorMeta("a", "uint8", (0,), 0))
