"""How much of a tensor a set of strided boxes covers, and which of them overlap.

Pure arithmetic over element numbers. A box becomes runs of neighbouring elements;
after sorting, overlaps are neighbours, so nothing grows with the square of the
number of boxes, and nothing with the size of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..boxes import Box

# A box of more runs than this is counted but not looked at for overlaps: it would
# take megabytes to find out what no loader that was read does.
MAX_RUNS = 1 << 20

Runs = tuple[npt.NDArray[np.int64], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What a set of boxes covers together.

    Attributes:
        num_elements: Elements in at least one box.
        overlap: Positions of two boxes that share an element, or ``None``.
        is_exact: Every box was looked at; else one was too ragged, and counted only.
    """

    num_elements: int
    overlap: tuple[int, int] | None
    is_exact: bool = True


def cover(boxes: Sequence[Box]) -> Coverage:
    """Return what ``boxes``, all of one tensor, cover together."""
    starts, ends, owners = [], [], []
    uncounted, is_exact = 0, True
    for owner, box in enumerate(boxes):
        if math.prod(box.shape) == 0:
            continue
        runs = _runs(box)
        if runs is None:
            uncounted, is_exact = uncounted + math.prod(box.shape), False
            continue
        first, length = runs
        starts.append(first)
        ends.append(first + length)
        owners.append(np.full(len(first), owner, dtype=np.int64))
    if not starts:
        return Coverage(num_elements=uncounted, overlap=None, is_exact=is_exact)
    start, end, owner_of = np.concatenate(starts), np.concatenate(ends), np.concatenate(owners)
    order = np.argsort(start, kind="stable")
    start, end, owner_of = start[order], end[order], owner_of[order]
    # The furthest end before each run, so that a long run is seen past short ones.
    reach = np.maximum.accumulate(end)
    meets = np.nonzero(start[1:] < reach[:-1])[0]
    covered = int(np.maximum(reach - np.maximum(start, np.r_[start[0], reach[:-1]]), 0).sum())
    if not len(meets):
        return Coverage(num_elements=covered + uncounted, overlap=None, is_exact=is_exact)
    later = int(meets[0]) + 1
    earlier = int(np.argmax(end[:later]))
    first_two = (int(owner_of[earlier]), int(owner_of[later]))
    overlap = min(first_two), max(first_two)
    return Coverage(num_elements=covered + uncounted, overlap=overlap, is_exact=is_exact)


def _runs(box: Box) -> Runs | None:
    """Return the first elements of a box's runs, and their common length."""
    dims = sorted(
        (stride, size) for size, stride in zip(box.shape, box.strides, strict=True) if size > 1
    )
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    if math.prod(size for _, size in dims) > MAX_RUNS:
        return None
    first = np.array([box.offset], dtype=np.int64)
    for stride, size in reversed(dims):
        first = (first[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return first, length
