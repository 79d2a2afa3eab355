"""Shared memory as CUDA likes it: pinned, and copied to on a stream of its own.

A copy from or to pageable memory runs at a third of the speed and holds up the host.
Memory that cannot be pinned (a limit of the container, WSL2, confidential computing) is
used as it is.
"""

from __future__ import annotations

import logging
from typing import Self

import torch

from ..errors import BucketSyncError
from . import cuda_runtime

logger = logging.getLogger(__name__)


class Pin:
    """A stretch of host memory, pinned where that is possible. Undone once.

    Attributes:
        is_pinned: Whether it is.
    """

    def __init__(self, address: int, *, device: int, is_pinned: bool) -> None:
        """Use ``of``."""
        self._address = address
        self._device = device
        self.is_pinned = is_pinned

    @classmethod
    def of(cls, data: torch.Tensor, *, device: torch.device) -> Self:
        """Pin memory, or warn that it is not. Costs some 40 ms per GiB.

        Args:
            data: ``[num_bytes]``, on the CPU.
            device: A GPU that copies from or to it; the others may, too.
        """
        address, num_bytes = data.data_ptr(), data.numel()
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            cuda_runtime.register_host(address, num_bytes, device=index)
        except BucketSyncError as error:
            logger.warning(
                "%d bytes of shared memory are not pinned, so copies are slower: %s; raise the "
                "memlock limit (ulimit -l), or lower slot_size",
                num_bytes,
                error,
            )
            return cls(address, device=index, is_pinned=False)
        return cls(address, device=index, is_pinned=True)

    def undo(self) -> None:
        """Let the memory be paged again. Idempotent. No copy may be under way."""
        if not self.is_pinned:
            return
        self.is_pinned = False
        try:
            cuda_runtime.unregister_host(self._address, device=self._device)
        # The memory goes on living, only pinned: no reason to fail what succeeded.
        except BucketSyncError as error:
            logger.warning("shared memory stays pinned: %s", error)


class HostCopies:
    """Copies from GPUs into one region, on a side stream for each of them.

    Packing a slot then overlaps with whatever the trainer's own streams do.
    """

    def __init__(self, pin: Pin) -> None:
        """Take over ``pin``: ``close`` undoes it."""
        self._pin = pin
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Copy behind what the device's current stream was given to do.

        Args:
            target: ``[n]``, uint8, in the region.
            data: ``[n]``, uint8, on a GPU. Its memory may be given up at once.
        """
        if not self._pin.is_pinned:
            target.copy_(data)
            return
        stream = self._streams.get(data.device)
        if stream is None:
            stream = self._streams[data.device] = torch.cuda.Stream(data.device)
        stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(stream):
            target.copy_(data, non_blocking=True)
        data.record_stream(stream)

    def wait(self) -> None:
        """Wait until every byte is there."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait, and unpin. Idempotent."""
        self.wait()
        self._pin.undo()
