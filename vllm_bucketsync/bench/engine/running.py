"""Starts the engine that is measured: random weights, one worker, processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_bucketsync.errors import UnsupportedError

from .extension import EXTENSION

_MAX_MODEL_LEN = 64
_MAX_TOKENS = 256
_KV_CACHE_BYTES = 512 * 1024**2
# Only what has to be free at the start: the cache has its own size, the trainer comes later.
_GPU_SHARE = 0.5

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Nothing is sampled, and it would be compiled first.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # For CPU builds.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
}
# Not to be chosen: between processes, and as vLLM's own ipc transfer has to have it.
_FIXED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
_FIXED_ON_GPU = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


@contextmanager
def running_engine(folder: Path, *, dtype: str, device: str, enforce_eager: bool) -> Iterator[Any]:
    """Yield a ``vllm.LLM``; stop its processes at the end.

    The environment is changed for as long as it runs; of what is no matter of the
    benchmark, what is set already stays.

    Args:
        folder: Has the ``config.json``.
        dtype: Of the weights.
        device: ``cpu`` or ``cuda``.
        enforce_eager: Whether to leave out CUDA graphs and compilation.

    Raises:
        UnsupportedError: It did not start.
    """
    fixed = {**_FIXED, **(_FIXED_ON_GPU if device == "cuda" else {})}
    with _environment({**_ENVIRONMENT, **os.environ, **fixed}):
        llm = _start(folder, dtype=dtype, device=device, enforce_eager=enforce_eager)
        try:
            yield llm
        finally:
            client = llm.llm_engine.engine_core
            client.shutdown()
            # vLLM leaves its ZeroMQ context to the garbage collector.
            client.ctx.destroy(linger=0)


def _start(folder: Path, *, dtype: str, device: str, enforce_eager: bool) -> Any:
    from vllm import LLM

    on_device: dict[str, Any] = {"num_gpu_blocks_override": 16, "gpu_memory_utilization": 0.2}
    if device == "cuda":
        on_device = {
            "gpu_memory_utilization": _GPU_SHARE,
            "kv_cache_memory_bytes": _KV_CACHE_BYTES,
            "attention_config": {"backend": "TRITON_ATTN"},
            "weight_transfer_config": {"backend": "ipc"},
        }
    try:
        return LLM(
            str(folder),
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=enforce_eager,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=4,
            max_num_batched_tokens=_MAX_TOKENS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            worker_extension_cls=EXTENSION,
            **on_device,
        )
    except Exception as error:
        raise UnsupportedError(
            f"vLLM did not start the engine of the benchmark: {type(error).__name__}: {error}; "
            f"what it printed last says why; set VLLM_LOGGING_LEVEL=INFO for more"
        ) from error


@contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
