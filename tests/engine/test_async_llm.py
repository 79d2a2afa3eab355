"""A trainer pushes into a real ``AsyncLLM``: from its loop and from another thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import engines
from support.process_engines import EXTENSION

from vllm_bucketsync import ConfigError, MissingTensorError, WeightSync

pytestmark = [
    pytest.mark.timeout(300),
    # vLLM leaves sockets and contexts of its client to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Outputs = list[list[tuple[int, float]]]


async def outputs_of(llm: Any) -> Outputs:
    """Return what ``engines.greedy`` does, all prompts at once."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True, detokenize=False
    )

    async def ask(index: int, prompt: list[int]) -> list[tuple[int, float]]:
        async for answer in llm.generate(
            {"prompt_token_ids": prompt}, params, f"{id(params)}-{index}"
        ):
            last = answer.outputs[0]
        return [
            (token, logprobs[token].logprob)
            for token, logprobs in zip(last.token_ids, last.logprobs, strict=True)
        ]

    asking = (ask(index, prompt) for index, prompt in enumerate(engines.PROMPTS))
    return list(await asyncio.gather(*asking))


async def train(folders: list[Path], answers: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(folders[0]),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            gpu_memory_utilization=0.2,
            worker_extension_cls=EXTENSION,
        )
    )
    try:
        answers["before"] = await outputs_of(llm)
        with WeightSync(llm) as sync:
            with pytest.raises(ConfigError, match=r"await apush\("):
                sync.push(folders[1], version=1)
            with pytest.raises(ConfigError, match=r"event loop"):
                sync.status()

            report = await sync.apush(folders[1], version="from the loop")
            answers["from the loop"] = await outputs_of(llm)
            answers["version"] = await llm.get_weight_version()
            answers["engines"] = report.engines

            with pytest.raises(MissingTensorError):
                await sync.apush({"model.norm.weight": torch.ones(64)}, version="bad")
            answers["after a failure"] = await outputs_of(llm)

            for mode, folder in (("wait", folders[0]), ("abort", folders[1]), ("keep", folders[0])):
                await asyncio.to_thread(sync.push, folder, version=mode, pause=mode)
                answers[mode] = await outputs_of(llm)
    finally:
        llm.shutdown()


def test_pushes_from_the_loop_and_from_a_thread_are_exact(
    checkpoint: Callable[[str, int], Path],
) -> None:
    folders = [checkpoint("qwen3", seed) for seed in (0, 1)]
    truths = []
    for folder in folders:
        with engines.running_engine(folder) as llm:
            truths.append(engines.greedy(llm))
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    answers: dict[str, Any] = {}

    with mock.patch.dict(os.environ, engines.ENVIRONMENT | environment):
        asyncio.run(train(folders, answers))

    old, new = truths
    assert old != new
    assert answers == {
        "before": old,
        "from the loop": new,
        "version": "from the loop",
        "engines": ("the AsyncLLM",),
        "after a failure": new,
        "wait": old,
        "abort": new,
        "keep": old,
    }
