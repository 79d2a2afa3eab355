"""The size of a slot: never shrunk when asked for, else as large as is useful."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.config import DEFAULT_SLOT_SIZE_BYTES, Settings
from vllm_bucketsync.errors import RegionError
from vllm_bucketsync.layout import ALIGNMENT_BYTES
from vllm_bucketsync.transport.slots import (
    MIN_OVERLAP_SLOT_BYTES,
    ON_DEVICE,
    ON_HOST,
    Cut,
    choose_slot_size,
    create_shrinking,
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
    assert choose_slot_size(Settings(), needed_bytes, cut=ON_HOST) == size_bytes


@pytest.mark.parametrize(
    ("needed_bytes", "size_bytes"),
    [
        (None, 512 * MIB),
        (1, 256),
        (16 * MIB, 16 * MIB),
        (100 * MIB, 50 * MIB),
        (2048 * MIB, 1024 * MIB),
        (1 << 45, 1024 * MIB),
    ],
)
def test_on_a_gpu_slots_are_larger_and_there_are_fewer_buckets(
    needed_bytes: int | None, size_bytes: int
) -> None:
    assert choose_slot_size(Settings(), needed_bytes, cut=ON_DEVICE) == size_bytes


@given(needed, st.integers(1, 64), st.sampled_from([ON_HOST, ON_DEVICE]))
def test_a_default_slot_is_aligned_and_leaves_buckets_to_overlap(
    needed_bytes: int | None, num_slots: int, cut: Cut
) -> None:
    size = choose_slot_size(Settings(num_slots=num_slots), needed_bytes, cut=cut)

    assert 0 < size <= cut.max_bytes
    assert size % ALIGNMENT_BYTES == 0
    if needed_bytes is not None:
        assert size < needed_bytes + ALIGNMENT_BYTES or needed_bytes == 0
        is_cut = needed_bytes / size >= cut.buckets_per_slot * num_slots - 1
        assert is_cut or size <= MIN_OVERLAP_SLOT_BYTES


@given(needed, st.integers(ALIGNMENT_BYTES, 1 << 40))
def test_a_size_that_was_asked_for_is_taken_as_it_is(
    needed_bytes: int | None, slot_size: int
) -> None:
    settings = Settings(slot_size=slot_size)

    size = choose_slot_size(settings, needed_bytes, cut=ON_HOST)

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


class Memory:
    """So many bytes are free, unless something gives more back.

    Attributes:
        tried: What was asked for.
        num_rooms: How often room was made.
    """

    def __init__(
        self, free_bytes: int, *, number: int = errno.ENOMEM, hidden_bytes: int = 0
    ) -> None:
        self.tried: list[int] = []
        self.num_rooms = 0
        self._free_bytes = free_bytes
        self._hidden_bytes = hidden_bytes
        self._number = number

    def make(self, num_bytes: int) -> int:
        self.tried.append(num_bytes)
        if num_bytes > self._free_bytes:
            error = RegionError("full")
            error.errno = self._number
            raise error
        return num_bytes

    def make_room(self) -> None:
        self.num_rooms += 1
        self._free_bytes += self._hidden_bytes


def test_memory_that_is_there_is_taken_at_once() -> None:
    memory = Memory(64 * MIB)

    found = create_shrinking(
        Settings(), 32 * MIB, cut=ON_HOST, make=memory.make, on_full=memory.make_room
    )

    assert found == (32 * MIB, 16 * MIB)
    assert (memory.tried, memory.num_rooms) == ([32 * MIB], 0)


@pytest.mark.parametrize("slot_size", [None, "16MiB"])
def test_room_is_made_before_anything_shrinks(slot_size: str | None) -> None:
    memory = Memory(MIB, hidden_bytes=31 * MIB)
    settings = Settings(slot_size=slot_size)

    found = create_shrinking(
        settings, 32 * MIB, cut=ON_HOST, make=memory.make, on_full=memory.make_room
    )

    assert found == (32 * MIB, 16 * MIB)
    assert (memory.tried, memory.num_rooms) == ([32 * MIB] * 2, 1)


def test_where_that_is_not_enough_a_default_size_is_halved_and_no_room_is_made_again() -> None:
    memory = Memory(4 * MIB, hidden_bytes=4 * MIB)

    found = create_shrinking(
        Settings(), 32 * MIB, cut=ON_HOST, make=memory.make, on_full=memory.make_room
    )

    assert found == (8 * MIB, 4 * MIB)
    assert memory.tried == [32 * MIB, 32 * MIB, 16 * MIB, 8 * MIB]
    assert memory.num_rooms == 1


def test_a_size_that_was_asked_for_is_tried_again_when_room_was_made_and_never_shrunk() -> None:
    memory = Memory(MIB)
    settings = Settings(slot_size="16MiB")

    with pytest.raises(RegionError, match="full"):
        create_shrinking(settings, None, cut=ON_HOST, make=memory.make, on_full=memory.make_room)

    assert (memory.tried, memory.num_rooms) == ([32 * MIB] * 2, 1)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_another_error_than_a_lack_of_room_is_raised_at_once(number: int) -> None:
    memory = Memory(0, number=number)

    with pytest.raises(RegionError, match="full"):
        create_shrinking(
            Settings(), 32 * MIB, cut=ON_HOST, make=memory.make, on_full=memory.make_room
        )

    assert (len(memory.tried), memory.num_rooms) == (1, 0)


def test_halving_ends_where_it_would_cost_more_in_messages() -> None:
    memory = Memory(0)

    with pytest.raises(RegionError, match="full"):
        create_shrinking(Settings(), 32 * MIB, cut=ON_HOST, make=memory.make)

    assert memory.tried == [size * MIB for size in (32, 16, 8, 4, 2)]
