"""What has arrived so far of one update: which tensors, and how much of the last one.

Nothing that a batch claims is believed: entries must carry the tensors on, byte after
byte and in order, and each description must be one that torch can have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from .errors import RemoteProtocolError
from .layout import (
    ALIGNMENT_BYTES,
    MAX_DIMS,
    MAX_NAME_BYTES,
    BucketLayout,
    BucketPlan,
    Entry,
    Manifest,
    Placed,
    Progress,
    TensorMeta,
    manifest_digest,
)
from .messages import Batch, Finish
from .tensors import DTYPE_NAMES

MAX_ELEMENTS = 1 << 60
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Arrivals:
    """The receiver's account of one update.

    Attributes:
        num_tensors: Tensors that arrived whole.
        num_bytes: Bytes that arrived.
    """

    def __init__(
        self, manifest: Manifest | None, *, layout: BucketLayout, placed: Placed | None = None
    ) -> None:
        self._manifest = manifest
        self._metas: list[TensorMeta] = []
        self._plan: BucketPlan | None = None
        if manifest is not None:
            self._metas = list(manifest.metas)
            self._plan = manifest.plan(layout, placed)
        self._placed_region = None if placed is None else placed.region
        self._open_bytes = 0
        self._is_open = False
        self.num_tensors = 0
        self.num_bytes = 0

    @property
    def num_buckets(self) -> int | None:
        """How many buckets were planned; ``None`` where nothing was."""
        return None if self._plan is None else len(self._plan.buckets)

    def describe(self) -> str:
        """Return how far it has come, behind a bucket's number, for messages."""
        buckets = "" if self._plan is None else f" of {len(self._plan.buckets)}"
        total = "" if self._plan is None else f" of {len(self._metas)}"
        last = self.num_tensors - (not self._is_open)
        name = f", {self._metas[last].name}" if 0 <= last < len(self._metas) else ""
        return f"{buckets} (tensor {self.num_tensors}{total}{name})"

    def deviate(self, index: int) -> None:
        """Forget what the manifest says from tensor ``index`` on.

        Raises:
            RemoteProtocolError: There is no manifest, or that tensor began already.
        """
        begun = self.num_tensors + self._is_open
        if self._manifest is None or not begun <= index <= len(self._metas):
            raise RemoteProtocolError(
                f"the stream leaves the manifest at tensor {index}, but {begun} of "
                f"{len(self._metas)} have begun"
            )
        del self._metas[index:]
        self._plan = None

    def accept_planned(
        self, batch: Batch, *, capacity_bytes: int
    ) -> Iterable[tuple[Entry, TensorMeta]] | None:
        """Take note of a bucket that both ends planned, as a whole.

        Args:
            batch: What was announced.
            capacity_bytes: Length of the region that holds it.

        Returns:
            Its entries, each with its tensor's meta, for whoever goes through them;
            ``None`` where the batch, or the update, has no plan.

        Raises:
            RemoteProtocolError: It is not the bucket that was planned next, or
                reaches past the region.
        """
        plan = self._plan
        if plan is None or batch.entries is not None:
            return None
        if batch.metas:
            raise RemoteProtocolError(f"bucket {batch.seq} brings metas that the manifest has")
        now = Progress(self.num_tensors, self.num_bytes, self._open_bytes)
        if batch.seq >= len(plan.buckets) or plan.progress[batch.seq] != now:
            raise RemoteProtocolError(
                f"bucket {batch.seq} says nothing of what it holds, and is not the next of the "
                f"{len(plan.buckets)} that were planned"
            )
        if plan.is_placed[batch.seq] != (batch.region == self._placed_region):
            raise RemoteProtocolError(
                f"bucket {batch.seq} was announced in region {batch.region}, where its tensors "
                f"are not"
            )
        if plan.used_bytes[batch.seq] > capacity_bytes:
            last = plan.buckets[batch.seq][-1]
            raise _misplaced(batch, last, f"within {capacity_bytes} bytes")
        after = plan.progress[batch.seq + 1]
        self.num_tensors, self.num_bytes = after.num_tensors, after.num_bytes
        self._open_bytes, self._is_open = after.open_bytes, after.open_bytes > 0
        metas = self._metas
        return ((entry, metas[entry.index]) for entry in plan.buckets[batch.seq])

    def accept(self, batch: Batch, *, capacity_bytes: int) -> list[tuple[Entry, TensorMeta]]:
        """Take note of a bucket and return its entries, each with its tensor's meta.

        Args:
            batch: What was announced.
            capacity_bytes: Length of the region that holds it.

        Raises:
            RemoteProtocolError: It does not carry on what came before, or reaches
                past the region.
        """
        planned = self.accept_planned(batch, capacity_bytes=capacity_bytes)
        if planned is not None:
            return list(planned)
        if self._plan is None:
            for meta in batch.metas:
                check_tensor_meta(meta)
            self._metas.extend(batch.metas)
        elif batch.metas:
            raise RemoteProtocolError(f"bucket {batch.seq} brings metas that the manifest has")
        if batch.entries is None or batch.region == self._placed_region:
            raise RemoteProtocolError(f"bucket {batch.seq} says nothing of what it holds")
        end_bytes = 0
        accepted = []
        for entry in batch.entries:
            if entry.offset_bytes < end_bytes or entry.offset_bytes % ALIGNMENT_BYTES:
                raise _misplaced(batch, entry, f"at or after byte {end_bytes}, aligned")
            end_bytes = entry.offset_bytes + entry.num_bytes
            if end_bytes > capacity_bytes:
                raise _misplaced(batch, entry, f"within {capacity_bytes} bytes")
            accepted.append((entry, self._advance(batch, entry)))
        return accepted

    def finish(self, finish: Finish) -> Manifest:
        """Check that all was received that was sent, and return what it was.

        Raises:
            RemoteProtocolError: A number or the manifest's digest differs.
        """
        found = (self.num_tensors, self.num_bytes, len(self._metas), self._is_open)
        if found != (finish.num_tensors, finish.num_bytes, finish.num_tensors, False):
            raise RemoteProtocolError(
                f"{finish.num_tensors} tensors of {finish.num_bytes} bytes were sent, but "
                f"{self.num_tensors} of {self.num_bytes} bytes arrived"
            )
        manifest = self._manifest
        if manifest is None or len(manifest) != len(self._metas) or self._plan is None:
            manifest = Manifest(self._metas)
        if manifest.digest != finish.manifest:
            raise RemoteProtocolError(
                f"what arrived is manifest {manifest.digest[:12]}, sent was {finish.manifest[:12]}"
            )
        return manifest

    def _advance(self, batch: Batch, entry: Entry) -> TensorMeta:
        if entry.index != self.num_tensors or entry.index >= len(self._metas):
            raise _misplaced(batch, entry, f"tensor {self.num_tensors} of {len(self._metas)}")
        meta = self._metas[entry.index]
        end_bytes = entry.first_byte + entry.num_bytes
        is_next = entry.first_byte == self._open_bytes and end_bytes <= meta.num_bytes
        if not is_next or (entry.num_bytes == 0 and meta.num_bytes != 0):
            raise _misplaced(
                batch, entry, f"byte {self._open_bytes} of {meta.num_bytes} to be next"
            )
        self.num_bytes += entry.num_bytes
        self._is_open = end_bytes < meta.num_bytes
        self._open_bytes = end_bytes if self._is_open else 0
        self.num_tensors += not self._is_open
        return meta


