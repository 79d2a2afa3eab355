"""A trainer on a GPU pushes into a real engine on the same GPU, over shared memory.

Outputs and every live tensor are those of an engine that was started from the new
checkpoint, whether its weights were random before or not.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models

from vllm_bucketsync import MissingTensorError, WeightSync

pytestmark = [
    pytest.mark.timeout(500),
    # vLLM leaves sockets and contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPTS = ([5, 17, 123, 42, 260], [301, 2, 77], [9] * 12)
KINDS = ("qwen3_moe", "qwen2", "qwen3_tied", "llama", "glm4_moe", "qwen3")


def live_tensors(worker: Any) -> dict[str, str]:
    """Return a hash of every live parameter and buffer; runs in the worker."""
    model = worker.model_runner.get_model()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        f"{name} {tensor.dtype} {tuple(tensor.shape)}": hashlib.blake2b(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        ).hexdigest()
        for name, tensor in named
    }


@contextmanager
def running(checkpoint: Path, **settings: Any) -> Iterator[Any]:
    from vllm import LLM

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for live_tensors alone
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # CUDA is in use here, too
    llm = LLM(
        str(checkpoint),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=True,
        disable_log_stats=True,
        attention_config={"backend": "TRITON_ATTN"},
        worker_extension_cls="vllm_bucketsync.WorkerExtension",
        **settings,
    )
    try:
        yield llm
    finally:
        client = llm.llm_engine.engine_core
        client.shutdown()
        client.ctx.destroy(linger=0)
        del llm, client
        gc.collect()


def holding(llm: Any) -> tuple[Any, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    tokens = [
        [
            (t, lp[t].logprob)
            for t, lp in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
        ]
        for o in outputs
    ]
    return llm.collective_rpc(live_tensors), tokens


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind = request.param
    folders = [
        tiny_models.save_checkpoint(kind, tmp_path_factory.mktemp(f"{kind}{seed}"), seed=seed)
        for seed in (0, 1)
    ]
    with running(folders[1]) as llm:
        new = holding(llm)
    with running(folders[0], load_format="dummy" if kind == "llama" else "auto") as llm:
        yield kind, llm, new


def test_pushes_from_the_gpu_and_from_the_host_are_exact_three_times_in_a_row(stage: Any) -> None:
    kind, llm, new = stage
    with WeightSync(llm) as sync:
        for seed in (0, 1):
            # In its own dtype: a router that is kept in fp32 would be rounded here.
            model = tiny_models.trainer_model(kind, seed=seed).cuda()
            report = sync.push(model, version=f"gpu {seed}")
        assert holding(llm) == new
        assert report.transport == "shm"
        for slot_size in (1024, "64KiB"):
            with WeightSync(llm, slot_size=slot_size) as small:
                small.push(tiny_models.checkpoint_tensors(kind, seed=0), version="other")
                small.push(tiny_models.checkpoint_tensors(kind, seed=1), version="host")
                assert holding(llm) == new


def test_what_does_not_fit_changes_nothing_and_a_torn_engine_is_mended(stage: Any) -> None:
    kind, llm, new = stage
    good = tiny_models.checkpoint_tensors(kind, seed=1)
    with WeightSync(llm, slot_size=4096) as sync:
        sync.push(good, version="good")
        without = {n: t for n, t in good.items() if "layers.0.self_attn.q_proj.weight" not in n}
        with pytest.raises(MissingTensorError):
            sync.push(without, version="bad")
        assert holding(llm) == new

        def failing() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(tiny_models.checkpoint_tensors(kind, seed=0).items())[:15]
            raise OSError("half")

        with pytest.raises(OSError, match="half"):
            sync.push(failing(), version="half")
        sync.push(good, version="mended")
        assert holding(llm) == new
