"""A process whose ``/dev/shm`` is a file system of its own, as small as a container's.

What would be SIGBUS or SIGSEGV there is an exit status here.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forking
from support.thread_engine import ThreadEngine

from vllm_bucketsync.errors import ConfigError, RegionError, TransportError
from vllm_bucketsync.sync import WeightSync

PATIENCE_S = 50
MIB = 1 << 20
SHM = Path("/dev/shm")  # noqa: S108 - of the process alone
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def weights(num_mib: int, fill: int) -> dict[str, torch.Tensor]:
    """Return so many tensors of one MiB each."""
    return {f"w{i}": torch.full((MIB,), fill, dtype=torch.uint8) for i in range(num_mib)}


def free() -> int:
    """Return the bytes that are left."""
    found = os.statvfs(SHM)
    return found.f_bavail * found.f_frsize


def fill_up() -> None:
    """Take every byte that is left, as another program would."""
    with (SHM / "others").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free())


def check(engine: ThreadEngine, model: dict[str, torch.Tensor]) -> None:
    """See that the last update has brought a model."""
    sink = engine.sinks[-1]
    assert all(sink.tensors[name].equal(data) for name, data in model.items())


def refused(sync: WeightSync, model: Any, kind: Any, *texts: str) -> str:
    """See that a push is refused, and return what it says."""
    with pytest.raises(kind) as caught:
        sync.push(model, version="refused")
    text = str(caught.value)
    assert all(one in text for one in texts), text
    assert caught.value.engine_state in {None, "unchanged"}, caught.value.engine_state
    return text


@contextmanager
def limited(limit: int, size: int) -> Iterator[None]:
    """Lower a limit of this process for a while."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def _mount(options: str) -> str:
    """Mount it, and return why that cannot be done, if so."""
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_CLONE_NEWNS, _CLONE_NEWNS | _CLONE_NEWUSER):
        uid = os.getuid()
        if libc.unshare(flags) == 0:
            if flags & _CLONE_NEWUSER:
                Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
            libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
            if libc.mount(b"tmpfs", str(SHM).encode(), b"tmpfs", 0, options.encode()) == 0:
                return ""
    return os.strerror(ctypes.get_errno())


def _enter(pipe: Connection, options: str, code: str) -> None:
    del os.environ["VLLM_BUCKETSYNC_DIR"]
    torch.set_num_threads(1)
    reason = _mount(options)
    if reason:
        pipe.send(("cannot", reason))
        return
    engine = ThreadEngine()
    names = globals() | {"engine": engine, "errno": errno}
    names |= {"ConfigError": ConfigError, "RegionError": RegionError}
    names |= {"TransportError": TransportError, "resource": resource}
    try:
        exec(compile(code, "<in a small /dev/shm>", "exec"), names)  # noqa: S102 - a test's own
        engine.close()
        gc.collect()
        left = [path for path in SHM.rglob("*") if path.name != "others"]
        assert left == [], left
    # The test shows it, whatever it is.
    except BaseException:  # noqa: BLE001
        pipe.send(("failed", traceback.format_exc()))
    else:
        pipe.send(("done", ""))


def run(code: str, *, options: str = "size=16m") -> None:
    """Run a program where ``/dev/shm`` is small; skip where that cannot be arranged."""
    context = forking.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_enter, args=(theirs, options, code), daemon=True)
    process.start()
    theirs.close()
    try:
        said = ours.recv() if ours.poll(PATIENCE_S) else ("silent", "")
    except EOFError:
        said = ("ended", "")
    ours.close()
    process.join(5)
    status = process.exitcode
    process.kill()
    process.join(5)
    process.close()
    if said[0] == "cannot":
        pytest.skip(f"this machine allows no mount of one's own: {said[1]}")
    assert (said, status) == (("done", ""), 0), said[1]
