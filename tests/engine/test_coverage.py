"""Boxes are covered as a mask of elements says, whatever their strides."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.boxes import Box
from vllm_bucketsync.worker.coverage import cover

WHOLE = (6, 4, 5)


@st.composite
def boxes(draw: st.DrawFn) -> list[Box]:
    """Views of one contiguous tensor, cut and turned at random."""
    base = torch.empty(WHOLE, device="meta")
    found = []
    for _ in range(draw(st.integers(0, 6))):
        view = base
        for dim, size in enumerate(WHOLE):
            first = draw(st.integers(0, size))
            view = view.narrow(dim, first, draw(st.integers(0, size - first)))
        view = view.permute(draw(st.permutations(range(3))))
        found.append(Box(int(view.storage_offset()), tuple(view.shape), tuple(view.stride())))
    return found


def _elements(box: Box) -> set[int]:
    numbers = torch.arange(6 * 4 * 5)
    return set(numbers.as_strided(box.shape, box.strides, box.offset).flatten().tolist())


@given(boxes())
def test_coverage_and_overlap_agree_with_sets_of_elements(found: list[Box]) -> None:
    elements = [_elements(box) for box in found]

    covered = cover(found)

    assert covered.num_elements == len(set().union(*elements))
    shared = [
        (one, two)
        for two in range(len(found))
        for one in range(two)
        if elements[one] & elements[two]
    ]
    if covered.overlap is None:
        assert shared == []
    else:
        assert covered.overlap in shared


def test_a_transposed_matrix_is_covered_by_its_columns() -> None:
    columns = [Box(column, (3,), (4,)) for column in range(4)]

    assert cover(columns).num_elements == 12
    assert cover(columns).overlap is None
    assert cover([*columns, Box(5, (2,), (1,))]).overlap in {(1, 4), (2, 4)}
