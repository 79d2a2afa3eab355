"""Counts how often a worker's weights were thrown away by a sleep.

A level-2 sleep keeps the addresses of the weights and drops their contents, so nothing
that is found by looking at the model tells of it. The worker's ``sleep`` is wrapped on
the instance, at our first RPC: no plan is older than that.
"""

from __future__ import annotations

from typing import Any

_COUNT = "_bucketsync_num_deep_sleeps"


def watch(worker: Any) -> None:
    """Count from now on. Idempotent; a worker that cannot sleep is left alone."""
    if _COUNT in vars(worker):
        return
    setattr(worker, _COUNT, 0)
    sleep = getattr(worker, "sleep", None)
    if sleep is None:
        return

    def counted(*args: Any, **kwargs: Any) -> Any:
        level = args[0] if args else kwargs.get("level", 1)
        # Also one that fails half-way, and one of a level that is not known here.
        if level != 1:
            setattr(worker, _COUNT, num_deep_sleeps(worker) + 1)
        return sleep(*args, **kwargs)

    worker.sleep = counted


def num_deep_sleeps(worker: Any) -> int:
    """Return how many sleeps since ``watch`` may have dropped the weights."""
    return int(vars(worker).get(_COUNT, 0))
