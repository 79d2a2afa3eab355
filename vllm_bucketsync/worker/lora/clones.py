"""Copies of an adapter's tensors in host memory: one for each memory that they share.

An adapter is some hundred small tensors, and each copy of one costs as much as a hundred KiB
of bytes. What arrived in one bucket lies together, and so do its copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...layout import aligned
from ...sinks import Piece

# What is copied is at most so many times as much as was asked for.
_MOST_SPREAD = 2


def on_host(pieces: Sequence[Piece], *, is_pinned: bool) -> list[Piece]:
    """Return pieces of one bucket, wherever that is, as views of one new tensor on the host.

    Args:
        pieces: Parts of one bucket; or, in process, of the trainer's own tensors, each of
            which gets a copy of its own.
        is_pinned: Whether to pin the new memory, which is kept by torch for the next time.
    """
    if not pieces:
        return []
    offsets = [int(piece.data.storage_offset()) for piece in pieces]
    ends = [offset + piece.data.numel() for offset, piece in zip(offsets, pieces, strict=True)]
    start, num_bytes = min(offsets), sum(aligned(piece.data.numel()) for piece in pieces)
    storages = {piece.data.untyped_storage().data_ptr() for piece in pieces}
    if len(storages) > 1 or max(ends) - start > num_bytes:
        # References to the trainer's own tensors, wherever those are.
        return [replace(piece, data=piece.data.to("cpu", copy=True)) for piece in pieces]
    bucket = pieces[0].data.as_strided((max(ends) - start,), (1,), start)
    copied = _copy(bucket, is_pinned=is_pinned)
    return [
        replace(piece, data=copied[offset - start : end - start])
        for piece, offset, end in zip(pieces, offsets, ends, strict=True)
    ]


def clones_of(tensors: Mapping[str, torch.Tensor], *, is_pinned: bool) -> dict[str, torch.Tensor]:
    """Return copies of tensors on the CPU, which share memory with nothing but each other.

    Args:
        tensors: Contiguous; those of one storage and dtype are copied together, unless
            most of it is not asked for.
        is_pinned: Whether to pin the new memory.
    """
    groups: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(name)
    copied: dict[str, torch.Tensor] = {}
    for names in groups.values():
        together = [tensors[name] for name in names]
        start = min(one.storage_offset() for one in together)
        end = max(one.storage_offset() + one.numel() for one in together)
        if end - start > _MOST_SPREAD * sum(one.numel() for one in together):
            copied |= {name: _copy(tensors[name], is_pinned=is_pinned) for name in names}
            continue
        copy = _copy(together[0].as_strided((end - start,), (1,), start), is_pinned=is_pinned)
        for name, one in zip(names, together, strict=True):
            copied[name] = copy.as_strided(one.shape, one.stride(), one.storage_offset() - start)
    # In the order in which they were given.
    return {name: copied[name] for name in tensors}


def _copy(tensor: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
    # Whatever the default device is: in process, a trainer may have set it.
    like: dict[str, Any] = {"dtype": tensor.dtype, "device": "cpu"}
    return torch.empty(tensor.shape, **like, pin_memory=is_pinned).copy_(tensor)
