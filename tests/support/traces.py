"""Reads a Chrome trace as a viewer does, and checks what every one of ours promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm_bucketsync.timeline import (
    EXAMINING,
    PACKING,
    PROCESSING,
    RETURNING,
    WAITING_FOR_SLOT,
)

# Parts of stages, by the stage in which they lie.
PARTS = {PACKING: "streaming", WAITING_FOR_SLOT: "streaming", PROCESSING: "loading"}
# Microseconds are written as fractions of two: no more than what that rounds.
ROUNDING_US = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One complete event, as a viewer draws it; times in microseconds."""

    end: str
    lane: str
    name: str
    begin_us: float
    end_us: float
    bucket: int | None

    def holds(self, other: Bar) -> bool:
        """Whether the other lies within it."""
        return (
            self.begin_us - ROUNDING_US <= other.begin_us
            and other.end_us <= self.end_us + ROUNDING_US
        )

    def overlaps(self, other: Bar) -> bool:
        """Whether both went on at the same time."""
        begin_us = max(self.begin_us, other.begin_us)
        return min(self.end_us, other.end_us) - begin_us > ROUNDING_US


def bars_of(trace: dict[str, Any]) -> list[Bar]:
    """Check the format of every event, and return those that are drawn."""
    assert trace["displayTimeUnit"] == "ms"
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    events = trace["traceEvents"]
    ends = _names(events, "process_name", "pid")
    lanes = _names(events, "thread_name", "tid")
    found = []
    for event in events:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        # 0 is the idle process to Perfetto.
        assert min(event["pid"], event["tid"]) > 0
        if event["ph"] == "M":
            assert set(event) == {"ph", "name", "pid", "tid", "args"}
            continue
        assert event["ph"] == "X"
        assert set(event) == {"ph", "name", "pid", "tid", "ts", "dur", "args"}
        assert min(event["ts"], event["dur"]) >= 0
        found.append(
            Bar(
                end=ends[event["pid"]],
                lane=lanes[event["tid"]],
                name=event["name"],
                begin_us=event["ts"],
                end_us=event["ts"] + event["dur"],
                bucket=event["args"].get("bucket"),
            )
        )
    # A lane belongs to one end alone.
    assert len({(e["pid"], e["tid"]) for e in events}) == len(lanes)
    return found


def check_update(trace: dict[str, Any]) -> list[Bar]:
    """Check that what is drawn can have been one update, and return it."""
    bars = bars_of(trace)
    trainer = of_end(bars, "trainer")
    stages = stages_of(trainer)
    assert (stages[0].name, stages[0].begin_us) == (EXAMINING, 0.0)
    assert stages[-1].name in {RETURNING, "committing", "aborting"}
    whole = stages_of_whole(stages)
    for end in {bar.end for bar in bars}:
        own = of_end(bars, end)
        parts = sorted((b for b in own if b.name in PARTS), key=lambda bar: bar.begin_us)
        assert not any(first.overlaps(second) for first, second in pairwise(parts))
        ordered = stages_of(own)
        assert not any(first.overlaps(second) for first, second in pairwise(ordered))
        for bar in own:
            # One clock: what a worker did for this push, it did while the push went on.
            assert whole.holds(bar), bar
            if bar.name in PARTS:
                fitting = [stage for stage in ordered if stage.name == PARTS[bar.name]]
                assert any(stage.holds(bar) for stage in fitting), bar
    return bars


def stages_of(bars: Iterable[Bar]) -> list[Bar]:
    """Return stages in the order in which they were."""
    return sorted((b for b in bars if b.name not in PARTS), key=lambda b: (b.begin_us, b.end_us))


def stages_of_whole(stages: Sequence[Bar]) -> Bar:
    """Return all of the trainer's stages as one."""
    first, last = stages[0], stages[-1]
    # They follow each other without a gap.
    assert all(abs(b.begin_us - a.end_us) <= ROUNDING_US for a, b in pairwise(stages))
    return Bar(
        end=first.end,
        lane=first.lane,
        name="push",
        begin_us=first.begin_us,
        end_us=last.end_us,
        bucket=None,
    )


def of_end(bars: Iterable[Bar], end: str) -> list[Bar]:
    """Return the bars of one end, by the beginning of its name."""
    return [bar for bar in bars if bar.end.startswith(end)]


def named(bars: Iterable[Bar], name: str) -> list[Bar]:
    """Return the bars of one name, in order of buckets."""
    return sorted((b for b in bars if b.name == name), key=lambda b: (b.end, b.bucket or 0))


def _names(events: Iterable[dict[str, Any]], kind: str, key: str) -> dict[int, str]:
    found = [(e[key], e["args"]["name"]) for e in events if e["name"] == kind]
    assert len(dict(found)) == len(found)
    return dict(found)
