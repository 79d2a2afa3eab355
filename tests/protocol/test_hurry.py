"""Proves that warm updates, sent before a worker has spoken, bring the right bytes or an error.

Real worker processes, which stay connected between updates; what they are connected for
may end, change or go wrong in between.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bytes_of import bytes_of
from support.fake_engine import FakeEngine
from support.striking import Strike, hashes_of
from support.thread_engine import ThreadEngine

from vllm_bucketsync import keeping, serve, transfer
from vllm_bucketsync.clients.base import UpdateAnswer, UpdateRequest
from vllm_bucketsync.errors import (
    BucketSyncError,
    ChannelTimeoutError,
    EngineBusyError,
    EngineState,
    EngineUnreachableError,
    PeerLostError,
)
from vllm_bucketsync.session import State
from vllm_bucketsync.sync import WeightSync


def tensors_of(step: int, *, size: int = 300) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"t{number}": torch.randn(size, generator=generator) for number in range(9)}


def push(sync: WeightSync, engine: FakeEngine, step: int, **options: Any) -> None:
    """Push, and compare what every worker has, byte for byte, by its hash."""
    tensors = tensors_of(step, **options)
    sync.push(tensors, version=step)
    expected = hashes_of(tensors)
    for loaded in engine.call("loaded"):
        assert {name: found[2] for name, found in loaded.items()} == expected


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


def test_two_trainers_take_turns_with_one_worker(engine: FakeEngine) -> None:
    with WeightSync(engine, slot_size=2048) as one, WeightSync(engine, slot_size=2048) as other:
        for step in range(8):
            push(one if step % 2 else other, engine, step)
            push(one if step % 2 else other, engine, step + 100)


def test_a_worker_that_was_replaced_in_between_is_greeted_anew(engine: FakeEngine) -> None:
    with WeightSync(engine, slot_size=2048) as sync:
        for step in range(6):
            push(sync, engine, step)
            if step % 2:
                engine.kill()
                engine.respawn()


def test_a_stream_reaches_a_worker_that_was_replaced_beside_one_that_was_not() -> None:
    with FakeEngine(world_size=2) as engine, WeightSync(engine, slot_size=2048) as sync:
        for step in range(4):
            report = sync.push(iter(tensors_of(step).items()), version=step)
            assert report.num_workers == 2
            (old, new) = engine.call("loaded")
            assert old == new
            engine.kill(1)
            engine.respawn(1)


def test_a_dry_run_whose_call_fails_behind_it_says_that_nothing_changed() -> None:
    engine = LateEngine()
    with WeightSync(engine, slot_size=2048) as sync:
        sync.push(tensors_of(1), version=1)
        engine.is_failing = True
        with pytest.raises(EngineUnreachableError, match="holds what it held") as caught:
            sync.push(tensors_of(2), version=2, dry_run=True)
        assert caught.value.engine_state is EngineState.UNCHANGED
        with pytest.raises(EngineUnreachableError, match="has the new weights") as caught:
            sync.push(tensors_of(3), version=3)
        assert caught.value.engine_state is EngineState.COMMITTED
        assert engine.workers[0].version == "3"
    engine.close()


def test_a_worker_that_gave_everything_back_gets_it_again(engine: FakeEngine) -> None:
    with WeightSync(engine, slot_size=2048) as sync, WeightSync(engine) as stranger:
        for step in range(3):
            push(sync, engine, step)
            sync.release()
            push(sync, engine, step + 10)
            stranger.release()
            push(sync, engine, step + 20)


def test_tensors_that_grow_shrink_and_change_their_names_are_what_arrives(
    engine: FakeEngine,
) -> None:
    with WeightSync(engine) as sync:
        for step, size in enumerate([300, 300, 9000, 9000, 20, 20, 40_000, 300]):
            push(sync, engine, step, size=size)


def test_a_dry_run_and_a_refused_source_in_between_change_nothing(engine: FakeEngine) -> None:
    with WeightSync(engine, slot_size=2048) as sync:
        push(sync, engine, 1)
        sync.push(tensors_of(2), version=2, dry_run=True)
        push(sync, engine, 3)
        with pytest.raises(BucketSyncError):
            sync.push({"t": object()}, version=4)
        push(sync, engine, 5)


def test_a_connection_is_kept_and_nothing_grows(engine: FakeEngine) -> None:
    with WeightSync(engine, slot_size=2048) as sync:
        for step in range(3):
            push(sync, engine, step)
        (before,) = engine.call("resources")
        for step in range(30):
            push(sync, engine, step)
        (after,) = engine.call("resources")
        assert (after["fds"], after["mapped"]) == (before["fds"], before["mapped"])
    (kept,) = engine.call("resources")
    engine.call("bucketsync_status")
    (closed,) = engine.call("resources")
    assert closed["fds"] < kept["fds"]
    assert closed["mapped"] == 0


class LateEngine(ThreadEngine):
    """Fails once its workers are done, where it is told to."""

    is_failing = False

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        answer = super().update(request)
        if self.is_failing:
            raise RuntimeError("the reply was lost")
        return answer


class RefusingEngine(ThreadEngine):
    """Fails before its workers hear of an update, as often as it is told to."""

    num_refusals = 0

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        if self.num_refusals:
            self.num_refusals -= 1
            raise EngineUnreachableError("the engine is not there", url="x")
        return super().update(request)


def test_what_was_sent_for_a_call_that_failed_is_never_loaded() -> None:
    engine = RefusingEngine()
    with WeightSync(engine, slot_size=2048) as sync:
        sync.push(tensors_of(1), version=1)
        sync.push(tensors_of(2), version=2)
        engine.num_refusals = 1

        with pytest.raises(EngineUnreachableError, match="not there") as caught:
            sync.push(tensors_of(3), version=3)

        assert caught.value.engine_state is EngineState.UNCHANGED
        sync.push(tensors_of(4), version=4)
        assert engine.finished == ["1", "2", "4"]
        found = engine.sinks[-1].tensors
        assert {name: bytes_of(one) for name, one in found.items()} == {
            name: bytes_of(one) for name, one in tensors_of(4).items()
        }
    engine.close()


class GatedEngine(ThreadEngine):
    """Its worker comes when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        assert self.gate.wait(60)
        return super().update(request)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_after_a_second_ctrl_c_nothing_is_sent_before_the_first_call_has_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "RETURN_TIMEOUT_S", 0.1)
    engine = GatedEngine()
    with WeightSync(engine, slot_size=2048) as sync:
        sync.push(tensors_of(1), version=1)
        sync.push(tensors_of(2), version=2)
        engine.gate.clear()
        with monkeypatch.context() as patched:
            patched.setattr(transfer._Run, "cut_off", interrupt)
            with pytest.raises(KeyboardInterrupt):
                sync.push(tensors_of(3), version=3, progress=interrupt)

        with pytest.raises(EngineBusyError):
            sync.push(tensors_of(4), version=4)
        engine.gate.set()
        assert all(call.wait(60) for call in sync._calls)
        sync.push(tensors_of(5), version=5)

        assert engine.finished == ["1", "2", "5"]
        found = engine.sinks[-1].tensors
        assert {name: bytes_of(one) for name, one in found.items()} == {
            name: bytes_of(one) for name, one in tensors_of(5).items()
        }
    engine.close()


