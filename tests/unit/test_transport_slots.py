"""The size of a slot: never shrunk when asked for, else as large as is useful."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.config import DEFAULT_SLOT_SIZE_BYTES, Settings
from vllm_bucketsync.layout import ALIGNMENT_BYTES
from vllm_bucketsync.transport.slots import (
    BUCKETS_PER_SLOT,
    MIN_OVERLAP_SLOT_BYTES,
    choose_slot_size,
    shrink_slot_size,
)

MIB = 1024**2
needed = st.one_of(st.none(), st.integers(0, 1 << 45))


@pytest.mark.parametrize(
    ("needed_bytes", "size_bytes"),
    [
        (None, 512 * MIB),
        (0, 256),
        (1, 256),
        (1000, 1024),
        (16 * MIB, 16 * MIB),
        (100 * MIB, 16 * MIB),
        (1024 * MIB, 128 * MIB),
        (4096 * MIB, 512 * MIB),
        (1 << 45, 512 * MIB),
    ],
)
def test_the_default_follows_what_the_update_needs(
    needed_bytes: int | None, size_bytes: int
) -> None:
    assert choose_slot_size(Settings(), needed_bytes) == size_bytes


@given(needed, st.integers(1, 64))
def test_a_default_slot_is_aligned_and_leaves_buckets_to_overlap(
    needed_bytes: int | None, num_slots: int
) -> None:
    size = choose_slot_size(Settings(num_slots=num_slots), needed_bytes)

    assert 0 < size <= DEFAULT_SLOT_SIZE_BYTES
    assert size % ALIGNMENT_BYTES == 0
    if needed_bytes is not None:
        assert size < needed_bytes + ALIGNMENT_BYTES or needed_bytes == 0
        is_cut = needed_bytes / size >= BUCKETS_PER_SLOT * num_slots - 1
        assert is_cut or size <= MIN_OVERLAP_SLOT_BYTES


@given(needed, st.integers(ALIGNMENT_BYTES, 1 << 40))
def test_a_size_that_was_asked_for_is_taken_as_it_is(
    needed_bytes: int | None, slot_size: int
) -> None:
    settings = Settings(slot_size=slot_size)

    size = choose_slot_size(settings, needed_bytes)

    assert size == settings.slot_size_bytes
    assert shrink_slot_size(settings, size) is None


@given(st.integers(ALIGNMENT_BYTES, DEFAULT_SLOT_SIZE_BYTES))
def test_shrinking_halves_and_ends_at_one_mebibyte(start_bytes: int) -> None:
    size = start_bytes
    while (smaller := shrink_slot_size(Settings(), size)) is not None:
        assert smaller >= MIB
        assert smaller <= max(size / 2 + ALIGNMENT_BYTES, MIB)
        size = smaller

    assert size == min(start_bytes, MIB)
