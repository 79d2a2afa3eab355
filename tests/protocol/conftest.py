"""After each of these tests everything is as it was: files, descriptors, processes."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

SHM = Path("/dev/shm")  # noqa: S108 - where shared memory is left, if it is
# What the directories of tests are called, also those of a test that runs beside us.
PREFIX = "bs-"


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:
    """Started with the first spawned process and kept to the end: not left by a test."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def _nothing_is_left(_resource_tracker: None) -> Iterator[None]:
    files, fds, children = _files(), _fds(), _children()

    yield

    gc.collect()
    assert _children() == children
    # What another program made meanwhile is not ours to judge: ask twice, and who is there.
    if _files() - files and not _others_use_shm():
        assert _files() - files == set()
    left = {fd: target for fd, target in _fds().items() if fd not in fds}
    assert left == {}


@pytest.fixture
def shm_dir(_nothing_is_left: None) -> Iterator[str]:
    """A directory of the test's own, short and in memory; it has to end up empty."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
    try:
        yield str(path)
        assert list(path.rglob("*")) == []
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    for item in sorted(path.rglob("*"), reverse=True):
        item.rmdir() if item.is_dir() and not item.is_symlink() else item.unlink()
    path.rmdir()


def _files() -> set[str]:
    return {
        path.name for path in SHM.iterdir() if path.name.startswith(("vllm_bucketsync", "torch_"))
    }


def _others_use_shm() -> bool:
    ours = {os.getpid(), *_children()}
    for process in psutil.process_iter():
        maps = Path(f"/proc/{process.pid}/maps")
        with contextlib.suppress(OSError):
            if process.pid not in ours and str(SHM) in maps.read_text():
                return True
    return False


def _fds() -> dict[int, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[int(link.name)] = str(link.readlink())
        except FileNotFoundError:
            continue  # the one that listed them
    return found


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
