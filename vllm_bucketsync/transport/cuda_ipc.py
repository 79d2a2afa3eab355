"""CUDA IPC: device memory of the sender, mapped by workers on the same GPU or a peer of it.

One plain allocation for each region, exported once and opened once per worker: the
handle is 64 bytes, and holds no index of anything. Beside it lies a page of shared
memory, the *lease*:

- The owner locks it for as long as the region lives, so a worker sees that it is dead.
- Each worker holds it for as long as the memory is mapped. To free memory that is still
  mapped elsewhere is undefined, so an owner that goes first parks it (``parked.py``).
- Its canary is in the device memory too: only the region that was meant passes.

Order between the two processes' streams: after the last write to a slot the owner
records the slot's interprocess event, and only then announces the bucket; the worker
makes its own stream wait for the event before it reads. Neither host waits for a device.
The way back needs no event: a worker acknowledges a bucket when its stream has read it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

import torch

from ..config import Settings
from ..errors import (
    LocalProtocolError,
    RegionError,
    RemoteProtocolError,
    UnsupportedError,
)
from ..handles import CudaIpcHandle
from ..identity import HOST
from ..layout import ALIGNMENT_BYTES
from . import parked
from .base import CANARY_BYTES, HEADER_BYTES, check_bounds, view_of
from .device_memory import DeviceMemory
from .devices import index_of, uuid_of
from .shm import OpenedShm, ShmRegion
from .slots import ON_DEVICE, create_shrinking

logger = logging.getLogger(__name__)


class CudaRegion:
    """The sender's end. Its owner unlinks and closes it.

    Attributes:
        handle: Opens the region in another process of the host.
        held_bytes: Device memory that it takes.
        data: ``[num_bytes]``, uint8, on the GPU; ``None`` after its end.
    """

    def __init__(
        self,
        lease: ShmRegion,
        *,
        handle: CudaIpcHandle,
        data: torch.Tensor,
        events: Sequence[torch.cuda.Event],
    ) -> None:
        """Use ``create``."""
        self.handle = handle
        self.held_bytes = HEADER_BYTES + handle.num_bytes
        self._lease = lease
        self._events = events
        self.data: torch.Tensor | None = data
        self._stream: torch.cuda.Stream | None = None

    @classmethod
    def create(
        cls, num_bytes: int, *, num_slots: int, device: torch.device, directory: str
    ) -> CudaRegion:
        """Allocate device memory and export it.

        Args:
            num_bytes: Room for data; a header page is added.
            num_slots: How many slots will be flushed by number.
            device: The GPU; without an index, the current one.
            directory: Setting ``dir``, for the lease.

        Raises:
            RegionError: It cannot be had; ``errno`` is ``ENOMEM`` where the GPU is full.
            UnsupportedError: This torch, or its CUDA, cannot do it.
        """
        parked.free_unused()
        memory: DeviceMemory | None = None
        with _as_region_errors(f"device memory on {device}"), torch.cuda.device(index_of(device)):
            device = torch.device("cuda", torch.cuda.current_device())
            lease = ShmRegion.create(ALIGNMENT_BYTES, directory=directory)
            try:
                size = HEADER_BYTES + num_bytes
                memory = DeviceMemory.allocate(size, device=device, watch=lease.watch())
                data = memory.tensor
                canary = torch.frombuffer(bytearray(lease.handle.canary), dtype=torch.uint8)
                data[:CANARY_BYTES] = canary.to(device)
                events = [torch.cuda.Event(interprocess=True) for _ in range(num_slots)]
                torch.cuda.current_stream().synchronize()
                handle = CudaIpcHandle(
                    id=lease.handle.id,
                    lease=lease.handle,
                    boot_id=HOST.boot_id,
                    device_uuid=uuid_of(device),
                    num_bytes=num_bytes,
                    memory=memory.export(),
                    events=tuple(bytes(event.ipc_handle()) for event in events),
                )
            except BaseException:
                lease.close()
                # By hand: the error that is on its way still refers to it.
                if memory is not None:
                    memory.give_up()
                parked.free_unused()
                raise
        return cls(lease, handle=handle, data=data[HEADER_BYTES:], events=events)

    @property
    def num_bytes(self) -> int:
        """Room for data, in bytes."""
        return self.handle.num_bytes

    def write(self, offset_bytes: int, data: torch.Tensor) -> None:
        """Copy bytes into the region, on the current stream of its device.

        Args:
            offset_bytes: Where they go, a multiple of ``ALIGNMENT_BYTES``.
            data: ``[n]``, uint8, contiguous, on any device. Its own current stream has
                what it is computed from; its memory may be given up at once.

        Raises:
            LocalProtocolError: They would not fit, or the region is closed. Nothing was
                written.
        """
        if self.data is None:
            raise LocalProtocolError(f"region {self.handle.id} was written to after its end")
        size = data.numel()
        check_bounds(offset_bytes, size, capacity_bytes=self.num_bytes, error=LocalProtocolError)
        with self.enqueuing({data.device}):
            # From the host it waits: a source may refill its memory at once.
            target = self.data[offset_bytes : offset_bytes + size]
            target.copy_(data, non_blocking=data.is_cuda)
        if data.is_cuda and size:
            data.record_stream(torch.cuda.current_stream(data.device))

    @contextmanager
    def enqueuing(self, devices: AbstractSet[torch.device]) -> Iterator[None]:
        """Let copies go into the current stream, in one order; see ``OwnedRegion``."""
        with torch.cuda.device(self._device()):
            stream = torch.cuda.current_stream()
            if self._stream is not None and self._stream != stream:
                # Behind what another one was given to write.
                stream.wait_stream(self._stream)
            self._stream = stream
            yield

    def flush(self, slot: int) -> None:
        """Let readers of a slot wait for everything that was written so far."""
        stream = self._stream or torch.cuda.current_stream(self._device())
        self._events[slot].record(stream)

    def unlink(self) -> None:
        """Remove the lease's file: every receiver has opened it. Idempotent."""
        self._lease.unlink()
        parked.free_unused()

    def close(self) -> None:
        """Give the memory up: at once, or as soon as no worker has it mapped. Idempotent."""
        if self.data is None:
            return
        stream = self._stream or torch.cuda.current_stream(self._device())
        try:
            stream.synchronize()
        finally:
            # Also where the device is past help: nothing may be left on the host.
            self.data = self._stream = None
            self._events = ()
            self._lease.close()
            parked.free_unused()

    def _device(self) -> torch.device:
        if self.data is None:
            raise LocalProtocolError(f"region {self.handle.id} was used after its end")
        return self.data.device


