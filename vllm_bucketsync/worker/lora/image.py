"""One adapter's tensors in one memory on the host: a bucket is one copy, a tensor a view.

An adapter is some hundred small tensors, and whatever is done with each of them costs as
much as a hundred KiB of bytes. Those of a declared adapter have their places before they
come: one after the other, aligned, as a bucket that could hold them all would have them.
So each bucket is a stretch of it, and the same manifest has the same places every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...layout import TensorMeta, aligned
from ...sinks import Bucket, Piece


class Layout:
    """Where each tensor of a manifest lies.

    Attributes:
        metas: The tensors, in order.
        dtype: Of them all, as they come.
        first_bytes: Of each, where it starts.
        num_bytes: Of all, with what lies between them.
    """

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        """Lay out.

        Args:
            metas: Tensors of one dtype; see ``has_one_dtype``.
        """
        self.metas = tuple(metas)
        self.dtype: torch.dtype = getattr(torch, metas[0].dtype)
        self.first_bytes: list[int] = []
        self.num_bytes = 0
        for meta in self.metas:
            self.first_bytes.append(self.num_bytes)
            self.num_bytes += aligned(meta.num_bytes)


def has_one_dtype(metas: Sequence[TensorMeta]) -> bool:
    """Whether tensors can share one memory, and be cast in one step."""
    return len({meta.dtype for meta in metas}) == 1


class Image(Mapping[str, torch.Tensor]):
    """All tensors of an adapter by name: views of one, made when they are asked for.

    Attributes:
        flat: ``[num_elements]``, on the CPU, in the engine's dtype of adapters. What lies
            between tensors is anything.
    """

    def __init__(self, layout: Layout, flat: torch.Tensor) -> None:
        """Name the parts of ``flat``, which has the elements of ``layout``."""
        self._layout = layout
        self._indices = {meta.name: index for index, meta in enumerate(layout.metas)}
        self.flat = flat

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        num_bytes = sum(meta.num_bytes for meta in self._layout.metas)
        return num_bytes // self._layout.dtype.itemsize * self.flat.itemsize

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor: a view."""
        index = self._indices[name]
        meta, itemsize = self._layout.metas[index], self._layout.dtype.itemsize
        first = self._layout.first_bytes[index] // itemsize
        return self.flat[first : first + meta.num_bytes // itemsize].view(meta.shape)

    def __iter__(self) -> Iterator[str]:
        """Yield names, in order."""
        return iter(self._indices)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._indices)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A bucket whose pieces lie apart as they do in the image.

    Attributes:
        first_byte: Where it starts there.
        data: All its bytes, where they come.
        sizes: Of each piece: its tensor's index, and its bytes.
    """

    first_byte: int
    data: torch.Tensor
    sizes: tuple[tuple[int, int], ...]


class Arriving:
    """An image that is being filled."""

    def __init__(self, layout: Layout, *, is_pinned: bool) -> None:
        """Make room for all of it.

        Args:
            layout: Of what comes.
            is_pinned: Whether to pin its memory, which is kept by torch for the next time.
        """
        self._layout = layout
        self._is_pinned = is_pinned
        self._raw = torch.empty(
            layout.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
        )
        self._num_filled = [0] * len(layout.metas)

    def add(self, bucket: Bucket) -> None:
        """Copy a bucket, wherever it is. Nothing of it is needed afterwards."""
        stretch = bucket.prepared
        if not isinstance(stretch, _Stretch):
            stretch = _stretch_of(bucket.pieces, self._layout)
            if bucket.is_kept:
                bucket.prepared = stretch
        if stretch is None:
            # References to the trainer's own tensors, wherever those are.
            for piece in bucket.pieces:
                self._copy(self._layout.first_bytes[piece.index] + piece.first_byte, piece.data)
                self._num_filled[piece.index] += piece.data.numel()
            return
        self._copy(stretch.first_byte, stretch.data)
        for index, num_bytes in stretch.sizes:
            self._num_filled[index] += num_bytes

    def _copy(self, first_byte: int, data: torch.Tensor) -> None:
        self._raw[first_byte : first_byte + data.numel()].copy_(data)

    def incomplete(self) -> tuple[TensorMeta, int] | None:
        """Return the first tensor that is not whole, and how many bytes of it came."""
        for meta, num_filled in zip(self._layout.metas, self._num_filled, strict=True):
            if num_filled != meta.num_bytes:
                return meta, num_filled
        return None

    def image(self, dtype: torch.dtype) -> Image:
        """Return what came, cast to ``dtype``. Nothing is to be added any more."""
        flat = self._raw.view(self._layout.dtype)
        if dtype != flat.dtype:
            like: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
            flat = torch.empty(flat.shape, **like, pin_memory=self._is_pinned).copy_(flat)
        return Image(self._layout, flat)


def _stretch_of(pieces: Sequence[Piece], layout: Layout) -> _Stretch | None:
    """Return a bucket as one stretch of the image; ``None`` where it is none."""
    if not pieces:
        return None
    first = pieces[0]
    start = end = layout.first_bytes[first.index] + first.first_byte
    shift = start - int(first.data.storage_offset())
    memory = first.data.untyped_storage().data_ptr()
    sizes = []
    for piece in pieces:
        begin, num_bytes = layout.first_bytes[piece.index] + piece.first_byte, piece.data.numel()
        # Nothing else's place lies between two of them: it would be overwritten.
        is_next = begin == aligned(end - start) + start
        is_apart_alike = int(piece.data.storage_offset()) + shift == begin
        if not (is_next and is_apart_alike) or piece.data.untyped_storage().data_ptr() != memory:
            return None
        end = begin + num_bytes
        sizes.append((piece.index, num_bytes))
    data = first.data.as_strided((end - start,), (1,), first.data.storage_offset())
    return _Stretch(start, data, tuple(sizes))
