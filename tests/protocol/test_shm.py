"""Shared memory between real processes, any of which may die at any moment."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.processes import PATIENCE_S, Child
from support.regions import random_bytes

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import RegionError
from vllm_bucketsync.handles import ShmHandle
from vllm_bucketsync.rundir import remove_stale
from vllm_bucketsync.transport.shm import OpenedShm, ShmRegion, create_slots

MIB = 1024**2
NUM_BYTES = 4 * MIB

OPENER = """
import hashlib, os, sys
import msgspec
from vllm_bucketsync.handles import ShmHandle
from vllm_bucketsync.transport.shm import OpenedShm

opened = OpenedShm.open(msgspec.json.decode(sys.argv[1], type=ShmHandle))

def digest(view):
    return hashlib.sha256(view.numpy().tobytes()).hexdigest()
"""
CREATOR = """
import sys
import msgspec
import torch
from vllm_bucketsync.transport.shm import ShmRegion

region = ShmRegion.create(int(sys.argv[2]), directory=sys.argv[1])
region.write(0, torch.full((region.num_bytes,), 7, dtype=torch.uint8))
print(msgspec.json.encode(region.handle).decode(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def region(shm_dir: str) -> Iterator[ShmRegion]:
    with ShmRegion.create(NUM_BYTES, directory=shm_dir) as found:
        yield found


def open_elsewhere(region: ShmRegion, code: str) -> Child:
    return Child(OPENER + code, msgspec.json.encode(region.handle).decode())


def test_every_byte_arrives_and_later_writes_are_seen(region: ShmRegion) -> None:
    code = """
for line in sys.stdin:
    print(digest(opened.view(0, opened.num_bytes)), flush=True)
"""
    with open_elsewhere(region, code) as child:
        for seed in range(3):
            data = random_bytes(NUM_BYTES, seed=seed)
            region.write(0, data)
            child.tell("look")

            assert child.line() == hashlib.sha256(data.numpy().tobytes()).hexdigest()


def test_a_receiver_that_ends_or_is_killed_leaves_the_region_to_its_owner(
    region: ShmRegion,
) -> None:
    path = Path(region.handle.path)
    with open_elsewhere(region, "kept = opened.view(0, 1000)") as child:
        assert child.end() == (0, "")  # without closing, and without a warning
    with open_elsewhere(region, "print('open', flush=True)\nsys.stdin.readline()") as child:
        assert child.line() == "open"
        child.kill()
        child.end()

    assert path.exists()
    OpenedShm.open(region.handle).close()


def test_a_killed_owner_is_noticed_and_its_bytes_stay_readable(shm_dir: str) -> None:
    with Child(CREATOR, shm_dir, str(NUM_BYTES)) as child:
        handle = msgspec.json.decode(child.line(), type=ShmHandle)
        with OpenedShm.open(handle) as opened:
            assert opened.owner_is_alive()
            child.kill()
            child.end()

            assert not opened.owner_is_alive()
            assert opened.view(0, NUM_BYTES).eq(7).all()

    path = Path(handle.path)
    assert remove_stale(shm_dir) == []  # too young to be sure
    os.utime(path, (time.time() - 60,) * 2)
    assert remove_stale(shm_dir) == [str(path)]


def test_a_living_owner_s_segment_is_never_stale(shm_dir: str) -> None:
    with Child(CREATOR, shm_dir, str(NUM_BYTES)) as child:
        path = Path(msgspec.json.decode(child.line(), type=ShmHandle).path)
        os.utime(path, (time.time() - 60,) * 2)
        child.stop()

        assert remove_stale(shm_dir) == []

        child.resume()
        child.tell("end")
        assert child.end() == (0, "")  # without closing, and without a warning
    assert remove_stale(shm_dir) == [str(path)]


def test_a_view_that_was_kept_too_long_can_be_read_to_the_end_of_the_process(
    region: ShmRegion,
) -> None:
    data = random_bytes(NUM_BYTES, seed=3)
    region.write(0, data)
    code = """
import gc
kept = opened.view(256, 1000)
opened.close()
del opened
gc.collect()
print(digest(kept), flush=True)
sys.stdin.readline()
print(digest(kept), flush=True)
"""
    with open_elsewhere(region, code) as child:
        expected = hashlib.sha256(data[256:1256].numpy().tobytes()).hexdigest()
        assert child.line() == expected
        region.close()
        child.tell("again")

        assert child.line() == expected
        assert child.end() == (0, "")


def test_an_owner_that_closes_while_its_tensor_is_kept_is_known_to_be_gone(
    region: ShmRegion,
) -> None:
    with OpenedShm.open(region.handle) as opened:
        kept = region._data
        region.close()

        assert kept is not None
        assert not opened.owner_is_alive()


def test_the_memory_is_given_back_when_the_last_view_dies(region: ShmRegion) -> None:
    code = """
def mapped():
    with open("/proc/self/maps") as maps:
        return ".seg" in maps.read()

kept = opened.view(0, 10)
opened.close()
assert mapped()
del kept
assert not mapped()
"""
    with open_elsewhere(region, code) as child:
        assert child.end() == (0, "")


@pytest.fixture
def small_dir(shm_dir: str) -> Iterator[str]:
    """A file system of 16 MiB, as Docker's 64 MiB are to large models."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", shm_dir]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        yield shm_dir
        left = [path for path in Path(shm_dir).rglob("*") if path.is_file()]
        assert left == []
    finally:
        # Lazily: what a failed test still maps must not keep the directory.
        subprocess.run(["umount", "--lazy", shm_dir], check=True, timeout=PATIENCE_S)


def test_a_full_file_system_is_an_error_with_advice_before_anything_is_sent(
    small_dir: str,
) -> None:
    settings = Settings(dir=small_dir, slot_size="32MiB", num_slots=2)

    with pytest.raises(RegionError) as caught:
        create_slots(settings, None)

    text = str(caught.value)
    assert str(64 * MIB + 4096) in text
    for part in ("bytes are free", small_dir, "slot_size", "num_slots", "--shm-size"):
        assert part in text


def test_default_slots_shrink_to_what_a_small_file_system_has(small_dir: str) -> None:
    region, slot_size_bytes = create_slots(Settings(dir=small_dir, num_slots=2), 1 << 40)
    with region:
        assert slot_size_bytes == 4 * MIB
        data = random_bytes(region.num_bytes, seed=0)
        region.write(0, data)
        with OpenedShm.open(region.handle) as opened:
            assert opened.view(0, region.num_bytes).equal(data)


def test_the_second_region_waits_for_the_room_of_the_first(small_dir: str) -> None:
    first, _ = create_slots(Settings(dir=small_dir, slot_size="6MiB"), None)
    with first, pytest.raises(RegionError):
        create_slots(Settings(dir=small_dir, slot_size="6MiB"), None)

    second, _ = create_slots(Settings(dir=small_dir, slot_size="6MiB"), None)
    second.close()