class OpenedCuda:
    """A receiver's end. Whoever opened it closes it.

    Attributes:
        id: The handle's id.
        num_bytes: Room for data, in bytes.
        held_bytes: Device memory that is mapped; it is the sender's.
    """

    def __init__(
        self,
        lease: OpenedShm,
        *,
        handle: CudaIpcHandle,
        data: torch.Tensor,
        events: Sequence[torch.cuda.Event],
    ) -> None:
        """Use ``open``."""
        self.id = handle.id
        self.num_bytes = handle.num_bytes
        self.held_bytes = HEADER_BYTES + handle.num_bytes
        self._lease = lease
        self._events = events
        self._data: torch.Tensor | None = data

    @classmethod
    def open(cls, handle: CudaIpcHandle, *, device: torch.device) -> OpenedCuda:
        """Map a region into this process, after making sure that it is the one meant.

        Args:
            handle: What the sender offers.
            device: The worker's own GPU. The memory may lie on a peer of it.

        Raises:
            RegionError: It cannot be mapped here, or is not what the handle says.
                Nothing is left open.
            UnsupportedError: This torch, or its CUDA, cannot do it.
        """
        if handle.boot_id != HOST.boot_id:
            raise RegionError(
                f"device memory of boot {handle.boot_id[:8]!r} was offered, and this is boot "
                f"{HOST.boot_id[:8]!r}: it is another host, or was started since; CUDA IPC works "
                f"within one host only"
            )
        lease = OpenedShm.open(handle.lease)
        memory: DeviceMemory | None = None
        try:
            with _as_region_errors(f"memory of GPU {handle.device_uuid} on {device}"):
                device = torch.device("cuda", index_of(device))
                memory = DeviceMemory.open_exported(
                    handle.memory,
                    HEADER_BYTES + handle.num_bytes,
                    device=device,
                    hold=lease.hold(),
                )
                data = memory.tensor
                _check_canary(data, handle)
                with torch.cuda.device(device):
                    events = [
                        torch.cuda.Event.from_ipc_handle(device, event) for event in handle.events
                    ]
        except BaseException:
            # By hand: the error that is on its way still refers to it.
            if memory is not None:
                memory.give_up()
            lease.close()
            raise
        return cls(lease, handle=handle, data=data[HEADER_BYTES:], events=events)

    def await_writes(self, slot: int) -> None:
        """Make the current stream wait for what the sender wrote into a slot."""
        if self._data is None or slot >= len(self._events):
            raise RemoteProtocolError(
                f"slot {slot} of region {self.id} was announced; it has {len(self._events)}"
            )
        torch.cuda.current_stream(self._data.device).wait_event(self._events[slot])

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of the region, in place; see ``OpenedRegion``."""
        return view_of(self._data, offset_bytes, num_bytes, region=self.id)

    def owner_is_alive(self) -> bool:
        """Return whether the sender still holds the region's lease."""
        return self._lease.owner_is_alive()

    def close(self) -> None:
        """Let the region go. Idempotent. It stays mapped while somebody keeps a view."""
        if self._data is None:
            return
        self._data = None
        self._events = ()
        self._lease.close()


