"""The sender's shared memory: kept between updates, replaced when it does not fit them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .config import Settings
from .layout import BucketLayout, Manifest
from .messages import Handle, Hello, Region
from .transport.base import OwnedRegion
from .transport.registry import Choice, Wish, create_slots
from .transport.slots import choose_slot_size


class Slots:
    """Slots of equal size in one region.

    Made and closed by a ``WeightSync``. Everything but ``num_slots`` and ``layout`` is
    empty until ``prepare``.

    Attributes:
        layout: What both ends plan with.
        num_slots: How many there are.
        last_manifest: What the last update sent: the next stream may be the same.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._region: OwnedRegion | None = None
        self._kind: str | None = None
        self._wanted_bytes = 0
        self._is_memory = True
        self._failures: dict[tuple[str, frozenset[str]], str] = {}
        self.layout = BucketLayout(settings.slot_size_bytes)
        self.num_slots = settings.num_slots
        self.last_manifest: Manifest | None = None

    @property
    def handles(self) -> tuple[Handle, ...]:
        """What opens the region elsewhere."""
        return () if self._region is None else (self._region.handle,)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Where the slots are in it."""
        size = self.layout.slot_size_bytes
        return tuple(Region(0, index * size, size) for index in range(self.num_slots))

    @property
    def slot_size_bytes(self) -> int:
        """Capacity of one slot, also of the last one given back; 0 for references."""
        return self.layout.slot_size_bytes if self._is_memory else 0

    def make_room(self, needed_bytes: int | None) -> None:
        """Give the region up before any worker is asked, if it will not do.

        Workers then close it first, so that old and new memory never add up.
        """
        if choose_slot_size(self._settings, needed_bytes) > self._enough_bytes:
            self.release()

    def prepare(
        self, kind: str, *, needed_bytes: int | None, hellos: Sequence[Hello], wish: Wish
    ) -> None:
        """Keep the region if every worker has it and it is large enough, else make one.

        Args:
            kind: The transport.
            needed_bytes: Bytes of the update; ``None`` where that is not known.
            hellos: The workers, each with the regions that it holds open.
            wish: On which GPU, where it is device memory.

        Raises:
            RegionError: There is no memory for it; nothing is left behind.
        """
        region = self._region
        wanted_bytes = choose_slot_size(self._settings, needed_bytes)
        if region is not None and kind == self._kind:
            is_held = all(region.handle.id in hello.regions for hello in hellos)
            if is_held and wanted_bytes <= self._enough_bytes:
                return
        self.release()
        self._wanted_bytes = wanted_bytes
        self._region, self.layout, self.num_slots = create_slots(
            kind, settings=self._settings, needed_bytes=needed_bytes, wish=wish
        )
        self._kind = kind
        self._is_memory = self._region.held_bytes > 0

    @property
    def _enough_bytes(self) -> float:
        # A little more is not worth new memory. What was asked for counts, not what
        # could be had: a slot that had to shrink would shrink again.
        return 1.1 * self._wanted_bytes

    def note_failure(self, kind: str, hellos: Sequence[Hello], reason: str) -> None:
        """Take note that a transport does not work with these very workers."""
        self._failures[kind, _instances(hellos)] = reason

    def without_failures(self, choices: list[Choice], hellos: Sequence[Hello]) -> list[Choice]:
        """Return the choices that may work: what failed with these workers is not retried."""
        workers, left = _instances(hellos), list(choices)
        while len(left) > 1 and (left[0].kind, workers) in self._failures:
            failed = left.pop(0).kind
            left[0] = left[0].after(failed, self._failures[failed, workers])
        return left

    def write(self, batch: int, offset_bytes: int, data: torch.Tensor) -> None:
        """Copy bytes into the slot of a bucket.

        Args:
            batch: The bucket's number; buckets take the slots in turn.
            offset_bytes: Where in the slot.
            data: ``[num_bytes]``, uint8, contiguous.
        """
        if self._region is None:
            raise RuntimeError("Slots.prepare was not called")
        start = (batch % self.num_slots) * self.layout.slot_size_bytes
        self._region.write(start + offset_bytes, data)

    def flush(self, batch: int) -> None:
        """Make sure that readers see what was written to the slot of a bucket."""
        if self._region is not None:
            self._region.flush(batch % self.num_slots)

    def unlink(self) -> None:
        """Take the region's name away: every end has opened it."""
        if self._region is not None:
            self._region.unlink()

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        if self._region is not None:
            self._region.close()
        self._region = self._kind = None


def _instances(hellos: Sequence[Hello]) -> frozenset[str]:
    return frozenset(hello.instance_id for hello in hellos)