class TornEngine(ThreadEngine):
    """Its worker took what had been sent, over a connection that its trainer saw end."""

    sync: WeightSync | None = None

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        if self.sync is None:
            return super().update(request)
        self.workers[0].memory.hang_up()
        listener = self.sync._listener
        deadline_s = time.monotonic() + 30
        while listener is not None and listener.peers() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        lost = {"code": "peer_lost", "message": "the trainer is gone", "details": {"pid": None}}
        return UpdateAnswer(results=[{"ok": False, "state": "torn", "rank": 0, "error": lost}])


def test_a_worker_that_is_torn_over_a_connection_that_ended_is_not_called_unchanged() -> None:
    engine = TornEngine()
    with WeightSync(engine, slot_size=2048) as sync:
        sync.push(tensors_of(1), version=1)
        engine.sync = sync

        with pytest.raises(BucketSyncError) as caught:
            sync.push(tensors_of(2), version=2)

        assert caught.value.engine_state is EngineState.UNKNOWN
        engine.sync = None
        sync.push(tensors_of(3), version=3)
        assert engine.finished == ["1", "3"]
    engine.close()


def test_an_update_that_came_for_another_call_is_refused() -> None:
    engine = ThreadEngine()
    with WeightSync(engine, slot_size=2048) as sync:
        sync.push(tensors_of(1), version=1)
        ask = engine.call

        def mistaken(method: str, *args: Any) -> list[Any]:
            offers = [{**one, "update_id": "an earlier one"} for one in args]
            return ask(method, *offers)

        engine.call = mistaken  # type: ignore[method-assign]
        with pytest.raises(BucketSyncError, match=r"was offered, and an earlier one asked for"):
            sync.push(tensors_of(2), version=2)
        engine.call = ask  # type: ignore[method-assign]

        assert engine.finished == ["1"]
        sync.push(tensors_of(3), version=3)
    engine.close()