def create_slots(
    settings: Settings, needed_bytes: int | None, *, device: torch.device
) -> tuple[CudaRegion, int]:
    """Make a region of ``settings.num_slots`` slots, sized by the rule of ``slots``.

    Where the GPU is full, torch's unused memory is given back to it once, and then a
    default size is halved until it can be had.

    Args:
        settings: Slot size, number of slots, directory.
        needed_bytes: Bytes of the whole update with alignment; ``None`` where a stream
            did not say.
        device: The GPU; without an index, the current one.

    Returns:
        The region, and the size of a slot in bytes.

    Raises:
        RegionError: Not even the smallest slots can be had. Nothing is left behind.
    """

    def make(num_bytes: int) -> CudaRegion:
        num_slots, directory = settings.num_slots, settings.dir
        return CudaRegion.create(num_bytes, num_slots=num_slots, device=device, directory=directory)

    return create_shrinking(
        settings, needed_bytes, cut=ON_DEVICE, make=make, on_full=torch.cuda.empty_cache
    )


def _check_canary(memory: torch.Tensor, handle: CudaIpcHandle) -> None:
    found = bytes(memory[:CANARY_BYTES].cpu().tolist())
    if found != handle.lease.canary:
        raise RegionError(
            f"device memory {handle.id} is not the one that was offered: another canary is in it"
        )


@contextmanager
def _as_region_errors(what: str) -> Iterator[None]:
    """Turn whatever torch raises about a device into ``RegionError``."""
    try:
        yield
    except UnsupportedError:
        raise
    except (RuntimeError, ValueError, AssertionError, RegionError) as error:
        # What torch goes on to advise is for those who write kernels.
        reason = str(error).partition("\n")[0]
        found = RegionError(f"{what} cannot be shared: {reason}")
        found.errno = getattr(error, "errno", None)
        raise found from error
