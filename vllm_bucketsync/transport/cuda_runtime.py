"""The calls of the CUDA runtime that torch has no function for.

Through ``cuda-bindings``, which a CUDA build of torch installs; where it is missing (ROCm,
older torch), through the runtime library that torch itself has loaded.

Each call selects the device, restores the one before, and turns an error code into a
``RegionError`` after clearing it: an error that stays would be raised by whatever CUDA
call comes next.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import RegionError
from .cuda_library import LoadedDriver, LoadedRuntime

_OUT_OF_MEMORY = 2
_PORTABLE = 1
_LAZY_PEER_ACCESS = 1


def allocate(num_bytes: int, *, device: int) -> int:
    """Return the address of fresh device memory: plain ``cudaMalloc``.

    Unlike torch's own memory it can be exported whatever the allocator's settings are
    (expandable segments, ``cudaMallocAsync``, a sleep pool), and holds nothing else.

    Raises:
        RegionError: There is none; ``errno`` is ``ENOMEM`` where it is full.
    """
    with _selected(device) as cuda:
        return int(_checked(cuda, "cudaMalloc", cuda.cudaMalloc(num_bytes)))


def free(address: int, *, device: int) -> None:
    """Give memory of ``allocate`` back. Waits for the device."""
    with _selected(device) as cuda:
        _checked(cuda, "cudaFree", cuda.cudaFree(address))


def export(addresses: Sequence[int], *, device: int) -> list[bytes]:
    """Return the handles that open allocations in another process.

    Args:
        addresses: One address in each.
        device: The GPU that has them.

    Raises:
        RegionError: One cannot be exported: it is no plain ``cudaMalloc``.
    """
    with _selected(device) as cuda:
        return [
            bytes(_checked(cuda, "cudaIpcGetMemHandle", cuda.cudaIpcGetMemHandle(one)).reserved)
            for one in addresses
        ]


def allocation_of(address: int) -> tuple[int, int]:
    """Return the first address and the bytes of the allocation that has an address.

    Raises:
        RegionError: It is no device memory.
    """
    code, *found = _driver().cuMemGetAddressRange(address)
    if int(code):
        raise RegionError(f"cuMemGetAddressRange failed with {int(code)} at {address:#x}")
    return int(found[0]), int(found[1])


def open_exported(handle: bytes, *, device: int) -> int:
    """Return the address at which ``device`` sees memory of another process.

    It may lie on another GPU: peer access is enabled where the hardware has it.

    Raises:
        RegionError: It cannot be opened.
    """
    with _selected(device) as cuda:
        exported = cuda.cudaIpcMemHandle_t()
        exported.reserved = handle
        opened = cuda.cudaIpcOpenMemHandle(exported, _LAZY_PEER_ACCESS)
        return int(_checked(cuda, "cudaIpcOpenMemHandle", opened))


def close_opened(address: int, *, device: int) -> None:
    """Unmap memory of ``open_exported``."""
    with _selected(device) as cuda:
        _checked(cuda, "cudaIpcCloseMemHandle", cuda.cudaIpcCloseMemHandle(address))


def register_host(address: int, num_bytes: int, *, device: int) -> None:
    """Pin host memory, so that copies from and to it run at full speed.

    Raises:
        RegionError: It cannot be pinned.
    """
    with _selected(device) as cuda:
        pinned = cuda.cudaHostRegister(address, num_bytes, _PORTABLE)
        _checked(cuda, "cudaHostRegister", pinned)


def unregister_host(address: int, *, device: int) -> None:
    """Undo ``register_host``. No copy may be under way."""
    with _selected(device) as cuda:
        _checked(cuda, "cudaHostUnregister", cuda.cudaHostUnregister(address))


def _runtime() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return LoadedRuntime.find()


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return LoadedDriver.find()


@contextmanager
def _selected(device: int) -> Iterator[Any]:
    cuda = _runtime()
    before = _checked(cuda, "cudaGetDevice", cuda.cudaGetDevice())
    if before == device:
        # To select a device makes a context on it, so none is selected in vain.
        yield cuda
        return
    _checked(cuda, "cudaSetDevice", cuda.cudaSetDevice(device))
    try:
        yield cuda
    finally:
        cuda.cudaSetDevice(before)


def _checked(cuda: Any, name: str, result: tuple[Any, ...]) -> Any:
    """Return what a call gave; its error code comes first."""
    code, *values = result
    if int(code):
        cuda.cudaGetLastError()
        _, text = cuda.cudaGetErrorString(code)
        error = RegionError(f"{name} failed with {int(code)}: {bytes(text).decode()}")
        error.errno = errno.ENOMEM if int(code) == _OUT_OF_MEMORY else errno.EIO
        raise error
    return values[0] if values else None
