"""The runtime library that torch has loaded, called as ``cuda-bindings`` is called.

For builds of torch that come without ``cuda-bindings``: every function returns its error
code first, and takes and gives addresses as numbers. HIP has the same functions under
another prefix, with handles of the same size.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch

from ..errors import UnsupportedError

_OUT = ctypes.c_void_p


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``: 64 bytes that only the driver can read."""

    _fields_ = (("_bytes", ctypes.c_char * 64),)

    @property
    def reserved(self) -> bytes:
        """All of its bytes, zeros included."""
        return bytes(self)

    @reserved.setter
    def reserved(self, data: bytes) -> None:
        ctypes.memmove(ctypes.byref(self), data, 64)


class LoadedRuntime:
    """A CUDA or HIP runtime library."""

    cudaIpcMemHandle_t = _Handle  # noqa: N815 - as cuda-bindings calls it

    def __init__(self, library: Any, *, prefix: str) -> None:
        """Use ``find``."""
        self._library = library
        self._prefix = prefix

    @classmethod
    def find(cls) -> Self:
        """Return the library that this torch works with.

        Raises:
            UnsupportedError: There is none.
        """
        if torch.version.hip is not None:
            names, prefix = ["libamdhip64.so"], "hip"
        elif torch.version.cuda is not None:
            major = torch.version.cuda.partition(".")[0]
            names, prefix = [f"libcudart.so.{major}", f"libcudart.so.{major}.0"], "cuda"
        else:
            raise UnsupportedError("this torch was built without CUDA; install one that has it")
        for name in names:
            try:
                return cls(ctypes.CDLL(name), prefix=prefix)
            except OSError:
                continue
        raise UnsupportedError(
            f"the runtime library {names[0]} is not loaded; pip install cuda-bindings"
        )

    def _call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, self._prefix + name)(*arguments))

    def cudaGetDevice(self) -> tuple[int, int]:  # noqa: N802
        """Return the code and the device."""
        found = ctypes.c_int()
        return self._call("GetDevice", ctypes.byref(found)), found.value

    def cudaSetDevice(self, device: int) -> tuple[int]:  # noqa: N802
        """Return the code."""
        return (self._call("SetDevice", ctypes.c_int(device)),)

    def cudaMalloc(self, num_bytes: int) -> tuple[int, int]:  # noqa: N802
        """Return the code and the address."""
        found = _OUT()
        code = self._call("Malloc", ctypes.byref(found), ctypes.c_size_t(num_bytes))
        return code, found.value or 0

    def cudaFree(self, address: int) -> tuple[int]:  # noqa: N802
        """Return the code."""
        return (self._call("Free", _OUT(address)),)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[int, _Handle]:  # noqa: N802
        """Return the code and the handle."""
        handle = _Handle()
        return self._call("IpcGetMemHandle", ctypes.byref(handle), _OUT(address)), handle

    def cudaIpcOpenMemHandle(self, handle: _Handle, flags: int) -> tuple[int, int]:  # noqa: N802
        """Return the code and the address."""
        found = _OUT()
        code = self._call("IpcOpenMemHandle", ctypes.byref(found), handle, ctypes.c_uint(flags))
        return code, found.value or 0

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[int]:  # noqa: N802
        """Return the code."""
        return (self._call("IpcCloseMemHandle", _OUT(address)),)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[int]:  # noqa: N802
        """Return the code."""
        size = ctypes.c_size_t(num_bytes)
        return (self._call("HostRegister", _OUT(address), size, ctypes.c_uint(flags)),)

    def cudaHostUnregister(self, address: int) -> tuple[int]:  # noqa: N802
        """Return the code."""
        return (self._call("HostUnregister", _OUT(address)),)

    def cudaGetLastError(self) -> tuple[int]:  # noqa: N802
        """Return the last error's code, and clear it."""
        return (self._call("GetLastError"),)

    def cudaGetErrorString(self, code: int) -> tuple[int, bytes]:  # noqa: N802
        """Return a code of 0 and the text for ``code``."""
        function = getattr(self._library, self._prefix + "GetErrorString")
        function.restype = ctypes.c_char_p
        return 0, function(ctypes.c_int(code)) or b""


class LoadedDriver:
    """The driver's library, for what the runtime has no function for."""

    def __init__(self, function: Any) -> None:
        """Use ``find``."""
        self._function = function

    @classmethod
    def find(cls) -> Self:
        """Return the driver that this torch works with.

        Raises:
            UnsupportedError: There is none.
        """
        try:
            if torch.version.hip is not None:
                return cls(ctypes.CDLL("libamdhip64.so").hipMemGetAddressRange)
            return cls(ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2)
        except (OSError, AttributeError) as error:
            raise UnsupportedError(f"the driver's library cannot be used: {error}") from error

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:  # noqa: N802
        """Return the code, the first address, and the length in bytes."""
        base, size = _OUT(), ctypes.c_size_t()
        code = self._function(ctypes.byref(base), ctypes.byref(size), _OUT(address))
        return int(code), base.value or 0, size.value
