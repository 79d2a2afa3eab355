"""Zero-copy without a GPU: memory of this process stands for the device's.

Workers are threads, so what a trainer exports is mapped by looking at its address. All
else - places, leases, messages, sinks - is real.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from vllm_bucketsync import receiver, route, slots
from vllm_bucketsync.errors import RegionError
from vllm_bucketsync.handles import CudaBlocksHandle
from vllm_bucketsync.messages import Hello
from vllm_bucketsync.transport import cuda_blocks, registry
from vllm_bucketsync.transport.registry import Choice, Wish


class _Mapped:
    """Stands for ``DeviceMemory``."""

    def __init__(self, memory: torch.Tensor, device: Device) -> None:
        self.tensor = memory
        self._device = device

    def give_up(self) -> None:
        self._device.num_given_up += 1


class Device:
    """What can be exported of this process's memory, and what was.

    Attributes:
        hidden: Addresses of storages that cannot be exported.
        generation: What is in an allocation: another one means another handle.
        num_exports: Handles that were taken.
        num_opens: Handles that were opened.
        num_given_up: Of these, the ones that were given up by hand.
        fails_at: The number of the opening that fails.
    """

    def __init__(self) -> None:
        self.hidden: set[int] = set()
        self.generation: dict[int, int] = {}
        self.num_exports = self.num_opens = self.num_given_up = 0
        self.fails_at: int | None = None
        self._sizes: dict[int, int] = {}
        self._create, self._open = registry.create_slots, registry.open_region

    def know(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the storages of tensors allocations of the device."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()

    def allocation_of(self, address: int) -> tuple[int, int]:
        for base, size in self._sizes.items():
            if base <= address < base + size:
                return base, size
        raise RegionError(f"{address:#x} is no memory of the device")

    def export(self, addresses: Sequence[int], *, device: int) -> list[bytes]:
        self.num_exports += len(addresses)
        if self.hidden & set(addresses):
            raise RegionError("cudaIpcGetMemHandle failed with 1: invalid argument")
        return [
            struct.pack("<QQQ40x", one, self._sizes[one], self.generation.get(one, 0))
            for one in addresses
        ]

    def open_exported(self, handle: bytes, num_bytes: int, *, device: torch.device) -> _Mapped:
        self.num_opens += 1
        if self.num_opens == self.fails_at:
            raise RegionError("cudaIpcOpenMemHandle failed with 801: operation not supported")
        address, size, _ = struct.unpack("<QQQ40x", handle)
        assert size == num_bytes
        memory = (ctypes.c_char * num_bytes).from_address(address)
        return _Mapped(torch.frombuffer(memory, dtype=torch.uint8), self)

    def candidates(self, wish: Wish, hellos: list[Hello]) -> list[Choice]:
        plain = [Choice("cuda_ipc", "a GPU"), Choice("shm", "works everywhere")]
        return registry._with_zero_copy(wish, plain)

    def create_slots(self, kind: str, **others: Any) -> Any:
        return self._create("shm", **others)

    def open_region(self, kind: str, handle: Any, *, device: torch.device) -> Any:
        if isinstance(handle, CudaBlocksHandle):
            return cuda_blocks.OpenedBlocks.open(handle, device=device)
        return self._open("shm", handle, device=device)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Let this process's memory be a GPU's, as far as zero-copy sees."""
    made = Device()
    monkeypatch.setattr(route, "candidates", made.candidates)
    monkeypatch.setattr(slots, "create_slots", made.create_slots)
    monkeypatch.setattr(receiver, "open_region", made.open_region)
    monkeypatch.setattr(cuda_blocks, "cuda_runtime", made)
    monkeypatch.setattr(cuda_blocks, "DeviceMemory", made)
    monkeypatch.setattr(cuda_blocks, "_can_be_read_in_place", _is_plain)
    monkeypatch.setattr(cuda_blocks, "index_of", lambda device: 0)
    return made
