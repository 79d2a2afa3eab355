"""Exported memory is freed when nobody has it mapped, by whatever way that comes about."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import stub_cuda
from support.stub_cuda import StubRuntime

from vllm_bucketsync.rundir import Watch
from vllm_bucketsync.transport import parked, registry
from vllm_bucketsync.transport.shm import OpenedShm, ShmRegion


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubRuntime]:
    yield stub_cuda.install(monkeypatch)
    assert parked._parked == []


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Lease:
    """The file of a region, as its owner and its workers have it open."""

    def __init__(self, directory: Path) -> None:
        self.owned = ShmRegion.create(256, directory=str(directory))
        self._opened = [OpenedShm.open(self.owned.handle) for _ in range(2)]
        self._holds: list[Watch] = []

    def map(self) -> None:
        """Have both workers map the memory that it stands for."""
        self._holds = [opened.hold() for opened in self._opened]

    def unmap(self, worker: int) -> None:
        self._opened[worker].close()
        self._holds[worker].close()

    def close(self) -> None:
        self.owned.close()
        for opened in self._opened:
            opened.close()
        for hold in self._holds:
            hold.close()


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    made = Lease(tmp_path)
    yield made
    made.close()


def test_with_nothing_parked_the_device_is_not_touched(cuda: StubRuntime) -> None:
    assert parked.free_unused() == registry.reclaim() == 0
    assert cuda.calls == []


def test_memory_that_nobody_mapped_is_freed_on_its_own_device(
    cuda: StubRuntime, lease: Lease
) -> None:
    parked.park(lease.owned.watch(), 0x40, 3, 512)
    assert cuda.calls == []

    assert parked.free_unused() == 0
    assert (cuda.calls, cuda.devices) == ([("cudaFree", 0x40)], [3])
    # Once.
    assert parked.free_unused() == 0
    assert len(cuda.calls) == 1


def test_memory_waits_for_the_last_worker_also_after_its_owner_has_closed(
    cuda: StubRuntime, lease: Lease
) -> None:
    lease.map()
    parked.park(lease.owned.watch(), 0x40, 3, 512)
    lease.owned.close()

    assert registry.reclaim() == 512
    lease.unmap(0)
    assert registry.reclaim() == 512
    assert cuda.calls == []
    lease.unmap(1)
    assert registry.reclaim() == 0
    assert cuda.named("cudaFree") == [(0x40,)]


def test_what_waits_does_not_hold_up_what_does_not(
    cuda: StubRuntime, lease: Lease, tmp_path: Path
) -> None:
    lease.map()
    parked.park(lease.owned.watch(), 0x40, 3, 512)
    with ShmRegion.create(256, directory=str(tmp_path)) as other:
        parked.park(other.watch(), 0x80, 4, 1024)

        assert parked.free_unused() == 512
    assert cuda.named("cudaFree") == [(0x80,)]
    lease.unmap(0)
    lease.unmap(1)
    assert parked.free_unused() == 0


def test_what_is_parked_meanwhile_is_not_lost(
    cuda: StubRuntime, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked.park(lease.owned.watch(), 0x40, 3, 512)
    free = cuda.cudaFree

    def parking_free(address: int) -> tuple[int]:
        if address == 0x40:
            parked.park(lease.owned.watch(), 0x80, 4, 1024)
        return free(address)

    monkeypatch.setattr(cuda, "cudaFree", parking_free)
    looked: list[Watch] = []
    is_held = Watch.is_held

    def parking_look(watch: Watch) -> bool:
        if not looked:
            looked.append(watch)
            parked.park(lease.owned.watch(), 0xC0, 5, 2048)
        return is_held(watch)

    monkeypatch.setattr(Watch, "is_held", parking_look)

    num_bytes = parked.free_unused()

    assert num_bytes >= 1024
    assert parked.free_unused() == 0
    assert sorted(cuda.named("cudaFree")) == [(0x40,), (0x80,), (0xC0,)]


def test_memory_that_cannot_be_freed_is_only_told(
    cuda: StubRuntime, lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.codes["cudaFree"] = 1
    for number in range(2):
        parked.park(lease.owned.watch(), number, 3, 512)

    assert parked.free_unused() == 0
    assert len(cuda.named("cudaFree")) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "512 bytes of device memory were not freed" in caplog.records[0].getMessage()
    assert cuda.last_error == 0


def test_what_was_freed_leaves_no_descriptor_open(cuda: StubRuntime, lease: Lease) -> None:
    fds = num_fds()
    for number in range(20):
        parked.park(lease.owned.watch(), number, 3, 512)
    assert num_fds() == fds + 20

    parked.free_unused()

    assert num_fds() == fds
    assert len(cuda.named("cudaFree")) == 20
