"""How tensors are laid out in buckets, and how a set of them is named.

Pure data and arithmetic: no torch, no sockets, no clock. Both ends run the same
planner over the same metas, so a layout never has to travel when the metas are
known: the placement of a tensor depends on nothing but what came before it.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Annotated

import msgspec
from msgspec import structs

from .errors import ConfigError, RemoteProtocolError

# A receiver may view any dtype in place, and copies start on a cache line pair.
ALIGNMENT_BYTES = 256
MAX_NAME_BYTES = 1024
MAX_DIMS = 64
# Bounds a Batch message, whatever the tensors: zero-element ones take no room.
MAX_ENTRIES = 8192
# What ``Placed`` has for a tensor that lies nowhere but in a slot.
NOT_PLACED = (1 << 64) - 1
_OFFSET_BYTES = 8
# Tensors that one message can place.
MAX_PLACED = 1 << 20
# Buckets of one update: more are a slot size that nobody wants, or no sender of ours.
MAX_BUCKETS = 1 << 20

# Checked wherever a message is decoded, so that no offset from outside is negative.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a tensor without its bytes.

    Attributes:
        name: Checkpoint (Hugging Face) name.
        dtype: torch's name of the dtype, without ``torch.``.
        shape: Elements along each dimension; empty for a 0-dim tensor.
        num_bytes: Bytes of its elements, contiguous.
        is_buffer: A persistent buffer: an engine without a place for it skips it
            and says so, where a parameter would be refused.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    is_buffer: bool = False


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's, or a tensor fragment's, place in a region.

    Attributes:
        index: Which tensor of the manifest.
        first_byte: Where the fragment starts within the tensor.
        offset_bytes: Where it lies in the region. A multiple of ``ALIGNMENT_BYTES``.
        num_bytes: Its length.
    """

    index: _Count
    first_byte: _Count
    offset_bytes: _Count
    num_bytes: _Count


class BucketLayout(msgspec.Struct, frozen=True):
    """The two numbers that a layout depends on besides the metas.

    Attributes:
        slot_size_bytes: Capacity of one slot, a positive multiple of
            ``ALIGNMENT_BYTES``.
        max_entries: Entries of one bucket at most; 1 where every tensor has to be
            taken over before the next one is asked for.
    """

    slot_size_bytes: int
    max_entries: int = MAX_ENTRIES

    def __post_init__(self) -> None:
        """Refuse numbers that no bucket can be built from.

        Raises:
            ConfigError: ``slot_size_bytes`` or ``max_entries`` is out of range.
        """
        if self.slot_size_bytes <= 0 or self.slot_size_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"slot_size is {self.slot_size_bytes} bytes; expected a positive multiple "
                f"of {ALIGNMENT_BYTES}"
            )
        if not 1 <= self.max_entries <= MAX_ENTRIES:
            raise ConfigError(f"max_entries is {self.max_entries}; expected 1 to {MAX_ENTRIES}")


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far an update has come.

    Attributes:
        num_tensors: Whole tensors.
        num_bytes: Bytes of tensors, without alignment.
        open_bytes: Of these, the bytes of a tensor that is not whole yet.
    """

    num_tensors: int = 0
    num_bytes: int = 0
    open_bytes: int = 0


class Placed(msgspec.Struct, frozen=True):
    """Where tensors lie that need not be copied into a slot.

    Attributes:
        region: The region that they lie in; it is no slot.
        offsets: For each tensor of the manifest its first byte there, 8 bytes each, the
            lowest first; ``NOT_PLACED`` for one that goes through a slot.
    """

    region: _Count
    offsets: Annotated[bytes, msgspec.Meta(max_length=MAX_PLACED * 8)]

    def unpacked(self) -> array[int]:
        """Return the offsets as numbers."""
        found = array("Q", self.offsets)
        if sys.byteorder == "big":
            found.byteswap()
        return found


class BucketPlan(msgspec.Struct, frozen=True):
    """The buckets of a manifest, the same on both ends.

    Attributes:
        buckets: The entries of each.
        progress: How far the update is before each bucket, and after the last.
        used_bytes: Where each bucket ends in its slot; 0 for one that is in no slot.
        is_placed: Whether each lies where its tensors are, and in no slot.
    """

    buckets: tuple[tuple[Entry, ...], ...]
    progress: tuple[Progress, ...]
    used_bytes: tuple[int, ...]
    is_placed: tuple[bool, ...]


class Manifest:
    """Names, dtypes and shapes of everything in an update, in order.

    Attributes:
        metas: The tensors, in the order in which they are sent.
    """

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self.metas = tuple(metas)
        self._plans: dict[tuple[BucketLayout, Placed | None], BucketPlan] = {}

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.metas)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        return sum(meta.num_bytes for meta in self.metas)

    @cached_property
    def aligned_bytes(self) -> int:
        """Bytes of all tensors as they lie in buckets."""
        return sum(aligned(meta.num_bytes) for meta in self.metas)

    @cached_property
    def digest(self) -> str:
        """The manifest's name: a hash of every meta in order, 64 hex digits."""
        return manifest_digest(self.metas)

    def plan(self, layout: BucketLayout, placed: Placed | None = None) -> BucketPlan:
        """Return the buckets that it makes; those of the last layout are kept.

        Args:
            layout: How slots are filled.
            placed: Which tensors are left where they are.

        Raises:
            ConfigError: Slots are so small that there would be too many buckets.
            RemoteProtocolError: ``placed`` is of another number of tensors.
        """
        if self.num_bytes // layout.slot_size_bytes > MAX_BUCKETS:
            raise ConfigError(
                f"slots of {layout.slot_size_bytes} bytes would cut {self.num_bytes} bytes into "
                f"more than {MAX_BUCKETS} buckets; raise slot_size"
            )
        key = (layout, placed)
        if key not in self._plans:
            self._plans = {key: _plan(self.metas, layout, placed)}
        return self._plans[key]


