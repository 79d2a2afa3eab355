"""Buckets lose nothing, overlap nowhere, never pass their slot, and depend on the past alone."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.errors import ConfigError
from vllm_bucketsync.layout import (
    ALIGNMENT_BYTES,
    MAX_ENTRIES,
    BucketLayout,
    BucketPlanner,
    Entry,
    Manifest,
    TensorMeta,
    manifest_digest,
    plan_buckets,
)

Buckets = list[tuple[Entry, ...]]

LAYOUTS = st.builds(
    BucketLayout,
    slot_size_bytes=st.integers(1, 8).map(lambda n: n * ALIGNMENT_BYTES),
    max_entries=st.integers(1, 5) | st.just(MAX_ENTRIES),
)
SIZES = st.lists(
    st.integers(0, 5 * ALIGNMENT_BYTES)
    | st.integers(0, 20).flatmap(lambda n: st.sampled_from([n * 256, n * 256 + 1])),
    max_size=30,
)
SLOT = BucketLayout(slot_size_bytes=4 * ALIGNMENT_BYTES)


def metas_of(sizes: list[int]) -> list[TensorMeta]:
    return [TensorMeta(f"t{i}", "uint8", (size,), size) for i, size in enumerate(sizes)]


def plan(sizes: list[int], layout: BucketLayout = SLOT) -> Buckets:
    return list(plan_buckets(metas_of(sizes), layout=layout))


@given(SIZES, LAYOUTS)
def test_nothing_is_lost_or_reordered(sizes: list[int], layout: BucketLayout) -> None:
    entries = [entry for bucket in plan(sizes, layout) for entry in bucket]

    seen: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        fragments = [entry for entry in entries if entry.index == index]
        end = 0
        for fragment in fragments:
            assert fragment.first_byte == end
            end += fragment.num_bytes
        assert end == size
        assert fragments
        assert size == 0 or all(fragment.num_bytes for fragment in fragments)
        seen.extend((index, fragment.first_byte) for fragment in fragments)
    assert [(entry.index, entry.first_byte) for entry in entries] == seen


@given(SIZES, LAYOUTS)
def test_entries_are_aligned_disjoint_and_within_the_slot(
    sizes: list[int], layout: BucketLayout
) -> None:
    for bucket in plan(sizes, layout):
        assert 1 <= len(bucket) <= layout.max_entries
        assert bucket[0].offset_bytes == 0
        for one, other in pairwise(bucket):
            assert other.offset_bytes >= one.offset_bytes + one.num_bytes
            assert other.offset_bytes > one.offset_bytes or one.num_bytes == 0
        for entry in bucket:
            assert entry.offset_bytes % ALIGNMENT_BYTES == 0
            assert entry.offset_bytes + entry.num_bytes <= layout.slot_size_bytes


@given(SIZES, LAYOUTS, st.data())
def test_where_a_tensor_lies_depends_only_on_those_before_it(
    sizes: list[int], layout: BucketLayout, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(sizes)))

    def flat(buckets: Buckets) -> list[tuple[int, Entry]]:
        return [(number, entry) for number, bucket in enumerate(buckets) for entry in bucket]

    whole, prefix = flat(plan(sizes, layout)), flat(plan(sizes[:length], layout))

    assert whole[: len(prefix)] == prefix


@given(SIZES, LAYOUTS)
def test_a_full_bucket_ends_before_another_tensor_is_asked_for(
    sizes: list[int], layout: BucketLayout
) -> None:
    planner = BucketPlanner(layout)
    used_bytes = num_entries = 0
    for size in sizes:
        for entry in planner.place(size):
            if entry is None:
                used_bytes = num_entries = 0
                continue
            end_bytes = entry.offset_bytes + entry.num_bytes
            used_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            num_entries += 1
        assert used_bytes < layout.slot_size_bytes
        assert num_entries < layout.max_entries


@given(SIZES, LAYOUTS)
def test_a_tensor_that_fits_a_slot_is_never_split(sizes: list[int], layout: BucketLayout) -> None:
    entries = [entry for bucket in plan(sizes, layout) for entry in bucket]

    for index, size in enumerate(sizes):
        if size <= layout.slot_size_bytes:
            assert sum(entry.index == index for entry in entries) == 1


def test_a_tensor_of_exactly_a_slot_fills_one_bucket() -> None:
    assert plan([1024, 1]) == [(Entry(0, 0, 0, 1024),), (Entry(1, 0, 0, 1),)]


def test_a_tensor_of_one_byte_more_than_a_slot_goes_on_in_the_next() -> None:
    assert plan([1025, 1]) == [
        (Entry(0, 0, 0, 1024),),
        (Entry(0, 1024, 0, 1), Entry(1, 0, 256, 1)),
    ]


def test_a_tensor_larger_than_a_slot_begins_in_a_bucket_of_its_own() -> None:
    assert [[entry.index for entry in bucket] for bucket in plan([1, 2048])] == [[0], [1], [1]]


def test_tensors_without_bytes_take_no_room_but_an_entry_each() -> None:
    assert plan([0, 0, 3, 0]) == [
        (Entry(0, 0, 0, 0), Entry(1, 0, 0, 0), Entry(2, 0, 0, 3), Entry(3, 0, 256, 0))
    ]


def test_one_entry_a_bucket_means_one_tensor_a_bucket() -> None:
    layout = BucketLayout(slot_size_bytes=1024, max_entries=1)

    assert [[e.index for e in bucket] for bucket in plan([0, 1, 1025, 2], layout)] == [
        [0], [1], [2], [2], [3],
    ]  # fmt: skip


def test_a_bucket_of_empty_tensors_is_bounded() -> None:
    assert [len(bucket) for bucket in plan([0] * (MAX_ENTRIES + 1))] == [MAX_ENTRIES, 1]


def test_nothing_makes_no_bucket() -> None:
    assert plan([]) == []


def test_tensors_of_odd_sizes_and_wide_dtypes_are_all_aligned() -> None:
    sizes = [3, 10, 28, 8, 0, 16]  # uint8[3], bf16[5], fp32[7], fp64[1], int64[0], complex64[2]

    (bucket,) = plan(sizes, BucketLayout(slot_size_bytes=4096))

    assert [entry.offset_bytes for entry in bucket] == [0, 256, 512, 768, 1024, 1024]


def test_a_million_tiny_tensors_are_planned_in_linear_time() -> None:
    layout = BucketLayout(slot_size_bytes=512 * 1024**2)

    def seconds(count: int) -> float:
        planner = BucketPlanner(layout)
        begin = time.process_time()
        for _ in range(count):
            for _entry in planner.place(2):
                pass
        return time.process_time() - begin

    seconds(1000)
    small, large = min(seconds(50_000) for _ in range(3)), seconds(1_000_000)

    assert large < 20 * small * 3 + 0.5


@pytest.mark.parametrize("size", [0, -256, 1, 255, 257])
def test_a_slot_of_a_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"slot_size is {size} bytes; .* multiple of 256"):
        BucketLayout(slot_size_bytes=size)


@pytest.mark.parametrize("number", [0, -1, MAX_ENTRIES + 1])
def test_a_wrong_number_of_entries_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"max_entries is {number}; expected 1 to 8192"):
        BucketLayout(slot_size_bytes=256, max_entries=number)


def test_a_digest_names_every_fact_and_the_order() -> None:
    base = TensorMeta("a", "uint8", (2, 3), 6)
    other = TensorMeta("b", "uint8", (2, 3), 6)
    manifests = [
        [],
        [base],
        [base, other],
        [other, base],
        [TensorMeta("a", "int8", (2, 3), 6)],
        [TensorMeta("a", "uint8", (3, 2), 6)],
        [TensorMeta("a", "uint8", (6,), 6)],
        [TensorMeta("a", "uint8", (2, 3), 7)],
        [TensorMeta("a", "uint8", (2, 3), 6, True)],
    ]

    digests = [manifest_digest(metas) for metas in manifests]

    assert len(set(digests)) == len(manifests)
    assert {len(digest) for digest in digests} == {64}


def test_a_digest_stays_what_it_is_between_versions() -> None:
    metas = [
        TensorMeta("model.norm.weight", "bfloat16", (64,), 128),
        TensorMeta("b", "bool", (), 1),
    ]

    assert manifest_digest(metas) == (
        "7bb55e2bc3152d003042298e76fa2a80b0403ff4afcc0acc7188005e8635fa86"
    )


def test_a_manifest_adds_up_and_names_itself_once() -> None:
    manifest = Manifest(metas_of([3, 0, 5]))

    assert len(manifest) == 3
    assert manifest.num_bytes == 8
    assert manifest.digest == manifest_digest(manifest.metas)
    assert manifest.digest is manifest.digest
