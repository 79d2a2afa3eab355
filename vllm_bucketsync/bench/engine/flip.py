"""Two sets of weights that differ in every byte, at the price of one.

Flipping the sign and the mantissa of every element is its own inverse, keeps every number
finite, and goes through views, copies and re-layouts unchanged: what an engine must hold
after a push of flipped weights is what it held after a push of the others, flipped.
"""

from __future__ import annotations

import torch

# By the size of an element: the integers of that size.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Sign and mantissa. Every byte of an element has a bit in it.
_MASKS = {torch.bfloat16: 0x807F, torch.float16: 0x83FF, torch.float32: 0x807FFFFF}
# Elements that are handled at a time where memory is made for them.
_CHUNK = 1 << 26


def can_flip(dtype: torch.dtype) -> bool:
    """Return whether there is a second set of weights of a dtype."""
    return dtype in _MASKS


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's elements.

    Returns:
        ``[numel]``, of the integers as wide as its elements. A view where the tensor is
        contiguous, else a copy.
    """
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.dtype.itemsize])


def flip_in_place(tensor: torch.Tensor) -> None:
    """Flip every element of a contiguous tensor."""
    as_integers(tensor).bitwise_xor_(_mask(tensor.dtype))


def equals(tensor: torch.Tensor, reference: torch.Tensor, *, flipped: bool = False) -> bool:
    """Return whether every bit of a tensor is that of its reference, or of that flipped."""
    pairs = zip(
        as_integers(tensor).split(_CHUNK), as_integers(reference).split(_CHUNK), strict=True
    )
    if not flipped:
        return all(torch.equal(one, other) for one, other in pairs)
    mask = _mask(reference.dtype)
    return all(torch.equal(one, other.bitwise_xor(mask)) for one, other in pairs)


def _mask(dtype: torch.dtype) -> int:
    """Return the mask as the signed integer that torch's kernels take."""
    num_bits = 8 * dtype.itemsize
    mask = _MASKS[dtype]
    return mask - (1 << num_bits) if mask >> (num_bits - 1) else mask
