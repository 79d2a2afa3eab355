"""Batches of copies: made ready once, run any number of times.

Whatever does not change from one run to the next is done when a batch is made: views,
addresses, which call is the cheapest for which copy, and which copies are neighbours
and become one. A run is a handful of statements, however many copies there are.

- Plain bytes between tensors on the CPU: ``memmove``, on this thread. Torch's pools, in
  two processes that share their cores, wait for each other (``transport/shm.py``).
- Plain bytes within a GPU: one launch of our own kernel (``copy_kernel.py``). Where that
  cannot run, or addresses are odd: one memcpy for each large copy, and one fused call of
  torch's for all small ones.
- Casts and strided parts: fused where torch can, else one ``copy_`` each.

Everything is enqueued on the current stream and nothing waits, but for copies to the CPU.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from . import copy_kernel
from .boxes import Box

# Below this, starting a memcpy takes longer than it runs. Above, both are alike.
LARGE_BYTES = 32 * 1024**2
# The first that divides addresses and length. Measured on one H200, torch 2.11, 4,608
# copies of 3 MiB: 8.8 ms as int32, 10.6 as int64, 11.2 as bfloat16, 13.3 as complex128; a
# memcpy each 37, one of them all 6.8.
_WIDTHS = (torch.int32, torch.int16, torch.uint8)

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class _Move:
    """Neighbouring bytes that go to neighbouring bytes."""

    to: torch.Tensor
    source: torch.Tensor
    to_address: int
    source_address: int
    num_bytes: int


class CopyBatch:
    """Copies between tensors that exist.

    Holds every tensor, so that an address that was taken stays good. Whoever moves a
    tensor's data elsewhere makes a new batch.

    Attributes:
        num_bytes: What one run writes.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        """Make ready.

        Args:
            pairs: Targets and sources, each pair of one shape. Dtypes may differ: the
                copy casts. No two targets overlap, and no target a source.
        """
        self.num_bytes = 0
        self._moves = _Moves()
        self._tables: dict[torch.device, _Table] = {}
        self._singles: list[Pair] = []
        self._fused: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        moves: list[_Move] = []
        for to, source in pairs:
            self.num_bytes += to.nbytes
            if not to.numel():
                continue
            if _is_plain(to, source):
                _append_merged(moves, to, source)
            else:
                self._add_shaped(to.detach(), source.detach())
        for move in moves:
            self._add_plain(move)

    def run(self) -> None:
        """Make every copy."""
        self._moves.run()
        for table in self._tables.values():
            table.run()
        with torch.no_grad():
            for to, source in self._singles:
                to.copy_(source, non_blocking=not to.is_cpu)
            for targets, sources in self._fused.values():
                torch._foreach_copy_(targets, sources, non_blocking=True)

    def _add_plain(self, move: _Move) -> None:
        if move.to.is_cpu and move.source.is_cpu:
            self._moves.add(move)
            return
        device = move.to.device
        if (
            device == move.source.device
            and _divides(copy_kernel.WIDTH_BYTES, move)
            and copy_kernel.is_available(device)
        ):
            self._tables.setdefault(device, _Table(device)).add(move)
            return
        width = next(w for w in _WIDTHS if _divides(w.itemsize, move))
        to, source = (_flat(t, move.num_bytes, width) for t in (move.to, move.source))
        if move.num_bytes >= LARGE_BYTES or to.device != source.device:
            self._singles.append((to, source))
        else:
            self._fuse(to, source)

    def _add_shaped(self, to: torch.Tensor, source: torch.Tensor) -> None:
        is_fusible = (
            not to.is_cpu
            and to.device == source.device
            and to.is_contiguous()
            and source.is_contiguous()
        )
        if is_fusible:
            self._fuse(to, source)
        else:
            self._singles.append((to, source))

    def _fuse(self, to: torch.Tensor, source: torch.Tensor) -> None:
        # One list for each kind: a single odd tensor makes torch copy one by one.
        targets, sources = self._fused.setdefault((to.device, to.dtype, source.dtype), ([], []))
        targets.append(to)
        sources.append(source)


