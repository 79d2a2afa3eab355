"""What opens memory elsewhere, as data: one handle for each way to share it."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_REGIONS = 65_536
MAX_SHORT_CHARS = 256
MAX_TEXT_CHARS = 65_536

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_SHORT_CHARS)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
CudaBytes = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class ShmHandle(msgspec.Struct, frozen=True, tag="shm"):
    """Opens a region of POSIX shared memory in another process of the host.

    Attributes:
        id: Random name of the region, for as long as it lives.
        path: The file, absolute. Gone as soon as every end has opened it.
        num_bytes: Room for data. The file is one header page longer.
        canary: What the header page holds, 32 bytes; proves that it is this region.
    """

    id: ShortText
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    num_bytes: Count
    canary: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class InprocHandle(msgspec.Struct, frozen=True, tag="inproc"):
    """Finds a region of references in this very process.

    Attributes:
        id: Random name of the region, for as long as it lives.
        num_bytes: Room for data, by offsets alone: nothing is allocated.
    """

    id: ShortText
    num_bytes: Count


class CudaIpcHandle(msgspec.Struct, frozen=True, tag="cuda_ipc"):
    """Opens device memory of another process of the host.

    Attributes:
        id: Random name of the region, for as long as it lives.
        lease: A page of shared memory that lives as long as the region. Whoever can open
            it runs as the same user on the same host; its canary is in the device memory
            too.
        boot_id: The boot of the kernel under which the handles mean anything.
        device_uuid: The GPU that has the memory.
        num_bytes: Room for data. The memory is one header page longer.
        memory: ``cudaIpcMemHandle_t``, 64 bytes.
        events: ``cudaIpcEventHandle_t``, 64 bytes, one for each slot: recorded when the
            slot's last byte was written.
    """

    id: ShortText
    lease: ShmHandle
    boot_id: ShortText
    device_uuid: ShortText
    num_bytes: Count
    memory: CudaBytes
    events: Annotated[tuple[CudaBytes, ...], msgspec.Meta(max_length=64)]


class CudaBlock(msgspec.Struct, frozen=True, array_like=True):
    """One allocation of another process.

    Attributes:
        memory: ``cudaIpcMemHandle_t``, 64 bytes.
        num_bytes: Its length.
    """

    memory: CudaBytes
    num_bytes: Count


class CudaBlocksHandle(msgspec.Struct, frozen=True, tag="cuda_blocks"):
    """Opens allocations of the sender's own, one behind the other, to be read in place.

    Attributes:
        id: Random name, made anew when any of them changes.
        lease: As in ``CudaIpcHandle``; nothing is written into the memory itself.
        boot_id: The boot of the kernel under which the handles mean anything.
        blocks: The allocations.
    """

    id: ShortText
    lease: ShmHandle
    boot_id: ShortText
    blocks: Annotated[tuple[CudaBlock, ...], msgspec.Meta(min_length=1, max_length=MAX_REGIONS)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(block.num_bytes for block in self.blocks)


Handle = ShmHandle | InprocHandle | CudaIpcHandle | CudaBlocksHandle
