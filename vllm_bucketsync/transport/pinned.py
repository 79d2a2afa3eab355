"""Shared memory as CUDA likes it: pinned, and copied to on a stream of its own.

A copy from or to pageable memory runs at a third of the speed and holds up the host.
Memory that cannot be pinned (a limit of the container, WSL2, confidential computing) is
used as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Self

import torch

from ..errors import BucketSyncError
from . import cuda_runtime
from .devices import index_of

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
        index = index_of(device)
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


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the same stream of a GPU every time: torch keeps memory for each one there was."""
    return torch.cuda.Stream(device)


class HostCopies:
    """Copies from GPUs into one region, on a side stream for each of them.

    Packing a slot then overlaps with whatever the trainer's own streams do.
    """

    def __init__(self, pin: Pin) -> None:
        """Take over ``pin``: ``close`` undoes it."""
        self._pin = pin
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def streams_of(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """Make a side stream of each device the current one, behind the one that was.

        What is copied from meanwhile must not be changed or freed before ``wait``.
        """
        with ExitStack() as stack:
            for device in devices:
                stream = self._streams.get(device)
                if stream is None:
                    stream = self._streams[device] = _side_stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def wait(self) -> None:
        """Wait until every byte is there."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait, and unpin. Idempotent."""
        try:
            self.wait()
        finally:
            self._pin.undo()
