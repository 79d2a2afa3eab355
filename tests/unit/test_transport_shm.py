"""Shared memory: what is opened is what was offered, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
import torch
from support import stub_cuda
from support.regions import NUM_BYTES, check_is_refused, check_region, random_bytes

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import ConfigError, LocalProtocolError, RegionError
from vllm_bucketsync.handles import ShmHandle
from vllm_bucketsync.transport.base import HEADER_BYTES
from vllm_bucketsync.transport.shm import OpenedShm, ShmRegion, create_slots

MIB = 1024**2


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_it_does_what_every_region_does(tmp_path: Path) -> None:
    owned = ShmRegion.create(NUM_BYTES, directory=str(tmp_path))

    check_region(owned, OpenedShm.open(owned.handle))

    assert list(tmp_path.iterdir()) == []


def test_the_file_is_ours_alone_and_its_name_cannot_be_guessed(tmp_path: Path) -> None:
    with ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned:
        found = Path(owned.handle.path).stat()

        assert found.st_mode & 0o7777 == 0o600
        assert found.st_size == HEADER_BYTES + NUM_BYTES
        assert len(bytes.fromhex(owned.handle.id)) * 8 >= 64
        assert len(set(owned.handle.canary)) > 8


def test_all_memory_is_reserved_at_creation(tmp_path: Path) -> None:
    with ShmRegion.create(4 * MIB, directory=str(tmp_path)) as owned:
        assert Path(owned.handle.path).stat().st_blocks * 512 >= 4 * MIB


def test_an_unlinked_region_lives_on_but_cannot_be_opened_again(tmp_path: Path) -> None:
    with (
        ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned,
        OpenedShm.open(owned.handle) as opened,
    ):
        owned.unlink()
        owned.write(0, random_bytes(100, seed=0))

        assert opened.view(0, 100).equal(random_bytes(100, seed=0))
        check_is_refused(OpenedShm, owned.handle)


def test_closed_regions_leave_no_descriptor_open(tmp_path: Path) -> None:
    before = num_fds()
    for _ in range(50):
        with (
            ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned,
            OpenedShm.open(owned.handle),
        ):
            pass

    assert num_fds() == before


def test_what_differs_from_the_handle_is_refused(tmp_path: Path) -> None:
    before = num_fds()
    with ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned:
        link, copy = tmp_path / "link.seg", tmp_path / "copy.seg"
        link.symlink_to(owned.handle.path)
        copy.write_bytes(b"x" * (HEADER_BYTES + NUM_BYTES))
        os.mkfifo(tmp_path / "pipe.seg")

        for wrong in (
            {"canary": bytes(32)},
            {"num_bytes": NUM_BYTES - 256},
            {"num_bytes": NUM_BYTES + 256},
            {"num_bytes": 1 << 62},
            {"path": str(link)},
            {"path": str(copy)},
            {"path": str(tmp_path)},
            {"path": str(tmp_path / "pipe.seg")},
            {"path": str(tmp_path / "missing.seg")},
            {"path": "/proc/self/mem"},
            {"path": "with\0zero"},
        ):
            check_is_refused(OpenedShm, msgspec.structs.replace(owned.handle, **wrong))

    assert num_fds() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned:
        os.chown(owned.handle.path, 12345, 12345)

        with pytest.raises(RegionError, match="uid 12345"):
            OpenedShm.open(owned.handle)


@pytest.mark.parametrize("size", [0, -1, -(1 << 40)])
def test_a_region_without_room_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        ShmRegion.create(size, directory=str(tmp_path))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1 << 62, 1 << 70])
def test_a_region_that_no_machine_has_is_refused_and_leaves_nothing(
    tmp_path: Path, size: int
) -> None:
    with pytest.raises(RegionError, match=r"bytes are free.*slot_size.*VLLM_BUCKETSYNC_DIR"):
        ShmRegion.create(size, directory=str(tmp_path))

    assert list((tmp_path / f"vllm_bucketsync-{os.geteuid()}").iterdir()) == []


def test_a_missing_directory_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.*VLLM_BUCKETSYNC_DIR"):
        ShmRegion.create(NUM_BYTES, directory=str(tmp_path / "missing"))


def fill_up(monkeypatch: pytest.MonkeyPatch, *, free_bytes: int, number: int) -> list[int]:
    """Let reserving more than ``free_bytes`` fail; return the list of what was tried."""
    tried: list[int] = []
    fallocate = os.posix_fallocate

    def limited(fd: int, offset: int, length: int) -> None:
        tried.append(length - HEADER_BYTES)
        if length > free_bytes:
            raise OSError(number, os.strerror(number))
        fallocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    return tried


def test_default_slots_are_halved_until_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = fill_up(monkeypatch, free_bytes=10 * MIB, number=errno.ENOSPC)
    settings = Settings(dir=str(tmp_path), num_slots=2)

    region, slot_size_bytes = create_slots(settings, 24 * MIB)

    with region:
        assert slot_size_bytes == 4 * MIB
        assert region.num_bytes == 8 * MIB
        assert tried == [32 * MIB, 16 * MIB, 8 * MIB]
        assert len(list(Path(region.handle.path).parent.iterdir())) == 1


def test_halving_ends_at_one_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fill_up(monkeypatch, free_bytes=MIB, number=errno.ENOSPC)

    with pytest.raises(RegionError, match="No space left"):
        create_slots(Settings(dir=str(tmp_path), num_slots=2), 5 * MIB)

    assert tried[-1] == 2 * MIB


@pytest.mark.parametrize(("slot_size", "number"), [("64MiB", errno.ENOSPC), (None, errno.EIO)])
def test_a_size_that_was_asked_for_and_other_errors_are_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot_size: str | None, number: int
) -> None:
    tried = fill_up(monkeypatch, free_bytes=MIB, number=number)

    with pytest.raises(RegionError) as caught:
        create_slots(Settings(dir=str(tmp_path), slot_size=slot_size), 256 * MIB)

    assert caught.value.errno == number
    assert len(tried) == 1


def test_handles_survive_the_wire(tmp_path: Path) -> None:
    with ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned:
        wire = msgspec.msgpack.encode(owned.handle)
        handle = msgspec.msgpack.decode(wire, type=ShmHandle)

        with OpenedShm.open(handle) as opened:
            assert opened.id == owned.handle.id


def test_its_owner_sees_who_holds_it_and_who_has_let_go(tmp_path: Path) -> None:
    with ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned:
        opened = OpenedShm.open(owned.handle)
        watch = owned.watch()
        assert not watch.is_held()
        hold = opened.hold()

        assert watch.is_held()
        opened.close()
        # As long as the memory that it stands for is mapped.
        assert watch.is_held()
        hold.close()
        assert not watch.is_held()
        watch.close()


def test_a_hold_outlives_the_owner_and_does_not_keep_it_alive(tmp_path: Path) -> None:
    owned = ShmRegion.create(NUM_BYTES, directory=str(tmp_path))
    with OpenedShm.open(owned.handle) as opened:
        watch, hold = owned.watch(), opened.hold()
        owned.close()

        assert not opened.owner_is_alive()
        assert watch.is_held()
        hold.close()
        watch.close()


def test_a_closed_region_is_neither_held_nor_watched(tmp_path: Path) -> None:
    owned = ShmRegion.create(NUM_BYTES, directory=str(tmp_path))
    opened = OpenedShm.open(owned.handle)
    opened.close()
    owned.close()

    with pytest.raises(LocalProtocolError, match="held after it was closed"):
        opened.hold()
    with pytest.raises(LocalProtocolError, match="watched after its end"):
        owned.watch()


def test_a_file_system_without_such_locks_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> object:
        raise OSError(errno.ENOLCK, "no locks")

    with (
        ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned,
        OpenedShm.open(owned.handle) as opened,
    ):
        before = num_fds()
        monkeypatch.setattr("vllm_bucketsync.rundir.fcntl.fcntl", refuse)
        with pytest.raises(RegionError, match=r"cannot be held: .*no locks"):
            opened.hold()
        assert num_fds() == before


def test_a_worker_on_a_gpu_pins_what_it_opens_until_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = stub_cuda.install(monkeypatch)
    with ShmRegion.create(NUM_BYTES, directory=str(tmp_path)) as owned:
        opened = OpenedShm.open(owned.handle, device=torch.device("cuda", 3))
        ((address, num_bytes, _),) = cuda.named("cudaHostRegister")
        assert (address, num_bytes) == (opened.view(0, 1).data_ptr(), NUM_BYTES)
        opened.close()
        opened.close()

        assert cuda.named("cudaHostUnregister") == [(address,)]
        # Nothing is pinned for a worker on the CPU, nor before a GPU writes.
        OpenedShm.open(owned.handle).close()
        owned.write(0, random_bytes(100, seed=0))
        owned.flush(0)
    assert len(cuda.calls) == 2
