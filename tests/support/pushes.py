"""Drives a weight sink as a receiver does, through one bucket that is used again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from vllm_bucketsync.layout import (
    ALIGNMENT_BYTES,
    BucketLayout,
    Entry,
    Manifest,
    TensorMeta,
    plan_buckets,
)
from vllm_bucketsync.sinks import Bucket, Piece, Sink, SinkReport
from vllm_bucketsync.tensors import byte_view

Tensors = Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]]

# What a bucket holds once its tensors were taken over: a view that was kept shows it.
POISON = 0xA5


def metas_of(tensors: Tensors, *, buffers: Iterable[str] = ()) -> list[TensorMeta]:
    """Describe tensors as a sender does; those named in ``buffers`` are buffers."""
    is_buffer = set(buffers)
    return [
        TensorMeta(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            num_bytes=tensor.nbytes,
            is_buffer=name in is_buffer,
        )
        for name, tensor in _pairs(tensors)
    ]


def load_all(
    sink: Sink,
    tensors: Tensors,
    *,
    slot_size_bytes: int,
    buffers: Iterable[str] = (),
    first: int = 0,
) -> None:
    """Send tensors through one reused bucket, which is poisoned after each load.

    The first of them is number ``first`` of its update.
    """
    metas = metas_of(tensors, buffers=buffers)
    layout = BucketLayout(slot_size_bytes=-(-slot_size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    plain = [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in _pairs(tensors)
    ]
    bucket = torch.full((layout.slot_size_bytes,), POISON, dtype=torch.uint8)
    for seq, entries in enumerate(plan_buckets(metas, layout=layout)):
        pieces = []
        for entry in entries:
            data = bucket[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
            data.copy_(plain[entry.index][entry.first_byte : entry.first_byte + entry.num_bytes])
            pieces.append(
                Piece(
                    index=first + entry.index,
                    meta=metas[entry.index],
                    first_byte=entry.first_byte,
                    data=data,
                )
            )
        try:
            sink.load(Bucket(seq=seq, pieces=tuple(pieces)))
        finally:
            bucket.fill_(POISON)


def run(
    sink: Sink,
    tensors: Tensors,
    *,
    slot_size_bytes: int = 1 << 16,
    buffers: Iterable[str] = (),
    declared: bool = True,
) -> SinkReport:
    """Run one update up to its commit, or to where it raises: declared, or streamed."""
    sink.open(Manifest(metas_of(tensors, buffers=buffers)) if declared else None)
    load_all(sink, tensors, slot_size_bytes=slot_size_bytes, buffers=buffers)
    sink.prepare()
    return sink.commit()


def push(
    sink: Sink,
    tensors: Tensors,
    *,
    slot_size_bytes: int = 1 << 16,
    buffers: Iterable[str] = (),
    declared: bool = True,
) -> SinkReport:
    """Run one whole update; one that fails is aborted, as a receiver would."""
    try:
        return run(
            sink, tensors, slot_size_bytes=slot_size_bytes, buffers=buffers, declared=declared
        )
    except BaseException:
        sink.abort()
        raise
    finally:
        sink.release()


def _pairs(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    return list(tensors.items() if isinstance(tensors, Mapping) else tensors)


class Failing(Mapping[str, torch.Tensor]):
    """A state dict that is whole when it is looked at, and fails while it is read."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, after: int) -> None:
        self._tensors = tensors
        # Each is looked at once to be described.
        self._left = len(tensors) + after

    def __getitem__(self, name: str) -> torch.Tensor:
        if not self._left:
            raise ConnectionError("a rank is gone")
        self._left -= 1
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Warm:
    """Pushes through slots that stay, so that planned buckets come again as the same objects.

    Attributes:
        buckets: Those of the manifest that was pushed last, by number.
    """

    def __init__(self, *, slot_size_bytes: int = 20_224, num_slots: int = 2) -> None:
        self._layout = BucketLayout(slot_size_bytes)
        self._slots = [
            torch.full((slot_size_bytes,), POISON, dtype=torch.uint8) for _ in range(num_slots)
        ]
        self._manifest: Manifest | None = None
        self.buckets: list[Bucket] = []

    def push(self, sink: Sink, tensors: Tensors) -> SinkReport:
        """Run one whole declared update; one that fails is aborted."""
        manifest = Manifest(metas_of(tensors))
        if self._manifest is None or self._manifest.digest != manifest.digest:
            self._manifest = manifest
            self.buckets = [
                self._bucket(seq, entries)
                for seq, entries in enumerate(plan_buckets(manifest.metas, layout=self._layout))
            ]
        plain = [byte_view(tensor) for _, tensor in _pairs(tensors)]
        try:
            sink.open(manifest)
            for bucket in self.buckets:
                for piece in bucket.pieces:
                    end = piece.first_byte + piece.data.numel()
                    piece.data.copy_(plain[piece.index][piece.first_byte : end])
                sink.load(bucket)
                self._slots[bucket.seq % len(self._slots)].fill_(POISON)
            sink.prepare()
            return sink.commit()
        except BaseException:
            sink.abort()
            raise
        finally:
            sink.release()

    def _bucket(self, seq: int, entries: Iterable[Entry]) -> Bucket:
        slot = self._slots[seq % len(self._slots)]
        metas = () if self._manifest is None else self._manifest.metas
        pieces = tuple(
            Piece(
                index=entry.index,
                meta=metas[entry.index],
                first_byte=entry.first_byte,
                data=slot[entry.offset_bytes : entry.offset_bytes + entry.num_bytes],
            )
            for entry in entries
        )
        return Bucket(seq=seq, pieces=pieces, is_kept=True)
