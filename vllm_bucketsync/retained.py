"""What a worker keeps between updates, so that a warm one sends almost nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from .channel import Dialer
from .layout import Entry, Manifest, TensorMeta
from .messages import Open, Region
from .sinks import Bucket, Piece
from .transport.base import OpenedRegion

MAX_MANIFESTS = 4

# By number of the bucket, and of the region that it came in.
KeptBuckets = dict[tuple[int, int], Bucket]


@dataclass(slots=True)
class ReceiverMemory:
    """One worker's regions, manifests, and whether it is torn.

    Attributes:
        regions: Opened regions by id.
        manifests: The last ``MAX_MANIFESTS`` manifests by digest.
        buckets: Of the last ``MAX_MANIFESTS`` planned updates, what was viewed once. The
            views keep memory, so they end with the regions.
        dialer: The connection of the last update, if that was committed: its trainer may
            send the next one before this worker has said hello.
        is_torn: An earlier update failed half-way and nothing has repaired it yet.
    """

    regions: dict[str, OpenedRegion] = field(default_factory=dict)
    manifests: OrderedDict[str, Manifest] = field(default_factory=OrderedDict)
    buckets: OrderedDict[object, KeptBuckets] = field(default_factory=OrderedDict)
    dialer: Dialer | None = None
    is_torn: bool = False

    def remember(self, manifest: Manifest) -> None:
        """Keep a manifest, and drop the one that was not used for longest."""
        self.manifests[manifest.digest] = manifest
        self.manifests.move_to_end(manifest.digest)
        while len(self.manifests) > MAX_MANIFESTS:
            self.manifests.popitem(last=False)

    def buckets_of(self, opened: Open) -> KeptBuckets | None:
        """Return what is kept of a planned update's buckets, to be added to.

        Returns:
            ``None`` where nothing can be kept: there is no plan, or the memory holds
            references, which are others every time.
        """
        ids = tuple(handle.id for handle in opened.handles)
        if opened.manifest is None or not all(self.regions[id].held_bytes for id in ids):
            return None
        key = (opened.manifest, opened.layout, opened.placed, ids, opened.regions)
        kept = self.buckets.setdefault(key, {})
        self.buckets.move_to_end(key)
        while len(self.buckets) > MAX_MANIFESTS:
            self.buckets.popitem(last=False)
        return kept

    def drop_dead_regions(self) -> None:
        """Close the regions, and the connection, whose owner is gone."""
        if self.dialer is not None and self.dialer.is_lost:
            self.hang_up()
        self._close([key for key, one in self.regions.items() if not one.owner_is_alive()])

    def release(self) -> None:
        """Close every region and the connection. Idempotent; the next update opens them."""
        with ExitStack() as stack:
            stack.callback(self._close, list(self.regions))
            self.hang_up()

    def take_dialer(self, endpoint: str) -> Dialer | None:
        """Return the kept connection to an endpoint, if it still stands; close any other."""
        kept = self.dialer
        if kept is None or kept.endpoint != endpoint or kept.is_lost:
            self.hang_up()
            return None
        self.dialer = None
        return kept

    def hang_up(self) -> None:
        """Close the kept connection. Idempotent."""
        kept, self.dialer = self.dialer, None
        if kept is not None:
            kept.close()

    def _close(self, keys: Sequence[str]) -> None:
        if keys:
            self.buckets.clear()
        # Whatever one of them raises, the others are closed.
        with ExitStack() as stack:
            for key in keys:
                stack.callback(self.regions.pop(key).close)


def view_pieces(
    memory: OpenedRegion, region: Region, entries: Iterable[tuple[Entry, TensorMeta]]
) -> tuple[Piece, ...]:
    """View a bucket's tensors where they lie.

    Raises:
        RemoteProtocolError: One of them is not within the memory.
    """
    return tuple(
        Piece(
            index=entry.index,
            meta=meta,
            first_byte=entry.first_byte,
            data=memory.view(region.offset_bytes + entry.offset_bytes, entry.num_bytes),
        )
        for entry, meta in entries
    )
