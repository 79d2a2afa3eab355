"""How a source becomes buckets: the sender's half of the layout.

Every tensor is copied into its slot before the next one is asked for, so a source may
reuse its memory. The bytes of a slot are left alone until every worker has
acknowledged it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from .config import Verify
from .digests import Digests, packed
from .errors import SourceError
from .layout import BucketPlan, BucketPlanner, Entry, Manifest, TensorMeta
from .messages import Batch, Busy, Command, Deviate
from .slots import Slots
from .sources import Source
from .tensors import byte_view
from .timeline import MAKING, PACKING, WAITING_FOR_SLOT, Timeline

# How often workers hear that a source is at work whose next bucket takes long.
BUSY_S = 0.25


class Packing:
    """The buckets of one update.

    Attributes:
        num_batches: Buckets handed out.
        num_tensors: Tensors that were packed whole.
        num_bytes: Bytes of those tensors.
        source_s: Seconds that the source took to give its last tensor.
    """

    def __init__(
        self,
        source: Source,
        *,
        manifest: Manifest | None,
        slots: Slots,
        verify: Verify = Verify.NONE,
        timeline: Timeline | None = None,
    ) -> None:
        """Begin with an empty bucket.

        Args:
            source: Where the tensors come from.
            manifest: What both ends already know of them: all of it for a declared
                source, what the last stream was for another, or nothing.
            slots: The shared memory to pack into.
            verify: Whether each bucket is announced with digests of what was packed.
            timeline: Where it is kept when each bucket was packed.
        """
        self._source = source
        self._manifest = manifest
        self._slots = slots
        self._timeline = Timeline() if timeline is None else timeline
        self._begin_ns = 0
        self._digests = Digests() if verify is Verify.DIGEST else None
        self._is_planned = manifest is not None
        self._sent: list[TensorMeta] = []
        self._entries: list[Entry] = []
        self._metas: list[TensorMeta] = []
        self.num_batches = 0
        self.num_tensors = 0
        self.num_bytes = 0
        self.source_s = 0.0

    def batches(self, num_acks: Callable[[], int]) -> Iterator[list[Command]]:
        """Pack the source, one bucket for every step.

        Args:
            num_acks: Tells how many buckets every worker has acknowledged.

        Yields:
            What is to be sent to every worker; nothing while all slots are in use. Also
            between two tensors of one bucket, where they come slowly.

        Raises:
            SourceError: The source is not what it declared, or cannot be sent.
        """
        self._begin_ns = self._timeline.now()
        if self._source.ready is not None and self._manifest is not None:
            yield from self._ready_batches(self._source.ready, self._manifest, num_acks)
            return
        planner = BucketPlanner(self._slots.layout)
        asked_s = said_s = time.monotonic()
        for meta, tensor in self._timed(self._source.tensors):
            commands = self._note(meta)
            now_s = time.monotonic()
            self.source_s = now_s - asked_s
            if now_s - said_s > BUSY_S:
                commands.append(Busy(num_tensors=len(self._sent)))
                said_s = now_s
            if commands:
                yield commands
            data = byte_view(tensor)
            for entry in planner.place(meta.num_bytes):
                if entry is None:
                    yield [self._end_bucket()]
                    yield from self._wait_for_slot(num_acks)
                    said_s = time.monotonic()
                    continue
                self._put(entry, meta)
                end_byte = entry.first_byte + entry.num_bytes
                part = data[entry.first_byte : end_byte]
                if self._digests is not None:
                    self._digests.add(part)
                self._slots.write(self.num_batches, entry.offset_bytes, part)
            self.num_tensors += 1
            self.num_bytes += meta.num_bytes
            # The source may need the memory for the next tensor.
            del tensor, data, part
            asked_s = time.monotonic()
        if self._is_planned and self.num_tensors < len(self._manifest or ()):
            # First: the last bucket is less than the one that was planned.
            yield [self._leave_manifest(self.num_tensors)]
        if self._entries:
            yield [self._end_bucket()]

    def _ready_batches(
        self,
        ready: Callable[[int, int], list[torch.Tensor]],
        manifest: Manifest,
        num_acks: Callable[[], int],
    ) -> Iterator[list[Command]]:
        """Pack tensors that exist all at once: a bucket at a time, as it was planned."""
        placed = self._slots.placed
        plan = manifest.plan(self._slots.layout, placed)
        for seq, entries in enumerate(plan.buckets):
            yield from self._wait_for_slot(num_acks)
            if plan.is_placed[seq] and placed is not None:
                if self._digests is not None:
                    here = ready(entries[0].index, entries[-1].index + 1)
                    _add_digests(self._digests, entries, here)
                    del here
                self._advance(plan, seq)
                yield [self._end_bucket(region=placed.region)]
                continue
            tensors = ready(entries[0].index, entries[-1].index + 1)
            if self._digests is not None:
                _add_digests(self._digests, entries, tensors)
            self._slots.fill(seq, manifest, tensors, devices=self._source.devices)
            # Whose the memory is may change it as soon as everything is sent.
            del tensors
            self._advance(plan, seq)
            yield [self._end_bucket()]

    def _advance(self, plan: BucketPlan, seq: int) -> None:
        progress = plan.progress[seq + 1]
        self.num_tensors = progress.num_tensors
        self.num_bytes = progress.num_bytes - progress.open_bytes

    def digest(self) -> str:
        """Return the digest of what was sent, and keep it for the next stream."""
        if self._is_planned and self._manifest is not None:
            sent = self._manifest
        else:
            sent = Manifest(self._sent)
        self._slots.last_manifest = sent
        return sent.digest

    def describe(self) -> str:
        """Return how far the packing has come, for messages."""
        declared = self._source.declared
        total = "" if declared is None else f" of {len(declared)}"
        num_sent, last = len(self._sent), self._sent[-1] if self._sent else None
        if declared is not None and last is None and self.num_tensors:
            num_sent, last = self.num_tensors, declared.metas[self.num_tensors - 1]
        name = "" if last is None else f", {last.name}"
        buckets = ""
        if self._is_planned and self._manifest is not None:
            plan = self._manifest.plan(self._slots.layout, self._slots.placed)
            buckets = f" of {len(plan.buckets)}"
        return f"bucket {self.num_batches}{buckets} (tensor {num_sent}{total}{name})"

    def _note(self, meta: TensorMeta) -> list[Command]:
        """Keep a meta, and leave the manifest where the stream leaves it."""
        index = len(self._sent)
        self._sent.append(meta)
        if not self._is_planned or self._manifest is None:
            return []
        if index < len(self._manifest) and self._manifest.metas[index] == meta:
            return []
        return [self._leave_manifest(index)]

    def _leave_manifest(self, index: int) -> Deviate:
        declared = self._source.declared
        if declared is not None:
            raise SourceError(
                f"{len(declared)} tensors were declared, and from tensor {index} on something "
                f"else came; the source must not change while it is pushed"
            )
        self._is_planned = False
        return Deviate(index=index)

    def _put(self, entry: Entry, meta: TensorMeta) -> None:
        self._entries.append(entry)
        if not self._is_planned and entry.first_byte == 0:
            self._metas.append(meta)

    def _end_bucket(self, *, region: int | None = None) -> Batch:
        """End the bucket in its slot, or one that is in the given region."""
        if region is None:
            self._slots.flush(self.num_batches)
        if region is None:
            region = self.num_batches % self._slots.num_slots
        self._timeline.note(PACKING, self._begin_ns, bucket=self.num_batches, region=region)
        batch = Batch(
            seq=self.num_batches,
            region=region,
            entries=None if self._is_planned else tuple(self._entries),
            metas=tuple(self._metas),
            digests=b"" if self._digests is None else packed(self._digests.take()),
        )
        self.num_batches += 1
        self._entries, self._metas = [], []
        return batch

    def _wait_for_slot(self, num_acks: Callable[[], int]) -> Iterator[list[Command]]:
        begin_ns, has_waited = self._timeline.now(), False
        while self.num_batches - num_acks() >= self._slots.num_slots:
            has_waited = True
            yield []
        if has_waited:
            self._timeline.note(WAITING_FOR_SLOT, begin_ns, bucket=self.num_batches)
        self._begin_ns = self._timeline.now()

    def _timed(
        self, tensors: Iterator[tuple[TensorMeta, torch.Tensor]]
    ) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield the source's tensors, and count what it takes to make them."""
        begin_ns = self._timeline.now()
        for item in tensors:
            self._timeline.count(MAKING, self._timeline.now() - begin_ns)
            yield item
            # The source may need the memory for the next tensor.
            del item
            begin_ns = self._timeline.now()


def _add_digests(
    digests: Digests, entries: Sequence[Entry], tensors: Sequence[torch.Tensor]
) -> None:
    """Digest what a bucket is to hold, where it lies."""
    for entry, tensor in zip(entries, tensors, strict=True):
        end_byte = entry.first_byte + entry.num_bytes
        digests.add(byte_view(tensor)[entry.first_byte : end_byte])
