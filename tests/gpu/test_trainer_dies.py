"""A trainer on the GPU is killed at each step: its workers stay usable, and free its memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.fake_engine import FakeEngine
from support.gpu_trainer import die_while_pushing, hashes_of, many_tensors

from vllm_bucketsync import WeightSync

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


TENSORS = {f"layer.{index}": torch.full((1 << 18,), float(index)) for index in range(8)}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    torch.zeros(1, device="cuda")
    with FakeEngine(device="cuda:0") as engine:
        yield engine


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
@pytest.mark.parametrize("strike", ["open", 0, 3, 7, "finish", "commit"], ids=str)
def test_the_worker_says_so_and_takes_the_next_update(
    engine: FakeEngine, strike: int | str, transport: str
) -> None:
    engine.call("bucketsync_status")
    before = engine.call("resources")[0]

    result = die_while_pushing(engine, strike, transport, TENSORS)

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
