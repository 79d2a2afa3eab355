"""Whether a bucket's bytes are those that were sent, by the digests that came with it."""

from __future__ import annotations

from .digests import Digests, unpacked
from .errors import CorruptionError, RemoteProtocolError
from .messages import DIGEST_BYTES
from .sinks import Bucket

_MASK = (1 << 64) - 1


def check_arrived(
    bucket: Bucket, digests: bytes, *, transport: str, num_buckets: int | None
) -> tuple[int, ...]:
    """Compare a bucket with what its sender says of it.

    Reads it once, where it lies, and waits for that.

    Args:
        bucket: What arrived.
        digests: ``DIGEST_BYTES`` for each of its pieces, in order.
        transport: What carried it, for the text.
        num_buckets: How many there are; ``None`` where that is not known.

    Returns:
        The pieces' digests.

    Raises:
        CorruptionError: A byte is another. Nothing was loaded.
        RemoteProtocolError: There is no digest for each piece.
    """
    if len(digests) != DIGEST_BYTES * len(bucket.pieces):
        raise RemoteProtocolError(
            f"bucket {bucket.seq} came with {len(digests)} bytes of digests for "
            f"{len(bucket.pieces)} entries; expected {DIGEST_BYTES} for each"
        )
    found = Digests()
    found.add_all([piece.data for piece in bucket.pieces])
    taken = tuple(found.take())
    for piece, sent, got in zip(bucket.pieces, unpacked(digests), taken, strict=True):
        if sent != got:
            end = piece.first_byte + piece.data.numel()
            of_all = "" if num_buckets is None else f" of {num_buckets}"
            raise CorruptionError(
                f"{piece.meta.name!r}: bytes {piece.first_byte} to {end} of "
                f"{piece.meta.num_bytes} are not those that were sent: their digest is "
                f"{got & _MASK:#018x}, expected {sent & _MASK:#018x}; they came in bucket "
                f"{bucket.seq + 1}{of_all} over {transport}; this bucket was not loaded; push "
                f"again, and look for failing memory, or for whoever else writes there, if it "
                f"comes back",
                name=piece.meta.name,
                first_byte=piece.first_byte,
                num_bytes=piece.data.numel(),
                bucket=bucket.seq,
                transport=transport,
            )
    return taken
