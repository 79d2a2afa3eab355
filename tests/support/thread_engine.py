"""An engine whose workers are threads of the test: real sockets and memory, no processes.

For what does not need a process to die: properties over many inputs, and sinks that the
test wants to look into.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_bucketsync import serve
from vllm_bucketsync.clients.base import UPDATE_METHOD, UpdateAnswer, UpdateRequest, verdict
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.messages import Open
from vllm_bucketsync.sinks import Bucket, Piece, Sink, SinkReport


class KeepingSink:
    """Puts every tensor together in memory of its own; can be told to fail.

    Attributes:
        tensors: ``[num_bytes]``, uint8, by name, as far as they came.
        calls: What the receiver called, in order.
        addresses: Where each piece lay, in order.
    """

    def __init__(self, fail_at: Callable[[str, Sequence[Piece]], None] | None = None) -> None:
        self._fail_at = fail_at
        self.metas: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.manifest: Manifest | None = None
        self.calls: list[str] = []
        self.addresses: list[int] = []

    def _note(self, call: str, pieces: Sequence[Piece] = ()) -> None:
        self.calls.append(call)
        if self._fail_at is not None:
            self._fail_at(call, pieces)

    def open(self, manifest: Manifest | None) -> None:
        self.manifest = manifest
        self._note("open")

    def deviate(self, index: int) -> None:
        self._note(f"deviate {index}")

    def load(self, bucket: Bucket) -> None:
        self._note("load", bucket.pieces)
        for piece in bucket.pieces:
            self.addresses.append(piece.data.data_ptr())
            meta = piece.meta
            self.metas[meta.name] = meta
            if meta.name not in self.tensors:
                self.tensors[meta.name] = torch.empty(meta.num_bytes, dtype=torch.uint8)
            end_byte = piece.first_byte + piece.data.numel()
            self.tensors[meta.name][piece.first_byte : end_byte] = piece.data

    def prepare(self) -> None:
        self._note("prepare")

    def commit(self) -> SinkReport:
        self._note("commit")
        return SinkReport()

    def abort(self) -> EngineState:
        self.calls.append("abort")
        return EngineState.TORN if self.tensors else EngineState.UNCHANGED

    def release(self) -> None:
        self.calls.append("release")


class ThreadEngine:
    """Runs the real worker side on the thread that calls it.

    Attributes:
        is_in_process: ``True`` makes ``WeightSync`` use references and one thread.
        sinks: Every sink that was made, in order.
        workers: The state that each worker keeps.
    """

    def __init__(
        self,
        *,
        num_workers: int = 1,
        is_in_process: bool = False,
        make: Callable[[], Sink] = KeepingSink,
    ) -> None:
        self.is_in_process = is_in_process
        self.is_idle = True
        self.sinks: list[Any] = []
        self.finished: list[str] = []
        self.requests: list[UpdateRequest] = []
        self.name = "the thread engine"
        self._make = make
        # As vLLM's workers: one call after the other, whoever asks.
        self._serial = threading.RLock()
        self.workers = [
            serve.Worker(make_sink=self._make_sink, rank=rank, world_size=num_workers)
            for rank in range(num_workers)
        ]

    def _make_sink(self, opened: Open) -> Sink:
        sink = self._make()
        self.sinks.append(sink)
        return sink

    def num_workers(self) -> int:
        return len(self.workers)

    def check_ready(self) -> None:
        pass

    def call(self, method: str, *args: Any) -> list[Any]:
        methods: dict[str, Callable[..., Any]] = {
            "update_weights_from_bucket": serve.update,
            "bucketsync_status": serve.status,
            "bucketsync_release": serve.release,
        }
        act = methods[method]
        results: list[Any] = [None] * len(self.workers)

        def run(index: int) -> None:
            results[index] = self._act(index, act, *args)

        threads = [
            threading.Thread(target=run, args=(index,)) for index in range(1, len(self.workers))
        ]
        with self._serial:
            for thread in threads:
                thread.start()
            run(0)
            for thread in threads:
                thread.join(60)
        return results

    def _act(self, index: int, act: Callable[..., Any], *args: Any) -> Any:
        """Run a method on one worker; a test may be late with it."""
        return act(self.workers[index], *args)

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        self.requests.append(request)
        results = self.call(UPDATE_METHOD, request.offer)
        if verdict(results) is EngineState.COMMITTED:
            self.finished.append(request.version)
        return UpdateAnswer(results=results)

    def close(self) -> None:
        for worker in self.workers:
            worker.memory.release()
