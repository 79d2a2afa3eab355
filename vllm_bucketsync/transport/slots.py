"""How large a slot is, and what happens where there is no memory for that."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..config import DEFAULT_SLOT_SIZE_BYTES, MIN_SHRUNK_SLOT_SIZE_BYTES, Settings
from ..errors import RegionError
from ..layout import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How an update is cut into buckets where nobody has asked for a size.

    Attributes:
        max_bytes: No slot is larger.
        buckets_per_slot: Buckets for each slot: while the first is packed nothing is
            loaded, and while the last is loaded nothing is packed.
    """

    max_bytes: int
    buckets_per_slot: int


ON_HOST = Cut(max_bytes=DEFAULT_SLOT_SIZE_BYTES, buckets_per_slot=4)
# Within a GPU both ends share one memory's bandwidth, so there is little to overlap, and a
# bucket's messages take as long as copying 200 MB. Measured on one H200, 1.5, 16 and 31 GB:
# 7.2, 26.7 and 52 ms with 2 slots of 1 GiB, 8.7, 34.5 and 61 with 2 of 512 MiB, 10.3, 32.4
# and 62 with 4 of those.
ON_DEVICE = Cut(max_bytes=2 * DEFAULT_SLOT_SIZE_BYTES, buckets_per_slot=1)
# A default slot is not cut smaller than this for the sake of overlap.
MIN_OVERLAP_SLOT_BYTES = 16 * 1024**2
# What memory that cannot be had fails with, on a file system or on a device.
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})

T = TypeVar("T")

logger = logging.getLogger(__name__)


def choose_slot_size(settings: Settings, needed_bytes: int | None, *, cut: Cut) -> int:
    """Return the size of a slot in bytes.

    A size that was asked for is taken as it is. The default is never more than the update
    needs, and small enough that packing and loading overlap, as long as a slot keeps
    ``MIN_OVERLAP_SLOT_BYTES``.

    Args:
        settings: Slot size and number of slots.
        needed_bytes: Bytes of the whole update with alignment; ``None`` where a stream
            did not say.
        cut: How large a default may be, and how small.
    """
    if settings.slot_size is not None or needed_bytes is None:
        return settings.slot_size_bytes
    wanted = -(-needed_bytes // (cut.buckets_per_slot * settings.num_slots))
    wanted = max(wanted, min(needed_bytes, MIN_OVERLAP_SLOT_BYTES), 1)
    return min(cut.max_bytes, aligned(wanted))


def shrink_slot_size(settings: Settings, slot_size_bytes: int) -> int | None:
    """Return the size to try after ``slot_size_bytes`` could not be had.

    Returns:
        Half of it, but 1 MiB at least; ``None`` where it may not get smaller.
    """
    if settings.slot_size is not None or slot_size_bytes <= MIN_SHRUNK_SLOT_SIZE_BYTES:
        return None
    return max(aligned(slot_size_bytes // 2), MIN_SHRUNK_SLOT_SIZE_BYTES)


def create_shrinking(
    settings: Settings,
    needed_bytes: int | None,
    *,
    cut: Cut,
    make: Callable[[int], T],
    on_full: Callable[[], None] | None = None,
) -> tuple[T, int]:
    """Make memory for all slots, smaller ones where it has to be.

    Args:
        settings: Slot size and number of slots.
        needed_bytes: Bytes of the whole update with alignment; ``None`` where a stream
            did not say.
        cut: How large a default may be, and how small.
        make: Makes memory of so many bytes, or raises ``RegionError``.
        on_full: Called once, before anything shrinks: it may make room.

    Returns:
        What was made, and the size of a slot in bytes.

    Raises:
        RegionError: It failed for another reason than room, or not even the smallest
            slots can be had.
    """
    size = choose_slot_size(settings, needed_bytes, cut=cut)
    while True:
        try:
            return make(size * settings.num_slots), size
        except RegionError as error:
            if error.errno not in _NO_ROOM:
                raise
            smaller = shrink_slot_size(settings, size)
            if on_full is None and smaller is None:
                raise
        if on_full is not None:
            on_full()
            on_full = None
        elif smaller is not None:
            logger.info("slots of %d bytes cannot be had; trying %d", size, smaller)
            size = smaller
