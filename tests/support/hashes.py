"""What a worker's model holds, as hashes: small enough to be sent, and compared byte by byte."""

from __future__ import annotations

import hashlib

import torch


def hashes_of(model: torch.nn.Module) -> dict[str, str]:
    """Return a hash of the bytes of every parameter and buffer, aliases included.

    The name of a tensor carries its dtype, shape and strides, so that these are compared too.
    """
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}": _hash(tensor)
        for name, tensor in named
    }


def _hash(tensor: torch.Tensor) -> str:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.cpu().numpy().tobytes(), digest_size=16).hexdigest()
