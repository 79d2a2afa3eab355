"""A transport that does not work is left within the update that finds out, and it is told.

There is no GPU in it: what is called ``cuda_ipc`` here is shared memory whose making or
opening fails as that of device memory does. Workers are threads; all else is real.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bytes_of import bytes_of
from support.thread_engine import ThreadEngine

from vllm_bucketsync import receiver, route, serve, slots
from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import (
    EngineState,
    RegionError,
    TransportError,
    UnsupportedError,
)
from vllm_bucketsync.handles import MAX_TEXT_CHARS
from vllm_bucketsync.messages import Hello
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.transport import registry
from vllm_bucketsync.transport.registry import Choice, Wish

PAIRS = [(f"w{i}", torch.arange(i, i + 200, dtype=torch.float32)) for i in range(5)]
# What cudaIpcOpenMemHandle fails with in containers, under MIG, confidential computing, HIP.
OPEN_ERRORS = [
    "cudaIpcOpenMemHandle failed with 801: operation not supported",
    "hipIpcOpenMemHandle failed with 1: invalid argument",
    "cudaIpcOpenMemHandle failed with 217: peer access is not supported between these two devices",
]


class Ipc:
    """A transport called ``cuda_ipc`` that fails where it is told to.

    Attributes:
        open_error: What opening fails with, in workers of these ranks.
        create_error: What making fails with.
        events: What was tried, in order.
    """

    def __init__(self) -> None:
        self.open_error: BaseException | None = None
        self.create_error: BaseException | None = None
        self.events: list[str] = []
        self._create = registry.create_slots
        self._open = registry.open_region

    def candidates(self, wish: Wish, hellos: list[Hello]) -> list[Choice]:
        found = Choice("cuda_ipc", "the tensors are on a GPU"), Choice("shm", "works everywhere")
        return [one for one in found if wish.transport in {one.kind, "auto"}]

    def create_slots(self, kind: str, *, settings: Settings, **others: Any) -> Any:
        self.events.append(f"create {kind}")
        if kind == "cuda_ipc" and self.create_error is not None:
            raise self.create_error
        return self._create("shm", settings=settings, **others)

    def open_region(self, kind: str, handle: Any, *, device: torch.device) -> Any:
        self.events.append(f"open {kind}")
        if kind == "cuda_ipc" and self.open_error is not None:
            raise self.open_error
        return self._open("shm", handle, device=device)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is pushed, and note when that begins."""
        self.events.append("first tensor")
        yield from PAIRS


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> Ipc:
    made = Ipc()
    monkeypatch.setattr(route, "candidates", made.candidates)
    monkeypatch.setattr(slots, "create_slots", made.create_slots)
    monkeypatch.setattr(receiver, "open_region", made.open_region)
    return made


@pytest.fixture
def engine() -> Iterator[ThreadEngine]:
    made = ThreadEngine(num_workers=2)
    yield made
    made.close()


def assert_arrived(engine: ThreadEngine) -> None:
    """Check that every worker's last sink has the very bytes."""
    for sink in engine.sinks[-len(engine.workers) :]:
        arrived = {name: bytes(tensor.numpy()) for name, tensor in sink.tensors.items()}
        assert arrived == {name: bytes_of(tensor) for name, tensor in PAIRS}


def test_a_transport_that_works_is_not_left(ipc: Ipc, engine: ThreadEngine) -> None:
    with WeightSync(engine, slot_size=1024) as sync:
        report = sync.push(ipc.pairs(), version=1)

    assert (report.transport, report.transport_reason) == ("cuda_ipc", "the tensors are on a GPU")
    assert ipc.events == ["create cuda_ipc", "open cuda_ipc", "open cuda_ipc", "first tensor"]
    assert_arrived(engine)


@pytest.mark.parametrize("text", OPEN_ERRORS)
def test_what_workers_cannot_open_is_replaced_in_the_same_update(
    ipc: Ipc, engine: ThreadEngine, text: str
) -> None:
    ipc.open_error = RegionError(text)
    with WeightSync(engine, slot_size=1024) as sync:
        report = sync.push(ipc.pairs(), version=1)
        said = sync.status()

    assert report.transport == "shm"
    assert report.transport_reason.startswith("cuda_ipc failed (rank ")
    assert report.transport_reason.endswith("works everywhere")
    assert report.transport_reason.count(text) == 2
    for worker in engine.workers:
        assert f"rank {worker.rank} pid " in report.transport_reason
    assert [(one["transport"], one["transport_reason"]) for one in said] == [
        ("shm", report.transport_reason)
    ] * 2
    assert [one["version"] for one in said] == ["1", "1"]
    # Nobody had asked the source for anything yet.
    assert ipc.events.index("first tensor") == len(ipc.events) - 1
    assert len(engine.sinks) == 2
    assert_arrived(engine)


