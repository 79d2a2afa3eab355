"""An update as Chrome trace JSON, for Perfetto or ``chrome://tracing``.

One process of the trace for the trainer and one for each worker; in each, one lane for
what it was about, and one for every slot. The format is Google's "Trace Event Format".

Numbers of processes and lanes are made up, and none is 0, which is the idle one to Perfetto.
The first lane of a process has its number, which makes it come first, and no two lanes of a
trace have the same, since older versions of Perfetto take those for one.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .sender import Sender
from .timeline import NO_BUCKET, Span

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Trace = dict[str, Any]

# How far apart the numbers of two ends are: more than there are slots.
_NUM_LANES = 100
_STAGES_LANE = 0


@contextlib.contextmanager
def traced(sender: Sender, path: Path | None) -> Iterator[None]:
    """Keep an update's time, and write it down at the end, however that comes.

    A file that cannot be written is logged: it does not change what the engine holds.

    Args:
        sender: The update.
        path: Where to; ``None`` for nowhere.
    """
    sender.timeline.enter(sender.phase.value)
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        sender.timeline.end()
        if path is not None:
            _write(chrome_trace(sender, failure=failure), path)


def _write(trace: Trace, path: Path) -> None:
    try:
        path.write_text(json.dumps(trace))
    except OSError as error:
        logger.warning("the trace could not be written: %s", error)


def chrome_trace(sender: Sender, *, failure: BaseException | None = None) -> Trace:
    """Return what each end did when, in microseconds from the beginning of the push.

    Args:
        sender: The update.
        failure: What it failed with.
    """
    timeline = sender.timeline
    start_ns = timeline.stages[0].begin_ns if timeline.stages else 0
    placed = None if sender.slots.placed is None else sender.slots.placed.region
    ends = [("trainer", (*timeline.stages, *timeline.spans))]
    for peer in sorted(sender.peers.values(), key=lambda peer: peer.place):
        # A worker that did not commit has not said what it did.
        spans = () if peer.done is None else peer.done.spans
        ends.append((f"worker {peer} on {peer.hello.device}", spans))
    return {
        "traceEvents": [
            event
            for number, (name, spans) in enumerate(ends, start=1)
            for event in _process(number, name, spans, start_ns=start_ns, placed=placed)
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "update_id": sender.update.update_id,
            "version": sender.update.version,
            "transport": sender.route.choice.kind if sender.route.choices else "",
            "error": "" if failure is None else str(failure) or type(failure).__name__,
        },
    }


def _process(
    number: int, name: str, spans: Sequence[Span], *, start_ns: int, placed: int | None
) -> list[Event]:
    """Return the events of one end: its names, then its spans."""
    process = number * _NUM_LANES
    lanes = {_STAGES_LANE: "update"} | {
        _lane(span): "in place" if span.region == placed else f"slot {span.region}"
        for span in spans
        if span.region != NO_BUCKET
    }
    events = [
        _about("process_name", process, process, name=name),
        _about("process_sort_index", process, process, sort_index=process),
    ]
    for lane in sorted(lanes):
        events += [
            _about("thread_name", process, process + lane, name=lanes[lane]),
            _about("thread_sort_index", process, process + lane, sort_index=lane),
        ]
    return events + [
        {
            "ph": "X",
            "name": span.name,
            "pid": process,
            "tid": process + _lane(span),
            "ts": (span.begin_ns - start_ns) / 1e3,
            "dur": (span.end_ns - span.begin_ns) / 1e3,
            "args": _arguments(span),
        }
        for span in spans
    ]


def _arguments(span: Span) -> dict[str, str | int]:
    found: dict[str, str | int] = {} if span.bucket == NO_BUCKET else {"bucket": span.bucket}
    return found | {"module": span.about} if span.about else found


def _about(kind: str, process: int, lane: int, **what: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": what}


def _lane(span: Span) -> int:
    return _STAGES_LANE if span.region == NO_BUCKET else span.region + 1
