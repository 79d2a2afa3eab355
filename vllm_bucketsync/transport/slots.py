"""How large a slot is, and what happens where there is no memory for that."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from ..config import MIN_SHRUNK_SLOT_SIZE_BYTES, Settings
from ..errors import RegionError
from ..layout import aligned

# Every update is to be cut into so many buckets for each slot: while the first is
# packed nothing is loaded, and while the last is loaded nothing is packed.
BUCKETS_PER_SLOT = 4
# A default slot is not cut smaller than this for the sake of overlap.
MIN_OVERLAP_SLOT_BYTES = 16 * 1024**2
# What memory that cannot be had fails with, on a file system or on a device.
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})

T = TypeVar("T")

logger = logging.getLogger(__name__)


def choose_slot_size(settings: Settings, needed_bytes: int | None) -> int:
    """Return the size of a slot in bytes.

    A size that was asked for is taken as it is. The default is 512 MiB, but never more
    than the update needs, and small enough that packing and loading overlap: an update
    is cut into ``BUCKETS_PER_SLOT`` buckets for each slot, as long as a slot keeps
    ``MIN_OVERLAP_SLOT_BYTES``.

    Args:
        settings: Slot size and number of slots.
        needed_bytes: Bytes of the whole update with alignment; ``None`` where a stream
            did not say.
    """
    size = settings.slot_size_bytes
    if settings.slot_size is not None or needed_bytes is None:
        return size
    wanted = -(-needed_bytes // (BUCKETS_PER_SLOT * settings.num_slots))
    wanted = max(wanted, min(needed_bytes, MIN_OVERLAP_SLOT_BYTES), 1)
    return min(size, aligned(wanted))


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
    make: Callable[[int], T],
    on_full: Callable[[], None] | None = None,
) -> tuple[T, int]:
    """Make memory for all slots, smaller ones where it has to be.

    Args:
        settings: Slot size and number of slots.
        needed_bytes: Bytes of the whole update with alignment; ``None`` where a stream
            did not say.
        make: Makes memory of so many bytes, or raises ``RegionError``.
        on_full: Called once, before anything shrinks: it may make room.

    Returns:
        What was made, and the size of a slot in bytes.

    Raises:
        RegionError: It failed for another reason than room, or not even the smallest
            slots can be had.
    """
    size = choose_slot_size(settings, needed_bytes)
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
