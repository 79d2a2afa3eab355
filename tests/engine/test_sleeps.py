"""A sleep that may have dropped the weights is counted, on the worker alone."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_bucketsync.worker import sleeps


class Worker:
    def __init__(self) -> None:
        self.levels: list[Any] = []

    def sleep(self, level: int = 1) -> str:
        self.levels.append(level)
        if level == 3:
            raise RuntimeError("no such level")
        return "asleep"


def test_only_deep_sleeps_count() -> None:
    worker = Worker()
    assert sleeps.num_deep_sleeps(worker) == 0
    sleeps.watch(worker)
    sleeps.watch(worker)

    assert [worker.sleep(), worker.sleep(1), worker.sleep(level=1)] == ["asleep"] * 3
    assert sleeps.num_deep_sleeps(worker) == 0
    worker.sleep(2)
    worker.sleep(level=2)
    assert sleeps.num_deep_sleeps(worker) == 2
    assert worker.levels == [1, 1, 1, 2, 2]


def test_a_deep_sleep_that_fails_counts() -> None:
    worker = Worker()
    sleeps.watch(worker)

    with pytest.raises(RuntimeError, match="no such level"):
        worker.sleep(3)

    assert sleeps.num_deep_sleeps(worker) == 1


def test_other_workers_are_left_alone() -> None:
    watched, other = Worker(), Worker()
    sleeps.watch(watched)

    other.sleep(2)

    assert sleeps.num_deep_sleeps(other) == sleeps.num_deep_sleeps(watched) == 0


def test_a_worker_that_cannot_sleep_is_left_alone() -> None:
    class Restless: ...

    worker = Restless()
    sleeps.watch(worker)

    assert not hasattr(worker, "sleep")
