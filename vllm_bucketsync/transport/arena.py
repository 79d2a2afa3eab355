"""One allocation for the staged part of an update: on the device, else on the host.

It is made before the first byte is sent, so that what does not fit is refused while
nothing has happened, and goes with the last tensor that views it.
"""

from __future__ import annotations

import logging
from typing import Self

import torch

from ..errors import RegionError, StagingError
from ..host_memory import available_bytes
from .device_memory import DeviceMemory
from .devices import index_of
from .pinned import Pin

logger = logging.getLogger(__name__)

# Left alone on the device: for what a forward pass, and post-processing, allocate.
DEVICE_MARGIN_BYTES = 1024**3
# Left alone on the host, for everybody else.
HOST_MARGIN_BYTES = 512 * 1024**2


class Arena:
    """Memory of one update. Whoever made it closes it.

    Attributes:
        data: ``[num_bytes]``, uint8, contiguous: the memory; empty after ``close``.
        place: The device, or the kind of host memory, for people.
    """

    def __init__(self, data: torch.Tensor, *, place: str, pin: Pin | None = None) -> None:
        """Use ``allocate``."""
        self.data = data
        self.place = place
        self._pin = pin

    @classmethod
    def allocate(cls, num_bytes: int, *, device: torch.device, num_sharers: int) -> Self:
        """Find room.

        Args:
            num_bytes: How much.
            device: The worker's device. A GPU's memory is tried first, host memory that is
                pinned next; any other device stages on the host.
            num_sharers: Workers of this host that stage at the same time: each may take
                its share of the host's memory.

        Raises:
            StagingError: There is no room. Nothing was allocated.
        """
        free_on_device = _free_on(device)
        if device.type == "cuda" and num_bytes <= free_on_device:
            try:
                memory = DeviceMemory.private(max(num_bytes, 1), device=_indexed(device))
                return cls(memory.tensor[:num_bytes], place=str(device))
            except RegionError as error:
                logger.info("no device memory to stage in, so the host's is used: %s", error)
        free_on_host = max(available_bytes() - HOST_MARGIN_BYTES, 0) // num_sharers
        if num_bytes > free_on_host:
            raise _no_room(num_bytes, device, free_on_device, free_on_host, num_sharers)
        data = _host_memory(num_bytes, free_on_device=free_on_device, free_on_host=free_on_host)
        if device.type != "cuda" or not num_bytes:
            return cls(data, place="host memory")
        pin = Pin.of(data, device=device)
        kind = "pinned host memory" if pin.is_pinned else "host memory"
        return cls(data, place=kind, pin=pin)

    def close(self) -> None:
        """Let the memory go. Idempotent. No copy may be under way."""
        if self._pin is not None:
            self._pin.undo()
        self.data = torch.empty(0, dtype=torch.uint8)
        self._pin = None


def _host_memory(num_bytes: int, *, free_on_device: int, free_on_host: int) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Limits of a process, and kernels that promise no more memory than they have.
    except RuntimeError as error:
        raise StagingError(
            f"an atomic update needs {num_bytes} bytes of host memory to stage this worker's part "
            f"of the weights, and cannot have them, though {free_on_host} seem to be free: "
            f"{error}; nothing was written; raise the process's limit (ulimit -v), or push without "
            f"atomic=True",
            needed_bytes=num_bytes,
            device_bytes=free_on_device,
            host_bytes=free_on_host,
        ) from error


def _free_on(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(free_bytes - DEVICE_MARGIN_BYTES, 0)


def _indexed(device: torch.device) -> torch.device:
    return torch.device(device.type, index_of(device))


def _no_room(
    num_bytes: int, device: torch.device, on_device: int, on_host: int, num_sharers: int
) -> StagingError:
    of_device = (
        ""
        if device.type != "cuda"
        else f"{on_device} are free on {device} ({DEVICE_MARGIN_BYTES} are left alone there), and "
    )
    return StagingError(
        f"an atomic update needs {num_bytes} bytes to stage this worker's part of the weights; "
        f"{of_device}{on_host} on the host ({HOST_MARGIN_BYTES} are left alone, the rest is for "
        f"{num_sharers} workers); nothing was written; make room (a smaller KV cache, "
        f"more host memory), or push without atomic=True",
        needed_bytes=num_bytes,
        device_bytes=on_device,
        host_bytes=on_host,
    )
