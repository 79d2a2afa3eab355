"""Which tensors are larger than what all workers together read of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_bucketsync.boxes import Box
from vllm_bucketsync.layout import TensorMeta
from vllm_bucketsync.worker.record import Copy
from vllm_bucketsync.worker.unread import num_shards, too_large


def found(
    rows: list[tuple[int, int]], *, num_rows: int, shards: int = 1, **changes: Any
) -> list[str]:
    """Return the problems of a tensor of which rows are read, from one to before another."""
    metas = [TensorMeta("t", "float32", (num_rows, 4), num_rows * 16)]
    copies = [
        Copy(
            source=0,
            source_box=Box(first * 4, (end - first, 4), (4, 1)),
            target="m.weight",
            target_box=Box(0, (end - first, 4), (4, 1)),
            is_live=False,
        )
        for first, end in rows
    ]
    given: dict[str, Any] = {"impure": (), "partial": ()} | changes
    return [one.text for one in too_large(copies, metas=metas, shards=shards, **given)]


@pytest.mark.parametrize(
    ("rows", "num_rows", "shards"),
    [
        ([(0, 8)], 8, 1),
        ([(0, 3), (3, 8)], 8, 1),
        ([(0, 4)], 8, 2),
        # Padded: the last rank has less, and does not begin at the first row.
        ([(0, 96)], 130, 2),
        ([(96, 130)], 130, 2),
        # Fewer heads than ranks: each is read twice.
        ([(0, 4)], 8, 4),
        # What precedes it is left out on purpose.
        ([(2, 8)], 8, 1),
    ],
)
def test_a_tensor_that_workers_read_all_of_is_right(
    rows: list[tuple[int, int]], num_rows: int, shards: int
) -> None:
    assert found(rows, num_rows=num_rows, shards=shards) == []


@pytest.mark.parametrize(
    ("rows", "num_rows", "shards"),
    [
        ([(0, 8)], 10, 1),
        ([(0, 4), (2, 6)], 8, 1),
        ([(0, 4)], 9, 2),
        ([(0, 4)], 16, 2),
    ],
)
def test_a_tensor_that_is_too_long_is_named(
    rows: list[tuple[int, int]], num_rows: int, shards: int
) -> None:
    (text,) = found(rows, num_rows=num_rows, shards=shards)

    assert "'t'" in text
    assert "m.weight" in text
    assert f"({num_rows}, 4)" in text
    assert found(rows, num_rows=num_rows, shards=shards, impure=(0,)) == []
    assert found(rows, num_rows=num_rows, shards=shards, partial=["m.*"]) == []


def test_experts_are_spread_over_replicas() -> None:
    def of(**parallel: Any) -> int:
        given = {"tensor_parallel_size": 2, "enable_expert_parallel": False} | parallel
        return num_shards(
            SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**given)))
        )

    assert of() == 2
    assert of(data_parallel_size=4) == 2
    assert of(data_parallel_size=4, enable_expert_parallel=True) == 8
