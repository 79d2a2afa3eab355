"""Device memory that torch did not allocate, as a tensor that does not copy it.

The tensor and every view of it keep the memory; with the last of them it goes: mapped
memory is unmapped, memory of our own is parked until no worker has it mapped.
"""

from __future__ import annotations

import logging
from weakref import finalize

import torch

from ..errors import BucketSyncError, RegionError
from ..rundir import Watch
from . import cuda_runtime, parked

logger = logging.getLogger(__name__)


class DeviceMemory:
    """A stretch of device memory by its address.

    Attributes:
        tensor: ``[num_bytes]``, uint8, on the device: the memory itself. Whoever made
            the memory takes it once, and then drops this object.
    """

    def __init__(self, address: int, num_bytes: int, *, device: torch.device) -> None:
        """Use ``allocate`` or ``open_exported``."""
        # As torch takes it: a reference to the holder is all that each view keeps.
        self._holder = _Holder(address, num_bytes)
        self._address = address
        self._device = device
        self._end: finalize[..., _Holder] | None = None

    @classmethod
    def allocate(cls, num_bytes: int, *, device: torch.device, watch: Watch) -> DeviceMemory:
        """Allocate memory that can be exported.

        Args:
            num_bytes: How much.
            device: The GPU, with its index.
            watch: Tells whether a worker has it mapped; closed with the memory.

        Raises:
            RegionError: It cannot be had; ``errno`` is ``ENOMEM`` where the GPU is full.
        """
        try:
            address = cuda_runtime.allocate(num_bytes, device=device.index)
        except BaseException:
            watch.close()
            raise
        memory = cls(address, num_bytes, device=device)
        memory._ends_with(
            finalize(memory._holder, parked.park, watch, address, device.index, num_bytes)
        )
        return memory

    @classmethod
    def private(cls, num_bytes: int, *, device: torch.device) -> DeviceMemory:
        """Allocate memory that nobody else sees; it is freed with its last view.

        Args:
            num_bytes: How much.
            device: The GPU, with its index.

        Raises:
            RegionError: It cannot be had; ``errno`` is ``ENOMEM`` where the GPU is full.
        """
        address = cuda_runtime.allocate(num_bytes, device=device.index)
        memory = cls(address, num_bytes, device=device)
        memory._ends_with(finalize(memory._holder, _free, address, device.index))
        return memory

    @classmethod
    def open_exported(
        cls, handle: bytes, num_bytes: int, *, device: torch.device, hold: Watch | None = None
    ) -> DeviceMemory:
        """Map memory that another process exported.

        Args:
            handle: Its ``cudaIpcMemHandle_t``.
            num_bytes: How much there is.
            device: The GPU that is to see it, with its index.
            hold: Shows the owner that it is mapped; closed when it no longer is. Not
                needed where the owner asks before it frees.

        Raises:
            RegionError: It cannot be mapped.
        """
        try:
            address = cuda_runtime.open_exported(handle, device=device.index)
        except BaseException:
            if hold is not None:
                hold.close()
            raise
        memory = cls(address, num_bytes, device=device)
        memory._ends_with(finalize(memory._holder, _unmap, hold, address, device.index))
        try:
            _check_length(address, num_bytes)
        except BaseException:
            memory.give_up()
            raise
        return memory

    @property
    def tensor(self) -> torch.Tensor:
        """See the class.

        Raises:
            RegionError: Torch would have to copy it.
        """
        tensor = torch.as_tensor(self._holder, device=self._device)
        if tensor.data_ptr() != self._address:
            raise RegionError(f"torch cannot show memory of {self._device} without a copy of it")
        return tensor

    def export(self) -> bytes:
        """Return the handle that opens it in another process."""
        (handle,) = cuda_runtime.export([self._address], device=self._device.index)
        return handle

    def give_up(self) -> None:
        """Let the memory go now, whoever still refers to it. Idempotent."""
        if self._end is not None:
            self._end()

    def _ends_with(self, end: finalize[..., _Holder]) -> None:
        # At the interpreter's end the driver does it.
        end.atexit = False
        self._end = end


class _Holder:
    """What torch is shown, and refers to for as long as a view lives."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _check_length(address: int, num_bytes: int) -> None:
    base, size = cuda_runtime.allocation_of(address)
    if address + num_bytes > base + size:
        raise RegionError(f"{num_bytes} bytes of device memory were offered, and there are {size}")


def _unmap(hold: Watch | None, address: int, device: int) -> None:
    try:
        cuda_runtime.close_opened(address, device=device)
    # In a destructor, and perhaps while the process ends: there is nobody to tell.
    except BucketSyncError as error:
        logger.debug("device memory was not unmapped: %s", error)
    if hold is not None:
        hold.close()


def _free(address: int, device: int) -> None:
    try:
        cuda_runtime.free(address, device=device)
    # In a destructor, as above.
    except BucketSyncError as error:
        logger.warning("device memory was not freed: %s", error)
