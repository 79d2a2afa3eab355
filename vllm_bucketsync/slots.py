"""The sender's shared memory: kept between updates, replaced when it does not fit them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch

from .config import Settings
from .handles import MAX_REGIONS, Handle
from .layout import (
    MAX_ENTRIES,
    MAX_PLACED,
    NOT_PLACED,
    BucketLayout,
    Manifest,
    Placed,
    aligned,
    packed,
)
from .messages import Hello, Region
from .places import BucketPlaces, part_of
from .transport.base import OwnedRegion
from .transport.cuda_blocks import ExportedBlocks
from .transport.registry import Choice, Wish, create_slots, slot_size_for


class Slots:
    """Slots of equal size in one region.

    Made and closed by a ``WeightSync``. Everything but ``num_slots`` and ``layout`` is
    empty until ``prepare``.

    Attributes:
        layout: What both ends plan with.
        num_slots: How many there are.
        last_manifest: What the last update sent: the next stream may be the same.
        placed: Which tensors are read where they lie; ``None`` in most updates.
        placed_bytes: Their bytes.
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
        self._places: dict[int, BucketPlaces] = {}
        self._filled_for: tuple[Manifest | None, torch.Tensor | None, Placed | None] = (None,) * 3
        self._has_others = True
        self._blocks = ExportedBlocks(settings.dir)
        self._offsets = b""
        self._others_bytes = 0
        # Whose places ``_offsets`` and the counts are.
        self._placed_for: Manifest | None = None
        self.placed: Placed | None = None
        self.placed_bytes = 0

    @property
    def handles(self) -> tuple[Handle, ...]:
        """What opens the memory elsewhere."""
        slots = () if self._region is None else (self._region.handle,)
        return slots if self._blocks.handle is None else (*slots, self._blocks.handle)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Where the slots are in it, and behind them what is read where it lies."""
        found: list[Region] = []
        if self._region is not None:
            size = self.layout.slot_size_bytes
            found += [Region(0, index * size, size) for index in range(self.num_slots)]
        if self._blocks.handle is not None:
            found.append(Region(len(self.handles) - 1, 0, self._blocks.handle.num_bytes))
        return tuple(found)

    @property
    def slot_size_bytes(self) -> int:
        """Capacity of one slot, also of the last one given back; 0 for references."""
        return self.layout.slot_size_bytes if self._is_memory else 0

    def place(
        self,
        manifest: Manifest,
        tensors: Sequence[torch.Tensor],
        *,
        seen: object | None,
        hellos: Sequence[Hello],
    ) -> int | None:
        """Let workers read tensors where they lie, as far as they can.

        Args:
            manifest: What they are.
            tensors: All of them.
            seen: What ``Source.seen`` returns.
            hellos: The workers, each with the regions that it holds open.

        Returns:
            Bytes, with alignment, of those that have to go through slots all the same;
            ``None`` if nothing can be read where it lies.
        """
        before = self._blocks.handle
        is_open = before is not None and _is_held(before, hellos)
        places = self._blocks.place(tensors, seen=seen, is_open=is_open)
        handle = self._blocks.handle
        if handle is None or len(places) > MAX_PLACED or len(handle.blocks) > MAX_REGIONS:
            self.unplace()
            return None
        if handle is not before or manifest is not self._placed_for:
            others = [
                meta.num_bytes
                for meta, place in zip(manifest.metas, places, strict=True)
                if place == NOT_PLACED
            ]
            self._offsets, self._placed_for = packed(places), manifest
            self.placed_bytes = manifest.num_bytes - sum(others)
            self._others_bytes = sum(map(aligned, others))
            self._has_others = bool(others)
        return self._others_bytes

    def unplace(self) -> bool:
        """Show no tensor any more; return whether any was."""
        self.placed, self.placed_bytes, self._has_others = None, 0, True
        self._placed_for = None
        return self._blocks.close()

    def make_room(self, needed_bytes: int | None) -> None:
        """Give the region up before workers are offered another, if it will not do.

        Who is asked after that closes it first; who was asked ahead, with the offer.
        """
        if self._wanted_of(self._kind, needed_bytes) > self._enough_bytes:
            self._release_region()

    def prepare(
        self,
        kind: str,
        *,
        needed_bytes: int | None,
        hellos: Sequence[Hello],
        wish: Wish,
        is_at_once: bool = False,
    ) -> None:
        """Keep the region if every worker has it and it is large enough, else make one.

        Args:
            kind: The transport.
            needed_bytes: Bytes of the update; ``None`` where that is not known.
            hellos: The workers, each with the regions that it holds open.
            wish: On which GPU, where it is device memory.
            is_at_once: All tensors exist together, so many can be handed over together.

        Raises:
            RegionError: There is no memory for it; nothing is left behind.
        """
        self._prepare_region(
            kind, needed_bytes=needed_bytes, hellos=hellos, wish=wish, is_at_once=is_at_once
        )
        if self._blocks.handle is not None:
            found = Placed(len(self.regions) - 1, self._offsets)
            # The same object for as long as it says the same: what it cost to plan is kept.
            self.placed = self.placed if self.placed == found else found

    def _prepare_region(
        self,
        kind: str,
        *,
        needed_bytes: int | None,
        hellos: Sequence[Hello],
        wish: Wish,
        is_at_once: bool,
    ) -> None:
        region = self._region
        if region is None and not self._has_others:
            return
        wanted_bytes = self._wanted_of(kind, needed_bytes)
        is_enough = kind == self._kind and wanted_bytes <= self._enough_bytes
        if region is not None and is_enough and _is_held(region.handle, hellos):
            # Of an update that failed, copies may still be under way.
            region.flush(0)
            self._set_layout(is_at_once=is_at_once)
            return
        self._release_region()
        self._wanted_bytes = wanted_bytes
        self._region, self.layout, self.num_slots = create_slots(
            kind, settings=self._settings, needed_bytes=needed_bytes, wish=wish
        )
        self._kind = kind
        self._is_memory = self._region.held_bytes > 0
        self._set_layout(is_at_once=is_at_once)

    def _set_layout(self, *, is_at_once: bool) -> None:
        if not self._is_memory:
            entries = MAX_ENTRIES if is_at_once else 1
            self.layout = BucketLayout(self.layout.slot_size_bytes, max_entries=entries)

    def fill(
        self,
        batch: int,
        manifest: Manifest,
        tensors: Sequence[torch.Tensor],
        *,
        devices: AbstractSet[torch.device],
    ) -> None:
        """Copy all tensors of a planned bucket into its slot.

        Args:
            batch: The bucket's number; buckets take the slots in turn.
            manifest: What is sent. Places are kept for the manifest that came last.
            tensors: Those that begin or go on in the bucket, in order, as
                ``Source.ready`` gives them.
            devices: Where they are.
        """
        if self._region is None:
            raise RuntimeError("Slots.prepare was not called")
        memory = self._region.data
        entries = manifest.plan(self.layout, self.placed).buckets[batch]
        if memory is None:
            for entry, tensor in zip(entries, tensors, strict=True):
                self.write(batch, entry.offset_bytes, part_of(tensor, entry))
            return
        key = (manifest, memory, self.placed)
        if any(one is not other for one, other in zip(key, self._filled_for, strict=True)):
            self._filled_for, self._places = key, {}
        places = self._places.get(batch)
        if places is None:
            start_byte = (batch % self.num_slots) * self.layout.slot_size_bytes
            metas = [manifest.metas[entry.index] for entry in entries]
            places = BucketPlaces(memory, start_byte=start_byte, entries=entries, metas=metas)
            self._places[batch] = places
        with self._region.enqueuing(devices):
            places.fill(tensors)

    def _wanted_of(self, kind: str | None, needed_bytes: int | None) -> int:
        return slot_size_for(kind, self._settings, needed_bytes)

    @property
    def _enough_bytes(self) -> float:
        # A little more is not worth new memory. What was asked for counts, not what
        # could be had: a slot that had to shrink would shrink again.
        return 1.1 * self._wanted_bytes

    def note_failure(self, name: str, hellos: Sequence[Hello], reason: str) -> None:
        """Take note that a choice does not work with these very workers."""
        self._failures[name, _instances(hellos)] = reason

    def without_failures(self, choices: list[Choice], hellos: Sequence[Hello]) -> list[Choice]:
        """Return the choices that may work: what failed with these workers is not retried."""
        workers, left = _instances(hellos), list(choices)
        while len(left) > 1 and (left[0].name, workers) in self._failures:
            failed = left.pop(0)
            left[0] = left[0].after(failed, self._failures[failed.name, workers])
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
        self._blocks.unlink()

    def release(self) -> bool:
        """Give the memory back, and show none of the trainer's. Idempotent.

        Returns:
            Whether workers may still have memory of the trainer's mapped.
        """
        try:
            self._release_region()
        finally:
            was_shown = self.unplace()
        return was_shown

    def _release_region(self) -> None:
        # First what views it: the memory goes with its last view.
        self._places, self._filled_for = {}, (None,) * 3
        region, self._region, self._kind = self._region, None, None
        if region is not None:
            region.close()


def _is_held(handle: Handle, hellos: Sequence[Hello]) -> bool:
    return all(handle.id in hello.regions for hello in hellos)


def _instances(hellos: Sequence[Hello]) -> frozenset[str]:
    return frozenset(hello.instance_id for hello in hellos)
