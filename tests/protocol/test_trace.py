"""Proves that the ends of an update share a clock, and that packing and loading overlap.

Two worker processes, a trainer, and shared memory with two slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_engine import FakeEngine, meet
from support.traces import Bar, bars_of, check_update, named, of_end, stages_of

from vllm_bucketsync.errors import RemoteError
from vllm_bucketsync.report import PushReport
from vllm_bucketsync.sync import WeightSync

SLOT_BYTES = 1024**2
# Of one slot each.
TENSORS = {
    f"layers.{index}.weight": torch.full((SLOT_BYTES,), index, dtype=torch.uint8)
    for index in range(8)
}
ENDS = ("worker rank 0", "worker rank 1")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def traced(path: Path, *, is_streamed: bool = False) -> tuple[PushReport, list[Bar]]:
    """Push twice, and return the second, which is warm."""
    with FakeEngine(world_size=2) as engine, WeightSync(engine, slot_size=SLOT_BYTES) as sync:
        for version in ("cold", "warm"):
            source = iter(TENSORS.items()) if is_streamed else TENSORS
            report = sync.push(source, version=version, trace=path)
    return report, check_update(read(path))


@pytest.mark.parametrize("is_streamed", [False, True], ids=["declared", "streamed"])
def test_every_bucket_is_packed_once_and_then_loaded_by_each_worker_within_the_push(
    is_streamed: bool, tmp_path: Path
) -> None:
    report, bars = traced(tmp_path / "trace.json", is_streamed=is_streamed)

    packed = {bar.bucket: bar for bar in named(of_end(bars, "trainer"), "packing")}
    assert list(packed) == list(range(report.num_buckets)) == list(range(8))
    for end in ENDS:
        loaded = named(of_end(bars, end), "loading")
        assert [bar.bucket for bar in loaded] == list(packed)
        for bar in loaded:
            # One clock for all: no bucket is loaded before it was packed.
            assert bar.begin_us >= packed[bar.bucket].end_us
            assert bar.lane == packed[bar.bucket].lane == f"slot {bar.bucket % 2}"  # type: ignore[operator]
    assert {bar.end.split(" pid ")[0] for bar in bars} == {"trainer", *ENDS}
    (returning,) = named(bars, "returning")
    assert returning.end_us <= 1e6 * report.seconds


def test_a_bucket_is_packed_while_the_one_before_is_loaded(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, (name, tensor) in enumerate(TENSORS.items()):
            meet(tmp_path, bucket, num_workers=2)
            yield name, tensor
        meet(tmp_path, len(TENSORS), num_workers=2)

    path = tmp_path / "trace.json"
    with (
        FakeEngine(f"meeting {tmp_path}", world_size=2) as engine,
        WeightSync(engine, slot_size=SLOT_BYTES) as sync,
    ):
        report = sync.push(tensors(), version="new", trace=path)

    bars = check_update(read(path))
    packed = named(of_end(bars, "trainer"), "packing")
    for end in ENDS:
        loaded = named(of_end(bars, end), "loading")
        # The first bucket has none before it.
        pairs = zip(loaded, packed[1:], strict=False)
        assert [now.overlaps(after) for now, after in pairs] == [True] * 7
    assert report.stages_ms["making tensors"] <= report.stages_ms["packing"]


def test_a_slot_is_waited_for_until_every_worker_has_loaded_what_is_in_it(tmp_path: Path) -> None:
    _, bars = traced(tmp_path / "trace.json")

    waits = {bar.bucket: bar for bar in named(bars, "waiting for a slot")}
    loaded = {
        (bar.end.split(" pid ")[0], bar.bucket): bar for end in ENDS for bar in of_end(bars, end)
    }
    assert waits
    for bucket, wait in waits.items():
        assert bucket is not None
        assert all(loaded[end, bucket - 2].end_us <= wait.end_us for end in ENDS)


def test_a_worker_that_fails_leaves_a_trace_with_its_error_and_no_word_of_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    with (
        FakeEngine("raise prepare", world_size=2) as engine,
        WeightSync(engine, slot_size=SLOT_BYTES) as sync,
        pytest.raises(RemoteError, match="this loader cannot prepare") as raised,
    ):
        sync.push(TENSORS, version="new", trace=path)

    found = read(path)
    assert found["otherData"]["error"] == str(raised.value)
    assert [bar.name for bar in stages_of(check_update(found))][-3:] == [
        *("finishing", "aborting", "returning")
    ]
    assert {bar.end for bar in bars_of(found)} == {"trainer"}
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(" pid ")[0] for name in names] == ["trainer", *ENDS]
