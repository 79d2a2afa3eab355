"""Watches vLLM process one module, to learn whether it could as well be left out.

A module is *direct* - its sources can be copied straight into the live tensors - only if
all of this was seen while vLLM itself processed it once:

(a) checkpoint and live tensors agree in shape, strides and dtype, and copies and
    constants give every element a value;
(b) processing wrote to no tensor of it but with its own bytes;
(c) nothing reachable from the module, its quant method or its kernel was made, replaced
    or changed, and nobody asked for an address behind torch's back;
(d) the live bytes after it are those that the loaders would have written.

Not every operation can be seen (kernels in C++ and Triton escape), so a module must
also be of a kind that ``compat.is_known_as_direct`` lists.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import compat
from .plan import PlannedModule

_COPY = torch.ops.aten.copy_.default
# What reads or writes memory without an operation that a dispatch mode sees.
_ESCAPES = frozenset({"data_ptr", "numpy", "__dlpack__", "__array__", "tolist"})
# Larger than anything around one module; whatever is larger is no plain layout.
MAX_OBJECTS = 10_000
_MAX_DEPTH = 6
_IGNORED = frozenset(
    {"_parameters", "_buffers", "_modules", "_already_called_process_weights_after_loading"}
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, enum.Enum)
_OPAQUE = (torch.nn.Module, type, types.ModuleType)


def observe(
    planned: PlannedModule, scratch: Mapping[str, torch.Tensor], process: Callable[[], None]
) -> str:
    """Let a module be processed, and say why it is not direct.

    Args:
        planned: The module, live.
        scratch: Its new weights as a checkpoint has them, filled. For a module that may
            turn out direct they are copied once for the comparison.
        process: Post-processes them and copies the result into the live tensors.

    Returns:
        The reason, for people; ``""`` if it is direct.
    """
    why = _unlike(planned, scratch) or compat.why_not_known_as_direct(planned.module)
    if why:
        process()
        return why
    expected = {name: tensor.detach().clone() for name, tensor in scratch.items()}
    live = {name: planned.live(name) for name in scratch}
    # The objects are kept alive, so that none can come back with another's identity.
    before = reachable(planned.module)
    identities, versions = _identities(before), _versions(before, scratch)
    functions = _Functions([*scratch.values(), *live.values()])
    operations = _Operations(scratch, live)
    with functions, operations:
        process()
    why = functions.fault or operations.fault
    after = reachable(planned.module)
    if not why and identities != _identities(after):
        why = "processing makes or replaces something that the module holds"
    if not why and versions != _versions(after, scratch):
        why = "processing writes to something that the module holds besides its weights"
    if not why and any(not _same_bytes(planned.live(n), expected[n]) for n in expected):
        why = "processing changes values"
    return why


def _unlike(planned: PlannedModule, scratch: Mapping[str, torch.Tensor]) -> str:
    if not planned.is_whole:
        return "a part of its tensors gets no value"
    for name, tensor in scratch.items():
        if name in planned.module._non_persistent_buffers_set:
            continue
        if name not in {**planned.module._parameters, **planned.module._buffers}:
            return f"{name} is not live"
        live = planned.live(name)
        if (live.shape, live.stride(), live.dtype, live.device) != (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        ):
            return f"{name} is laid out differently when it is live"
    return ""


class _Operations(TorchDispatchMode):
    """Finds fault with any operation but a copy of a tensor's own bytes to its own place."""

    def __init__(
        self, scratch: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_place(one): name for name, one in scratch.items()}
        self._names |= {_place(one): name for name, one in live.items()}
        self._storages = {_storage(one) for one in (*scratch.values(), *live.values())}
        self.fault = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and not self.fault:
            touched = [one for one in _tensors([args, kwargs]) if _storage(one) in self._storages]
            is_own = func is _COPY and len(touched) == 2 and self._is_own(*touched)
            if touched and not is_own:
                self.fault = f"processing computes with its weights ({func})"
        return func(*args, **(kwargs or {}))

    def _is_own(self, to: torch.Tensor, value: torch.Tensor) -> bool:
        name = self._names.get(_place(to))
        return name is not None and name == self._names.get(_place(value))


class _Functions(TorchFunctionMode):
    """Finds fault with whoever takes a tensor's address: what it does there is not seen."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._storages = {_storage(tensor) for tensor in tensors}
        self.fault = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_escape = name in _ESCAPES and not self.fault
        if is_escape and any(_storage(one) in self._storages for one in _tensors([args])):
            self.fault = f"processing takes the address of its weights ({name})"
        return func(*args, **(kwargs or {}))


def reachable(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module holds besides submodules, by its path: objects, not copies.

    Modules and classes are named, not entered; so are vLLM's and transformers' configs.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", module, 0)]
    while waiting and len(found) <= MAX_OBJECTS:
        path, value, depth = waiting.pop()
        if path:
            found[path] = value
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        waiting += [(f"{path}.{key}", one, depth + 1) for key, one in _members(value, path)]
    return found


def _members(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, as far as it is looked into."""
    if not path:
        tensors = {**value._parameters, **value._buffers}
        rest = {key: one for key, one in vars(value).items() if key not in _IGNORED}
        yield from {**rest, **tensors}.items()
    elif isinstance(value, dict):
        yield from ((repr(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(position), one) for position, one in enumerate(value))
    elif not isinstance(value, (*_OPAQUE, *_PLAIN, torch.Tensor)) and not compat.is_config(value):
        yield from getattr(value, "__dict__", {}).items()


def _identities(found: Mapping[str, Any]) -> dict[str, Any]:
    if len(found) > MAX_OBJECTS:
        return {"": object()}
    return {path: _identity(value) for path, value in found.items()}


def _identity(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (id(value), value.data_ptr(), value.shape, value.stride(), value.dtype)
    if isinstance(value, types.MethodType):
        return (id(value.__self__), id(value.__func__))
    if isinstance(value, _PLAIN):
        return (type(value), value)
    return id(value)


def _versions(found: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return how often each tensor was written to, but for the weights themselves."""
    tensors = {path: one for path, one in found.items() if isinstance(one, torch.Tensor)}
    return {
        path: one._version
        for path, one in tensors.items()
        if path.removeprefix(".") not in own and not one.is_inference()
    }


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (_storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    plain = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*plain)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values or ():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _tensors(value)
