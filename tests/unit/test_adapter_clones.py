"""Copies of an adapter: of all that lies together at once, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.bytes_of import bytes_of

from vllm_bucketsync.layout import TensorMeta
from vllm_bucketsync.sinks import Piece
from vllm_bucketsync.worker.lora.clones import clones_of, on_host


def pieces_of(bucket: torch.Tensor) -> list[Piece]:
    metas = [TensorMeta("a", "int16", (100,), 200), TensorMeta("b", "float32", (3,), 12)]
    slots = [bucket[512:712], bucket[768:780]]
    return [
        Piece(index=index, meta=meta, first_byte=0, data=data)
        for index, (meta, data) in enumerate(zip(metas, slots, strict=True))
    ]


def storages_of(tensors: list[torch.Tensor]) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tensors}


def test_a_bucket_is_copied_once_for_all_that_it_holds() -> None:
    bucket = torch.arange(4096, dtype=torch.int16).view(torch.uint8)
    pieces = pieces_of(bucket)
    elsewhere = replace(pieces[0], data=bucket[512:712].clone())
    far = replace(pieces[0], data=bucket[7168:7368])

    for given, num_copies in ((pieces, 1), ([*pieces, elsewhere], 3), ([*pieces, far], 3), ([], 0)):
        found = on_host(given, is_pinned=False)

        assert [bytes_of(one.data) for one in found] == [bytes_of(one.data) for one in given]
        storages = storages_of([one.data for one in found])
        assert len(storages) == num_copies
        assert not storages & storages_of([bucket, elsewhere.data])
    assert [one.tensor().shape for one in on_host(pieces, is_pinned=False)] == [(100,), (3,)]


def test_clones_share_memory_with_nothing_but_each_other() -> None:
    whole = torch.arange(1000, dtype=torch.float32)
    given = {
        "b": whole[40:100].view(6, 10),
        "alone": torch.arange(7.0),
        "a": whole[:30].view(3, 10),
        "empty": torch.empty(0, 4),
    }
    before = {name: bytes_of(tensor) for name, tensor in given.items()}

    found = clones_of(given, is_pinned=False)

    assert list(found) == list(given)
    assert {name: bytes_of(tensor) for name, tensor in found.items()} == before
    assert [found[name].shape for name in given] == [given[name].shape for name in given]
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    for tensor in found.values():
        tensor.mul_(4)
    assert {name: bytes_of(tensor) for name, tensor in given.items()} == before


@pytest.mark.parametrize("step", [1, 8])
def test_what_was_not_asked_for_is_not_copied_if_it_is_most(step: int) -> None:
    whole = torch.arange(800, dtype=torch.bfloat16)
    given = {str(first): whole[first : first + 10] for first in range(0, 800, 10 * step)}

    found = clones_of(given, is_pinned=False)

    assert {n: bytes_of(t) for n, t in found.items()} == {n: bytes_of(t) for n, t in given.items()}
    held_bytes = sum(
        {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in found.values()
        }.values()
    )
    assert held_bytes == sum(one.nbytes for one in given.values())
