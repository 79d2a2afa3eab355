"""An update as Chrome trace JSON, for Perfetto or ``chrome://tracing``.

One process of the trace for the trainer and one for each worker; in each, one lane for
what it was about, and one for every slot. The format is Google's "Trace Event Format".
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .sender import Sender
from .timeline import NO_BUCKET, Span

logger = logging.getLogger(__name__)

Event = dict[str, Any]
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
    try:
        yield
    finally:
        sender.timeline.end()
        if path is not None:
            try:
                path.write_text(json.dumps(chrome_trace(sender)))
            except OSError as error:
                logger.warning("the trace could not be written: %s", error)


def chrome_trace(sender: Sender) -> dict[str, Any]:
    """Return what each end did when, in microseconds from the beginning of the push."""
    timeline = sender.timeline
    start_ns = timeline.stages[0].begin_ns if timeline.stages else 0
    events = _process(0, "trainer", [*timeline.stages, *timeline.spans], start_ns=start_ns)
    peers = sorted(sender.peers.values(), key=lambda peer: peer.place)
    for number, peer in enumerate(peers, start=1):
        # A worker that did not commit has not said what it did.
        spans = () if peer.done is None else peer.done.spans
        events += _process(
            number, f"worker {peer} on {peer.hello.device}", spans, start_ns=start_ns
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "update_id": sender.update.update_id,
            "version": sender.update.version,
            "transport": sender.route.choice.kind if sender.route.choices else "",
            "error": "" if sender.error is None else str(sender.error),
        },
    }


def _process(number: int, name: str, spans: Iterable[Span], *, start_ns: int) -> list[Event]:
    """Return the events of one end: its names, then its spans."""
    found = list(spans)
    lanes = {_STAGES_LANE: "update"} | {
        _lane(span): f"slot {span.region}" for span in found if span.region != NO_BUCKET
    }
    names = [_name("process_name", number, 0, name)]
    names += [_name("thread_name", number, lane, lanes[lane]) for lane in sorted(lanes)]
    return names + [
        {
            "ph": "X",
            "name": span.name,
            "pid": number,
            "tid": _lane(span),
            "ts": (span.begin_ns - start_ns) / 1e3,
            "dur": (span.end_ns - span.begin_ns) / 1e3,
            "args": {} if span.bucket == NO_BUCKET else {"bucket": span.bucket},
        }
        for span in found
    ]


def _name(kind: str, process: int, lane: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _lane(span: Span) -> int:
    return _STAGES_LANE if span.region == NO_BUCKET else span.region + 1
