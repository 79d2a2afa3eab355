"""The staged sink: an atomic update, which no model sees before every rank has all of it.

Wraps another sink. What comes is copied into one arena, only the parts that this rank
needs, and the model is left alone. With the commit, when every worker of every engine has
voted, the other sink loads it all from the arena at once. So whatever fails before leaves
the old weights, to the last byte; what fails while they are applied leaves the model torn.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from .boxes import Box
from .config import Verify
from .copies import CopyBatch, view
from .errors import ApplyError, EngineState, MissingTensorError, RemoteProtocolError
from .layout import MAX_ENTRIES, Manifest, TensorMeta, aligned
from .messages import Open, Staged
from .proofs import Proof
from .sinks import Bucket, Piece, Sink, SinkReport
from .streams import synchronise
from .transport.arena import Arena
from .wire_errors import to_wire

logger = logging.getLogger(__name__)


class Stageable(Sink, Protocol):
    """A sink that can say what it needs, once it is open."""

    def wanted(self, index: int) -> tuple[Box, ...] | None:
        """Return the parts of a tensor that it reads; ``None`` for all of its bytes.

        A part that it names comes as a piece of its own, with ``Piece.box`` set to it.

        Args:
            index: Which tensor of the manifest.
        """


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor, or a part of one, waits.

    Attributes:
        index: Which tensor of the manifest.
        box: The part; ``None`` for all of its bytes, as they are.
        first_byte: Where it lies in the arena.
        num_bytes: Its length.
    """

    index: int
    box: Box | None
    first_byte: int
    num_bytes: int


def staged_if_asked(sink: Stageable, opened: Open, *, device: torch.device) -> Sink:
    """Wrap a sink where the offer asks for an atomic update.

    Args:
        sink: Where the weights go in the end.
        opened: The offer.
        device: The worker's device.
    """
    if not opened.is_atomic:
        return sink
    return StagedSink(sink, device=device, num_sharers=opened.num_workers, verify=opened.verify)


