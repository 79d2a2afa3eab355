"""What a sender offers a worker, and what it tells it of the manifest."""

from __future__ import annotations

from collections.abc import Collection

from .handles import MAX_TEXT_CHARS
from .layout import Manifest
from .messages import MAX_METAS, Metas, Open
from .slots import Slots
from .transport.registry import Choice
from .update import Update


def opening_of(
    update: Update,
    *,
    slots: Slots,
    choice: Choice,
    manifest: Manifest | None,
    is_declared: bool,
    known: Collection[str],
) -> tuple[Open, list[Metas]]:
    """Return the offer of an update to one worker, and the metas that follow it.

    Args:
        update: What is sent.
        slots: The memory that it goes through; a dry run shows none of it.
        choice: The transport.
        manifest: What will come; ``None`` for a stream seen for the first time.
        is_declared: The manifest is a promise.
        known: Digests of the manifests that the worker holds: it needs no metas of these.
    """
    metas = () if manifest is None or manifest.digest in known else manifest.metas
    opened = Open(
        update_id=update.update_id,
        version=update.version,
        kind=update.kind,
        transport=choice.kind,
        transport_reason=choice.reason[:MAX_TEXT_CHARS],
        handles=() if update.is_dry_run else slots.handles,
        regions=() if update.is_dry_run else slots.regions,
        layout=slots.layout,
        placed=None if update.is_dry_run else slots.placed,
        manifest=None if manifest is None else manifest.digest,
        num_metas=len(metas),
        is_declared=is_declared,
        partial=update.partial,
        adapter=update.adapter,
        is_traced=update.is_traced,
        is_atomic=update.is_atomic,
        verify=update.verify,
        num_workers=sum(update.num_workers),
    )
    firsts = range(0, len(metas), MAX_METAS)
    return opened, [Metas(metas=metas[first : first + MAX_METAS]) for first in firsts]
