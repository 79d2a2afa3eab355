"""References instead of bytes, for a trainer and a worker in one process.

A device cannot open its own memory handle, and need not: the receiver gets the very
tensors that the sender wrote. A region holds one bucket, so it is one slot; writing at
offset 0 begins the next bucket and drops the one before.
"""

from __future__ import annotations

import secrets
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakValueDictionary

import torch

from vllm_bucketsync.errors import ConfigError, LocalProtocolError, RegionError, RemoteProtocolError
from vllm_bucketsync.handles import InprocHandle

from .base import check_bounds

# Weak: a region that its owner dropped without closing it must not keep tensors.
_regions: WeakValueDictionary[str, InprocRegion] = WeakValueDictionary()


class InprocRegion:
    """The sender's end: tensors by their offset.

    Attributes:
        handle: Finds the region in this process.
        held_bytes: Memory that it takes: none.
    """

    def __init__(self, handle: InprocHandle) -> None:
        """Use ``create``."""
        self.handle = handle
        self.held_bytes = 0
        self._bucket: dict[int, torch.Tensor] = {}

    @classmethod
    def create(cls, num_bytes: int) -> InprocRegion:
        """Make a region and enter it in the process's table.

        Args:
            num_bytes: Room for data by offsets alone; nothing is allocated.

        Raises:
            ConfigError: ``num_bytes`` is not positive.
        """
        if num_bytes <= 0:
            raise ConfigError(f"a region of {num_bytes} bytes was asked for; expected more")
        region = cls(InprocHandle(id=secrets.token_hex(16), num_bytes=num_bytes))
        _regions[region.handle.id] = region
        return region

    @property
    def num_bytes(self) -> int:
        """Room for data, in bytes."""
        return self.handle.num_bytes

    @property
    def data(self) -> None:
        """No memory of its own."""
        return

    def write(self, offset_bytes: int, data: torch.Tensor) -> None:
        """Keep a reference to ``data`` until the next bucket begins.

        Args:
            offset_bytes: What the receiver will ask for; 0 begins a new bucket.
            data: ``[n]``, uint8, contiguous, on any device.

        Raises:
            LocalProtocolError: It would not fit, or the region is closed.
        """
        if self.handle.id not in _regions:
            raise LocalProtocolError(f"region {self.handle.id} was written to after its end")
        check_bounds(
            offset_bytes, data.numel(), capacity_bytes=self.num_bytes, error=LocalProtocolError
        )
        if offset_bytes == 0:
            self._bucket.clear()
        # What has no bytes takes no room: the next tensor has the same offset.
        if data.numel():
            self._bucket[offset_bytes] = data

    def read(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return the very tensor that was written at an offset.

        Raises:
            RemoteProtocolError: None of that length was.
        """
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        data = self._bucket.get(offset_bytes)
        if data is None or data.numel() != num_bytes:
            found = "nothing" if data is None else f"{data.numel()} bytes"
            raise RemoteProtocolError(
                f"{num_bytes} bytes were announced at offset {offset_bytes} of region "
                f"{self.handle.id}; {found} was written there"
            )
        return data

    def enqueuing(self, devices: AbstractSet[torch.device]) -> AbstractContextManager[None]:
        """Change nothing: there is nothing to copy to."""
        return nullcontext()

    def flush(self, slot: int) -> None:
        """Do nothing: the receiver reads on this thread, and so in the same stream."""

    def unlink(self) -> None:
        """Do nothing: the region has no name outside of this process."""

    def close(self) -> None:
        """Leave the table and drop every reference. Idempotent."""
        _regions.pop(self.handle.id, None)
        self._bucket.clear()


class OpenedInproc:
    """The receiver's end.

    Attributes:
        id: The handle's id.
        num_bytes: Room for data, in bytes.
        held_bytes: Memory that it takes: none.
    """

    def __init__(self, region: InprocRegion) -> None:
        """Use ``open``."""
        self.id = region.handle.id
        self.num_bytes = region.num_bytes
        self.held_bytes = 0
        self._region: InprocRegion | None = region

    @classmethod
    def open(cls, handle: InprocHandle) -> OpenedInproc:
        """Find a region of this process.

        Raises:
            RegionError: There is no such region here.
        """
        region = _regions.get(handle.id)
        if region is None or region.handle != handle:
            raise RegionError(
                f"region {handle.id} is not in this process; references can be handed over "
                f"only where trainer and worker share one"
            )
        return cls(region)

    def await_writes(self, slot: int) -> None:
        """Do nothing: the sender wrote on this thread, and so in the same stream."""

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return the very tensor that was written at an offset.

        Returns:
            ``[num_bytes]``, uint8, contiguous, on the sender's device. Not a copy:
            writing to it writes to the sender's tensor.

        Raises:
            RemoteProtocolError: None of that length was, or the offset cannot be.
            LocalProtocolError: The region is closed.
        """
        if self._region is None:
            raise LocalProtocolError(f"region {self.id} was viewed after it was closed")
        check_bounds(
            offset_bytes, num_bytes, capacity_bytes=self.num_bytes, error=RemoteProtocolError
        )
        return self._region.read(offset_bytes, num_bytes)

    def owner_is_alive(self) -> bool:
        """Return whether the sender has not closed the region."""
        return self.id in _regions

    def close(self) -> None:
        """Let the region go. Idempotent."""
        self._region = None
