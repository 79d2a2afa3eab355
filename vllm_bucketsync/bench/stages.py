"""What the stages of many updates took, and their medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Stages = Mapping[str, float]


def stages_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what each stage took, on the trainer's side and in the first worker.

    Args:
        reports: ``PushReport.as_dict()`` of each update; others are left out.

    Returns:
        ``runs``: for each end and stage the milliseconds of each update; ``medians``: the
        median of them. A stage that an update did not have took no time in it.
    """
    pushes = [one for one in reports if "stages_ms" in one]
    ends = {
        "trainer": [one["stages_ms"] for one in pushes],
        "worker": [one["workers"][0]["stages_ms"] for one in pushes if one["workers"]],
    }
    runs = {end: _by_name(found) for end, found in ends.items()}
    return {
        "runs": runs,
        "medians": {
            end: {name: median(values) for name, values in found.items()}
            for end, found in runs.items()
        },
    }


def _by_name(updates: Sequence[Stages]) -> dict[str, list[float]]:
    # In the order in which the updates had them.
    names = dict.fromkeys(name for stages in updates for name in stages)
    return {name: [stages.get(name, 0.0) for stages in updates] for name in names}
