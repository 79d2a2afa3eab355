"""Proves what a trace file holds, also of updates that fail, and what happens where none can be.

A whole push within one process: both ends are the real ones, without sockets.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.stepping import WISH, byte_pairs, commands_of, feed, greeted, manifest_of, shm_slots
from support.thread_engine import KeepingSink, ThreadEngine
from support.traces import bars_of, check_update, named, of_end, stages_of

from vllm_bucketsync import receiver, timeline
from vllm_bucketsync import trace as trace_of
from vllm_bucketsync.arguments import check_trace
from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import ConfigError, LoadError, RegionError, SourceError
from vllm_bucketsync.layout import Placed
from vllm_bucketsync.messages import Done
from vllm_bucketsync.retained import ReceiverMemory
from vllm_bucketsync.route import Route
from vllm_bucketsync.sender import Sender
from vllm_bucketsync.sinks import Piece
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.sources import Source
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.trace import chrome_trace
from vllm_bucketsync.update import Update

TENSORS = {f"layers.{index}.weight": torch.full((100,), float(index)) for index in range(5)}
LORA = (
    {f"model.layers.0.q_proj.lora_{side}.weight": torch.ones(2, 2) for side in "AB"},
    {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"},
)
Push = Callable[..., Any]


def push_weights(sync: WeightSync, **options: Any) -> Any:
    return sync.push(TENSORS, version="new", **options)


def push_stream(sync: WeightSync, **options: Any) -> Any:
    return sync.push(iter(TENSORS.items()), version="new", **options)


def push_adapter(sync: WeightSync, **options: Any) -> Any:
    return sync.push_lora(LORA, name="policy", version="new", **options)


PUSHES = pytest.mark.parametrize("push", [push_weights, push_stream, push_adapter])


@pytest.fixture
def engine() -> ThreadEngine:
    return ThreadEngine(is_in_process=True)


@pytest.fixture
def sync(engine: ThreadEngine) -> Iterator[WeightSync]:
    with WeightSync(engine) as made:
        yield made


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces" / "update.json"


def read(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(target.read_text())
    return found


@PUSHES
def test_a_trace_has_every_stage_of_both_ends_in_its_order(
    push: Push, sync: WeightSync, target: Path
) -> None:
    report = push(sync, trace=str(target))

    found = read(target)
    bars = check_update(found)
    trainer, worker = of_end(bars, "trainer"), of_end(bars, "worker")
    assert [bar.name for bar in stages_of(trainer)] == [
        *("examining", "greeting", "opening", "streaming", "finishing", "committing")
    ]
    names = [bar.name for bar in stages_of(worker)]
    assert list(dict.fromkeys(names)) == [
        *("waiting", "opening", "loading", "preparing", "committing")
    ]
    assert [bar.lane for bar in trainer if bar.name != "packing"] == ["update"] * 6
    numbers = list(range(report.num_buckets))
    for bars_of_buckets in (named(trainer, "packing"), named(worker, "loading")):
        assert [bar.bucket for bar in bars_of_buckets] == numbers
        assert {bar.lane for bar in bars_of_buckets} <= {"slot 0", "slot 1"}
    assert found["otherData"] == {
        "update_id": report.update_id,
        "version": "new",
        "transport": "inproc",
        "error": "",
    }


@PUSHES
def test_stages_of_a_report_are_those_of_the_trace(
    push: Push, sync: WeightSync, target: Path
) -> None:
    report = push(sync, trace=target)

    bars = bars_of(read(target))
    for end, stages_ms in (("trainer", report.stages_ms), ("worker", report.workers[0].stages_ms)):
        drawn_ms: dict[str, float] = {}
        for bar in of_end(bars, end):
            spent_ms = (bar.end_us - bar.begin_us) / 1e3
            drawn_ms[bar.name] = drawn_ms.get(bar.name, 0.0) + spent_ms
        counted = {name: ms for name, ms in stages_ms.items() if name != "making tensors"}
        assert drawn_ms == pytest.approx(counted, abs=1e-3)


@PUSHES
def test_nothing_is_written_and_no_worker_says_when_without_being_asked(
    push: Push, sync: WeightSync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Done] = []

    def noted(**fields: Any) -> Done:
        said.append(Done(**fields))
        return said[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(receiver, "Done", noted)

    report = push(sync)

    assert [done.spans for done in said] == [()]
    assert set(report.workers[0].stages_ms) >= {"opening", "loading", "committing"}
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_leaves_a_trace_of_the_trainer_alone(sync: WeightSync, target: Path) -> None:
    sync.push(TENSORS, version="new", dry_run=True, trace=target)

    bars = check_update(read(target))
    assert [bar.name for bar in bars] == ["examining", "greeting", "opening", "aborting"]


def failing_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS.items()
    raise ValueError("the trainer is out of memory")


def interrupted_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS.items()
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("tensors", "raised", "text"),
    [
        (failing_tensors, ValueError, "the trainer is out of memory"),
        # It has no text of its own.
        (interrupted_tensors, KeyboardInterrupt, "KeyboardInterrupt"),
    ],
)
def test_a_source_that_fails_leaves_a_trace_with_its_error(
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    raised: type[BaseException],
    text: str,
    sync: WeightSync,
    target: Path,
) -> None:
    with pytest.raises(raised):
        sync.push(tensors(), version="new", trace=target)

    found = read(target)
    assert [bar.name for bar in stages_of(check_update(found))][-2:] == ["streaming", "aborting"]
    assert found["otherData"]["error"] == text


def test_a_worker_that_fails_leaves_a_trace_with_its_error(target: Path) -> None:
    def refuse(call: str, pieces: Sequence[Piece]) -> None:
        if call == "prepare":
            raise LoadError("two parts are missing")

    engine = ThreadEngine(is_in_process=True, make=lambda: KeepingSink(refuse))
    with WeightSync(engine) as sync, pytest.raises(LoadError, match="two parts are missing"):
        sync.push(TENSORS, version="new", trace=target)

    found = read(target)
    names = [bar.name for bar in stages_of(check_update(found))]
    assert names[-2:] == ["finishing", "aborting"]
    assert found["otherData"]["error"].startswith("two parts are missing (the engine is torn")


def test_a_failure_before_anybody_was_asked_leaves_a_trace_with_its_error(
    engine: ThreadEngine, sync: WeightSync, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(slots: Slots, needed_bytes: int | None) -> None:
        raise RegionError("no memory is left")

    monkeypatch.setattr(Slots, "make_room", refuse)
    with pytest.raises(RegionError):
        sync.push(TENSORS, version="new", trace=target)

    found = read(target)
    assert [bar.name for bar in bars_of(found)] == ["examining", "greeting"]
    assert found["otherData"] | {"update_id": ""} == {
        "update_id": "",
        "version": "new",
        "transport": "",
        "error": "no memory is left",
    }
    assert engine.requests == []


def test_a_file_may_be_new_or_there_below_the_home_or_in_the_working_directory(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(target.parent))
    monkeypatch.chdir(target.parent)
    (target.parent / "old.json").touch()

    assert check_trace(None) is None
    assert check_trace(target) == check_trace("~/update.json") == target
    assert check_trace("update.json") == Path("update.json")
    assert check_trace("old.json") == Path("old.json")


@PUSHES
@pytest.mark.parametrize("name", ["", "missing/update.json", "update.json/update.json"])
def test_a_file_that_cannot_be_is_refused_before_anything_is_asked(
    push: Push, name: str, engine: ThreadEngine, sync: WeightSync, target: Path
) -> None:
    target.write_text("an older one")

    with pytest.raises(ConfigError, match=r"trace '.*' (is|has) a folder.*; expected a file"):
        push(sync, trace=str(target.parent / name))

    assert engine.requests == []
    assert engine.sinks == []
    assert target.read_text() == "an older one"


def test_a_file_that_can_no_longer_be_written_is_logged_and_the_push_succeeds(
    sync: WeightSync, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from TENSORS.items()
        shutil.rmtree(target.parent)

    with caplog.at_level(logging.WARNING):
        report = sync.push(tensors(), version="new", trace=target)

    assert report.num_tensors == len(TENSORS)
    (record,) = caplog.records
    assert "the trace could not be written" in record.getMessage()
    assert str(target) in record.getMessage()


def test_an_error_of_the_update_is_not_hidden_by_a_trace_that_cannot_be_written(
    sync: WeightSync, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from TENSORS.items()
        shutil.rmtree(target.parent)
        yield "wrong", torch.eye(2).to_sparse()

    with caplog.at_level(logging.WARNING), pytest.raises(SourceError):
        sync.push(tensors(), version="new", trace=target)

    assert any("the trace could not be written" in text for text in caplog.messages)


def test_a_trace_takes_the_place_of_the_one_before(sync: WeightSync, target: Path) -> None:
    ids = set()
    for _ in range(2):
        report = sync.push(TENSORS, version="new", trace=target)
        ids.add(report.update_id)
        assert read(target)["otherData"]["update_id"] == report.update_id
    assert len(ids) == 2


def test_what_is_read_in_place_has_a_lane_that_says_so() -> None:
    slots = Slots(Settings(num_slots=2))
    slots.placed = Placed(region=2, offsets=b"")
    sender = Sender(
        update=Update(update_id="u", version="1", token="", num_workers=(1,)),
        source=Source(declared=None, tensors=iter(())),
        slots=slots,
        route=Route(wish=WISH, slots=slots),
    )
    for bucket, region in enumerate([2, 0, 1]):
        sender.timeline.note("packing", 0, bucket=bucket, region=region)

    lanes = [bar.lane for bar in named(bars_of(chrome_trace(sender)), "packing")]

    assert lanes == ["in place", "slot 0", "slot 1"]


def test_more_than_a_trace_holds_is_left_out_and_counted(
    sync: WeightSync, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 3)

    report = sync.push(iter(TENSORS.items()), version="new", trace=target)

    bars = bars_of(read(target))
    # Each end keeps three stages, and three parts of stages.
    assert len(stages_of(of_end(bars, "trainer"))) == 3
    assert len(named(bars, "packing")) <= 3
    assert len(of_end(bars, "worker")) == 3
    assert set(report.stages_ms) >= {"streaming", "finishing", "committing", "packing"}
    assert set(report.workers[0].stages_ms) >= {"waiting", "loading", "committing"}


def test_a_worker_says_when_in_the_order_in_which_it_was(tmp_path: Path) -> None:
    pairs = byte_pairs(300, 700)
    slots = shm_slots(tmp_path)
    try:
        commands = commands_of(slots, pairs, manifest=manifest_of(pairs), is_traced=True)
        worker = greeted(ReceiverMemory())
        done = feed(worker, commands)[-1]
        worker.release()
    finally:
        slots.release()

    assert isinstance(done, Done)
    assert [(span.name, span.bucket, span.region) for span in done.spans if span.bucket >= 0] == [
        *(("loading", 0, 0), ("loading", 1, 1), ("loading", 2, 2))
    ]
    # The offer, the description of its tensors, three buckets, and what ends it.
    stages = ["opening"] * 2 + ["loading"] * 3 + ["preparing", "committing"]
    assert [span.name for span in done.spans[1::2]] == stages
    assert {span.name for span in done.spans[::2]} == {"waiting"}
    assert [span.begin_ns for span in done.spans] == sorted(span.begin_ns for span in done.spans)


def test_a_span_that_is_about_a_module_names_it() -> None:
    span = timeline.Span("processing", 1_000, 3_000, about="model.layers.0.mlp")

    *_, event = trace_of._process(1, "worker", [span], start_ns=0, placed=None)

    assert (event["name"], event["args"]) == ("processing", {"module": "model.layers.0.mlp"})


def test_a_name_of_any_length_travels() -> None:
    line = timeline.Timeline()

    line.note("processing", line.now(), about="a" * 1000 + "b")

    (span,) = line.spans
    assert span.about.endswith("ab")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(span), type=timeline.Span) == span
