"""Strided parts of tensors, as numbers: what of them a range of bytes holds.

Pure arithmetic, without torch. A tensor larger than a slot comes in fragments, cut
wherever a slot ends; what a fragment holds of a box is a few smaller boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A strided part of a tensor, in elements of it.

    Attributes:
        offset: Its first element, counted from the tensor's own first one.
        shape: Elements along each dimension.
        strides: Distance of neighbours along each dimension.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it has; one that it shows twice counts twice."""
        return math.prod(self.shape)

    @property
    def reach(self) -> int:
        """Distance of its first element to its last one."""
        return sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are neighbours, in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def slabs(self, dim: int, first: int, end: int) -> Box:
        """Return the part with indices ``first`` to ``end`` along a dimension."""
        shape = (*self.shape[:dim], end - first, *self.shape[dim + 1 :])
        return Box(self.offset + first * self.strides[dim], shape, self.strides)


def cut(source: Box, target: Box, *, first: int, end: int) -> Iterator[tuple[Box, Box]]:
    """Find what of a copy a fragment of its source can do.

    Whole slabs along the largest stride stay one box, so a cut adds a few boxes for
    each dimension, however large the tensor.

    Args:
        source: What is read.
        target: What is written, of the same shape.
        first: The fragment's first element, as the source counts them.
        end: One past its last.

    Yields:
        The parts of both. Over fragments that make up the source, every element
        comes once.
    """
    if not source.num_elements:
        return
    low, high = source.offset, source.offset + source.reach
    if first <= low and high < end:
        yield source, target
        return
    if end <= low or high < first:
        return
    dim = max(range(len(source.shape)), key=lambda d: (source.shape[d] > 1) * source.strides[d])
    step = source.strides[dim]
    # From the first to the last element of one slab.
    span = high - low - (source.shape[dim] - 1) * step
    touched = (
        max(0, _ceil(first - low - span, step)),
        min(source.shape[dim], _ceil(end - low, step)),
    )
    whole_first = max(0, _ceil(first - low, step))
    whole_end = min(source.shape[dim], (end - 1 - span - low) // step + 1)
    for index in range(touched[0], min(whole_first, touched[1])):
        yield from _cut_slab(source, target, dim, index, first=first, end=end)
    if whole_first < whole_end:
        yield source.slabs(dim, whole_first, whole_end), target.slabs(dim, whole_first, whole_end)
    for index in range(max(whole_first, whole_end), touched[1]):
        yield from _cut_slab(source, target, dim, index, first=first, end=end)


def _cut_slab(
    source: Box, target: Box, dim: int, index: int, *, first: int, end: int
) -> Iterator[tuple[Box, Box]]:
    slabs = source.slabs(dim, index, index + 1), target.slabs(dim, index, index + 1)
    return cut(*slabs, first=first, end=end)


def _ceil(value: int, step: int) -> int:
    return -(-value // step)
