"""However a tensor is cut, its fragments do a copy's elements once each, and no others."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.boxes import Box, cut


def box_of(view: torch.Tensor) -> Box:
    return Box(int(view.storage_offset()), tuple(view.shape), view.stride())


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A part of a contiguous tensor: sliced, stepped, turned, spread."""
    shape = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    view = torch.empty(shape, device="meta")
    for dim, size in enumerate(shape):
        # Mostly large parts: of small ones little can be cut.
        first = draw(st.sampled_from([0, 0, 1]))
        end = max(first, size - draw(st.sampled_from([0, 0, 1])))
        index = [slice(None)] * len(shape)
        index[dim] = slice(first, end, draw(st.sampled_from([1, 1, 1, 2])))
        view = view[tuple(index)]
    view = view.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        view = view.unsqueeze(0).expand(2, *view.shape)
    return view


def numbers(box: Box) -> torch.Tensor:
    """Element numbers of a box, in its own order."""
    found = torch.full(box.shape, box.offset)
    for dim, (size, step) in enumerate(zip(box.shape, box.strides, strict=True)):
        line = torch.arange(size).reshape([-1 if d == dim else 1 for d in range(len(box.shape))])
        found = found + step * line
    return found


@given(views(), st.data())
def test_fragments_do_what_the_whole_does(view: torch.Tensor, data: st.DataObject) -> None:
    source = box_of(view)
    contiguous = torch.empty(source.shape, device="meta")
    target = Box(7, source.shape, contiguous.stride())
    num_elements = view.untyped_storage().nbytes() // 4
    cuts = data.draw(st.lists(st.integers(0, num_elements), min_size=1, max_size=4).map(sorted))
    bounds = [0, *cuts, num_elements]

    done: list[tuple[int, int]] = []
    for first, end in itertools.pairwise(bounds):
        for part, place in cut(source, target, first=first, end=end):
            assert part.shape == place.shape
            read, written = numbers(part).flatten(), numbers(place).flatten()
            assert all(first <= number < end for number in read.tolist())
            done += zip(written.tolist(), read.tolist(), strict=True)

    expected = zip(numbers(target).flatten().tolist(), numbers(source).flatten().tolist())  # noqa: B905
    assert sorted(done) == sorted(expected)


def test_a_cut_adds_a_few_boxes_however_many_rows_there_are() -> None:
    rows = Box(0, (10_000, 64), (128, 1))
    target = Box(0, (10_000, 64), (64, 1))

    parts = list(cut(rows, target, first=128 * 5_000 + 7, end=10_000 * 128))

    assert [part.shape for part, _ in parts] == [(1, 57), (4_999, 64)]


def test_a_box_knows_whether_it_is_contiguous() -> None:
    for shape, strides in [((3, 4), (4, 1)), ((1, 4), (99, 1)), ((), ()), ((2, 1), (1, 5))]:
        assert Box(3, shape, strides).is_contiguous
    for shape, strides in [((3, 4), (1, 3)), ((3, 4), (5, 1)), ((2,), (0,))]:
        assert not Box(3, shape, strides).is_contiguous