class OneCannot(Ipc):
    """Opening fails in one of two workers alone, whichever comes second."""

    def open_region(self, kind: str, handle: Any, *, device: torch.device) -> Any:
        is_second = "open cuda_ipc" in self.events
        self.open_error = RegionError("no peer access") if is_second else None
        return super().open_region(kind, handle, device=device)


def test_one_worker_that_cannot_open_it_takes_all_to_the_next_transport(
    monkeypatch: pytest.MonkeyPatch, engine: ThreadEngine
) -> None:
    ipc = OneCannot()
    monkeypatch.setattr(route, "candidates", ipc.candidates)
    monkeypatch.setattr(slots, "create_slots", ipc.create_slots)
    monkeypatch.setattr(receiver, "open_region", ipc.open_region)
    with WeightSync(engine, slot_size=1024) as sync:
        report = sync.push(ipc.pairs(), version=1)
        said = sync.status()
        # What the other one had opened lost its owner.
        assert [len(worker.memory.regions) for worker in engine.workers] == [1, 1]

    assert report.transport_reason.count("no peer access") == 1
    assert [one["transport"] for one in said] == ["shm", "shm"]
    assert_arrived(engine)


CREATE_ERRORS = [
    RegionError("cudaIpcGetMemHandle failed with 1: invalid argument"),
    RegionError("cudaMalloc failed with 2: out of memory"),
    UnsupportedError("the runtime library libcudart.so.13 is not loaded"),
]


@pytest.mark.parametrize("error", CREATE_ERRORS, ids=str)
def test_what_the_trainer_cannot_make_is_replaced_before_workers_are_asked(
    ipc: Ipc, engine: ThreadEngine, error: BaseException
) -> None:
    ipc.create_error = error
    with WeightSync(engine, slot_size=1024) as sync:
        report = sync.push(ipc.pairs(), version=1)
        said = sync.status()

    reason = f"cuda_ipc failed ({error}); works everywhere"
    assert (report.transport, report.transport_reason) == ("shm", reason)
    assert [one["transport_reason"] for one in said] == [reason] * 2
    assert ipc.events == ["create cuda_ipc", "create shm", "open shm", "open shm", "first tensor"]
    assert_arrived(engine)


