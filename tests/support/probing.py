"""The extension with one more method, by which a test sees a worker's live tensors.

Also what a framework with an extension of its own does: derive from ours.
"""

from __future__ import annotations

import hashlib
from typing import Any

from support.engines import live_tensors

import vllm_bucketsync


class Extension(vllm_bucketsync.WorkerExtension):
    def probe_live_tensors(self) -> dict[str, str]:
        """Return a hash of the bytes of every live parameter and buffer, by name."""
        worker: Any = self
        return {
            name: hashlib.blake2b(data, digest_size=16).hexdigest()
            for name, data in live_tensors(worker).items()
        }

    def probe_adapters_break(self, rank: int) -> None:
        """Make vLLM refuse the next adapter that this worker builds, if it has that rank."""
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        merge = manager._create_merged_loras_inplace

        def refuse(model: Any) -> None:
            manager._create_merged_loras_inplace = merge
            raise RuntimeError("no such kernel on this rank")

        if worker.rank == rank:
            manager._create_merged_loras_inplace = refuse

    def probe_memory(self) -> int:
        """Return this process's resident bytes."""
        import psutil

        resident: int = psutil.Process().memory_info().rss
        return resident
