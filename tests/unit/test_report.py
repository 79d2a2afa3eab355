"""Proves that a report is plain data: for JSON, and with numbers that can be divided."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from vllm_bucketsync.report import PushReport, WorkerReport

WORKER = WorkerReport(
    engine=0,
    rank=1,
    dp_index=2,
    pid=3,
    device="cpu",
    num_direct=2,
    direct_bytes=10,
    num_processed=3,
    processed_bytes=20,
    num_loaded=1,
    loaded_bytes=4,
    process_s=0.1,
    load_s=0.5,
    wait_s=0.25,
    stages_ms={"loading": 500.0, "waiting": 250.0},
    cloned_bytes=7,
    notes=("a",),
)


def report(**changes: Any) -> PushReport:
    made = PushReport(
        engines=("the LLM",),
        update_id="u",
        version="1",
        is_dry_run=False,
        num_tensors=2,
        num_bytes=3_000_000_000,
        num_buckets=4,
        seconds=1.5,
        transport="shm",
        transport_reason="asked for",
        slot_size_bytes=512,
        zero_copy_bytes=0,
        skipped=("rope",),
        stages_ms={"streaming": 700.0},
        workers=(WORKER, WORKER),
    )
    return dataclasses.replace(made, **changes)


def test_a_report_is_json_with_every_field_and_what_follows_from_them() -> None:
    found = json.loads(json.dumps(report().as_dict(), allow_nan=False))

    fields = {field.name for field in dataclasses.fields(PushReport)}
    assert set(found) == fields | {"num_workers", "gb_per_s", "goes_back", "left_as_is"}
    assert (found["num_workers"], found["gb_per_s"]) == (2, 2.0)
    assert set(found["workers"][0]) == {field.name for field in dataclasses.fields(WorkerReport)}
    assert found["workers"][0]["notes"] == ["a"]
    assert found["skipped"] == ["rope"]


def test_an_update_that_took_no_time_has_no_speed() -> None:
    assert report(seconds=0.0).gb_per_s == 0.0


def test_a_report_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().version = "2"  # type: ignore[misc]