def check_manifest(metas: Sequence[TensorMeta], *, digest: str) -> Manifest:
    """Return the manifest that was announced as ``digest``.

    Raises:
        RemoteProtocolError: The metas are others, or no tensor can be like one of them.
    """
    for meta in metas:
        check_tensor_meta(meta)
    found = manifest_digest(metas)
    if found != digest:
        raise RemoteProtocolError(
            f"the metas that arrived are manifest {found[:12]}, announced was {digest[:12]}"
        )
    return Manifest(metas)


def check_tensor_meta(meta: TensorMeta) -> None:
    """Refuse a meta that no tensor of this torch can have.

    Raises:
        RemoteProtocolError: The dtype is unknown here, or the bytes do not fit the shape.
    """
    check_meta(meta)
    dtype = _DTYPES.get(meta.dtype)
    if dtype is None:
        raise RemoteProtocolError(
            f"{meta.name!r} has dtype {meta.dtype!r}, which torch {torch.__version__} does not "
            f"have; both ends need a torch that does"
        )
    expected = math.prod(meta.shape) * dtype.itemsize
    # torch counts in 64 bits, also where a dimension of zero leaves nothing to count.
    is_countable = math.prod(size for size in meta.shape if size) < MAX_ELEMENTS
    if meta.num_bytes != expected or not is_countable:
        raise RemoteProtocolError(
            f"{meta.name!r} of shape {list(meta.shape)} and dtype {meta.dtype} takes {expected} "
            f"bytes, announced were {meta.num_bytes}"
        )


def check_meta(meta: TensorMeta) -> None:
    """Refuse a meta that no tensor can have.

    Raises:
        RemoteProtocolError: A name, a shape or a size is out of bounds.
    """
    name_bytes = len(meta.name.encode())
    is_sane = (
        0 < name_bytes <= MAX_NAME_BYTES
        and len(meta.dtype) <= MAX_NAME_BYTES
        and len(meta.shape) <= MAX_DIMS
        and min(meta.shape, default=0) >= 0
        and meta.num_bytes >= 0
    )
    if not is_sane:
        raise RemoteProtocolError(
            f"a tensor's description is out of bounds: name of {name_bytes} bytes (1 to "
            f"{MAX_NAME_BYTES}), {len(meta.shape)} dimensions (at most {MAX_DIMS}), "
            f"{meta.num_bytes} bytes"
        )


def _misplaced(batch: Batch, entry: Entry, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"bucket {batch.seq}: {entry}; expected {expected}")
