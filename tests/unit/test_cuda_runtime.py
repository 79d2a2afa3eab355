"""Calls of the CUDA runtime leave the device and the last error as they were."""

from __future__ import annotations

import ctypes
import errno
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import stub_cuda
from support.stub_cuda import StubRuntime

from vllm_bucketsync.errors import RegionError, UnsupportedError
from vllm_bucketsync.transport import cuda_runtime
from vllm_bucketsync.transport.cuda_library import LoadedRuntime

Calls = dict[str, tuple[Callable[[int], Any], tuple[Any, ...], Any]]
# What is called: how, with which arguments it has to arrive, and what it gives.
CALLS: Calls = {
    "cudaMalloc": (lambda d: cuda_runtime.allocate(512, device=d), (512,), 0x2000),
    "cudaFree": (lambda d: cuda_runtime.free(0x40, device=d), (0x40,), None),
    "cudaIpcGetMemHandle": (
        lambda d: cuda_runtime.export([0x40], device=d),
        (0x40,),
        [b"h" * 64],
    ),
    "cudaIpcOpenMemHandle": (
        lambda d: cuda_runtime.open_exported(b"e" * 64, device=d),
        # Peer access is enabled where the hardware has it.
        (b"e" * 64, 1),
        0x9000,
    ),
    "cudaIpcCloseMemHandle": (lambda d: cuda_runtime.close_opened(0x40, device=d), (0x40,), None),
    "cudaHostRegister": (
        lambda d: cuda_runtime.register_host(0x40, 512, device=d),
        # Portable: pinned for every device.
        (0x40, 512, 1),
        None,
    ),
    "cudaHostUnregister": (lambda d: cuda_runtime.unregister_host(0x40, device=d), (0x40,), None),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StubRuntime:
    return stub_cuda.install(monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_its_device_and_gives_what_cuda_gave(cuda: StubRuntime, name: str) -> None:
    call, arguments, expected = CALLS[name]

    assert call(3) == expected
    assert cuda.calls == [(name, *arguments)]
    assert cuda.devices == [3]
    assert cuda.device == 5


@pytest.mark.parametrize("code", [1, 2, 217, 712, 801])
@pytest.mark.parametrize("name", CALLS)
def test_a_failed_call_is_an_error_with_its_name_code_and_text_and_leaves_nothing(
    cuda: StubRuntime, name: str, code: int
) -> None:
    cuda.codes[name] = code

    with pytest.raises(RegionError) as caught:
        CALLS[name][0](3)

    text = stub_cuda.NAMES.get(code, "something else")
    assert str(caught.value) == f"{name} failed with {code}: {text}"
    assert caught.value.errno == (errno.ENOMEM if code == 2 else errno.EIO)
    # An error that stays would be raised by whatever comes next.
    assert cuda.last_error == 0
    assert cuda.device == 5


@pytest.mark.parametrize("name", ["cudaGetDevice", "cudaSetDevice"])
def test_a_device_that_cannot_be_selected_is_not_used(cuda: StubRuntime, name: str) -> None:
    cuda.codes[name] = 101

    with pytest.raises(RegionError, match=f"{name} failed with 101"):
        cuda_runtime.free(0x40, device=3)

    assert cuda.calls == []
    assert (cuda.device, cuda.last_error) == (5, 0)


class Function:
    """A function of a C library: notes what it was called with, and fills in what is asked."""

    def __init__(self, library: Library, name: str) -> None:
        self._library = library
        self._name = name
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        # A plain number would be cut to 32 bits.
        assert not any(isinstance(argument, int) for argument in arguments)
        plain = [getattr(argument, "value", argument) for argument in arguments]
        self._library.calls.append((self._name, plain))
        if self._name.endswith("GetErrorString"):
            assert self.restype is ctypes.c_char_p
            return b"no peer access"
        if self._name.endswith(("GetDevice", "Malloc", "IpcOpenMemHandle")):
            # What ctypes.byref() refers to.
            arguments[0]._obj.value = self._library.filled
        if self._name.endswith("IpcGetMemHandle"):
            arguments[0]._obj.reserved = bytes(range(64))
        return self._library.codes.get(self._name, 0)


class Library:
    """A runtime library as ``ctypes`` gives it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.codes: dict[str, int] = {}
        self.filled = 0x7F00_0000_1000
        self.functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        return self.functions.setdefault(name, Function(self, name))


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_a_loaded_library_is_called_as_cuda_bindings_is(prefix: str) -> None:
    library = Library()
    runtime = LoadedRuntime(library, prefix=prefix)
    handle = runtime.cudaIpcMemHandle_t()
    handle.reserved = bytes(64)

    assert runtime.cudaMalloc(512) == (0, library.filled)
    code, exported = runtime.cudaIpcGetMemHandle(library.filled)
    # All of it, zeros in the middle included.
    assert (code, exported.reserved) == (0, bytes(range(64)))
    assert runtime.cudaIpcOpenMemHandle(handle, 1) == (0, library.filled)
    assert runtime.cudaIpcCloseMemHandle(0x40) == (0,)
    assert runtime.cudaFree(0x40) == (0,)
    assert runtime.cudaHostRegister(0x40, 512, 1) == (0,)
    assert runtime.cudaHostUnregister(0x40) == (0,)
    assert runtime.cudaSetDevice(3) == (0,)
    assert runtime.cudaGetLastError() == (0,)
    assert runtime.cudaGetErrorString(217) == (0, b"no peer access")
    assert [name for name, _ in library.calls] == [
        prefix + name
        for name in (
            "Malloc", "IpcGetMemHandle", "IpcOpenMemHandle", "IpcCloseMemHandle", "Free",
            "HostRegister", "HostUnregister", "SetDevice", "GetLastError", "GetErrorString",
        )
    ]  # fmt: skip
    last = {
        name.removeprefix(prefix): arguments[-1] for name, arguments in library.calls if arguments
    }
    assert last["Malloc"] == 512
    assert last["IpcGetMemHandle"] == library.filled
    assert last["IpcCloseMemHandle"] == last["Free"] == last["HostUnregister"] == 0x40
    assert last["IpcOpenMemHandle"] == last["HostRegister"] == 1
    assert last["SetDevice"] == 3


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_an_error_code_of_a_loaded_library_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    library = Library()
    library.filled = 0
    library.codes[prefix + "IpcOpenMemHandle"] = 217
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    monkeypatch.setattr(LoadedRuntime, "find", classmethod(lambda cls: cls(library, prefix=prefix)))

    with pytest.raises(RegionError, match="failed with 217: no peer access"):
        cuda_runtime.open_exported(bytes(64), device=3)

    assert prefix + "GetLastError" in [name for name, _ in library.calls]
    selected = [arguments for name, arguments in library.calls if name == prefix + "SetDevice"]
    assert selected == [[3], [0]]


@pytest.mark.parametrize(
    ("cuda", "hip", "names", "prefix"),
    [
        ("13.0", None, ["libcudart.so.13"], "cuda"),
        ("12.8", None, ["libcudart.so.12"], "cuda"),
        ("11.8", None, ["libcudart.so.11", "libcudart.so.11.0"], "cuda"),
        (None, "6.2", ["libamdhip64.so"], "hip"),
    ],
)
def test_the_library_is_the_one_that_torch_works_with(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    hip: str | None,
    names: list[str],
    prefix: str,
) -> None:
    library, asked = Library(), []

    def load(name: str) -> Library:
        asked.append(name)
        if name != names[-1]:
            raise OSError("no such file")
        return library

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", load)

    LoadedRuntime.find().cudaSetDevice(0)

    assert asked == names
    assert library.calls == [(prefix + "SetDevice", [0])]


def test_a_library_that_is_not_there_is_named_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(ctypes, "CDLL", load)

    with pytest.raises(UnsupportedError, match=r"libcudart\.so\.13 is not.*cuda-bindings"):
        LoadedRuntime.find()


def test_a_torch_without_cuda_has_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)

    with pytest.raises(UnsupportedError, match="built without CUDA"):
        cuda_runtime.allocate(512, device=0)
