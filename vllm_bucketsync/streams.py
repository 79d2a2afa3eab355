"""Takes a thread's CUDA stream along to another thread.

Device and stream belong to a thread. Whoever goes on with tensors in another one has to
wait there for what the first one's stream was given to do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def leave_thread() -> Callable[[], None]:
    """Note the calling thread's device and the work of its stream.

    Returns:
        To be called once, first, in the thread that goes on: it selects the device and
        makes that thread's stream wait. Does nothing where CUDA is not in use.
    """
    if not torch.cuda.is_initialized():
        return _nothing
    device = torch.cuda.current_device()
    event = torch.cuda.current_stream().record_event()

    def enter() -> None:
        torch.cuda.set_device(device)
        torch.cuda.current_stream().wait_event(event)

    return enter


def _nothing() -> None:
    """CUDA is not in use."""
