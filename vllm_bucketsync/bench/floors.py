"""Plain copies of as many bytes: what no way to move them can beat.

Each makes and touches its memory once, and then only copies. On a GPU its time ends when
the copies have.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

# Far more than any cache, and far less than the largest models.
DEVICE_PIECE_BYTES = 2 * 1024**3
HOST_PIECE_BYTES = 1024**3
_CPU = torch.device("cpu")
# Never zeros.
_FILL = 0x5A


class Memcpys:
    """Every tensor to its place in a buffer, and from there to a second one, on the CPU."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make two buffers, each as large as all tensors."""
        # Cut beforehand, so that nothing but the copies is measured.
        self._sources = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        sizes = [source.numel() for source in self._sources]
        self._first, self._second = (_filled(sum(sizes), _CPU).split(sizes) for _ in range(2))

    def run(self) -> float:
        """Copy everything twice, and return the seconds that it took."""
        begin_s = time.perf_counter()
        for source, target in zip(self._sources, self._first, strict=True):
            target.copy_(source)
        for source, target in zip(self._first, self._second, strict=True):
            target.copy_(source)
        return time.perf_counter() - begin_s


class DeviceCopy:
    """One pass over the bytes on one device, from one buffer of at most 2 GiB to another."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Make two buffers."""
        self._device = device
        self._pieces = pieces(num_bytes, DEVICE_PIECE_BYTES)
        self._source, self._target = (_filled(self._pieces[0], device) for _ in range(2))
        synchronise(device)

    def run(self) -> float:
        """Copy everything once, and return the seconds that it took."""
        begin_s = time.perf_counter()
        for size in self._pieces:
            self._target[:size].copy_(self._source[:size])
        synchronise(self._device)
        return time.perf_counter() - begin_s


class TensorCopies:
    """One pass over tensors, a copy each, into a buffer that is used over and over."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the buffer, and cut it."""
        self._sources = tensors
        self._device = tensors[0].device
        room = max(DEVICE_PIECE_BYTES, *(tensor.nbytes for tensor in tensors))
        buffer = _filled(min(sum(tensor.nbytes for tensor in tensors), room), self._device)
        self._targets, start = [], 0
        for tensor in tensors:
            start = 0 if start + tensor.nbytes > buffer.numel() else start
            part = buffer[start : start + tensor.nbytes]
            self._targets.append(part.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        synchronise(self._device)

    def run(self) -> float:
        """Copy tensor by tensor, and return the seconds that it took."""
        begin_s = time.perf_counter()
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)
        synchronise(self._device)
        return time.perf_counter() - begin_s


class HostCopies:
    """From a GPU to pinned host memory, all of it, and then up again: shared memory's floor."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Make a buffer of at most 1 GiB at each end."""
        self._device = device
        self._pieces = pieces(num_bytes, HOST_PIECE_BYTES)
        self._host = torch.empty(self._pieces[0], dtype=torch.uint8, pin_memory=True).fill_(_FILL)
        self._own = _filled(self._pieces[0], device)
        synchronise(device)

    def run(self) -> float:
        """Copy everything both ways, and return the seconds that it took."""
        begin_s = time.perf_counter()
        for source, target in ((self._own, self._host), (self._host, self._own)):
            for size in self._pieces:
                target[:size].copy_(source[:size], non_blocking=True)
            synchronise(self._device)
        return time.perf_counter() - begin_s


def pieces(num_bytes: int, piece_bytes: int) -> list[int]:
    """Return the sizes of pieces that add up to ``num_bytes``: the largest come first."""
    whole, rest = divmod(num_bytes, piece_bytes)
    return [piece_bytes] * whole + [rest] * bool(rest)


def synchronise(device: torch.device) -> None:
    """Wait for all that this process gave a device to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _filled(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.full((num_bytes,), _FILL, dtype=torch.uint8, device=device)
