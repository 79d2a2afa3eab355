"""What a worker keeps between updates, so that a warm one sends almost nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .layout import Manifest
from .transport.base import OpenedRegion

MAX_MANIFESTS = 4


@dataclass(slots=True)
class ReceiverMemory:
    """One worker's regions, manifests, and whether it is torn.

    Attributes:
        regions: Opened regions by id.
        manifests: The last ``MAX_MANIFESTS`` manifests by digest.
        is_torn: An earlier update failed half-way and nothing has mended it yet.
    """

    regions: dict[str, OpenedRegion] = field(default_factory=dict)
    manifests: OrderedDict[str, Manifest] = field(default_factory=OrderedDict)
    is_torn: bool = False

    def remember(self, manifest: Manifest) -> None:
        """Keep a manifest, and drop the one that was not used for longest."""
        self.manifests[manifest.digest] = manifest
        self.manifests.move_to_end(manifest.digest)
        while len(self.manifests) > MAX_MANIFESTS:
            self.manifests.popitem(last=False)

    def drop_dead_regions(self) -> None:
        """Close the regions whose owner is gone."""
        for key in [key for key, region in self.regions.items() if not region.owner_is_alive()]:
            self.regions.pop(key).close()

    def release(self) -> None:
        """Close every region. Idempotent; the next update opens them again."""
        while self.regions:
            self.regions.popitem()[1].close()
