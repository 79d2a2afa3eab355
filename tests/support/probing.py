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
        """Make the next adapter that this worker is given be refused, if it has that rank."""
        from vllm_bucketsync.worker.lora.shelf import shelf_of

        worker: Any = self
        shelf: Any = shelf_of(worker)

        def refuse(kept: Any) -> None:
            del shelf.prepare
            raise RuntimeError("no such kernel on this rank")

        if worker.rank == rank:
            shelf.prepare = refuse

    def probe_memory(self) -> int:
        """Return this process's resident bytes."""
        import psutil

        resident: int = psutil.Process().memory_info().rss
        return resident
