"""Zero-copy: the trainer's own device memory, read by workers where it lies.

Every allocation that has tensors is exported once and opened once per worker; a tensor
is an offset into all of them, one behind the other. Nothing is written to this memory,
so no event orders it: a push waits for the trainer's streams before it begins
(``streams.wait_for_trainer``), and returns when every worker has read.

The caller has promised that the memory stays. CUDA cannot tell whether it did: an
address may come back with other memory. So each push takes every allocation's handle
again, and where one differs all of them are opened anew.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch

from ..errors import (
    LocalProtocolError,
    RegionError,
    RemoteProtocolError,
    UnsupportedError,
)
from ..handles import CudaBlock, CudaBlocksHandle
from ..identity import HOST
from ..layout import ALIGNMENT_BYTES, NOT_PLACED
from ..looks import Looks
from . import cuda_runtime
from .device_memory import DeviceMemory
from .devices import index_of
from .shm import OpenedShm, ShmRegion


class ExportedBlocks:
    """The sender's end: which allocations are shown to workers. Closed by its owner.

    Attributes:
        handle: Opens them elsewhere; ``None`` while there are none.
    """

    def __init__(self, directory: str) -> None:
        """Begin with none.

        Args:
            directory: Setting ``dir``, for the lease.
        """
        self._directory = directory
        self._lease: ShmRegion | None = None
        self._blocks: dict[int, tuple[int, CudaBlock]] = {}
        self._places: list[int] = []
        self._looks = Looks()
        self._seen: object | None = None
        self.handle: CudaBlocksHandle | None = None

    def place(
        self, tensors: Sequence[torch.Tensor], *, is_open: bool, seen: object | None = None
    ) -> list[int]:
        """Export what can be, and say where each tensor lies.

        Args:
            tensors: What is to be sent.
            seen: The same object again where all of them are, and look, as last time.
            is_open: Every worker has what was exported last; a new one could not open
                it any more.

        Returns:
            For each its first byte in all allocations together; ``NOT_PLACED`` for one
            that is not contiguous, or in memory that cannot be exported. Meaningless
            where ``handle`` is ``None`` afterwards: nothing could be.
        """
        is_same = (seen is not None and seen is self._seen) or (
            len(self._looks) == len(tensors) and self._looks.are_those_of(tensors)
        )
        if not (is_open and is_same and self._is_current()):
            self.close()
            self._places = self._export(tensors)
            self._looks = Looks(tensors)
        self._seen = seen
        return self._places

    def unlink(self) -> None:
        """Remove the lease's file: every receiver has opened it. Idempotent."""
        if self._lease is not None:
            self._lease.unlink()

    def close(self) -> bool:
        """Tell workers to let go, with their next update or status. Idempotent.

        Returns:
            Whether there was anything to let go of.
        """
        lease, self._lease, self._seen = self._lease, None, None
        self._blocks, self._places, self._looks, self.handle = {}, [], Looks(), None
        if lease is not None:
            lease.close()
        return lease is not None

    def _is_current(self) -> bool:
        """Take every handle again, and compare."""
        by_device: dict[int, dict[int, bytes]] = {}
        for base, (device, block) in self._blocks.items():
            by_device.setdefault(device, {})[base] = block.memory
        try:
            return all(
                cuda_runtime.export(list(known), device=device) == list(known.values())
                for device, known in by_device.items()
            )
        except RegionError:
            return False

    def _export(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        homes = [self._home_of(tensor) for tensor in tensors]
        starts = dict(
            zip(
                self._blocks,
                accumulate((b.num_bytes for _, b in self._blocks.values()), initial=0),
                strict=False,
            )
        )
        if self._blocks:
            self._lease = ShmRegion.create(ALIGNMENT_BYTES, directory=self._directory)
            self.handle = CudaBlocksHandle(
                id=self._lease.handle.id,
                lease=self._lease.handle,
                boot_id=HOST.boot_id,
                blocks=tuple(block for _, block in self._blocks.values()),
            )
        return [
            # What has no bytes lies anywhere.
            (0 if not tensor.numel() else NOT_PLACED)
            if home is None
            else starts[home] + tensor.data_ptr() - home
            for home, tensor in zip(homes, tensors, strict=True)
        ]

    def _home_of(self, tensor: torch.Tensor) -> int | None:
        """Return where the allocation begins that has a tensor, and export it."""
        if not _can_be_read_in_place(tensor):
            return None
        with suppress(RegionError, UnsupportedError):
            device = index_of(tensor.device)
            base, num_bytes = cuda_runtime.allocation_of(tensor.data_ptr())
            if base not in self._blocks:
                (memory,) = cuda_runtime.export([base], device=device)
                self._blocks[base] = (device, CudaBlock(memory, num_bytes))
            return base
        return None


def _can_be_read_in_place(tensor: torch.Tensor) -> bool:
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return is_plain and tensor.is_cuda and tensor.numel() > 0


class OpenedBlocks:
    """A receiver's end. Whoever opened it closes it.

    Attributes:
        id: The handle's id.
        num_bytes: Bytes of all allocations.
        held_bytes: Device memory that is mapped; it is the sender's.
    """

    def __init__(
        self, lease: OpenedShm, *, handle: CudaBlocksHandle, blocks: Sequence[torch.Tensor]
    ) -> None:
        """Use ``open``."""
        self.id = handle.id
        self.num_bytes = self.held_bytes = handle.num_bytes
        self._lease = lease
        self._blocks = blocks
        self._starts = list(accumulate((one.numel() for one in blocks), initial=0))

    @classmethod
    def open(cls, handle: CudaBlocksHandle, *, device: torch.device) -> OpenedBlocks:
        """Map all allocations into this process.

        Args:
            handle: What the sender offers.
            device: The worker's own GPU. The memory may lie on peers of it.

        Raises:
            RegionError: One cannot be mapped here. Nothing is left open.
        """
        if handle.boot_id != HOST.boot_id:
            raise RegionError(
                f"device memory of boot {handle.boot_id[:8]!r} was offered, and this is boot "
                f"{HOST.boot_id[:8]!r}: CUDA IPC works within one host only"
            )
        device = torch.device("cuda", index_of(device))
        lease = OpenedShm.open(handle.lease)
        opened: list[DeviceMemory] = []
        try:
            opened.extend(
                DeviceMemory.open_exported(block.memory, block.num_bytes, device=device)
                for block in handle.blocks
            )
            blocks = [memory.tensor for memory in opened]
        except BaseException:
            # By hand: the error that is on its way still refers to them.
            for memory in opened:
                memory.give_up()
            lease.close()
            raise
        return cls(lease, handle=handle, blocks=blocks)

    def await_writes(self, slot: int) -> None:
        """Do nothing: all was written before the push began."""

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of one allocation, in place; see ``OpenedRegion``.

        They need not be aligned further than their dtype is.
        """
        if not self._blocks:
            raise LocalProtocolError(f"region {self.id} was viewed after it was closed")
        index = bisect_right(self._starts, offset_bytes) - 1
        if 0 <= index < len(self._blocks):
            first, block = offset_bytes - self._starts[index], self._blocks[index]
            if num_bytes >= 0 and first + num_bytes <= block.numel():
                return block[first : first + num_bytes]
        raise RemoteProtocolError(
            f"{num_bytes} bytes at {offset_bytes} are within none of the {len(self._blocks)} "
            f"allocations of region {self.id}"
        )

    def owner_is_alive(self) -> bool:
        """Return whether the sender still shows them."""
        return self._lease.owner_is_alive()

    def close(self) -> None:
        """Let them go. Idempotent. They stay mapped while somebody keeps a view."""
        if not self._blocks:
            return
        self._blocks = []
        self._lease.close()
