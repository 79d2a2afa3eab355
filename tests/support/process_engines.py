"""Starts vLLM engines whose workers are processes of their own, as users do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from support import engines

EXTENSION = "support.probing.Extension"


@dataclass(frozen=True)
class Holding:
    """What an engine holds and says.

    Attributes:
        live: For each rank, a hash of every live tensor by name.
        outputs: Greedy tokens and log-probabilities.
    """

    live: list[dict[str, str]]
    outputs: list[list[tuple[int, float]]]

    @classmethod
    def of(cls, llm: Any) -> Holding:
        return cls(llm.collective_rpc("probe_live_tensors"), engines.greedy(llm))


@contextmanager
def running_processes(checkpoint: Path, *, num_ranks: int = 1, **settings: Any) -> Iterator[Any]:
    """Yield an ``LLM`` with an engine process and ``num_ranks`` workers."""
    from vllm import LLM, envs

    # What an engine in this process has left there would say that this one is to be there too.
    envs.disable_envs_cache()
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if num_ranks == 1 else "0|1",
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), str(Path.cwd()))),
    }
    with mock.patch.dict(os.environ, environment):
        ordinary = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 4,
            "gpu_memory_utilization": 0.2,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "tensor_parallel_size": num_ranks,
        }
        llm = LLM(str(checkpoint), **{**ordinary, **settings})
        try:
            yield llm
        finally:
            client = llm.llm_engine.engine_core
            client.shutdown()
            # vLLM leaves its ZeroMQ context to the garbage collector, which warns.
            client.ctx.destroy(linger=0)
