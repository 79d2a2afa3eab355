"""A tensor as plain bytes: which ones can be, what describes them, and how.

The bytes are those that the elements have in memory, in row-major order. A receiver
gets the tensor back with ``data.view(dtype).view(shape)``, so nothing is converted
and every bit survives: NaN payloads, negative zeros, packed sub-byte values.
"""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import nn

from .errors import SourceError
from .layout import MAX_DIMS, TensorMeta
from .texts import with_article

# Their bytes mean nothing without scales that a plain tensor cannot carry.
_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _QUANTISED
}
"""What a meta calls each dtype that can be sent: an attribute of ``torch``."""

# Copied as integers where torch has no copy kernel for the dtype (uint1 to uint7, …).
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes.

    Args:
        tensor: Plain and strided, as ``check_sendable`` lets through; on any device.

    Returns:
        ``[num_bytes]``, uint8, on the tensor's device, contiguous, without gradient.
        A view of the tensor's own memory where it is contiguous, else a copy. On a
        GPU the copy is enqueued on the current stream.
    """
    # What a subclass would do to its views is nothing that belongs to its bytes.
    with torch._C.DisableTorchFunctionSubclass():
        return _bytes_of(tensor.detach())


def _bytes_of(data: torch.Tensor) -> torch.Tensor:
    if data.is_conj():
        data = data.resolve_conj()
    if data.is_neg():
        data = data.resolve_neg()
    if not data.is_contiguous():
        data = data.view(_SAME_SIZE.get(data.element_size(), data.dtype)).contiguous()
    # A single element may have any stride, and counts as contiguous all the same.
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def meta_of(name: str, tensor: object, *, is_buffer: bool = False) -> TensorMeta:
    """Describe a tensor without its bytes; a DTensor as the whole that it is part of.

    Args:
        name: Its checkpoint name.
        tensor: Anything; refused unless it is a tensor that can be sent.
        is_buffer: It is a persistent buffer of a module.

    Raises:
        SourceError: It cannot be sent; the text says why and what to do.
    """
    return describe(name, check_sendable(name, tensor), is_buffer=is_buffer)


def describe(name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> TensorMeta:
    """Describe a tensor that ``check_sendable`` has let through."""
    dtype = tensor.dtype
    return TensorMeta(
        name, DTYPE_NAMES[dtype], tuple(tensor.shape), tensor.numel() * dtype.itemsize, is_buffer
    )


def check_sendable(name: str, value: object) -> torch.Tensor:
    """Return ``value`` if it is a tensor whose bytes can be sent.

    Raises:
        SourceError: It is not; the text names it, says what it is and what to do.
    """
    refusal = _refusal(value)
    if refusal is not None:
        raise SourceError(f"{name!r} {refusal[0]}; {refusal[1]}", name=name)
    return cast(torch.Tensor, value)


def check_unchanged(meta: TensorMeta, value: object) -> torch.Tensor:
    """Return ``value`` if it is a tensor of which ``meta`` is still true.

    Raises:
        SourceError: It cannot be sent any more, or has another shape or dtype.
    """
    if value is None:
        raise SourceError(
            f"{meta.name!r} was declared as {meta.dtype} {list(meta.shape)} and is gone; the "
            f"source must not change while it is pushed",
            name=meta.name,
        )
    tensor = check_sendable(meta.name, value)
    if tuple(tensor.shape) != meta.shape or DTYPE_NAMES[tensor.dtype] != meta.dtype:
        raise SourceError(
            f"{meta.name!r} was declared as {meta.dtype} {list(meta.shape)} and is now "
            f"{DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}; the source must not change while "
            f"it is pushed",
            name=meta.name,
        )
    return tensor


def is_as_described(tensor: object, *, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a tensor is, at a glance, sendable and what was described; else look closer.

    For the tensors of a source that has not changed since the last push: most of what
    ``check_sendable`` looks at follows from a plain type and a known dtype.
    """
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype is dtype  # type: ignore[attr-defined]
        and not tensor.is_nested  # type: ignore[attr-defined]
        and tensor.layout is torch.strided  # type: ignore[attr-defined]
        and tensor.shape == shape  # type: ignore[attr-defined]
        and not tensor.is_meta  # type: ignore[attr-defined]
        and _has_memory(tensor)  # type: ignore[arg-type]
    )


