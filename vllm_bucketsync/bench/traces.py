"""Traces of updates like those that were measured: which one is kept, and all in one file.

Updates that are timed are never traced, since a trace is written before ``push`` returns.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_bucketsync.report import PushReport
from vllm_bucketsync.trace import Trace

# Updates that are traced for each one that is kept.
NUM_TRACED = 3


def traced(push: Callable[[Path], PushReport]) -> tuple[float, Trace]:
    """Return the seconds of an update, and its trace.

    Args:
        push: Runs it, with its trace in the given file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        report = push(path)
        trace: Trace = json.loads(path.read_text())
    return report.seconds, trace


def nearest(run: Callable[[], tuple[float, Trace]], *, seconds: float) -> Trace:
    """Trace ``NUM_TRACED`` updates, and return the one that took about as long as others did.

    Args:
        run: Traces one.
        seconds: What an update takes, by the median of those that were timed.
    """
    found = [run() for _ in range(NUM_TRACED)]
    return min(found, key=lambda one: abs(one[0] - seconds))[1]


def merged(traces: Mapping[str, Trace]) -> Trace:
    """Return traces as one, with the ends of each under its name, all from the same zero.

    So a viewer shows them one below the other, on one scale.
    """
    events: list[dict[str, Any]] = []
    for name, trace in traces.items():
        shift = max((event["pid"] for event in events), default=0)
        # Ends are as far apart as the first is from 0, so those of two traces are, too.
        events += [_moved(event, name, shift) for event in trace["traceEvents"]]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            f"{name}: {key}": value
            for name, trace in traces.items()
            for key, value in trace["otherData"].items()
        },
    }


def _moved(event: dict[str, Any], name: str, shift: int) -> dict[str, Any]:
    moved = event | {"pid": event["pid"] + shift, "tid": event["tid"] + shift}
    match event["name"]:
        case "process_name" if event["ph"] == "M":
            moved["args"] = {"name": f"{name}: {event['args']['name']}"}
        case "process_sort_index":
            moved["args"] = {"sort_index": moved["pid"]}
    return moved
