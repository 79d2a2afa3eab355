"""What an offer may say, and has to go on saying: checked before anything is opened."""

from __future__ import annotations

from .errors import RemoteProtocolError
from .messages import Open


def check_offer(offer: Open, *, before: Open | None) -> None:
    """Refuse an offer that contradicts itself, or the one before it.

    Args:
        offer: What a sender offers.
        before: What it offered for the same update, with another transport.

    Raises:
        RemoteProtocolError: It does.
    """
    for region in offer.regions:
        fits = region.handle < len(offer.handles) and (
            region.offset_bytes + region.num_bytes <= offer.handles[region.handle].num_bytes
        )
        if not fits:
            raise RemoteProtocolError(f"{region} reaches past the shared memory")
    if offer.placed is not None and not (
        offer.is_declared and offer.placed.region < len(offer.regions)
    ):
        raise RemoteProtocolError("places came without a declared manifest, or without region")
    if before is not None and _promise(offer) != _promise(before):
        raise RemoteProtocolError("another offer for this update promises something else")
    if offer.is_atomic and not (offer.is_declared and offer.kind == "weights"):
        raise RemoteProtocolError(
            f"an atomic update of {offer.kind} came without a declared manifest"
        )


def _promise(offer: Open) -> tuple[object, ...]:
    """Return what has to stay when another transport is offered: the sink was told of it."""
    return (
        offer.update_id,
        offer.version,
        offer.kind,
        offer.manifest,
        offer.is_declared,
        offer.partial,
        offer.adapter,
        offer.is_atomic,
        offer.verify,
        offer.num_workers,
    )
