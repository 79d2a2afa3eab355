"""A tensor comes out of a bucket as it went in, and the sink that keeps nothing keeps nothing."""

from __future__ import annotations

import pytest
import torch
from support.tensor_samples import (
    ALL_DTYPES,
    FORMS,
    SPECIAL_VALUES,
    as_bytes,
    bytes_tensor,
    expected_bytes,
    sample,
)

from vllm_bucketsync.boxes import Box
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import ALIGNMENT_BYTES, BucketLayout, TensorMeta, plan_buckets
from vllm_bucketsync.sinks import Bucket, DiscardSink, Piece, SinkReport
from vllm_bucketsync.tensors import byte_view, meta_of


def through_a_bucket(tensors: list[torch.Tensor]) -> list[Piece]:
    """Pack tensors one after the other into dirty memory, as a sender would."""
    metas = [meta_of(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    num_bytes = sum(meta.num_bytes + ALIGNMENT_BYTES for meta in metas)
    slot_size_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    region = bytes_tensor(slot_size_bytes, seed=1)
    (bucket,) = plan_buckets(metas, layout=BucketLayout(slot_size_bytes))
    pieces = []
    for entry, meta, tensor in zip(bucket, metas, tensors, strict=True):
        data = region[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
        data.copy_(byte_view(tensor))
        pieces.append(Piece(index=entry.index, meta=meta, first_byte=0, data=data))
    return pieces


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_form_of_every_dtype_comes_out_bit_exact(dtype: torch.dtype) -> None:
    # A byte in front of each, so that nothing is aligned by luck.
    tensors = [make(sample(dtype, seed=i)) for i, make in enumerate(FORMS.values())]
    odd = torch.ones(1, dtype=torch.uint8)

    pieces = through_a_bucket([t for tensor in tensors for t in (odd, tensor)])[1::2]

    for tensor, piece in zip(tensors, pieces, strict=True):
        arrived = piece.tensor()
        assert piece.is_whole
        assert arrived.dtype is dtype
        assert arrived.shape == tensor.shape
        assert expected_bytes(arrived) == expected_bytes(tensor)
        assert arrived.numel() == 0 or arrived.data_ptr() == piece.data.data_ptr()


@pytest.mark.parametrize("dtype", SPECIAL_VALUES, ids=str)
def test_nan_payloads_negative_zero_and_denormals_keep_their_bits(dtype: torch.dtype) -> None:
    bits = SPECIAL_VALUES[dtype]
    tensor = torch.frombuffer(bytearray(bits), dtype=dtype)

    (piece, spread) = through_a_bucket([tensor, tensor.expand(2, -1).t()])

    assert expected_bytes(piece.tensor()) == bits
    size = dtype.itemsize
    twice = b"".join(2 * bits[i : i + size] for i in range(0, len(bits), size))
    assert expected_bytes(spread.tensor()) == twice


def test_tensors_of_odd_sizes_and_wide_dtypes_share_a_bucket() -> None:
    tensors = [
        bytes_tensor(3),
        bytes_tensor(10).view(torch.bfloat16),
        bytes_tensor(28).view(torch.float32),
        bytes_tensor(8).view(torch.float64),
        torch.zeros(0, dtype=torch.int64),
        bytes_tensor(16).view(torch.complex64),
        torch.tensor(True),
    ]

    pieces = through_a_bucket(tensors)

    assert [expected_bytes(p.tensor()) for p in pieces] == [expected_bytes(t) for t in tensors]


def test_a_fragment_is_not_whole() -> None:
    meta = TensorMeta("a", "uint8", (8,), 8)

    assert not Piece(index=0, meta=meta, first_byte=4, data=bytes_tensor(4)).is_whole
    assert Piece(index=0, meta=meta, first_byte=0, data=bytes_tensor(8)).is_whole


def test_the_discard_sink_leaves_its_pieces_alone_and_keeps_none() -> None:
    sink = DiscardSink()
    pieces = through_a_bucket([bytes_tensor(5), bytes_tensor(300), torch.zeros(0)])
    before = [as_bytes(piece.data) for piece in pieces]

    sink.open(None)
    sink.load(Bucket(seq=0, pieces=tuple(pieces)))
    sink.deviate(2)
    sink.load(Bucket(seq=1, pieces=()))
    sink.prepare()
    report = sink.commit()
    sink.release()
    sink.release()

    assert report == SinkReport()
    assert [as_bytes(piece.data) for piece in pieces] == before
    assert sink._scratch.numel() == 0


def test_an_aborted_discard_changed_nothing() -> None:
    sink = DiscardSink()
    sink.load(Bucket(seq=0, pieces=tuple(through_a_bucket([bytes_tensor(5)]))))

    assert sink.abort() is EngineState.UNCHANGED


def test_a_piece_shares_what_it_holds_of_a_copy() -> None:
    tensor = torch.arange(24, dtype=torch.int16).view(4, 6)
    meta = meta_of("t", tensor)
    columns, target = Box(2, (4, 2), (6, 1)), Box(0, (4, 2), (2, 1))
    whole = Piece(index=0, meta=meta, first_byte=0, data=byte_view(tensor))
    half = Piece(index=0, meta=meta, first_byte=24, data=byte_view(tensor)[24:])

    ((data, to),) = whole.share(columns, target)
    shares = list(half.share(columns, target))

    assert torch.equal(data, tensor[:, 2:4])
    assert to == target
    assert torch.equal(torch.cat([one for one, _ in shares]), tensor[2:, 2:4])
    assert [box.offset for _, box in shares] == [4 + 2 * i for i in range(len(shares))]


def test_a_piece_that_is_one_part_shares_that_and_no_other() -> None:
    tensor = torch.arange(24, dtype=torch.int16).view(4, 6)
    columns, target = Box(2, (4, 2), (6, 1)), Box(0, (4, 2), (2, 1))
    packed = byte_view(tensor[:, 2:4].contiguous())
    piece = Piece(index=0, meta=meta_of("t", tensor), first_byte=0, data=packed, box=columns)

    ((data, to),) = piece.share(columns, target)

    assert torch.equal(data, tensor[:, 2:4])
    assert to == target
    assert list(piece.share(Box(3, (4, 2), (6, 1)), target)) == []
    assert not piece.is_whole
