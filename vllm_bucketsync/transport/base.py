"""What every transport offers: a region's two ends.

The sender makes an ``OwnedRegion`` and writes buckets into it; each receiver turns its
handle into an ``OpenedRegion`` and views tensors there. A slot is refilled only after
every receiver has acknowledged it, so neither end locks anything.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from vllm_bucketsync.errors import BucketSyncError, LocalProtocolError, RemoteProtocolError
from vllm_bucketsync.handles import Handle
from vllm_bucketsync.layout import ALIGNMENT_BYTES

# A region of real memory begins with a page that says which region it is.
HEADER_BYTES = 4096
# Random bytes at the start of the header; the handle carries the same.
CANARY_BYTES = 32


class OwnedRegion(Protocol):
    """The sender's end. Its owner unlinks and closes it; both are idempotent."""

    @property
    def handle(self) -> Handle:
        """What opens the region elsewhere."""

    @property
    def num_bytes(self) -> int:
        """Room for data, in bytes."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the region takes; 0 for references."""

    @property
    def data(self) -> torch.Tensor | None:
        """Its memory: ``[num_bytes]``, uint8; ``None`` for references, and after its end."""

    def write(self, offset_bytes: int, data: torch.Tensor) -> None:
        """Put bytes into the region, or begin to: ``flush`` says when they are there.

        Args:
            offset_bytes: Where they go.
            data: ``[n]``, uint8, contiguous, on any device. On a GPU, its current stream
                has what it is computed from.

        Raises:
            LocalProtocolError: They would not fit, or the region is closed. Nothing was
                written.
        """

    def enqueuing(self, devices: AbstractSet[torch.device]) -> AbstractContextManager[None]:
        """Let whatever is copied to ``data`` meanwhile come in the order of ``write``.

        Copies may be enqueued without waiting for them: ``flush`` does.

        Args:
            devices: Where it is copied from.
        """

    def flush(self, slot: int) -> None:
        """Make sure that readers of a slot see what was written to it.

        Called once for each bucket, before it is announced.
        """

    def unlink(self) -> None:
        """Take the region's name away: every receiver has opened it."""

    def close(self) -> None:
        """Give the region up. Views that somebody kept stay readable."""


class OpenedRegion(Protocol):
    """A receiver's end. Whoever opened it closes it; that is idempotent."""

    @property
    def id(self) -> str:
        """The handle's id."""

    @property
    def num_bytes(self) -> int:
        """Room for data, in bytes."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the region takes; 0 for references."""

    def await_writes(self, slot: int) -> None:
        """Let the current stream see what the sender wrote into a slot.

        Called once for each bucket, before its bytes are viewed.

        Raises:
            RemoteProtocolError: The region has no such slot.
        """

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of the region, in place.

        Returns:
            ``[num_bytes]``, uint8, contiguous. Its contents are valid until the bucket
            is acknowledged; the memory under it stays readable for as long as the view
            lives, also after ``close``.

        Raises:
            RemoteProtocolError: The bytes are not aligned, or not in the region. No view
                was made.
            LocalProtocolError: The region is closed.
        """

    def owner_is_alive(self) -> bool:
        """Return whether the sender still holds its end. Never waits."""

    def close(self) -> None:
        """Let the region go. Views that somebody kept stay readable."""


def check_bounds(
    offset_bytes: int, num_bytes: int, *, capacity_bytes: int, error: type[BucketSyncError]
) -> None:
    """Refuse bytes that are not aligned or not in a region.

    Args:
        offset_bytes: Where they start.
        num_bytes: How many they are.
        capacity_bytes: The region's room for data.
        error: What to raise.
    """
    if offset_bytes % ALIGNMENT_BYTES:
        raise error(
            f"bytes at offset {offset_bytes} of a region; expected a multiple of {ALIGNMENT_BYTES}"
        )
    if offset_bytes < 0 or num_bytes < 0 or offset_bytes + num_bytes > capacity_bytes:
        raise error(
            f"{num_bytes} bytes at offset {offset_bytes} are not within a region of "
            f"{capacity_bytes} bytes"
        )


def view_of(
    data: torch.Tensor | None, offset_bytes: int, num_bytes: int, *, region: str
) -> torch.Tensor:
    """Return bytes of an opened region's memory, in place; see ``OpenedRegion.view``.

    Args:
        data: All of them, ``[capacity]``, uint8; ``None`` once the region is closed.
        offset_bytes: Where they start.
        num_bytes: How many they are.
        region: The region's id, for messages.
    """
    if data is None:
        raise LocalProtocolError(f"region {region} was viewed after it was closed")
    check_bounds(offset_bytes, num_bytes, capacity_bytes=data.numel(), error=RemoteProtocolError)
    return data[offset_bytes : offset_bytes + num_bytes]
