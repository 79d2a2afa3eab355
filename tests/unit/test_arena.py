"""Room for a staged update is found where it may be had, or refused with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_bucketsync.errors import RegionError, StagingError
from vllm_bucketsync.transport import arena
from vllm_bucketsync.transport.arena import DEVICE_MARGIN_BYTES, HOST_MARGIN_BYTES, Arena
from vllm_bucketsync.transport.device_memory import DeviceMemory
from vllm_bucketsync.transport.pinned import Pin

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeGpu:
    """Stands for a GPU: how much is free on it, and what was pinned and allocated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = DEVICE_MARGIN_BYTES + 1000
        self.host_bytes = HOST_MARGIN_BYTES + 10_000
        self.is_full = False
        self.can_pin = True
        self.allocated: list[int] = []
        self.pins: list[str] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes, 1 << 40))
        monkeypatch.setattr(arena, "available_bytes", lambda: self.host_bytes)
        monkeypatch.setattr(DeviceMemory, "private", self._private)
        monkeypatch.setattr(Pin, "of", self._pin)

    def _private(self, num_bytes: int, *, device: torch.device) -> Any:
        if self.is_full:
            raise RegionError("cudaMalloc failed with 2: out of memory")
        assert device == GPU
        self.allocated.append(num_bytes)
        # The memory of a test: on the host, as there is no GPU.
        return type("Memory", (), {"tensor": torch.zeros(num_bytes, dtype=torch.uint8)})

    def _pin(self, data: torch.Tensor, *, device: torch.device) -> Any:
        self.pins.append("pinned")
        gpu = self

        class Pinned:
            is_pinned = self.can_pin

            def undo(self) -> None:
                gpu.pins.append("undone")

        return Pinned()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def allocate(num_bytes: int, *, device: torch.device = GPU, num_sharers: int = 1) -> Arena:
    return Arena.allocate(num_bytes, device=device, num_sharers=num_sharers)


@pytest.mark.parametrize("num_bytes", [0, 1, 1000])
def test_a_gpu_with_room_behind_the_margin_is_staged_on(gpu: FakeGpu, num_bytes: int) -> None:
    made = allocate(num_bytes)

    assert (made.place, made.data.numel()) == ("cuda:0", num_bytes)
    assert gpu.allocated == [max(num_bytes, 1)]
    made.close()
    made.close()
    assert made.data.numel() == 0
    assert gpu.pins == []


@pytest.mark.parametrize(
    ("num_bytes", "is_full", "can_pin", "place"),
    [
        (1001, False, True, "pinned host memory"),
        (1000, True, True, "pinned host memory"),
        (1001, False, False, "host memory"),
    ],
    ids=["larger than what is free", "full all the same", "cannot be pinned"],
)
def test_what_the_gpu_has_no_room_for_is_staged_on_the_host_and_unpinned_in_the_end(
    gpu: FakeGpu, num_bytes: int, is_full: bool, can_pin: bool, place: str
) -> None:
    gpu.is_full, gpu.can_pin = is_full, can_pin

    made = allocate(num_bytes)

    assert (made.place, made.data.numel(), made.data.device) == (place, num_bytes, CPU)
    made.close()
    made.close()
    assert gpu.pins == ["pinned", "undone"]


def test_a_cpu_is_staged_on_itself_without_a_pin(gpu: FakeGpu) -> None:
    made = allocate(10_000, device=CPU)

    assert (made.place, made.data.numel()) == ("host memory", 10_000)
    made.close()
    assert (gpu.allocated, gpu.pins) == ([], [])


@pytest.mark.parametrize(("num_sharers", "num_bytes"), [(1, 10_001), (2, 5001), (8, 1251)])
def test_no_room_anywhere_says_what_is_needed_free_and_left_alone(
    gpu: FakeGpu, num_sharers: int, num_bytes: int
) -> None:
    allocate(num_bytes - 1, num_sharers=num_sharers).close()

    with pytest.raises(StagingError) as caught:
        allocate(num_bytes, num_sharers=num_sharers)

    error = caught.value
    assert (error.needed_bytes, error.device_bytes) == (num_bytes, 1000)
    assert error.host_bytes == 10_000 // num_sharers
    for word in (f"needs {num_bytes} bytes", "1000 are free on cuda:0", "smaller KV cache"):
        assert word in str(error)


def test_memory_that_seems_free_and_cannot_be_had_is_no_room_either(gpu: FakeGpu) -> None:
    gpu.host_bytes = 1 << 62

    with pytest.raises(StagingError, match="cannot have them, though") as caught:
        allocate(1 << 61, device=CPU)

    assert caught.value.needed_bytes == 1 << 61


def test_a_device_of_another_kind_stages_on_the_host(gpu: FakeGpu) -> None:
    assert allocate(8, device=torch.device("meta")).place == "host memory"


def test_less_than_the_margin_is_nothing(gpu: FakeGpu) -> None:
    gpu.free_bytes, gpu.host_bytes = 5, 5

    with pytest.raises(StagingError) as caught:
        allocate(1)
    assert (caught.value.device_bytes, caught.value.host_bytes) == (0, 0)