def test_a_worker_that_never_hears_the_call_is_waited_for_as_in_a_greeting(
    engine: FakeEngine,
) -> None:
    with WeightSync(engine, slot_size=2048, connect_timeout_s=1, idle_timeout_s=60) as sync:
        push(sync, engine, 1)
        engine.kill(number=signal.SIGSTOP)
        resume = threading.Timer(2.5, engine.kill, kwargs={"number": signal.SIGCONT})
        resume.start()
        with pytest.raises(ChannelTimeoutError, match="1 of 1 workers that have not said hello"):
            sync.push(tensors_of(2), version=2)
        resume.join()
        push(sync, engine, 3)


def test_a_kept_connection_is_one_to_the_last_trainer_only() -> None:
    engine = ThreadEngine()
    worker: serve.Worker = engine.workers[0]
    with WeightSync(engine) as one, WeightSync(engine) as other:
        one.push(tensors_of(1), version=1)
        first = worker.memory.dialer
        assert first is not None
        one.push(tensors_of(2), version=2)
        assert worker.memory.dialer is first
        other.push(tensors_of(3), version=3)
        assert worker.memory.dialer not in {first, None}
        assert first._socket.is_closed
    serve.status(worker)
    assert worker.memory.dialer is None
    engine.close()


@pytest.mark.parametrize(
    ("call", "state", "left"),
    [
        ("open", State.OPENING, EngineState.UNCHANGED),
        ("load", State.READY, EngineState.UNCHANGED),
        ("prepare", State.FINISHING, EngineState.TORN),
        ("commit", State.COMMITTING, EngineState.TORN),
    ],
)
def test_a_loader_that_fails_in_a_hurry_says_what_is_left(
    tmp_path: Path, call: str, state: State, left: EngineState
) -> None:
    with FakeEngine("live") as engine, WeightSync(engine, slot_size=2048) as sync:
        sync.push(tensors_of(1), version=1)
        strike = Strike(state=state, fault="loader", stamp=str(tmp_path / "stamp"))
        engine.call("arm", strike)

        with pytest.raises(BucketSyncError) as caught:
            sync.push(tensors_of(2), version=2)

        assert (tmp_path / "stamp").exists(), call
        assert caught.value.engine_state is left
        (status,) = engine.call("bucketsync_status")
        assert (status["version"], status["is_torn"]) == ("1", left is EngineState.TORN)
        sync.push(tensors_of(3), version=3)
        sync.push(tensors_of(4), version=4)
        (held,) = engine.call("live")
        assert held == hashes_of(tensors_of(4))


@pytest.mark.parametrize("state", [State.GREETED, State.READY, State.COMMITTING])
def test_a_worker_that_dies_in_a_hurry_is_named_at_once(tmp_path: Path, state: State) -> None:
    with FakeEngine("live") as engine, WeightSync(engine, slot_size=2048) as sync:
        sync.push(tensors_of(1), version=1)
        stamp = tmp_path / "stamp"
        engine.call("arm", Strike(state=state, fault="kill", stamp=str(stamp)))

        # Before its word has arrived, only the engine's call knows of it.
        lost: tuple[type[BucketSyncError], ...] = (PeerLostError, EngineUnreachableError)
        kinds = lost if state is State.GREETED else (PeerLostError,)
        with pytest.raises(kinds, match=r"rank 0 pid \d+|worker \d+ is gone") as caught:
            sync.push(tensors_of(2), version=2)

        # What a dead worker holds is known only where it had not begun.
        assert caught.value.engine_state in {EngineState.UNCHANGED, EngineState.UNKNOWN}
        assert time.monotonic() - float(stamp.read_text()) < 1
        engine.respawn()
        sync.push(tensors_of(3), version=3)
        sync.push(tensors_of(4), version=4)
        (held,) = engine.call("live")
        assert held == hashes_of(tensors_of(4))
