"""Proves what ``test_fault_matrix.py`` has no row for: single faults, and what is said of them.

Real processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.fake_engine import FakeEngine
from support.thread_engine import KeepingSink
from support.trainer_process import TrainerProcess

from vllm_bucketsync import serve
from vllm_bucketsync.errors import (
    BucketSyncError,
    ChannelTimeoutError,
    EngineBusyError,
    PeerLostError,
    RegionError,
)
from vllm_bucketsync.rundir import remove_stale
from vllm_bucketsync.sync import WeightSync

TENSORS = {f"model.layers.{i}.weight": torch.full((256,), float(i)) for i in range(8)}
# Seconds within which a death must be seen.
AT_ONCE_S = 1.0


def test_a_stopped_worker_is_a_timeout_and_the_engine_is_busy_until_it_goes_on(
    short_patience: None,
) -> None:
    with (
        FakeEngine("stop load") as engine,
        WeightSync(engine, slot_size=1024, connect_timeout_s=5, idle_timeout_s=0.5) as sync,
    ):
        with pytest.raises(ChannelTimeoutError, match="rank 0 pid") as caught:
            sync.push(TENSORS, version="bad")
        assert caught.value.timeout_s == 0.5
        assert caught.value.engine_state == "unknown"

        with pytest.raises(EngineBusyError, match="cannot be cancelled"):
            sync.push(TENSORS, version="early")

        engine.kill(number=signal.SIGCONT)
        deadline_s = time.monotonic() + 20
        while True:
            try:
                sync.push(TENSORS, version="good")
            except EngineBusyError:
                assert time.monotonic() < deadline_s
            else:
                break
        assert sync.status()[0]["version"] == "good"
        assert not sync.status()[0]["is_torn"]


def test_an_exception_of_the_source_passes_through_and_the_next_push_works() -> None:
    class GatherFailedError(Exception):
        pass

    def failing(num_good: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(num_good):
            yield f"model.layers.{index}.weight", torch.ones(256)
        raise GatherFailedError("a rank is missing")

    with FakeEngine(world_size=2) as engine, WeightSync(engine, slot_size=1024) as sync:
        for num_good, state in ((0, "unchanged"), (5, "torn")):
            with pytest.raises(GatherFailedError, match="a rank is missing") as caught:
                sync.push(failing(num_good), version="bad")
            assert any(state in note for note in caught.value.__notes__)

        sync.push(TENSORS, version="good")
        assert [s["is_torn"] for s in sync.status()] == [False] * 2


def test_ctrl_c_in_the_source_aborts_the_workers_and_passes_through() -> None:
    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise KeyboardInterrupt

    with FakeEngine() as engine, WeightSync(engine) as sync:
        with pytest.raises(KeyboardInterrupt):
            sync.push(interrupted(), version="bad")
        sync.push(TENSORS, version="good")


def make_old(directory: str) -> None:
    """Make files older than one that is just being made can be."""
    for file in Path(directory).rglob("*.*"):
        os.utime(file, (0, 0))


def remove_left_behind(directory: str) -> None:
    """Do what the next trainer would."""
    make_old(directory)
    assert remove_stale(directory)


def test_a_worker_that_was_told_to_commit_does_so_without_its_trainer(shm_dir: str) -> None:
    with TrainerProcess(None, dir=shm_dir) as trainer:

        def die_at_the_commit(call: str, _pieces: object) -> None:
            if call == "commit":
                trainer.process.kill()
                trainer.process.join(10)

        worker = serve.Worker(make_sink=lambda opened: KeepingSink(die_at_the_commit))
        _, (offer,) = trainer.receive()
        result = serve.update(worker, offer)
    remove_left_behind(shm_dir)

    assert (result["ok"], result["state"], worker.version) == (True, "committed", "new")
    serve.release(worker)


def test_a_stopped_trainer_is_a_timeout_for_the_worker() -> None:
    worker = serve.Worker(make_sink=lambda opened: KeepingSink())
    with TrainerProcess(3, signal.SIGSTOP, connect_timeout_s=10, idle_timeout_s=0.3) as trainer:
        _, (offer,) = trainer.receive()
        begin_s = time.monotonic()
        result = serve.update(worker, offer)

        assert 0.5 < time.monotonic() - begin_s < 5
        assert result["error"]["code"] == ChannelTimeoutError.code
        text = result["error"]["message"]
        assert f"pid {trainer.process.pid}" in text
        assert "stopped by a signal" in text
        assert "idle_timeout_s" in text
        trainer.answer([result])
        trainer.resume()
        name, (kind, _text) = trainer.receive()
        # What the worker said last is worth more than that it is gone.
        assert (name, kind) == ("error", "ChannelTimeoutError")
        trainer.finish()
    serve.release(worker)


def test_an_offer_whose_trainer_is_gone_is_refused_at_once(shm_dir: str) -> None:
    worker = serve.Worker(make_sink=lambda opened: KeepingSink())
    with TrainerProcess(None, dir=shm_dir) as trainer:
        _, (offer,) = trainer.receive()
        trainer.process.kill()
        trainer.process.join(10)
    begin_s = time.monotonic()
    result = serve.update(worker, offer)
    seconds = time.monotonic() - begin_s
    remove_left_behind(shm_dir)

    assert seconds < AT_ONCE_S
    assert result["error"]["code"] == PeerLostError.code
    assert result["state"] == "unchanged"


@pytest.mark.parametrize(
    "offer",
    [
        None,
        {},
        {"protocol": 1},
        {
            "protocol": 99,
            "token": "t",
            "endpoints": {},
            "engine": 0,
            "connect_timeout_s": 1.0,
            "idle_timeout_s": 1.0,
        },
        {
            "protocol": 1,
            "token": "t",
            "endpoints": {"GPU-1": "ipc:///x"},
            "engine": 0,
            "connect_timeout_s": 1.0,
            "idle_timeout_s": 1.0,
        },
        {
            "protocol": 1,
            "token": "t",
            "endpoints": {"*": "inproc://nobody"},
            "engine": 0,
            "connect_timeout_s": 1.0,
            "idle_timeout_s": 1.0,
        },
        {
            "protocol": 1,
            "token": "t",
            "endpoints": {"*": "tcp://127.0.0.1:1"},
            "engine": 0,
            "connect_timeout_s": 1.0,
            "idle_timeout_s": 1.0,
        },
        {
            "protocol": 1,
            "token": "t",
            "endpoints": {"*": "ipc:///x"},
            "engine": 0,
            "connect_timeout_s": float("inf"),
            "idle_timeout_s": 1.0,
        },
    ],
)
def test_a_wrong_offer_is_an_answer_and_never_an_exception(offer: object) -> None:
    worker = serve.Worker(make_sink=lambda opened: KeepingSink())

    result = serve.update(worker, offer)

    assert result["ok"] is False
    assert result["state"] == "unchanged"
    assert result["error"]["message"]


def test_an_engine_whose_call_fails_ends_the_push_with_its_text() -> None:
    class FailingEngine(FakeEngine):
        def call(self, method: str, *args: object) -> list[object]:
            if method.startswith("update"):
                raise RuntimeError("EngineCore died unexpectedly")
            return super().call(method, *args)

    with FailingEngine() as engine, WeightSync(engine) as sync:
        with pytest.raises(BucketSyncError, match="EngineCore died unexpectedly") as caught:
            sync.push(TENSORS, version=1)
        assert caught.value.engine_state == "unchanged"


def test_memory_that_cannot_be_had_is_an_error_before_anything_is_written() -> None:
    with FakeEngine() as engine:
        with WeightSync(engine, slot_size="1TiB") as sync:
            with pytest.raises(RegionError, match="VLLM_BUCKETSYNC_DIR") as caught:
                sync.push(TENSORS, version=1)
            assert caught.value.engine_state == "unchanged"
        with WeightSync(engine) as sync:
            sync.push(TENSORS, version=1)