class BucketPlanner:
    """Places tensors one after the other, greedily and in order.

    Order is kept because loaders may rely on it: the parts of a fused layer
    arrive in the order in which the checkpoint lists them. A tensor larger than
    what is left of a slot starts a new one, and a tensor larger than a whole slot
    is split.
    """

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout
        self._next_index = 0
        self._used_bytes = 0
        self._num_entries = 0

    def place(self, num_bytes: int) -> Iterator[Entry | None]:
        """Place the next tensor.

        Args:
            num_bytes: Its length; zero for a tensor without elements.

        Yields:
            Its entries in order; ``None`` wherever the bucket is complete and the
            next one begins. A bucket that is full ends at once, so the caller can
            hand it over before it asks for another tensor.
        """
        index, self._next_index = self._next_index, self._next_index + 1
        capacity = self._layout.slot_size_bytes
        if self._num_entries and self._used_bytes + num_bytes > capacity:
            self._end_bucket()
            yield None
        first_byte = 0
        while True:
            size = min(num_bytes - first_byte, capacity)
            yield Entry(index, first_byte, self._used_bytes, size)
            self._num_entries += 1
            self._used_bytes += aligned(size)
            first_byte += size
            if self._used_bytes >= capacity or self._num_entries >= self._layout.max_entries:
                self._end_bucket()
                yield None
            if first_byte >= num_bytes:
                return

    def _end_bucket(self) -> None:
        self._used_bytes = 0
        self._num_entries = 0


def plan_buckets(
    metas: Iterable[TensorMeta], *, layout: BucketLayout
) -> Iterator[tuple[Entry, ...]]:
    """Pack tensors into buckets with ``BucketPlanner``.

    Args:
        metas: Tensors to send, in the order in which they are to arrive.
        layout: Capacity of a slot, and entries at most.

    Yields:
        The entries of one bucket: never empty, never past the slot.
    """
    planner = BucketPlanner(layout)
    bucket: list[Entry] = []
    for meta in metas:
        for entry in planner.place(meta.num_bytes):
            if entry is not None:
                bucket.append(entry)
                continue
            yield tuple(bucket)
            bucket = []
    if bucket:
        yield tuple(bucket)


def _plan(metas: Sequence[TensorMeta], layout: BucketLayout, placed: Placed | None) -> BucketPlan:
    if placed is None:
        buckets = tuple(plan_buckets(metas, layout=layout))
        is_placed = (False,) * len(buckets)
    else:
        found = list(_placed_buckets(metas, layout, placed))
        buckets, is_placed = tuple(e for e, _ in found), tuple(flag for _, flag in found)
    progress = [Progress()]
    num_tensors = num_bytes = 0
    for entries in buckets:
        num_bytes += sum(entry.num_bytes for entry in entries)
        last = entries[-1]
        end_byte = last.first_byte + last.num_bytes
        is_open = end_byte < metas[last.index].num_bytes
        num_tensors = last.index + (not is_open)
        progress.append(Progress(num_tensors, num_bytes, end_byte if is_open else 0))
    used = tuple(
        0 if is_here else entries[-1].offset_bytes + entries[-1].num_bytes
        for entries, is_here in zip(buckets, is_placed, strict=True)
    )
    return BucketPlan(buckets, tuple(progress), used, is_placed)


def _placed_buckets(
    metas: Sequence[TensorMeta], layout: BucketLayout, placed: Placed
) -> Iterator[tuple[tuple[Entry, ...], bool]]:
    """Yield the buckets in the manifest's order, each with whether it is in no slot."""
    if len(placed.offsets) != _OFFSET_BYTES * len(metas):
        raise RemoteProtocolError(
            f"places of {len(placed.offsets) / _OFFSET_BYTES:g} tensors came with a manifest of "
            f"{len(metas)}"
        )
    offsets = placed.unpacked()
    first = 0
    for is_here, run in groupby(range(len(metas)), lambda index: offsets[index] != NOT_PLACED):
        end = first + sum(1 for _ in run)
        if is_here:
            for start in range(first, end, MAX_ENTRIES):
                yield (
                    tuple(
                        Entry(index, 0, offsets[index], metas[index].num_bytes)
                        for index in range(start, min(start + MAX_ENTRIES, end))
                    ),
                    True,
                )
        else:
            for entries in plan_buckets(metas[first:end], layout=layout):
                yield tuple(structs.replace(e, index=e.index + first) for e in entries), False
        first = end


def packed(offsets: Iterable[int]) -> bytes:
    """Return offsets as ``Placed`` carries them."""
    found = array("Q", offsets)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT_BYTES``."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def manifest_digest(metas: Iterable[TensorMeta]) -> str:
    """Return the name of a manifest: BLAKE2b-256 over its metas, as 64 hex digits."""
    digest = hashlib.blake2b(digest_size=32)
    encoder = msgspec.msgpack.Encoder()
    for meta in metas:
        digest.update(encoder.encode(meta))
    return digest.hexdigest()
