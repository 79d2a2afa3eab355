"""Processes that begin with torch and the package imported: in milliseconds, not seconds.

A server of Python's own is started once, with a fresh interpreter, and forks itself for
each process. It never touches a device, so its children may.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from typing import Any

_PRELOADED = [
    "torch",
    "support.fake_engine",
    "support.trainer_process",
    "support.striking",
    "support.small_shm",
]


def start() -> None:
    """Start the server, with the environment and the descriptors of now. Idempotent."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    _Server.has_started = True


def context(*, is_fresh: bool = False) -> Any:
    """Return how to start a process: by the server, where somebody has started it.

    Args:
        is_fresh: It needs an interpreter of its own, for another environment.
    """
    is_forked = _Server.has_started and not is_fresh
    return multiprocessing.get_context("forkserver" if is_forked else "spawn")


class _Server:
    has_started = False
