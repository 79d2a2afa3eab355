"""Closing asks workers to let go of device memory, only where some waits, and not for long.

What frees device memory is a stand-in; sockets, shared memory and both ends are real.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.thread_engine import ThreadEngine

from vllm_bucketsync import keeping
from vllm_bucketsync.errors import ConfigError
from vllm_bucketsync.sync import WeightSync

PAIRS = [("w", torch.ones(8))]
CLOSE_TIMEOUT_S = 0.3


class Device:
    """Says how much device memory waits for workers, and notes when it was asked.

    Attributes:
        num_bytes: What waits; a status call of an engine takes it away.
        events: What happened, in order.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.events: list[str] = []

    def reclaim(self) -> int:
        self.events.append(f"reclaim {self.num_bytes}")
        return self.num_bytes


class LookingEngine(ThreadEngine):
    """Lets go of device memory when it is asked for its status.

    Attributes:
        act: What happens before.
        refusal: What ``check_ready`` raises.
    """

    def __init__(self, device: Device, name: str = "looked", **others: Any) -> None:
        super().__init__(**others)
        self.act: Callable[[], None] = lambda: None
        self.refusal: BaseException | None = None
        self._device = device
        self._name = name

    def check_ready(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "bucketsync_status":
            self.act()
            self._device.events.append(self._name)
            self._device.num_bytes = 0
        return super().call(method, *args)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(keeping, "reclaim", made.reclaim)
    monkeypatch.setattr(keeping, "CLOSE_TIMEOUT_S", CLOSE_TIMEOUT_S)
    return made


@pytest.fixture
def engine(device: Device) -> Iterator[LookingEngine]:
    made = LookingEngine(device)
    yield made
    made.close()


def pushed(engine: Any) -> WeightSync:
    sync = WeightSync(engine)
    sync.push(PAIRS, version=1)
    return sync


def wait_for(event: threading.Event) -> None:
    assert event.wait(30)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_without_device_memory_that_waits_no_engine_is_asked(
    device: Device, engine: LookingEngine
) -> None:
    sync = pushed(engine)

    sync.close()
    sync.close()

    assert "looked" not in device.events
    assert set(device.events) == {"reclaim 0"}


def test_device_memory_that_waits_is_freed_when_workers_have_looked(
    device: Device, engine: LookingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sync = pushed(engine)
    device.num_bytes = 512
    # Whoever looks finds that the region has lost its owner.
    engine.act = lambda: device.events.append(f"{len(sync._slots.handles)} regions")

    sync.close()

    assert device.events == ["reclaim 512", "0 regions", "looked", "reclaim 0"]
    assert [worker.memory.regions for worker in engine.workers] == [{}]
    assert warnings(caplog) == []


def test_every_engine_is_asked(device: Device) -> None:
    engines = [LookingEngine(device, name=f"engine {number}") for number in range(3)]
    sync = pushed(engines)
    device.num_bytes = 512

    sync.close()

    assert sorted(device.events[1:-1]) == ["engine 0", "engine 1", "engine 2"]
    for engine in engines:
        engine.close()


def test_an_engine_that_does_not_answer_is_not_waited_for_longer_than_is_said(
    device: Device, engine: LookingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sync = pushed(engine)
    device.num_bytes = 512
    goes_on = threading.Event()
    engine.act = lambda: wait_for(goes_on)
    begin_s = time.monotonic()

    sync.close()

    took_s = time.monotonic() - begin_s
    assert CLOSE_TIMEOUT_S <= took_s < CLOSE_TIMEOUT_S + 5
    (text,) = warnings(caplog)
    for part in ("512 bytes of device memory stay", "status()", "0.3 s"):
        assert part in text
    assert device.events == ["reclaim 512", "reclaim 512"]
    goes_on.set()
    join_calls()


def test_engines_that_do_not_answer_are_waited_for_together(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "CLOSE_TIMEOUT_S", 1.0)
    engines = [LookingEngine(device) for _ in range(8)]
    sync = pushed(engines)
    device.num_bytes = 512
    goes_on = threading.Event()
    for engine in engines:
        engine.act = lambda: wait_for(goes_on)
    begin_s = time.monotonic()

    sync.close()

    assert time.monotonic() - begin_s < 6.0
    goes_on.set()
    join_calls()
    for engine in engines:
        engine.close()


def join_calls() -> None:
    for thread in threading.enumerate():
        if thread.name == "bucketsync-rpc":
            thread.join(30)


def test_a_dead_engine_is_told_of_and_not_waited_for(
    device: Device, engine: LookingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sync = pushed(engine)
    device.num_bytes = 512

    def die() -> None:
        raise ConnectionError("the engine is dead")

    engine.act = die

    sync.close()

    assert len(warnings(caplog)) == 1
    assert device.events == ["reclaim 512", "reclaim 512"]


def test_what_was_forgotten_is_closed_without_asking_anybody(
    device: Device, engine: LookingEngine
) -> None:
    sync = pushed(engine)
    device.num_bytes = 512

    del sync
    gc.collect()

    assert device.events == []
    assert not any(worker.memory.regions[key].owner_is_alive() for worker, key in opened(engine))


def opened(engine: ThreadEngine) -> Sequence[tuple[Any, str]]:
    return [(worker, key) for worker in engine.workers for key in worker.memory.regions]


def test_a_close_during_a_push_asks_when_the_push_has_ended(
    device: Device, engine: LookingEngine
) -> None:
    sync = WeightSync(engine)

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        device.num_bytes = 512
        sync.close()
        assert device.events == []
        yield from PAIRS

    sync.push(produce(), version=1)

    assert device.events == ["reclaim 512", "looked", "reclaim 0"]
    assert engine.workers[0].version == "1"


@pytest.mark.parametrize("can_be_asked", [False, True])
def test_on_an_event_loop_only_an_engine_is_asked_that_does_not_need_it(
    device: Device,
    engine: LookingEngine,
    caplog: pytest.LogCaptureFixture,
    can_be_asked: bool,
) -> None:
    sync = pushed(engine)
    device.num_bytes = 512
    engine.refusal = None if can_be_asked else ConfigError("the loop that it blocks")

    async def close() -> None:
        sync.close()

    asyncio.run(close())

    assert ("looked" in device.events) is can_be_asked
    assert len(warnings(caplog)) == (0 if can_be_asked else 1)


def test_an_engine_in_this_process_has_nothing_mapped_and_is_not_asked(device: Device) -> None:
    engine = LookingEngine(device, is_in_process=True)
    sync = pushed(engine)
    device.num_bytes = 512

    sync.close()

    assert "looked" not in device.events
    engine.close()