def falls(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the trainer said of leaving a transport."""
    return [r.getMessage() for r in caplog.records if r.name == route.__name__]


def fail_to_open(ipc: Ipc) -> None:
    ipc.open_error = RegionError("error 801")


def fail_to_create(ipc: Ipc) -> None:
    ipc.create_error = RegionError("error 801")


@pytest.mark.parametrize("fail", [fail_to_open, fail_to_create])
def test_what_failed_is_not_tried_again_with_the_same_workers(
    ipc: Ipc,
    engine: ThreadEngine,
    fail: Callable[[Ipc], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail(ipc)
    with caplog.at_level(logging.WARNING), WeightSync(engine, slot_size=1024) as sync:
        first = sync.push(ipc.pairs(), version=1)
        ipc.events.clear()
        for version in (2, 3):
            report = sync.push(ipc.pairs(), version=version)
            # The same words, and no failure of a failure.
            assert report.transport_reason == first.transport_reason
            assert_arrived(engine)

        assert ipc.events == ["first tensor"] * 2
        assert [one["transport_reason"] for one in sync.status()] == [first.transport_reason] * 2
    assert falls(caplog) == [f"falling back to shm: {first.transport_reason}"]
    told = [r for r in caplog.records if r.name == receiver.__name__]
    assert len(told) == (2 if ipc.open_error is not None else 0)


def test_what_failed_is_tried_again_when_a_worker_is_a_new_one(
    ipc: Ipc, engine: ThreadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    ipc.open_error = RegionError("error 801")
    with caplog.at_level(logging.WARNING), WeightSync(engine, slot_size=1024) as sync:
        sync.push(ipc.pairs(), version=1)
        ipc.open_error = None
        old = engine.workers[1]
        engine.workers[1] = serve.Worker(make_sink=old.make_sink, rank=1, world_size=2)
        old.memory.release()
        ipc.events.clear()
        report = sync.push(ipc.pairs(), version=2)

    assert ipc.events == ["create cuda_ipc", "open cuda_ipc", "open cuda_ipc", "first tensor"]
    assert (report.transport, report.transport_reason) == ("cuda_ipc", "the tensors are on a GPU")
    assert len(falls(caplog)) == 1
    assert_arrived(engine)


def test_another_weightsync_finds_out_by_itself(ipc: Ipc, engine: ThreadEngine) -> None:
    ipc.open_error = RegionError("error 801")
    with WeightSync(engine, slot_size=1024) as first:
        first.push(ipc.pairs(), version=1)
    ipc.open_error = None
    with WeightSync(engine, slot_size=1024) as second:
        assert second.push(ipc.pairs(), version=2).transport == "cuda_ipc"


@pytest.mark.parametrize("text", OPEN_ERRORS)
def test_what_was_asked_for_and_cannot_be_opened_fails_by_rank_pid_and_reason(
    ipc: Ipc, engine: ThreadEngine, text: str
) -> None:
    ipc.open_error = RegionError(text)
    with WeightSync(engine, slot_size=1024, transport="cuda_ipc") as sync:
        with pytest.raises(TransportError) as caught:
            sync.push(ipc.pairs(), version=1)
        assert [one["version"] for one in sync.status()] == [None, None]
        assert [one["is_torn"] for one in sync.status()] == [False, False]

        assert type(caught.value) is TransportError
        assert caught.value.engine_state is EngineState.UNCHANGED
        said = str(caught.value)
        assert said.startswith("transport cuda_ipc does not work: ")
        assert said.endswith("nothing was written; there is no other transport to fall back to")
        for worker in engine.workers:
            assert f"rank {worker.rank} pid {worker.status()['pid']}: {text}" in said
        assert "first tensor" not in ipc.events

        ipc.open_error = None
        assert sync.push(ipc.pairs(), version=2).transport == "cuda_ipc"
    assert_arrived(engine)


def test_what_was_asked_for_and_cannot_be_made_fails_with_its_own_error(
    ipc: Ipc, engine: ThreadEngine
) -> None:
    ipc.create_error = RegionError("cudaMalloc failed with 2: out of memory")
    with WeightSync(engine, slot_size=1024, transport="cuda_ipc") as sync:
        with pytest.raises(RegionError) as caught:
            sync.push(ipc.pairs(), version=1)

        assert caught.value is ipc.create_error
        assert caught.value.engine_state is EngineState.UNCHANGED
        assert ipc.events == ["create cuda_ipc"]


def test_a_reason_that_is_longer_than_a_message_is_cut_and_the_update_goes_on(
    ipc: Ipc, engine: ThreadEngine
) -> None:
    ipc.create_error = RegionError("x" * 100_000)
    with WeightSync(engine, slot_size=1024) as sync:
        report = sync.push(ipc.pairs(), version=1)
        said = sync.status()

    assert len(report.transport_reason) > 100_000
    for one in said:
        assert report.transport_reason.startswith(one["transport_reason"])
        assert len(one["transport_reason"]) == MAX_TEXT_CHARS
    assert_arrived(engine)


def test_shared_memory_never_touches_a_device_on_either_end(
    engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(*_: Any, **__: Any) -> Any:
        raise RuntimeError("this device has no IPC")

    touchable = {name for name in dir(torch.cuda) if callable(getattr(torch.cuda, name))}
    assert {"ipc_collect", "synchronize", "current_device", "Stream", "Event"} <= touchable
    # That alone is asked: whether anybody uses CUDA.
    for name in touchable - {"is_initialized"}:
        monkeypatch.setattr(torch.cuda, name, touch)
    monkeypatch.setattr("vllm_bucketsync.transport.cuda_runtime._runtime", touch)

    sync = WeightSync(engine, slot_size=1024)
    for version, pairs in enumerate((PAIRS, iter(PAIRS))):
        assert sync.push(pairs, version=version).transport == "shm"
        assert_arrived(engine)
    sync.release()
    sync.push(PAIRS, version="again")
    sync.close()
    engine.close()
    # Also where it is forgotten.
    sync = WeightSync(engine, slot_size=1024)
    sync.push(PAIRS, version="last")
    del sync
    assert_arrived(engine)
