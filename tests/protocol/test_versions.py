"""Proves that versions only move on a commit, and go back only where that is allowed.

Workers are threads here; sockets, shared memory and both ends are the real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.thread_engine import ThreadEngine

from vllm_bucketsync.errors import ConfigError, OlderVersionError
from vllm_bucketsync.sync import WeightSync

TENSORS = {"a": torch.arange(1000.0), "b": torch.ones(3)}


@pytest.fixture(params=[False, True], ids=["sockets", "in process"])
def engine(request: pytest.FixtureRequest) -> Iterator[ThreadEngine]:
    made = ThreadEngine(is_in_process=request.param)
    yield made
    made.close()


def test_going_back_is_reported_and_refused_where_it_has_to_be_newer(
    engine: ThreadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with WeightSync(engine) as sync, caplog.at_level(logging.WARNING, "vllm_bucketsync"):
        first = sync.push(TENSORS, version=9, require_newer=True)
        assert (first.previous_version, first.goes_back) == (None, False)
        newer = sync.push(TENSORS, version="10", require_newer=True)
        assert (newer.previous_version, newer.goes_back) == ("9", False)
        num_sinks = len(engine.sinks)
        for version in (9, "10"):
            for dry_run in (False, True):
                with pytest.raises(OlderVersionError, match="nothing was written") as caught:
                    sync.push(TENSORS, version=version, require_newer=True, dry_run=dry_run)
                assert (caught.value.held, caught.value.engine_state) == ("10", "unchanged")
        # Refused before the first byte, and before the model was looked at.
        assert len(engine.sinks) == num_sinks
        assert caplog.messages == []

        back = sync.push(TENSORS, version=8)
        assert (back.previous_version, back.goes_back) == ("10", True)
        assert back.workers[0].previous_version == "10"
        assert caplog.messages == [
            "version 8 is older than 10, which the engine held: it went back"
        ]
        sync.push(TENSORS, version=9, require_newer=True)
    assert engine.workers[0].version == "9"


def test_names_without_an_order_are_refused_where_it_has_to_be_newer(engine: ThreadEngine) -> None:
    with WeightSync(engine) as sync:
        for dry_run in (False, True):
            with pytest.raises(ConfigError, match="whole numbers"):
                sync.push(TENSORS, version="step-7", require_newer=True, dry_run=dry_run)
        assert engine.requests == []
        report = sync.push(TENSORS, version="step-7")
        assert not report.goes_back

        with pytest.raises(ConfigError, match="step-7"):
            sync.push(TENSORS, version=8, require_newer=True)
        assert engine.workers[0].version == "step-7"
        sync.push(TENSORS, version=8)
        sync.push(TENSORS, version=9, require_newer=True)


def test_a_failed_update_moves_no_version_so_that_it_can_be_pushed_again(
    engine: ThreadEngine,
) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1 << 16)
        raise OSError("the gather failed")

    with WeightSync(engine, slot_size=1024) as sync:
        sync.push(TENSORS, version=1)
        with pytest.raises(OSError, match="gather"):
            sync.push(failing(), version=2, require_newer=True)
        status = sync.status()[0]
        assert (status["version"], status["state"]) == ("1", "torn")
        report = sync.push(TENSORS, version=2, require_newer=True)
    assert report.previous_version == "1"


def test_workers_that_differ_are_given_the_newest_again() -> None:
    engine = ThreadEngine(num_workers=2)
    with WeightSync(engine) as sync:
        sync.push(TENSORS, version=6)
        engine.workers[1].version = "7"
        with pytest.raises(OlderVersionError):
            sync.push(TENSORS, version=6, require_newer=True)

        report = sync.push(TENSORS, version=7, require_newer=True)

    assert report.previous_version is None
    assert [one.previous_version for one in report.workers] == ["6", "7"]
    engine.close()


def test_of_several_engines_none_is_changed_where_one_holds_something_newer() -> None:
    engines: list[Any] = [ThreadEngine(), ThreadEngine()]
    with WeightSync(engines[0]) as sync:
        sync.push(TENSORS, version=5)
    with WeightSync(engines) as sync, pytest.raises(OlderVersionError, match="5"):
        sync.push(TENSORS, version=4, require_newer=True)

    assert [engine.workers[0].version for engine in engines] == ["5", None]
    for engine in engines:
        engine.close()
