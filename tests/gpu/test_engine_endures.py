"""One engine with CUDA graphs, through hundreds of updates and the death of either end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import tiny_models
from support.gpu_engines import LlmAsEngine, holding, resources, running
from support.gpu_trainer import die_while_pushing

from vllm_bucketsync import BucketSyncError, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KIND = "qwen3"
# Compiled and captured, as an engine is that nobody told otherwise.
GRAPHS: dict[str, Any] = {"enforce_eager": False}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    old, new = (
        tiny_models.save_checkpoint(KIND, tmp_path_factory.mktemp(f"{KIND}{seed}"), seed=seed)
        for seed in (0, 1)
    )
    with running(new, **GRAPHS) as llm:
        held_new = holding(llm)
    with running(old, **GRAPHS) as llm:
        yield llm, holding(llm), held_new


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_two_hundred_updates_are_exact_and_nothing_grows(stage: Any, transport: str) -> None:
    llm, old, new = stage
    models = [tiny_models.trainer_model(KIND, seed=seed).cuda() for seed in (0, 1)]
    with WeightSync(llm, transport=transport) as sync:
        for version in range(6):
            sync.push(models[version % 2], version=version)
        (before,) = llm.collective_rpc(resources)
        free_bytes = torch.cuda.mem_get_info()[0]
        for version in range(200):
            sync.push(models[version % 2], version=version)
            if version % 50 > 47:
                assert holding(llm) == (old, new)[version % 2]
        (after,) = llm.collective_rpc(resources)
    assert after == before
    assert abs(torch.cuda.mem_get_info()[0] - free_bytes) < 1024**3


@pytest.mark.parametrize(
    ("strike", "transport"),
    [("open", "cuda_ipc"), (3, "cuda_ipc"), (3, "shm"), ("commit", "cuda_ipc")],
    ids=str,
)
def test_a_trainer_that_dies_leaves_an_engine_that_the_next_one_mends(
    stage: Any, strike: int | str, transport: str
) -> None:
    llm, _, new = stage
    checkpoint = tiny_models.checkpoint_tensors(KIND, seed=0)
    result = die_while_pushing(LlmAsEngine(llm), strike, transport, checkpoint)
    assert result["error"]["code"] == "peer_lost"
    with WeightSync(llm) as sync:
        sync.push(tiny_models.trainer_model(KIND, seed=1).cuda(), version="next")
        assert holding(llm) == new


def test_an_engine_that_dies_leaves_a_trainer_that_has_its_memory_back(stage: Any) -> None:
    llm, _, _ = stage
    (worker,) = llm.collective_rpc(resources)
    tensors = {n: t.cuda() for n, t in tiny_models.checkpoint_tensors(KIND, seed=0).items()}
    torch.cuda.synchronize()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(tensors.items()):
            if index == 5:
                os.kill(worker["pid"], signal.SIGKILL)
            yield item

    before = torch.cuda.mem_get_info()[0]
    with WeightSync(llm, slot_size="1MiB") as sync, pytest.raises(BucketSyncError, match="gone"):
        sync.push(source(), version="lost")
    assert torch.cuda.mem_get_info()[0] >= before
