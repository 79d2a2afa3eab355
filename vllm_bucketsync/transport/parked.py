"""Exported device memory whose owner is done with it: freed when no worker has it mapped.

CUDA leaves undefined what happens to memory that is freed before whoever opened it has
closed it. A worker closes it with its next update, or when it is asked to; until then it
waits here. What is left at the end of the process goes with it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from ..errors import BucketSyncError
from ..rundir import Watch
from . import cuda_runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parked:
    watch: Watch
    address: int
    device: int
    num_bytes: int


_parked: list[_Parked] = []
# Memory is parked wherever its last view dies, also by the garbage collector.
_lock = threading.RLock()


def park(watch: Watch, address: int, device: int, num_bytes: int) -> None:
    """Take memory over, to be freed by ``free_unused``."""
    with _lock:
        _parked.append(_Parked(watch, address, device, num_bytes))


def free_unused() -> int:
    """Free what nobody has mapped any more. Never raises, never waits for a worker.

    Returns:
        Bytes that still wait.
    """
    with _lock:
        unused = [one for one in _parked if not one.watch.is_held()]
        # One by one: the garbage collector may park more meanwhile.
        for one in unused:
            _parked.remove(one)
    for one in unused:
        one.watch.close()
        try:
            cuda_runtime.free(one.address, device=one.device)
        except BucketSyncError as error:
            logger.warning("%d bytes of device memory were not freed: %s", one.num_bytes, error)
    return sum(one.num_bytes for one in _parked)
