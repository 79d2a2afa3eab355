"""Starts vLLM engines inside the test process, and looks into them.

Import it before anything of vLLM: some of the environment is read by that import. It is
changed only then and while an engine runs, so that other tests' processes do not inherit it.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

ENVIRONMENT = {
    # In-process: the worker can be reached, and an engine starts in 2 s, not 35.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Some machines advertise AMX tiles that they cannot use: SIGILL without this.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def environment() -> Iterator[None]:
    """Set what these engines need in this process's environment, and put it back."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


with environment():
    from vllm import LLM

# Threads that spin for each other are slow where others use the cores too.
torch.set_num_threads(1)

PROMPTS = ([5, 17, 123, 42, 260], [301, 2, 77], [9] * 12)


@contextmanager
def running_engine(checkpoint: Path, **settings: Any) -> Iterator[Any]:
    """Yield an ``LLM`` that serves ``checkpoint``; free it at the end.

    Skips where this vLLM cannot start one.
    """
    if _is_latent(checkpoint) and not _has_latent_attention():
        pytest.skip("this vLLM's CPU build has no prefill for latent attention (MLA)")
    with environment():
        llm = _start(checkpoint, **settings)
        try:
            yield llm
        finally:
            _free(llm)


@contextmanager
def running_experts(checkpoint: Path, **settings: Any) -> Iterator[Any]:
    """Yield an ``LLM`` with experts and adapters; skip where this vLLM cannot start one."""
    with ExitStack() as stack:
        try:
            llm = stack.enter_context(running_engine(checkpoint, **settings))
        except AssertionError as error:
            if "Monolithic kernels are not supported for Fused MoE LoRA" not in str(error):
                raise
            pytest.skip("this vLLM's CPU build takes no adapters where there are experts")
        yield llm


def _is_latent(checkpoint: Path) -> bool:
    return "kv_lora_rank" in json.loads((checkpoint / "config.json").read_text())


def _has_latent_attention() -> bool:
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    # 0.27 and 0.28 have none, and import a kernel of GPUs instead.
    return hasattr(MLAPrefillBackendEnum, "CPU")


def _start(checkpoint: Path, **settings: Any) -> Any:
    ordinary = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.2,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        # Enough for these prompts, and many engines fit in one process.
        "num_gpu_blocks_override": 16,
    }
    return LLM(str(checkpoint), **{**ordinary, **settings})


def worker_of(llm: Any) -> Any:
    """Return vLLM's worker object of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def greedy(llm: Any, *, num_tokens: int = 8) -> list[list[tuple[int, float]]]:
    """Return, for each of ``PROMPTS``, the greedy tokens and their log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, logprobs=1, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
    )
    return [_tokens(output.outputs[0]) for output in outputs]


def live_tensors(worker: Any) -> dict[str, bytes]:
    """Return the bytes of every parameter and buffer of the model, by name.

    Aliases are listed under each of their names. The name of a tensor carries its
    dtype, shape and strides, so that these are compared as well.
    """
    model = worker.model_runner.get_model()
    found: dict[str, bytes] = {}
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            key = f"{kind} {name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
            found[key] = tensor_bytes(tensor)
    return found


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(plain.cpu().numpy().tobytes())


def live_addresses(worker: Any) -> dict[str, tuple[int, int]]:
    """Return identity and address of every parameter and buffer of the model, by name."""
    model = worker.model_runner.get_model()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in named}


def _tokens(output: Any) -> list[tuple[int, float]]:
    return [
        (token, logprobs[token].logprob)
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
    ]


def _free(llm: Any) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    # A reload leaves references to the modules in the values of this dictionary,
    # whose keys they are: without this no model is ever freed.
    for module in worker_of(llm).model_runner.get_model().modules():
        LAYERWISE_INFO.pop(module, None)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
