"""A CUDA runtime without a GPU: takes note of every call, and fails where it is told to."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

NAMES = {1: "invalid argument", 2: "out of memory", 801: "operation not supported"}


class StubHandle:
    """``cudaIpcMemHandle_t``."""

    def __init__(self, reserved: bytes = b"") -> None:
        self.reserved = reserved


class StubDriver(ModuleType):
    """Stands for ``cuda.bindings.driver``.

    Attributes:
        allocation: First address and length of whatever is asked for.
        code: What it fails with.
    """

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.allocation = (0, 1 << 60)
        self.code = 0

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:  # noqa: N802
        return (self.code, *self.allocation)


class StubRuntime(ModuleType):
    """Stands for ``cuda.bindings.runtime``.

    Attributes:
        codes: What the function of a name fails with, from now on.
        calls: Name and arguments of each call but those that select and look up.
        device: The device that is selected.
        devices: On which device each of ``calls`` ran.
        last_error: What the next call of anybody would raise.
        driver: The driver that goes with it.
    """

    cudaIpcMemHandle_t = StubHandle  # noqa: N815

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.driver = StubDriver()
        self.codes: dict[str, int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.devices: list[int] = []
        self.device = 5
        self.last_error = 0
        self.next_address = 0x1000

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        self.devices.append(self.device)
        code = self.codes.get(call[0], 0)
        self.last_error = code or self.last_error
        return code

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of every call of one function."""
        return [call[1:] for call in self.calls if call[0] == name]

    def cudaGetDevice(self) -> tuple[int, int]:  # noqa: N802
        self.last_error = self.codes.get("cudaGetDevice", self.last_error)
        return self.codes.get("cudaGetDevice", 0), self.device

    def cudaSetDevice(self, device: int) -> tuple[int]:  # noqa: N802
        code = self.codes.get("cudaSetDevice", 0)
        if not code:
            self.device = device
        self.last_error = code or self.last_error
        return (code,)

    def cudaMalloc(self, num_bytes: int) -> tuple[int, int]:  # noqa: N802
        self.next_address += 0x1000
        return self._note("cudaMalloc", num_bytes), self.next_address

    def cudaFree(self, address: int) -> tuple[int]:  # noqa: N802
        return (self._note("cudaFree", address),)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[int, StubHandle]:  # noqa: N802
        return self._note("cudaIpcGetMemHandle", address), StubHandle(b"h" * 64)

    def cudaIpcOpenMemHandle(self, handle: StubHandle, flags: int) -> tuple[int, int]:  # noqa: N802
        return self._note("cudaIpcOpenMemHandle", handle.reserved, flags), 0x9000

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[int]:  # noqa: N802
        return (self._note("cudaIpcCloseMemHandle", address),)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[int]:  # noqa: N802
        return (self._note("cudaHostRegister", address, num_bytes, flags),)

    def cudaHostUnregister(self, address: int) -> tuple[int]:  # noqa: N802
        return (self._note("cudaHostUnregister", address),)

    def cudaGetLastError(self) -> tuple[int]:  # noqa: N802
        found, self.last_error = self.last_error, 0
        return (found,)

    def cudaGetErrorString(self, code: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, NAMES.get(code, "something else").encode()


def install(monkeypatch: pytest.MonkeyPatch) -> StubRuntime:
    """Have it imported where ``cuda-bindings`` would be."""
    stub = StubRuntime()
    for module in (stub, stub.driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return stub