class StagedSink:
    """One atomic update. See ``sinks.Sink`` for the order of calls."""

    def __init__(
        self,
        inner: Stageable,
        *,
        device: torch.device,
        num_sharers: int = 1,
        verify: Verify = Verify.NONE,
    ) -> None:
        """Prepare for one update; nothing is allocated.

        Args:
            inner: What applies it.
            device: The worker's device: staged there, if there is room.
            num_sharers: Workers that stage in this host's memory at the same time.
            verify: Whether what is staged is checked before the vote.
        """
        self._inner = inner
        self._device = device
        self._num_sharers = num_sharers
        self._proof = Proof() if verify is Verify.DIGEST else None
        self._metas: tuple[TensorMeta, ...] = ()
        self._places: dict[int, list[_Place]] = {}
        self._left: dict[int, int] = {}
        self._arena: Arena | None = None
        self._is_applying = False

    def open(self, manifest: Manifest | None) -> None:
        """Let the other sink check the manifest, then find room for what it needs of it.

        Raises:
            LoadError: The manifest does not fit. Nothing was changed.
            StagingError: There is no room. Nothing was changed.
        """
        if manifest is None:
            raise RemoteProtocolError("an atomic update came without a declared manifest")
        self._inner.open(manifest)
        self._metas = manifest.metas
        num_bytes = self._lay_out()
        self._arena = Arena.allocate(num_bytes, device=self._device, num_sharers=self._num_sharers)
        logger.debug("%d bytes are staged in %s", num_bytes, self._arena.place)

    def deviate(self, index: int) -> None:
        """Refuse: what was declared is what was laid out."""
        raise RemoteProtocolError(f"an atomic update leaves its manifest at tensor {index}")

    def load(self, bucket: Bucket) -> None:
        """Copy what this rank needs of a bucket; the model is not touched."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        known = bucket.known_digests()
        for piece in bucket.pieces:
            for place in self._places.get(piece.index, ()):
                for to, data in self._shares(piece, place):
                    pairs.append((to, data))
                    self._left[piece.index] -= data.nbytes
                    if self._proof is not None:
                        self._proof.note(
                            f"the staged {piece.meta.name}",
                            to,
                            source=piece.meta.name,
                            data=data,
                            known=known,
                        )
        CopyBatch(pairs).run()
        if self._proof is not None:
            self._proof.seal()
        devices = {piece.data.device for piece in bucket.pieces}
        for device in devices if self._arena is None else devices | {self._arena.data.device}:
            synchronise(device)

    def prepare(self) -> None:
        """Confirm that everything is staged, and, where that is asked for, that it is right.

        Raises:
            MissingTensorError: A part of a tensor did not come.
            VerifyError: What is staged is not what came.
        """
        missing = [index for index, num_bytes in self._left.items() if num_bytes]
        if missing:
            name = self._metas[missing[0]].name
            raise MissingTensorError(
                f"{self._left[missing[0]]} bytes of {name!r} were not staged, and {len(missing)} "
                f"tensors are not whole; nothing was written; push again",
                name=name,
            )
        if self._proof is not None:
            self._proof.check(state="nothing was written")

    def commit(self) -> SinkReport:
        """Load everything from the arena, and make it the model's.

        Raises:
            ApplyError: That failed. ``abort`` says what is left.
        """
        arena = self._made()
        self._is_applying = True
        try:
            for bucket in self._buckets():
                self._inner.load(bucket)
            self._inner.prepare()
            report = self._inner.commit()
        except Exception as error:
            # Logged, not chained: its traceback holds views of the arena.
            logger.exception("a staged update could not be applied")
            code, text, details = to_wire(error)
            name = details.get("name")
            raise ApplyError(
                f"the update was complete on every worker, and applying it failed here: {text}; "
                f"the old weights may be lost in part, and other workers may have the new ones; "
                f"push again",
                name=name if isinstance(name, str) else None,
                cause=code,
            ) from None
        staged = Staged(num_bytes=arena.data.numel(), place=arena.place)
        return replace(report, staged=staged)

    def abort(self) -> EngineState:
        """Say what is left: before the commit the model was not touched.

        Later it is torn, also where nothing was written here: other ranks may have applied it.
        """
        self._inner.abort()
        return EngineState.TORN if self._is_applying else EngineState.UNCHANGED

    def release(self) -> None:
        """Drop what was staged. Idempotent."""
        self._inner.release()
        self._places, self._left, self._proof = {}, {}, None
        arena, self._arena = self._arena, None
        if arena is None:
            return
        try:
            # A load that failed left copies under way.
            synchronise(self._device)
        finally:
            arena.close()

    def _made(self) -> Arena:
        if self._arena is None:
            raise RemoteProtocolError("nothing was opened yet")
        return self._arena

    def _lay_out(self) -> int:
        """Give every wanted part a place; return the bytes of all."""
        end_byte = 0
        for index, meta in enumerate(self._metas):
            boxes = self._inner.wanted(index)
            itemsize = getattr(torch, meta.dtype).itemsize
            # A part that is read twice waits once.
            for box in (None,) if boxes is None else dict.fromkeys(boxes):
                size = meta.num_bytes if box is None else box.num_elements * itemsize
                place = _Place(index, box, end_byte, size)
                self._places.setdefault(index, []).append(place)
                self._left[index] = self._left.get(index, 0) + size
                end_byte += aligned(size)
        return end_byte

    def _shares(self, piece: Piece, place: _Place) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield where in the arena a piece goes, and what of it."""
        waiting = self._view(place)
        if place.box is None:
            yield waiting[piece.first_byte : piece.first_byte + piece.data.numel()], piece.data
            return
        typed = waiting.view(getattr(torch, piece.meta.dtype))
        for data, box in piece.share(place.box, _packed(place.box)):
            yield view(typed, box), data

    def _view(self, place: _Place) -> torch.Tensor:
        return self._made().data[place.first_byte : place.first_byte + place.num_bytes]

    def _buckets(self) -> Iterator[Bucket]:
        """Yield everything that is staged, in the manifest's order."""
        pieces = [
            Piece(
                index=place.index,
                meta=self._metas[place.index],
                first_byte=0,
                data=self._view(place),
                box=place.box,
            )
            for index in sorted(self._places)
            for place in self._places[index]
        ]
        for seq, first in enumerate(range(0, len(pieces), MAX_ENTRIES)):
            yield Bucket(seq=seq, pieces=tuple(pieces[first : first + MAX_ENTRIES]))


def _packed(box: Box) -> Box:
    """Return a box of the same shape whose elements are neighbours."""
    strides = tuple(math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape)))
    return Box(0, box.shape, strides)
