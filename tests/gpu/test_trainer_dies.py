"""A trainer on the GPU is killed at each step: its workers stay usable, and free its memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support.fake_engine import FakeEngine
from support.gpu_trainer import dying_source, hashes_of, many_tensors
from support.trainer_process import _PipeEngine, _strike_around

from vllm_bucketsync import WeightSync

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def _train(pipe: Connection, strike: int | str, transport: str) -> None:
    if isinstance(strike, str):
        _strike_around(strike, signal.SIGKILL)
    at = strike if isinstance(strike, int) else -1
    with WeightSync(_PipeEngine(pipe), slot_size="1MiB", transport=transport) as sync:
        torch.zeros(1, device="cuda")
        sync.push(dying_source(at), version="lost")
    os._exit(3)  # it was to be killed


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    torch.zeros(1, device="cuda")
    with FakeEngine(device="cuda:0") as engine:
        yield engine


def die(engine: FakeEngine, strike: int | str, transport: str) -> Any:
    """Let a trainer ask the engine for an update, and die in the middle of it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(theirs, strike, transport), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(60):
            raise TimeoutError("the trainer asks for nothing")
        method, arguments = ours.recv()
        (result,) = engine.call(method, *arguments)
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        return result
    finally:
        ours.close()
        process.kill()
        process.join(5)
        process.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
@pytest.mark.parametrize("strike", ["open", 0, 3, 7, "finish", "commit"], ids=str)
def test_the_worker_says_so_and_takes_the_next_update(
    engine: FakeEngine, strike: int | str, transport: str
) -> None:
    engine.call("bucketsync_status")
    before = engine.call("resources")[0]

    result = die(engine, strike, transport)

    assert not result["ok"]
    assert result["error"]["code"] == "peer_lost"
    engine.call("bucketsync_status")
    tensors = many_tensors()
    with WeightSync(engine, slot_size=4096) as sync:
        sync.push(tensors, version="next")
        (loaded,) = engine.call("loaded")
        assert loaded == hashes_of(tensors)
    engine.call("bucketsync_status")
    after = engine.call("resources")[0]
    assert after["fds"] <= before["fds"]
    assert after["mapped"] <= before["mapped"]
