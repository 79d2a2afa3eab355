"""Proves that stages follow each other without a gap, and that sums are of everything."""

from __future__ import annotations

import itertools
import time

import pytest

from vllm_bucketsync.codec import decode_reply, encode
from vllm_bucketsync.messages import MAX_STAGES, Done
from vllm_bucketsync.timeline import MAX_SPANS, NO_BUCKET, Span, Timeline


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a microsecond pass from one look at the clock to the next, beginning with 0."""
    counted = itertools.count(0, 1000)
    monkeypatch.setattr(time, "monotonic_ns", counted.__next__)


def test_stages_follow_each_other_without_a_gap() -> None:
    timeline = Timeline("examining")
    timeline.enter("greeting")
    timeline.enter("loading", bucket=3, region=1)
    timeline.enter("greeting")
    timeline.end()

    assert timeline.stages == [
        Span("examining", 0, 1000),
        Span("greeting", 1000, 2000),
        Span("loading", 2000, 3000, bucket=3, region=1),
        Span("greeting", 3000, 4000),
    ]
    assert timeline.stages_ms() == {"examining": 0.001, "greeting": 0.002, "loading": 0.001}


def test_an_end_ends_one_stage_once_and_what_comes_between_belongs_to_none() -> None:
    timeline = Timeline("examining")
    for _ in range(3):
        timeline.end()
    timeline.enter("greeting")
    timeline.end()

    assert timeline.stages == [Span("examining", 0, 1000), Span("greeting", 4000, 5000)]


def test_a_timeline_without_a_stage_has_none_and_one_that_goes_on_does_not_count_yet() -> None:
    assert Timeline().stages_ms() == {}

    timeline = Timeline("examining")
    assert (timeline.stages, timeline.stages_ms()) == ([], {})
    assert timeline.seconds("examining") == 0.0


def test_a_note_ends_now_and_leaves_the_stage_alone() -> None:
    timeline = Timeline("streaming")
    begin_ns = timeline.now()
    timeline.note("packing", begin_ns, bucket=2, region=0)
    timeline.note("processing", begin_ns)
    timeline.end()

    assert timeline.spans == [
        Span("packing", 1000, 2000, 2, 0),
        Span("processing", 1000, 3000, NO_BUCKET, NO_BUCKET),
    ]
    assert timeline.stages == [Span("streaming", 0, 4000)]


def test_a_count_is_summed_and_not_kept() -> None:
    timeline = Timeline()
    timeline.count("making tensors", 500)
    timeline.count("making tensors", 1500)

    assert timeline.spans == []
    assert timeline.stages_ms() == {"making tensors": 0.002}


def test_seconds_are_those_of_the_names_that_are_asked_for() -> None:
    timeline = Timeline()
    timeline.count("processing", 2_000_000_000)
    timeline.count("loading", 500_000_000)
    timeline.count("waiting", 1)

    assert timeline.seconds("processing", "loading", "never seen") == 2.5
    # To ask for a name is not to have spent time on it.
    assert "never seen" not in timeline.stages_ms()


def test_more_than_are_kept_are_counted_all_the_same() -> None:
    timeline = Timeline()
    for bucket in range(MAX_SPANS + 10):
        timeline.enter("loading", bucket=bucket)
        timeline.note("packing", timeline.now(), bucket=bucket)
    timeline.end()

    for kept in (timeline.stages, timeline.spans):
        assert [span.bucket for span in kept] == list(range(MAX_SPANS))
    # Three looks at the clock for each: a stage's begin, and a note's begin and end.
    found = timeline.stages_ms()
    assert found["loading"] * 1000 == pytest.approx(3 * (MAX_SPANS + 10))
    assert found["packing"] * 1000 == pytest.approx(MAX_SPANS + 10)


def test_as_much_as_a_worker_can_keep_fits_into_its_last_message() -> None:
    span = Span("waiting for a slot", 2**62, 2**62, bucket=2**31, region=64)
    done = Done(stages_ms={str(i): 1.0 for i in range(MAX_STAGES)}, spans=(span,) * 2 * MAX_SPANS)

    assert decode_reply(encode(done)) == done
