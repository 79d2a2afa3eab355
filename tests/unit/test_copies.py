"""A batch of copies does, each time it is run, what ``copy_`` does one by one."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bytes_of import bytes_of

from vllm_bucketsync import copies
from vllm_bucketsync.boxes import Box
from vllm_bucketsync.copies import CopyBatch, DeferredCopies, view
from vllm_bucketsync.places import Places

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[Box, torch.dtype, Box, torch.dtype]]:
    """Disjoint parts of one memory, and what is copied there: plain, strided, or cast."""
    found = []
    for slab in range(draw(st.integers(0, 6))):
        rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        to_step = draw(st.integers(columns, 4))
        from_step = draw(st.integers(columns, 4))
        found.append(
            (
                Box(16 * slab, (rows, columns), (to_step, 1)),
                draw(st.sampled_from(DTYPES)),
                Box(16 * slab, (rows, columns), (from_step, 1)),
                draw(st.sampled_from(DTYPES)),
            )
        )
    return found


def memory(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (96 * 8,), generator=generator, dtype=torch.int8)


def typed(base: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """A box's place in a memory of 8 bytes for each element, whatever the dtype."""
    start = box.offset * 8 // dtype.itemsize
    return base.view(dtype).as_strided(box.shape, box.strides, start)


@given(batches())
def test_a_batch_is_its_copies_every_time_it_is_run(
    batch: list[tuple[Box, torch.dtype, Box, torch.dtype]],
) -> None:
    source, to, expected = memory(1), memory(2), memory(2)
    # Only numbers that every dtype has.
    for box, _, origin, other in batch:
        typed(source, origin, other).copy_(torch.arange(box.num_elements).reshape(box.shape))
    pairs = [
        (typed(to, box, dtype), typed(source, origin, other)) for box, dtype, origin, other in batch
    ]
    prepared = CopyBatch(pairs)

    for turn in range(3):
        for box, dtype, origin, other in batch:
            value = typed(source, origin, other)
            value.add_(turn)
            typed(expected, box, dtype).copy_(value)
        to.copy_(memory(2))
        prepared.run()
        assert bytes_of(to) == bytes_of(expected)


def test_neighbours_become_one_copy_and_others_do_not() -> None:
    source, to = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    neighbours = [(to[i : i + 8], source[i : i + 8]) for i in range(0, 32, 8)]
    turned = [(to[40:48], source[48:56]), (to[48:56], source[40:48])]

    batch = CopyBatch([*neighbours, *turned])
    batch.run()

    assert batch._moves._sizes == [32, 8, 8]
    assert batch.num_bytes == 48
    assert to.tolist() == [*range(32), *[0] * 8, *range(48, 56), *range(40, 48), *[0] * 8]


def test_memories_that_are_neighbours_by_chance_stay_apart() -> None:
    base = torch.zeros(16, dtype=torch.uint8)
    first, second = (torch.frombuffer(bytearray(8), dtype=torch.uint8) for _ in range(2))

    batch = CopyBatch([(base[:8], first), (base[8:], second)])

    assert len(batch._moves._sizes) == 2


def test_a_single_element_of_any_stride_is_plain_bytes() -> None:
    tensor = torch.arange(9, dtype=torch.float32)[3::3][:1]
    assert tensor.stride() == (3,)

    assert copies._flat(tensor, 4, torch.uint8).tolist() == list(struct.pack("f", 3.0))


def test_gradients_and_conjugates_are_copied_as_values() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    to = torch.zeros(4, 3), torch.zeros(4, dtype=torch.complex64)

    CopyBatch([(to[0], parameter.t()), (to[1], conjugate)]).run()

    assert torch.equal(to[0], parameter.detach().t())
    assert torch.equal(to[1], conjugate.resolve_conj())
    assert not to[0].requires_grad


def test_deferred_copies_fill_targets_that_are_new_every_time() -> None:
    source = torch.arange(24, dtype=torch.float32)
    parts = [
        ("a", Box(0, (2, 4), (4, 1)), source[:8].view(2, 4)),
        ("a", Box(8, (4,), (1,)), source[8:12]),
        ("b", Box(1, (2, 3), (4, 1)), source[12:18].view(2, 3)),
        ("c", Box(0, (6,), (1,)), source[18:]),
    ]
    deferred = DeferredCopies(parts)

    for turn in range(3):
        source += turn
        targets = {
            "a": torch.zeros(12),
            "b": torch.zeros(2, 4),
            "c": torch.zeros(6, dtype=torch.bfloat16),
        }
        deferred.run(targets)

        assert targets["a"].tolist() == source[:12].tolist()
        assert targets["b"][:, 1:].tolist() == source[12:18].view(2, 3).tolist()
        assert targets["b"][:, 0].tolist() == [0, 0]
        assert targets["c"].tolist() == source[18:].tolist()
    # Two of the four are neighbours on both sides, and plain.
    assert deferred._moves == [("a", 0, source.data_ptr(), 48)]


def test_a_part_past_its_target_is_refused_before_anything_is_written() -> None:
    to = torch.zeros(4)

    with pytest.raises(RuntimeError, match="out of bounds"):
        DeferredCopies([("a", Box(2, (4,), (1,)), torch.ones(4))]).run({"a": to})
    with pytest.raises(RuntimeError, match="out of bounds"):
        view(to, Box(2, (4,), (1,)))
    assert to.tolist() == [0] * 4


SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "turned": lambda tensor: tensor.t().contiguous().t(),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("form", SOURCES)
def test_places_take_other_tensors_every_time(form: str) -> None:
    memory_ = torch.full((4096,), 7, dtype=torch.uint8)
    places = Places(
        memory_, [(0, torch.float32, (3, 4)), (256, torch.bfloat16, (2, 2)), (512, torch.int8, ())]
    )

    for turn in range(3):
        sources = [
            SOURCES[form](torch.randn(3, 4)),
            SOURCES[form](torch.randn(2, 2).to(torch.bfloat16)),
            torch.tensor(turn, dtype=torch.int8),
        ]
        places.fill(sources)

        for first, one in zip((0, 256, 512), sources, strict=True):
            size = one.numel() * one.element_size()
            assert bytes_of(memory_[first : first + size]) == bytes_of(one)
        assert memory_[48:256].tolist() == [7] * 208
        assert memory_[513:].tolist() == [7] * (4096 - 513)


def test_a_place_outside_of_its_memory_is_refused() -> None:
    memory_ = torch.zeros(512, dtype=torch.uint8)

    for first, size in [(256, 257), (-256, 1), (512, 1)]:
        with pytest.raises(ValueError, match="of a memory of 512"):
            Places(memory_, [(first, torch.uint8, (size,))])
