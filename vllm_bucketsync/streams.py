"""What other CUDA streams were given to do, and has to be done before tensors are read.

Device and stream belong to a thread. Whoever goes on with tensors in another one has to
wait there for what the first one's stream was given to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def wait_for_trainer(devices: Iterable[torch.device]) -> None:
    """Wait for all that this process gave GPUs to do: the new weights are among it.

    Nothing tells which stream a tensor is computed in, and a trainer that has just taken
    its step may have left that to any of them. Once for each push, and before it: an
    update itself never waits for a whole device.

    Args:
        devices: Where the tensors are; nothing means the current GPU, if there is one.
    """
    if not torch.cuda.is_initialized():
        return
    for device in set(devices) or {torch.device("cuda")}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _nothing() -> None:
    """CUDA is not in use."""


def synchronise(device: torch.device) -> None:
    """Wait until the current stream of ``device`` has nothing left to read."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
