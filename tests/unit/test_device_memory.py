"""Device memory goes with its last reference, or by hand, and exactly once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import stub_cuda
from support.stub_cuda import StubRuntime

from vllm_bucketsync.errors import RegionError
from vllm_bucketsync.transport import parked
from vllm_bucketsync.transport.device_memory import DeviceMemory
from vllm_bucketsync.transport.shm import OpenedShm, ShmRegion

GPU = torch.device("cuda", 3)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StubRuntime:
    return stub_cuda.install(monkeypatch)


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[ShmRegion]:
    with ShmRegion.create(256, directory=str(tmp_path)) as made:
        yield made


@pytest.fixture
def opened(lease: ShmRegion) -> Iterator[OpenedShm]:
    with OpenedShm.open(lease.handle) as made:
        yield made


def test_allocated_memory_is_parked_with_its_last_reference(
    cuda: StubRuntime, lease: ShmRegion
) -> None:
    memory = DeviceMemory.allocate(512, device=GPU, watch=lease.watch())
    assert memory.export() == b"h" * 64
    assert cuda.calls == [("cudaMalloc", 512), ("cudaIpcGetMemHandle", 0x2000)]
    assert parked.free_unused() == 0
    assert cuda.named("cudaFree") == []

    del memory
    gc.collect()

    assert parked.free_unused() == 0
    assert cuda.named("cudaFree") == [(0x2000,)]
    assert set(cuda.devices) == {3}


def test_memory_is_given_up_by_hand_once_whoever_refers_to_it(
    cuda: StubRuntime, lease: ShmRegion
) -> None:
    memory = DeviceMemory.allocate(512, device=GPU, watch=lease.watch())

    memory.give_up()
    memory.give_up()
    parked.free_unused()
    del memory
    gc.collect()
    parked.free_unused()

    assert cuda.named("cudaFree") == [(0x2000,)]


def test_memory_that_cannot_be_allocated_leaves_no_watch(
    cuda: StubRuntime, lease: ShmRegion
) -> None:
    cuda.codes["cudaMalloc"] = 2
    watch = lease.watch()

    with pytest.raises(RegionError, match="out of memory"):
        DeviceMemory.allocate(512, device=GPU, watch=watch)

    with pytest.raises(ValueError, match="closed"):
        watch.is_held()
    assert cuda.named("cudaFree") == []


def test_mapped_memory_holds_its_lease_until_it_is_unmapped(
    cuda: StubRuntime, lease: ShmRegion, opened: OpenedShm
) -> None:
    watch = lease.watch()
    memory = DeviceMemory.open_exported(b"e" * 64, 512, device=GPU, hold=opened.hold())
    opened.close()
    assert cuda.calls == [("cudaIpcOpenMemHandle", b"e" * 64, 1)]
    assert watch.is_held()

    del memory
    gc.collect()

    assert cuda.named("cudaIpcCloseMemHandle") == [(0x9000,)]
    assert set(cuda.devices) == {3}
    assert not watch.is_held()
    watch.close()


@pytest.mark.parametrize("code", [1, 217, 801])
def test_memory_that_cannot_be_mapped_is_not_held(
    cuda: StubRuntime, lease: ShmRegion, opened: OpenedShm, code: int
) -> None:
    cuda.codes["cudaIpcOpenMemHandle"] = code
    watch = lease.watch()

    with pytest.raises(RegionError, match=f"failed with {code}"):
        DeviceMemory.open_exported(b"e" * 64, 512, device=GPU, hold=opened.hold())

    opened.close()
    assert not watch.is_held()
    assert cuda.named("cudaIpcCloseMemHandle") == []
    watch.close()


def test_memory_that_cannot_be_unmapped_is_let_go_all_the_same(
    cuda: StubRuntime, lease: ShmRegion, opened: OpenedShm
) -> None:
    cuda.codes["cudaIpcCloseMemHandle"] = 1
    watch = lease.watch()
    memory = DeviceMemory.open_exported(b"e" * 64, 512, device=GPU, hold=opened.hold())
    opened.close()

    memory.give_up()

    assert not watch.is_held()
    watch.close()


@pytest.mark.parametrize(
    ("allocation", "code"), [((0x8000, 0x1000 + 511), 0), ((0x9000, 511), 0), ((0, 1 << 60), 1)]
)
def test_memory_that_is_shorter_than_was_offered_is_not_taken(
    cuda: StubRuntime, lease: ShmRegion, opened: OpenedShm, allocation: tuple[int, int], code: int
) -> None:
    cuda.driver.allocation, cuda.driver.code = allocation, code
    watch = lease.watch()

    with pytest.raises(RegionError):
        DeviceMemory.open_exported(b"e" * 64, 512, device=GPU, hold=opened.hold())

    opened.close()
    assert cuda.named("cudaIpcCloseMemHandle") == [(0x9000,)]
    assert not watch.is_held()
    watch.close()
