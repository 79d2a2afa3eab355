"""Real engines on a GPU, and what they hold."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PROMPTS = ([5, 17, 123, 42, 260], [301, 2, 77], [9] * 12)
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 64 * 1024**2,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "attention_config": {"backend": "TRITON_ATTN"},
    "worker_extension_cls": "vllm_bucketsync.WorkerExtension",
}


@contextmanager
def running(checkpoint: Path, *, is_in_process: bool = False, **settings: Any) -> Iterator[Any]:
    """Start an engine in a process of its own, or in this one, and end it."""
    from vllm import LLM

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for what is asked below alone
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # CUDA is in use here, too
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_in_process else "1"
    llm = LLM(str(checkpoint), **{"enforce_eager": True, **SETTINGS, **settings})
    try:
        yield llm
    finally:
        client = llm.llm_engine.engine_core
        client.shutdown()
        if not is_in_process:
            client.ctx.destroy(linger=0)
        del llm, client
        gc.collect()
        if is_in_process:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def holding(llm: Any) -> tuple[Any, Any]:
    """Return the live tensors of every worker, and greedy tokens with their logprobs."""
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


def addresses(worker: Any) -> list[int]:
    """Return where every live parameter lies: CUDA graphs read there; runs in the worker."""
    return [p.data_ptr() for p in worker.model_runner.get_model().parameters()]


def resources(worker: Any) -> dict[str, int]:
    """Return what the worker's process holds; runs in the worker."""
    torch.cuda.synchronize()
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "mapped": Path("/proc/self/maps").read_text().count(".seg"),
        "shm": len(list(Path("/dev/shm").iterdir())),  # noqa: S108
        "free_bytes": torch.cuda.mem_get_info()[0],
        "pid": os.getpid(),
    }


class LlmAsEngine:
    """What a trainer in another process asks, through this one, of an ``LLM``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call(self, method: str, *args: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._llm.collective_rpc(method, args=args)
        return found
