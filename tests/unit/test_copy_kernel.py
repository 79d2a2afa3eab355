"""The rows of the copy kernel's table; the kernel itself runs in ``tests/gpu``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync import copy_kernel

sizes_ = st.lists(
    st.integers(0, 5 * copy_kernel._CHUNK_BYTES // copy_kernel.WIDTH_BYTES).map(
        lambda count: count * copy_kernel.WIDTH_BYTES
    ),
    max_size=8,
)


@given(sizes_, st.booleans())
def test_chunks_are_small_and_cover_every_copy_once_and_in_order(
    sizes: list[int], is_large: bool
) -> None:
    # Enough to be made by torch: one copy of its own, far from the others.
    sizes = [*sizes, copy_kernel._SMALL_BYTES] if is_large else sizes
    sources = [1 << 40 | index << 30 for index in range(len(sizes))]
    targets = [1 << 50 | index << 30 for index in range(len(sizes))]

    rows = copy_kernel._chunks(targets, sources, sizes).tolist()

    for index, size in enumerate(sizes):
        mine = [row for row in rows if row[0] >> 30 == sources[index] >> 30]
        assert all(0 < length <= copy_kernel._CHUNK_BYTES for _, _, length in mine)
        end = 0
        for source, target, length in mine:
            assert (source - sources[index], target - targets[index]) == (end, end)
            end += length
        assert end == size
    assert len(rows) == sum(-(-size // copy_kernel._CHUNK_BYTES) for size in sizes)


@pytest.mark.parametrize("size", [4096, copy_kernel._SMALL_BYTES])
def test_the_table_is_made_on_the_host_whatever_the_default_device_is(size: int) -> None:
    with torch.device("meta"):
        rows = copy_kernel._chunks([1 << 40], [1 << 41], [size])

    assert rows.is_cpu
    assert rows[0].tolist() == [1 << 41, 1 << 40, min(size, copy_kernel._CHUNK_BYTES)]


def test_it_is_for_gpus_only() -> None:
    assert not copy_kernel.is_available(torch.device("cpu"))
    assert not copy_kernel.is_available(torch.device("meta"))


def test_the_kernel_comes_with_the_package_and_has_as_many_threads_as_are_started() -> None:
    text = copy_kernel._PTX.read_text()

    assert ".visible .entry copy_chunks(" in text
    assert f".maxntid {copy_kernel._THREADS}, 1, 1" in text
    # One step of all threads, and the two that a thread makes at a time.
    assert f"%first, {copy_kernel._THREADS * copy_kernel.WIDTH_BYTES};" in text
