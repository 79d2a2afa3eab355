"""Tensors as bytes, so that a test compares bits and never values."""

from __future__ import annotations

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in row-major order, by a way of the test's own."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.clone(memory_format=torch.contiguous_format)
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
