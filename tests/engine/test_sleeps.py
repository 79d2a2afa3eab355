"""A sleep that may have dropped the weights is known of, on the worker alone."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_bucketsync import WorkerExtension
from vllm_bucketsync.worker import sleeps


class Worker:
    model_runner = None

    def __init__(self) -> None:
        self.levels: list[Any] = []
        self._weight_update_is_draft = False

    def sleep(self, level: int = 1) -> str:
        self.levels.append(level)
        if level == 3:
            raise RuntimeError("no such level")
        return "asleep"

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def reload_weights(self) -> None: ...

    def finish_weight_update(self) -> None: ...


class ExtendedWorker(Worker, WorkerExtension): ...


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


def test_weights_are_lost_until_vllm_loads_those_of_the_model_itself() -> None:
    worker = Worker()
    watched = sleeps.watch(worker)
    worker.sleep(1)
    assert not watched.has_lost_base

    worker.sleep(2)
    worker.wake_up()
    assert watched.has_lost_base
    worker._weight_update_is_draft = True
    worker.finish_weight_update()
    assert watched.has_lost_base
    worker._weight_update_is_draft = False
    worker.finish_weight_update()
    assert not watched.has_lost_base

    worker.sleep(2)
    # As the last update of vLLM's left it; a reload is always of the model.
    worker._weight_update_is_draft = True
    worker.reload_weights()
    assert not watched.has_lost_base


def test_sleeps_are_watched_before_the_first_call_where_vllm_has_a_hook() -> None:
    worker = ExtendedWorker()

    worker.init_worker_extension()
    worker.sleep(2)

    assert sleeps.watch(worker).has_lost_base
    assert sleeps.num_deep_sleeps(worker) == 1


def test_the_hook_never_ends_the_start_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no such worker")

    monkeypatch.setattr(sleeps, "watch", fail)

    ExtendedWorker().init_worker_extension()

    assert "no such worker" in caplog.text
