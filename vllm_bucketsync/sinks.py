"""What a receiver hands tensors to: the contract, and the sink that keeps nothing.

A receiver knows nothing of models. It opens regions, checks what it is told, and
drives one sink through one update. A new capability is a new sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .boxes import Box, cut
from .copies import view
from .digests import KnownDigests
from .errors import EngineState
from .layout import Manifest, TensorMeta
from .messages import Cast, Checked, LoadSplit, Staged
from .timeline import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A whole tensor, or a fragment of one, as it lies in a region.

    Attributes:
        index: Which tensor of the manifest.
        meta: What that tensor is.
        first_byte: Where the fragment starts within the tensor.
        data: ``[num_bytes]``, uint8, on the region's device, contiguous. A view:
            valid until ``Sink.load`` returns. Clone what has to live longer.
        box: The part of the tensor that ``data`` holds, packed, where it is no stretch of
            its bytes. Only sinks that asked for parts get such.
    """

    index: int
    meta: TensorMeta
    first_byte: int
    data: torch.Tensor
    box: Box | None = None

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the tensor, as it is."""
        return self.box is None and self.data.numel() == self.meta.num_bytes

    def tensor(self) -> torch.Tensor:
        """Return the whole tensor in its own dtype and shape: a view of ``data``."""
        return self.data.view(getattr(torch, self.meta.dtype)).view(self.meta.shape)

    def share(self, source: Box, target: Box) -> Iterator[tuple[torch.Tensor, Box]]:
        """Find what of a copy this piece can do.

        Args:
            source: What is read of the tensor.
            target: What is written, of the same shape.

        Yields:
            A view of ``data`` in the tensor's dtype, and the part of the target for it.
        """
        dtype = getattr(torch, self.meta.dtype)
        data = self.data.view(dtype)
        if self.box is not None:
            if self.box == source:
                yield data.view(source.shape), target
            return
        if self.is_whole:
            yield view(data, source), target
            return
        first = self.first_byte // dtype.itemsize
        for part, to in cut(source, target, first=first, end=first + data.numel()):
            yield view(data, Box(part.offset - first, part.shape, part.strides)), to


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """A filled slot, as a sink sees it.

    Where both ends planned the layout, the same object comes again with every update of
    that manifest through the same memory: its tensors lie at the same addresses. What a
    sink makes ready for it is then worth keeping, and is kept here, so that it ends
    with the memory that it points into.

    Attributes:
        seq: Counts from 0 within the update.
        pieces: Its tensors and fragments, in order.
        is_kept: Whether the same object comes again.
        prepared: Whatever the sink has made ready for this bucket, or ``None``.
        digests: Of each piece's bytes, this time; empty where nothing is verified.
    """

    seq: int
    pieces: tuple[Piece, ...]
    is_kept: bool = False
    prepared: object = None
    digests: tuple[int, ...] = ()

    def known_digests(self) -> KnownDigests:
        """Return the pieces' digests by where they lie, for whoever verifies copies of them."""
        return {
            (piece.data.data_ptr(), piece.data.numel()): digest
            for piece, digest in zip(self.pieces, self.digests, strict=bool(self.digests))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    """What a sink did with one update.

    Attributes:
        split: Which ways the weights took, and how long post-processing was.
        staged: Where they waited for the commit.
        checked: What was verified.
        cloned_bytes: Bytes copied aside because they had to outlive their bucket.
        skipped: Names that the engine has no place for and was allowed to skip.
        notes: Anything else that a user should read.
        spans: When the parts of loading were that are worth showing.
        left_as_is: Patterns of ``partial`` that let a parameter keep its old value.
        casts: What was cast, as far as the update was known in advance.
    """

    split: LoadSplit = field(default_factory=LoadSplit)
    staged: Staged = field(default_factory=Staged)
    checked: Checked = field(default_factory=Checked)
    cloned_bytes: int = 0
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    left_as_is: tuple[str, ...] = ()
    casts: tuple[Cast, ...] = ()


class Sink(Protocol):
    """One update, seen from where the tensors go.

    Called in this order: ``open``, any number of ``load`` (and at most one
    ``deviate``), ``prepare``, ``commit``; ``abort`` instead of the next one, or after any
    that raised, ``commit`` included; ``release`` at the end of it all.
    """

    def open(self, manifest: Manifest | None) -> None:
        """Begin. Find everything that can be found before a byte is written.

        Args:
            manifest: What will come; ``None`` for a stream that was not declared.

        Raises:
            LoadError: The manifest does not fit. Nothing was changed.
        """

    def deviate(self, index: int) -> None:
        """Take note that the stream leaves the manifest at tensor ``index``."""

    def load(self, bucket: Bucket) -> None:
        """Take over the tensors of one bucket, in order.

        No byte of the bucket may be needed when this returns.
        """

    def prepare(self) -> None:
        """Confirm that the update is complete and can be committed.

        Raises:
            LoadError: Something is missing.
        """

    def commit(self) -> SinkReport:
        """Make the update the one that is used."""

    def abort(self) -> EngineState:
        """Undo what can be undone, and say what is left."""

    def release(self) -> None:
        """Drop everything that was kept for this update. Idempotent."""


class DiscardSink:
    """Copies every piece to one scratch buffer, as loading would, and keeps nothing.

    Stands for a model in benchmarks and protocol tests.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def open(self, manifest: Manifest | None) -> None:
        """Accept any manifest."""

    def deviate(self, index: int) -> None:
        """Accept any stream."""

    def load(self, bucket: Bucket) -> None:
        """Copy each piece once."""
        for piece in bucket.pieces:
            size = piece.data.numel()
            if size > self._scratch.numel() or self._scratch.device != piece.data.device:
                self._scratch = torch.empty(size, dtype=torch.uint8, device=piece.data.device)
            self._scratch[:size].copy_(piece.data)
        for device in {piece.data.device for piece in bucket.pieces if piece.data.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def prepare(self) -> None:
        """Have nothing to miss."""

    def commit(self) -> SinkReport:
        """Have nothing to commit."""
        return SinkReport()

    def abort(self) -> EngineState:
        """Say that nothing changed, since there is nothing."""
        return EngineState.UNCHANGED

    def release(self) -> None:
        """Give the scratch buffer back."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
