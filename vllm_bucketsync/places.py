"""Places in one memory that are filled again and again: the slots that a sender packs.

What does not depend on the tensors that come is made ready once; so is the copy itself, for
as long as they come from the same addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from . import copy_kernel
from .copies import LARGE_BYTES, run_moves
from .layout import Entry, TensorMeta
from .tensors import byte_view

# What every model is made of; complex ones, whose bytes may stand for conjugates, are not.
_FUSIBLE = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8}
)
_device_of = attrgetter("device")


class BucketPlaces:
    """Where the tensors of one planned bucket go, and parts of those that go on in the next."""

    def __init__(
        self,
        memory: torch.Tensor,
        *,
        start_byte: int,
        entries: Sequence[Entry],
        metas: Sequence[TensorMeta],
    ) -> None:
        """Make ready.

        Args:
            memory: ``[num_bytes]``, uint8, contiguous.
            start_byte: Where the bucket's slot begins in it.
            entries: What is in the bucket.
            metas: The tensors that those are of.
        """
        self._parts = [
            (number, entry)
            for number, (entry, meta) in enumerate(zip(entries, metas, strict=True))
            if entry.num_bytes != meta.num_bytes
        ]
        forms = [(getattr(torch, meta.dtype), meta.shape) for meta in metas]
        for number, entry in self._parts:
            forms[number] = (torch.uint8, (entry.num_bytes,))
        firsts = [start_byte + entry.offset_bytes for entry in entries]
        self._places = Places(
            memory, [(first, *form) for first, form in zip(firsts, forms, strict=True)]
        )

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors, whole ones, or what the bucket has of them; see ``Places.fill``."""
        if self._parts:
            tensors = list(tensors)
            for number, entry in self._parts:
                tensors[number] = part_of(tensors[number], entry)
        self._places.fill(tensors)


class Places:
    """Places in one memory that are filled again and again, from other tensors each time."""

    def __init__(
        self, memory: torch.Tensor, places: Sequence[tuple[int, torch.dtype, tuple[int, ...]]]
    ) -> None:
        """Make ready.

        Args:
            memory: ``[num_bytes]``, uint8, contiguous.
            places: For each its first byte, a multiple of any dtype's size, and what will
                lie there, contiguous.
        """
        self._memory = memory
        self._places = places
        self._views: list[torch.Tensor] | None = None
        self._groups: dict[torch.dtype, list[torch.Tensor]] | None = None
        # Which places each group has; under ``None`` those that have a copy of their own.
        self._indices: dict[torch.dtype | None, list[int]] = {}
        self._sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in places]
        for (first, _, _), size in zip(places, self._sizes, strict=True):
            if first < 0 or first + size > memory.numel():
                raise ValueError(f"{size} bytes at {first} of a memory of {memory.numel()}")
        base = memory.data_ptr()
        self._addresses = [base + first for first, _, _ in places]
        # What one launch of the kernel can fill, and the rest.
        self._even, self._odd = self._sort_out()
        self._table: tuple[list[int], copy_kernel.CopyTable] | None = None

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy one tensor to each place.

        From a GPU the copies are only enqueued: whoever reads the memory waits first.

        Args:
            sources: Plain tensors of the places' dtypes and shapes, on any device, of
                any strides.
        """
        if len(sources) != len(self._places):
            raise ValueError(f"{len(sources)} tensors for {len(self._places)} places")
        if self._memory.is_cpu and all(
            one.is_cpu and one.is_contiguous() and not (one.is_conj() or one.is_neg())
            for one in sources
        ):
            run_moves(self._addresses, [one.data_ptr() for one in sources], self._sizes)
            return
        # Tensors of two subclasses in one call would each leave it to the other.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # One call of C for each question and tensor: there may be thousands.
            is_plain = not any(map(torch.Tensor.is_neg, sources))
            if not (is_plain and set(map(_device_of, sources)) == {self._memory.device}):
                self._fill_one_by_one(sources, range(len(sources)))
            elif self._fill_by_kernel(sources):
                self._fill_one_by_one(sources, self._odd)
            else:
                self._fill_by_torch(sources)

    def _sort_out(self) -> tuple[list[int], list[int]]:
        if not copy_kernel.is_available(self._memory.device):
            return [], []
        numbers, width = range(len(self._places)), copy_kernel.WIDTH_BYTES
        is_even = [
            # Bytes are bytes, but those of a complex tensor may stand for its conjugate.
            not dtype.is_complex and not (size | address) % width
            for (_, dtype, _), size, address in zip(
                self._places, self._sizes, self._addresses, strict=True
            )
        ]
        return [n for n in numbers if is_even[n]], [n for n in numbers if not is_even[n]]

    def _fill_by_kernel(self, sources: Sequence[torch.Tensor]) -> bool:
        """Fill what the kernel can fill; return whether the tensors lie so that it could."""
        if not self._even:
            return False
        even = [sources[index] for index in self._even]
        if not all(map(torch.Tensor.is_contiguous, even)):
            return False
        addresses = list(map(torch.Tensor.data_ptr, even))
        if self._table is None or self._table[0] != addresses:
            if any(address % copy_kernel.WIDTH_BYTES for address in addresses):
                return False
            table = copy_kernel.CopyTable(
                [self._addresses[index] for index in self._even],
                addresses,
                [self._sizes[index] for index in self._even],
                device=self._memory.device,
            )
            self._table = addresses, table
        self._table[1].run()
        return True

    def _fill_by_torch(self, sources: Sequence[torch.Tensor]) -> None:
        for kind, targets in self._fused().items():
            torch._foreach_copy_(targets, [sources[index] for index in self._indices[kind]])
        self._fill_one_by_one(sources, self._indices[None])

    def _fill_one_by_one(self, sources: Sequence[torch.Tensor], indices: Iterable[int]) -> None:
        views = self._typed()
        for index in indices:
            source = sources[index].detach()
            if source.is_neg():
                # Torch's copy multiplies instead, which gives zeros another sign.
                source = source.resolve_conj().resolve_neg()
            views[index].copy_(source, non_blocking=not source.is_cpu)

    def _typed(self) -> list[torch.Tensor]:
        if self._views is None:
            self._views = [
                self._memory[first : first + size].view(dtype).view(shape)
                for (first, dtype, shape), size in zip(self._places, self._sizes, strict=True)
            ]
        return self._views

    def _fused(self) -> dict[torch.dtype, list[torch.Tensor]]:
        """Return what one call for each dtype can fill; the rest are large, or rare."""
        if self._groups is None:
            self._indices = {None: []}
            for index, ((_, dtype, _), size) in enumerate(
                zip(self._places, self._sizes, strict=True)
            ):
                is_fused = dtype in _FUSIBLE and size < LARGE_BYTES
                self._indices.setdefault(dtype if is_fused else None, []).append(index)
            views = self._typed()
            self._groups = {
                dtype: [views[index] for index in indices]
                for dtype, indices in self._indices.items()
                if dtype is not None
            }
        return self._groups


def part_of(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return what a bucket's entry has of a tensor: ``[num_bytes]``, uint8; see ``byte_view``."""
    return byte_view(tensor)[entry.first_byte : entry.first_byte + entry.num_bytes]
