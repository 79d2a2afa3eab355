"""Engines that run no request are asked while the trainer still looks at its tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.thread_engine import ThreadEngine

from vllm_bucketsync import serve
from vllm_bucketsync.clients.base import UpdateRequest
from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.sync import WeightSync

PATIENCE_S = 10.0


class Asked(ThreadEngine):
    """Tells when it is asked."""

    def __init__(self, *, is_idle: bool = True) -> None:
        super().__init__()
        self.is_idle = is_idle
        self.is_asked = threading.Event()

    def update(self, request: UpdateRequest) -> Any:
        self.is_asked.set()
        return super().update(request)


class Slow(dict[str, torch.Tensor]):
    """A state dict that takes its time to say what it holds."""

    def __init__(self, fill: float, asked: threading.Event) -> None:
        super().__init__(weight=torch.full((8,), fill))
        self.asked = asked
        self.was_asked: bool | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        self.was_asked = self.asked.wait(0.5)
        return super().__getitem__(key)


@pytest.fixture
def engine() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.close()


def test_a_warm_engine_is_asked_before_the_source_was_looked_at(engine: Asked) -> None:
    found = []
    with WeightSync(engine) as sync:
        for fill in (1.0, 2.0, 3.0):
            engine.is_asked.clear()
            source = Slow(fill, engine.is_asked)
            sync.push(source, version=int(fill))
            found.append(source.was_asked)
            assert torch.equal(
                engine.sinks[-1].tensors["weight"].view(torch.float32), source["weight"]
            )

    # Of the first push it is not known whether anybody will come.
    assert found == [False, True, True]
    assert engine.finished == ["1", "2", "3"]


@pytest.mark.parametrize("change", [{"dry_run": True}, {"require_newer": True}], ids=str)
def test_who_has_to_answer_first_is_not_asked_ahead(engine: Asked, change: dict[str, Any]) -> None:
    with WeightSync(engine) as sync:
        sync.push({"weight": torch.ones(8)}, version=1)
        engine.is_asked.clear()
        source = Slow(2.0, engine.is_asked)
        sync.push(source, version=2, **change)

    assert source.was_asked is False


def test_an_engine_that_runs_requests_is_not_paused_for_longer_than_it_must() -> None:
    engine = Asked(is_idle=False)
    with WeightSync(engine) as sync:
        sync.push({"weight": torch.ones(8)}, version=1)
        engine.is_asked.clear()
        source = Slow(2.0, engine.is_asked)
        sync.push(source, version=2)
    engine.close()

    assert source.was_asked is False


def test_a_source_that_is_refused_after_all_changes_nothing_and_the_next_push_works(
    engine: Asked,
) -> None:
    good: dict[str, Any] = {"weight": torch.ones(8)}
    with WeightSync(engine) as sync:
        sync.push(good, version=1)
        before = list(engine.sinks)
        engine.is_asked.clear()
        with pytest.raises(SourceError, match="on the meta device"):
            sync.push({"weight": torch.ones(8, device="meta")}, version=2)
        assert engine.is_asked.wait(PATIENCE_S)
        (status,) = sync.status()
        assert (status["version"], status["state"], status["is_torn"]) == ("1", "unchanged", False)
        assert engine.sinks == before

        good["weight"] = torch.full((8,), 3.0)
        sync.push(good, version=3)
        assert torch.equal(engine.sinks[-1].tensors["weight"].view(torch.float32), good["weight"])
    assert engine.finished == ["1", "3"]


def test_no_engine_is_asked_any_more_when_a_failed_push_returns(engine: Asked) -> None:
    with WeightSync(engine) as sync:
        for version in range(3):
            sync.push({"weight": torch.ones(8)}, version=version)
            with pytest.raises(SourceError):
                sync.push({"weight": torch.ones(8, device="meta")}, version="bad")
            assert [call.is_done for call in sync._calls] == [True]


def test_a_source_that_takes_longer_than_a_connection_may_is_waited_for(engine: Asked) -> None:
    with WeightSync(engine, connect_timeout_s=0.2) as sync:
        for fill in (1.0, 2.0):
            engine.is_asked.clear()
            source = Slow(fill, threading.Event())
            sync.push(source, version=int(fill))
            assert source.was_asked is False
    assert engine.finished == ["1", "2"]


def test_an_engine_that_does_not_say_whether_it_is_idle_is_asked_in_time(engine: Asked) -> None:
    del engine.is_idle
    with WeightSync(engine) as sync:
        for version in range(2):
            sync.push({"weight": torch.ones(8)}, version=version)
    assert engine.finished == ["0", "1"]


class Noting(serve.Ahead):
    """Notes what it is asked for, and when."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def during_a_call(self) -> Any:
        self.calls.append("call")
        return super().during_a_call()

    def look_ahead(self) -> None:
        self.calls.append("look")


def test_a_worker_looks_ahead_once_in_each_call_for_weights(engine: Asked) -> None:
    noting = engine.workers[0].ahead = Noting()
    with WeightSync(engine) as sync:
        sync.push({"weight": torch.ones(8)}, version=1)
        assert noting.calls == ["call", "look"]
        sync.push({"weight": torch.ones(8)}, version=3)
    assert noting.calls == ["call", "look"] * 2
