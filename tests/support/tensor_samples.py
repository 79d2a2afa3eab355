"""Tensors of every dtype and form that torch can have, made from given bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch

from vllm_bucketsync.tensors import DTYPE_NAMES

ALL_DTYPES = sorted(DTYPE_NAMES, key=str)
"""Every dtype of this build whose bytes can be sent."""

QUANTISED_DTYPES = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "0-dim": lambda t: t[1, 2],
    "zero elements": lambda t: t[:0],
    "zero elements, shape (0, 3)": lambda t: t[:0, :3],
    "slice of rows": lambda t: t[1:3],
    "slice of columns": lambda t: t[:, 1:3],
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(5, 6),
    "expanded scalar": lambda t: t[0, 0].expand(3, 2),
    "every other": lambda t: t[::2, ::3],
    "five dims": lambda t: t.reshape(2, 2, 3, 1, 2),
    "permuted": lambda t: t.view(2, 2, 3, 2).permute(3, 1, 0, 2),
}


def bytes_tensor(num_bytes: int, *, seed: int = 0) -> torch.Tensor:
    """Return ``[num_bytes]``, uint8, random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def sample(dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Return ``[4, 6]`` of a dtype, made of random bytes: any bit pattern may occur."""
    return bytes_tensor(24 * dtype.itemsize, seed=seed).view(dtype).view(4, 6)


def expected_bytes(tensor: torch.Tensor) -> bytes:
    """Return a strided tensor's elements in row-major order, read one by one.

    Independent of the code under test: addresses are computed from the strides.
    """
    storage = tensor.untyped_storage()
    memory = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
    size = tensor.element_size()
    places = [tensor.storage_offset()]
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + i * stride for place in places for i in range(length)]
    return b"".join(memory[place * size : (place + 1) * size] for place in places)


def as_bytes(data: torch.Tensor) -> bytes:
    """Return ``[num_bytes]``, uint8, as bytes."""
    return bytes(data.tolist())


SPECIAL_VALUES: dict[torch.dtype, bytes] = {
    # Quiet and signalling NaNs with payloads, -0, the smallest denormal, both infinities.
    torch.float32: struct.pack(
        "<7I",
        0x7FC12345, 0x7FA00001, 0xFFC00001, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000,
    ),
    torch.bfloat16: struct.pack(
        "<7H", 0x7FC5, 0x7F81, 0xFFC1, 0x8000, 0x0001, 0x7F80, 0xFF80
    ),
    torch.float16: struct.pack("<7H", 0x7E05, 0x7C01, 0xFE01, 0x8000, 0x0001, 0x7C00, 0xFC00),
    torch.float64: struct.pack(
        "<3Q", 0x7FF0000000000001, 0x8000000000000000, 0xFFF8000000000BAD
    ),
}  # fmt: skip
