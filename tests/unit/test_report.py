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


def test_a_report_prints_as_one_line_of_what_matters() -> None:
    assert str(report()) == (
        "version '1': 3 GB in 2 tensors, 1.500 s, 2.00 GB/s over shm, into 2 workers"
    )
    assert str(report(num_bytes=12, workers=(WORKER,), version="a")) == (
        "version 'a': 12 bytes in 2 tensors, 1.500 s, 0.00 GB/s over shm, into 1 worker"
    )


def test_a_dry_run_s_report_has_nothing_that_only_an_update_could_know() -> None:
    dry = report(is_dry_run=True, num_buckets=0, slot_size_bytes=0, workers=())

    found = json.loads(json.dumps(dry.as_dict(), allow_nan=False))
    assert str(dry) == ("version '1' fits: 3 GB in 2 tensors, checked in 1.500 s, nothing written")
    assert dry.gb_per_s == 0.0
    assert {"num_buckets", "gb_per_s", "slot_size_bytes", "workers"} & set(found) == set()
    assert {"num_tensors", "num_bytes", "transport", "previous_version"} <= set(found)


def test_an_update_that_took_no_time_has_no_speed() -> None:
    assert report(seconds=0.0).gb_per_s == 0.0


def test_a_report_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().version = "2"  # type: ignore[misc]
