"""Digests of bytes, computed where they lie: the same number on a CPU as on a GPU.

Bytes are cut into rows of ``ROW_BYTES``, the last one filled up with zeros. A row's eight-byte
words are added up; the sum of the last row counts once, that of the one before three times,
then five times, and so on; all of that is added up, with the length; everything modulo
2**64. So the data is read once, by torch's own reduction, and what follows (two running
sums) is a 32nd of it.

What it finds: any change within one word, and so every single flipped bit, for certain:
it changes the sum of one row by less than 2**64, and an odd factor cannot make that
vanish. Rows in another order, other lengths, old bytes in place of new ones, zeros: all
but always. What it does not find: words in another order within one row, and changes
that cancel each other. It is not a cryptographic hash: whoever wants to deceive it can.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import torch

from .messages import DIGEST_BYTES

# By address and number of bytes.
KnownDigests = dict[tuple[int, int], int]
ROW_BYTES = 256
_WORD_BYTES = 8


class Digests:
    """Digests of stretches of bytes, one after the other, fetched together.

    On a GPU everything is enqueued on the current stream, and only ``take`` waits.
    """

    def __init__(self) -> None:
        self._rows: dict[torch.device, list[torch.Tensor]] = {}
        # For each stretch: where it lies, its rows, its bytes.
        self._stretches: list[tuple[torch.device, int, int]] = []

    def add(self, data: torch.Tensor) -> None:
        """Digest one more stretch.

        Args:
            data: ``[num_bytes]``, uint8, contiguous, on any device.
        """
        num_whole = data.numel() // ROW_BYTES
        rows = []
        if num_whole:
            rows.append(_row_sums(data[: num_whole * ROW_BYTES]))
        if data.numel() % ROW_BYTES:
            rows.append(_last_row_sum(data[num_whole * ROW_BYTES :]))
        self._note(data, rows)

    def add_all(self, stretches: Sequence[torch.Tensor]) -> None:
        """Digest several stretches; those of one slot with a single pass over it.

        Args:
            stretches: As ``add`` takes them.
        """
        if len(stretches) < 2 or not _are_neighbours(stretches):
            for data in stretches:
                self.add(data)
            return
        first, last = stretches[0], stretches[-1]
        begin = first.storage_offset()
        num_rows = (last.storage_offset() + last.numel() - begin) // ROW_BYTES
        sums = _row_sums(first.as_strided((num_rows * ROW_BYTES,), (1,)))
        for data in stretches:
            row, num_whole = (data.storage_offset() - begin) // ROW_BYTES, data.numel() // ROW_BYTES
            rows = [sums[row : row + num_whole]]
            if data.numel() % ROW_BYTES:
                # What lies behind its end in the slot is not of this tensor.
                rows.append(_last_row_sum(data[num_whole * ROW_BYTES :]))
            self._note(data, rows)

    def absorb(self, other: Digests) -> None:
        """Take over what another one has, behind what is here; it begins anew."""
        for device, rows in other._rows.items():
            self._rows.setdefault(device, []).extend(rows)
        self._stretches += other._stretches
        other._rows, other._stretches = {}, []

    def take(self) -> list[int]:
        """Return the digests, signed numbers of 64 bits in the order of ``add``; begin anew."""
        stretches, self._stretches = self._stretches, []
        all_rows, self._rows = self._rows, {}
        found = {
            device: iter(
                _combine(
                    all_rows.get(device, []),
                    [(rows, size) for one, rows, size in stretches if one == device],
                    device=device,
                )
            )
            for device in {device for device, _, _ in stretches}
        }
        return [next(found[device]) for device, _, _ in stretches]

    def _note(self, data: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        self._rows.setdefault(data.device, []).extend(rows)
        num_rows = sum(one.numel() for one in rows)
        self._stretches.append((data.device, num_rows, data.numel()))


def digest(data: torch.Tensor) -> int:
    """Return the digest of one stretch, see ``Digests.add``."""
    digests = Digests()
    digests.add(data)
    return digests.take()[0]


def packed(digests: Sequence[int]) -> bytes:
    """Return digests as they travel: ``DIGEST_BYTES`` each, the lowest first."""
    found = array("q", digests)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def unpacked(data: bytes) -> list[int]:
    """Return digests that have travelled.

    Raises:
        ValueError: A part of one is missing.
    """
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes are no multiple of {DIGEST_BYTES}")
    found = array("q", data)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def _are_neighbours(stretches: Sequence[torch.Tensor]) -> bool:
    """Whether stretches lie in one memory, in order, each at the start of a row and close by."""
    first = stretches[0]
    storage, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    end = begin
    for data in stretches:
        offset = data.storage_offset()
        is_next = end <= offset < end + ROW_BYTES and not (offset - begin) % ROW_BYTES
        if not is_next or data.untyped_storage().data_ptr() != storage:
            return False
        end = offset + data.numel()
    return end - begin >= ROW_BYTES


def _row_sums(data: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row: ``[num_rows]``, int64. One read of the data."""
    if data.data_ptr() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64).view(-1, ROW_BYTES // _WORD_BYTES).sum(dim=1)


def _last_row_sum(data: torch.Tensor) -> torch.Tensor:
    """Return the sum of a row that is not whole: ``[1]``, int64."""
    row = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=data.device)
    row[: data.numel()] = data
    return _row_sums(row)


def _combine(
    rows: Sequence[torch.Tensor], stretches: Sequence[tuple[int, int]], *, device: torch.device
) -> list[int]:
    """Return the digests of a device's stretches, given as (number of rows, bytes)."""
    sizes = [size for _, size in stretches]
    if not rows:
        return sizes
    counts = torch.tensor([count for count, _ in stretches])
    ends = counts.cumsum(0)
    counts, starts, ends = (one.to(device) for one in (counts, ends - counts, ends))
    sums = torch.cat(list(rows)).cumsum(0)
    before = _up_to(sums, starts)
    total = _up_to(sums, ends) - before
    # The sum of the running sums within a stretch has its last row once, the one before
    # twice, and so on.
    ramps = sums.cumsum(0)
    ramp = _up_to(ramps, ends) - _up_to(ramps, starts) - counts * before
    found = 2 * ramp - total + torch.tensor(sizes, device=device)
    return [int(one) for one in found.tolist()]


def _up_to(sums: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return running sums up to, and without, some rows."""
    return torch.where(ends > 0, sums[(ends - 1).clamp(min=0)], 0)