def gather(meta: TensorMeta, tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor, and any other tensor as it is.

    Collective for a DTensor: every rank must call it for the same tensors in order.

    Raises:
        SourceError: What was gathered is not what ``meta`` says.
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return check_unchanged(meta, tensor.full_tensor())  # type: ignore[attr-defined]


class SeenTensors:
    """Tells tied tensors: the same object, or the same bytes shown in the same way."""

    def __init__(self) -> None:
        # They stay alive here, so that no address comes back with another tensor.
        self._by_address: dict[int, list[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Take note of a new tensor; return the first one that is the same, or ``None``."""
        # Where nothing but the object can tell, its identity stands for its address. No
        # bytes, no address; and a DTensor's local part may be empty on one rank only,
        # while every rank must come to the same answer.
        has_address = bool(tensor.numel()) and not is_sharded(tensor)
        address = tensor.data_ptr() if has_address else -id(tensor)
        neighbours = self._by_address.setdefault(address, [])
        for other in neighbours:
            if other is tensor or show_the_same(other, tensor):
                return other
        neighbours.append(tensor)
        return None


def show_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at one address show their bytes in the same way."""
    return (
        one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def is_sharded(value: object) -> bool:
    """Whether a tensor is a DTensor: to be gathered before it is sent."""
    # No DTensor exists before its module does, and loading that takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def _refusal(value: object) -> tuple[str, str] | None:
    """Say what is wrong with a value and what to do, or ``None``."""
    if not isinstance(value, torch.Tensor):
        return _refuse_non_tensor(value)
    refusal = None
    is_dtensor = False
    if type(value) not in _PLAIN_TYPES:
        is_dtensor = is_sharded(value)
        refusal = None if is_dtensor else _refuse_subclass(value)
    if refusal is None:
        refusal = _refuse_form(value)
    if refusal is None and not is_dtensor and not _has_memory(value):
        refusal = (
            f"has no memory for its {value.numel()} elements: its storage was freed",
            "gather it first (with FSDP inside summon_full_params)",
        )
    return refusal


def _refuse_form(value: torch.Tensor) -> tuple[str, str] | None:
    if value.is_meta:
        return "is on the meta device: it has no data", "materialise it first"
    if value.is_nested or value.layout is not torch.strided:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"has the layout {layout}; expected strided", "send it as dense tensors"
    if value.dtype not in DTYPE_NAMES or value.is_quantized:
        return (
            f"is quantised ({value.dtype}): its scales are not among its bytes",
            "send int_repr() and the scales as tensors of their own, or dequantize() it",
        )
    if value.dim() > MAX_DIMS:
        return f"has {value.dim()} dimensions; at most {MAX_DIMS} are allowed", "reshape it"
    return None


def _refuse_non_tensor(value: object) -> tuple[str, str]:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = "leave it out"
    if hasattr(value, "__array_interface__"):
        advice = "send torch.from_numpy(…) of it"
    elif isinstance(value, int | float | complex):
        advice = "send torch.tensor(…) of it"
    return f"is {with_article(kind)}; expected a torch.Tensor", advice


def _refuse_subclass(value: torch.Tensor) -> tuple[str, str] | None:
    kind = type(value).__qualname__
    if nn.parameter.is_lazy(value):
        return f"is an {kind}: it has no shape yet", "run the module once to materialise it first"
    if value.is_nested:
        return (
            f"is {with_article(kind)} of layout nested; expected strided",
            "send it as dense tensors",
        )
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is {with_article(kind)}, which stands for other tensors and has no bytes of its own",
            "send those, or what it computes (dequantize(), wait())",
        )
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage reaches as far as its elements."""
    reach = tensor.numel()
    if not reach:
        return True
    if not tensor.is_contiguous():
        reach = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    end_byte = (tensor.storage_offset() + reach) * tensor.element_size()
    return end_byte <= tensor.untyped_storage().nbytes()
