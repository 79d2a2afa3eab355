"""A bucket whose bytes are others than those that were sent is named, and not loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.stepping import (
    byte_pairs,
    bytes_by_name,
    commands_of,
    feed,
    greeted,
    kept_by,
    manifest_of,
    shm_slots,
)
from support.tensor_samples import bytes_tensor
from support.thread_engine import KeepingSink

from vllm_bucketsync.config import Verify
from vllm_bucketsync.corruption import check_arrived
from vllm_bucketsync.digests import digest, packed
from vllm_bucketsync.errors import CorruptionError, RemoteProtocolError
from vllm_bucketsync.layout import TensorMeta
from vllm_bucketsync.messages import Batch, Command, Done, Error
from vllm_bucketsync.retained import ReceiverMemory
from vllm_bucketsync.sinks import Bucket, Piece
from vllm_bucketsync.slots import Slots


def bucket_of(*sizes: int, seq: int = 2) -> Bucket:
    """Return a bucket of one slot; its second tensor is a fragment from byte 512 on."""
    slot, pieces, offset = bytes_tensor(8192, seed=3), [], 0
    for index, size in enumerate(sizes):
        meta = TensorMeta(f"t{index}", "uint8", (4096,), 4096)
        data = slot[offset : offset + size]
        pieces.append(Piece(index=index, meta=meta, first_byte=512 * index, data=data))
        offset += -(-size // 256) * 256
    return Bucket(seq=seq, pieces=tuple(pieces))


def digests_of(bucket: Bucket) -> bytes:
    return packed([digest(piece.data.clone()) for piece in bucket.pieces])


def test_a_bucket_that_arrived_as_it_was_sent_gives_its_digests() -> None:
    bucket = bucket_of(300, 256, 0, 1)

    found = check_arrived(bucket, digests_of(bucket), transport="shm", num_buckets=7)

    assert found == tuple(digest(piece.data.clone()) for piece in bucket.pieces)


@pytest.mark.parametrize("bit", [0, 8 * 256 + 3, 8 * 300 - 1])
def test_a_flipped_bit_is_named_by_tensor_bytes_bucket_and_transport(bit: int) -> None:
    bucket = bucket_of(256, 300, 40)
    sent = digests_of(bucket)
    bucket.pieces[1].data[bit // 8] ^= 1 << bit % 8

    with pytest.raises(CorruptionError) as caught:
        check_arrived(bucket, sent, transport="cuda_ipc", num_buckets=7)

    error = caught.value
    assert (error.name, error.first_byte, error.num_bytes) == ("t1", 512, 300)
    assert (error.bucket, error.transport) == (2, "cuda_ipc")
    for word in ("'t1'", "bytes 512 to 812 of 4096", "bucket 3 of 7", "over cuda_ipc"):
        assert word in str(error)


def test_what_lies_between_tensors_does_not_matter() -> None:
    bucket = bucket_of(300, 40)
    sent = digests_of(bucket)
    bucket.pieces[0].data.as_strided((1,), (1,), 300).add_(1)

    check_arrived(bucket, sent, transport="shm", num_buckets=None)


@pytest.mark.parametrize("digests", [b"", bytes(8), bytes(15), bytes(24)])
def test_another_number_of_digests_is_a_fault_of_the_sender(digests: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="bytes of digests for 2 entries"):
        check_arrived(bucket_of(1, 2), digests, transport="shm", num_buckets=None)


PAIRS = byte_pairs(300, 1300, 0, 17, 512)


def received(
    commands: Sequence[Command], slots: Slots, *, flip: int | None = None
) -> tuple[KeepingSink, list[object]]:
    """Feed an update, with one bit of the slots' memory flipped before the first bucket."""
    memory, sink = ReceiverMemory(), KeepingSink()
    receiver = greeted(memory, sink)
    if flip is not None:
        assert slots._region is not None
        data = slots._region.data
        assert data is not None
        data[flip // 8] ^= 1 << flip % 8
    try:
        return sink, list(feed(receiver, commands))
    finally:
        memory.release()


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "streamed"])
def test_a_verified_update_arrives_and_says_how_much_it_compared(
    tmp_path: Path, is_declared: bool
) -> None:
    slots = shm_slots(tmp_path)
    manifest = manifest_of(PAIRS) if is_declared else None
    commands = commands_of(
        slots, PAIRS, manifest=manifest, is_declared=is_declared, verify=Verify.DIGEST
    )

    sink, replies = received(commands, slots)
    slots.release()

    assert kept_by(sink) == bytes_by_name(PAIRS)
    done = replies[-1]
    assert isinstance(done, Done)
    assert done.checked.arrived_bytes == sum(meta.num_bytes for meta, _ in PAIRS)


@pytest.mark.parametrize("byte", [0, 299, 512, 512 + 1299])
def test_a_bit_that_flips_on_the_way_is_found_before_its_bucket_is_loaded(
    tmp_path: Path, byte: int
) -> None:
    slots = shm_slots(tmp_path)
    commands = commands_of(
        slots, PAIRS, manifest=manifest_of(PAIRS), is_declared=True, verify=Verify.DIGEST
    )

    sink, replies = received(commands[:-2], slots, flip=8 * byte + 5)
    slots.release()

    error = next(reply for reply in replies if isinstance(reply, Error))
    assert error.code == CorruptionError.code
    assert error.details["name"] == ("t0" if byte < 300 else "t1")
    for name, data in kept_by(sink).items():
        # What came before is whole; of the tensor itself no damaged byte was taken over.
        assert data == bytes_by_name(PAIRS)[name] or name == error.details["name"]
    assert error.details["name"] not in kept_by(sink) or byte > 512


def test_a_sender_that_promised_digests_and_sends_none_is_refused(tmp_path: Path) -> None:
    slots = shm_slots(tmp_path)
    commands = commands_of(slots, PAIRS, verify=Verify.DIGEST)
    bare = [
        Batch(seq=one.seq, region=one.region, entries=one.entries, metas=one.metas)
        if isinstance(one, Batch)
        else one
        for one in commands
    ]

    sink, replies = received(bare[:3], slots)
    slots.release()

    error = replies[-1]
    assert isinstance(error, Error)
    assert error.code == RemoteProtocolError.code
    assert sink.tensors == {}


def test_without_verify_nothing_is_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> torch.Tensor:
        raise AssertionError("a digest was computed")

    monkeypatch.setattr("vllm_bucketsync.digests._row_sums", never)
    slots = shm_slots(tmp_path)
    commands = commands_of(slots, PAIRS)

    sink, _ = received(commands, slots)
    slots.release()

    assert all(one.digests == b"" for one in commands if isinstance(one, Batch))
    assert kept_by(sink) == bytes_by_name(PAIRS)