class DeferredCopies:
    """Copies whose targets are made anew for every run, always alike."""

    def __init__(self, parts: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Take note of them.

        Args:
            parts: For each copy the target's name, the part of it, and what is copied
                there: a tensor of the part's shape.
        """
        self._parts = list(parts)
        self._moves: list[tuple[str, int, int, int]] | None = None

    def run(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Make every copy.

        Args:
            targets: By name. Their dtypes, strides and devices are the same every time.
        """
        if self._moves is None:
            self._moves = self._sort_out(targets)
        if self._moves:
            bases = {name: tensor.data_ptr() for name, tensor in targets.items()}
            run_moves(
                [bases[name] + offset for name, offset, _, _ in self._moves],
                [address for _, _, address, _ in self._moves],
                [size for _, _, _, size in self._moves],
            )
        if self._parts:
            CopyBatch((view(targets[name], box), data) for name, box, data in self._parts).run()

    def _sort_out(self, targets: Mapping[str, torch.Tensor]) -> list[tuple[str, int, int, int]]:
        """Return what plain bytes can do: target, offset there, address, length."""
        found: list[tuple[str, int, int, int]] = []
        self._kept = [data for _, _, data in self._parts]
        rest = []
        for name, box, data in self._parts:
            to = targets[name]
            # The view checks that the part is within the target.
            is_on_host = to.is_cpu and data.is_cpu
            if not (box.is_contiguous and is_on_host and _is_plain(view(to, box), data)):
                rest.append((name, box, data))
                continue
            offset, address, size = box.offset * to.itemsize, data.data_ptr(), data.nbytes
            last = found[-1] if found else None
            is_next = last is not None and (last[0], last[1] + last[3], last[2] + last[3]) == (
                name,
                offset,
                address,
            )
            if last is not None and is_next:
                found[-1] = (name, last[1], last[2], last[3] + size)
            else:
                found.append((name, offset, address, size))
        self._parts = rest
        return found


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a part of a tensor, in place.

    Raises:
        RuntimeError: The part reaches past the tensor's memory.
    """
    return tensor.detach().as_strided(box.shape, box.strides, tensor.storage_offset() + box.offset)


class _Moves:
    """Copies of plain bytes on the CPU."""

    def __init__(self) -> None:
        self._targets: list[int] = []
        self._sources: list[int] = []
        self._sizes: list[int] = []
        self._kept: list[Pair] = []

    def add(self, move: _Move) -> None:
        self._targets.append(move.to_address)
        self._sources.append(move.source_address)
        self._sizes.append(move.num_bytes)
        self._kept.append((move.to, move.source))

    def run(self) -> None:
        run_moves(self._targets, self._sources, self._sizes)


class _Table(_Moves):
    """Copies of plain bytes within one GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._table: copy_kernel.CopyTable | None = None

    def run(self) -> None:
        if self._table is None:
            self._table = copy_kernel.CopyTable(
                self._targets, self._sources, self._sizes, device=self._device
            )
        self._table.run()


def run_moves(targets: Iterable[int], sources: Iterable[int], sizes: Iterable[int]) -> None:
    """Copy bytes on the CPU: to each address, from each address, as many."""
    # The loop is C's. The lock of the interpreter is free during each copy.
    deque(map(ctypes.memmove, targets, sources, sizes), maxlen=0)


def _is_plain(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy is one of neighbouring bytes to neighbouring bytes."""
    return (
        to.dtype == source.dtype
        and to.is_contiguous()
        and source.is_contiguous()
        and not (to.is_conj() or source.is_conj() or to.is_neg() or source.is_neg())
    )


def _append_merged(moves: list[_Move], to: torch.Tensor, source: torch.Tensor) -> None:
    """Append a copy, or lengthen the last one where both ends carry it on."""
    addresses = to.data_ptr(), source.data_ptr()
    last = moves[-1] if moves else None
    if last is not None and _carries_on(last, to, source, addresses):
        last.num_bytes += to.nbytes
        return
    moves.append(_Move(to, source, *addresses, to.nbytes))


def _carries_on(
    last: _Move, to: torch.Tensor, source: torch.Tensor, addresses: tuple[int, int]
) -> bool:
    ends = last.to_address + last.num_bytes, last.source_address + last.num_bytes
    # Neighbours by chance, in memories of their own, stay two.
    return ends == addresses and all(
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in ((last.to, to), (last.source, source))
    )


def _divides(num_bytes: int, move: _Move) -> bool:
    return not (move.num_bytes | move.to_address | move.source_address) % num_bytes


def _flat(tensor: torch.Tensor, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """View ``num_bytes`` from a tensor's first element on as elements of ``dtype``."""
    plain = tensor.detach().as_strided((0,), (1,)).view(torch.uint8)
    first_byte = tensor.storage_offset() * tensor.itemsize
    return plain.as_strided((num_bytes,), (1,), first_byte).view(dtype)
