"""After each of these tests everything is as it was: files, descriptors, processes."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
from support import forking
from support.struck_trainer import shorten_patience

from vllm_bucketsync import transfer

SHM = Path("/dev/shm")  # noqa: S108 - where shared memory is left, if it is
# What the directories of tests are called, also those of a test that runs beside us.
PREFIX = "bs-"


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:
    """Started with the first spawned process and kept to the end: not left by a test."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _session_dir() -> Iterator[Path]:
    """Where everything of these tests lies that has no directory of its own.

    Not the default: what another program leaves there is not ours to judge.
    """
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_BUCKETSYNC_DIR", str(path))
        yield path
    _remove(path)


@pytest.fixture(scope="session", autouse=True)
def _fork_server(_resource_tracker: None, _session_dir: Path) -> None:
    """Started with the environment of the session, and kept to the end as well."""
    forking.start()
    # What was imported by now stays: the collections after each test need not look at it.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_left(_fork_server: None, _session_dir: Path) -> Iterator[None]:
    files, fds, children = set(_session_dir.rglob("*")), _fds(), _children()

    yield

    gc.collect()
    assert _children() - children == set()
    assert set(_session_dir.rglob("*")) - files == set()
    assert {fd: target for fd, target in _fds().items() if fd not in fds} == {}


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less than users do for workers that do not answer an abort."""
    for name in ("DRAIN_TIMEOUT_S", "RETURN_TIMEOUT_S"):
        monkeypatch.setattr(transfer, name, getattr(transfer, name))
    shorten_patience()


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
