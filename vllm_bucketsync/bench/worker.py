"""A worker without vLLM: a process that runs the real receiver.

Its owner is an ``Engine`` for ``WeightSync``. Calls go over a pipe, as vLLM's executor
sends them; the process ends with the pipe, so also when its owner is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch

from vllm_bucketsync import serve
from vllm_bucketsync.clients.base import UPDATE_METHOD, UpdateAnswer, UpdateRequest
from vllm_bucketsync.errors import EngineUnreachableError
from vllm_bucketsync.messages import Open
from vllm_bucketsync.sinks import DiscardSink, Sink
from vllm_bucketsync.transport.devices import uuid_of

from .memory import begin_peak, peak_since
from .sink import ModelSink

# For a process whose pipe is closed to end by itself.
STOP_TIMEOUT_S = 5.0
# Calls of the benchmark, beside those of ``WorkerExtension``: what the next updates go
# into, and how much memory they took.
INTO, BEGIN_PEAK, PEAK = "into", "begin_peak", "peak"
# What they can go into.
DISCARD, MODEL = "discard", "model"


class WorkerProcess:
    """One worker process, as the engine that it is to a ``WeightSync``.

    Its owner calls ``stop``; ``with`` does.

    Attributes:
        is_in_process: ``False``: updates go through shared memory.
        is_idle: ``True``: it has nothing else to do.
        name: What messages call it.
    """

    is_in_process = False
    is_idle = True
    name = "the benchmark's worker"

    def __init__(self, *, model_bytes: int, num_threads: int, device: str = "cpu") -> None:
        """Start the process, and return when it answers.

        Args:
            model_bytes: Bytes of the model that it makes for updates to go into.
            num_threads: Threads of torch in it.
            device: Where its model is.

        Raises:
            EngineUnreachableError: It ended while it started.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_work,
            args=(theirs, model_bytes, num_threads, device),
            name="bucketsync-bench",
            daemon=True,
        )
        try:
            self._process.start()
            theirs.close()
            self.call("bucketsync_status")
        except BaseException:
            theirs.close()
            self.stop()
            raise

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the process."""
        self.stop()

    def num_workers(self) -> int:
        """See ``Engine``."""
        return 1

    def check_ready(self) -> None:
        """See ``Engine``: it is ready from the start."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """See ``Engine``.

        Raises:
            EngineUnreachableError: The process is gone.
        """
        try:
            self._pipe.send((method, args))
            wait([self._pipe, self._process.sentinel])
            # What it said last is read, also when it is gone by now.
            if self._pipe.poll():
                return [self._pipe.recv()]
        except (EOFError, OSError) as error:
            raise self._gone(method) from error
        raise self._gone(method)

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """See ``Engine``: there are no requests and no caches."""
        return UpdateAnswer(results=self.call(UPDATE_METHOD, request.offer))

    def close(self) -> None:
        """See ``Engine``: the process goes on."""

    def stop(self) -> None:
        """End the process and reap it. Idempotent."""
        if self._pipe.closed:
            return
        self._pipe.close()
        if self._process.pid is None:
            return
        try:
            self._process.join(STOP_TIMEOUT_S)
        finally:
            # Also when a second Ctrl-C comes meanwhile.
            self._process.kill()
            self._process.join(STOP_TIMEOUT_S)

    def _gone(self, method: str) -> EngineUnreachableError:
        return EngineUnreachableError(
            f"the benchmark's worker (pid {self._process.pid}) is gone and did not answer "
            f"{method}; what it printed last says why",
            url="",
        )


@dataclass(slots=True)
class _State:
    """What the worker process keeps.

    Attributes:
        model: ``[num_bytes]``, uint8: what an engine would have as its weights.
        into: ``DISCARD`` or ``MODEL``.
    """

    model: torch.Tensor
    into: str = DISCARD

    def make_sink(self, opened: Open) -> Sink:
        """Make the sink of one update."""
        return ModelSink(self.model) if self.into == MODEL else DiscardSink()


def _work(pipe: Connection, model_bytes: int, num_threads: int, device: str) -> None:
    # Ctrl-C reaches the whole group; the owner ends the update, and then the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(num_threads)
    state = _State(torch.full((model_bytes,), 1, dtype=torch.uint8, device=device))
    where = state.model.device
    worker = serve.Worker(make_sink=state.make_sink, device=str(where), device_uuid=uuid_of(where))
    # The pipe's end, or an owner that is gone: either way there is nothing left to do.
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, args = pipe.recv()
            pipe.send(_answer(worker, state, method, args))


def _answer(worker: serve.Worker, state: _State, method: str, args: Sequence[Any]) -> Any:
    if method == UPDATE_METHOD:
        return serve.update(worker, *args)
    if method == INTO:
        (state.into,) = args
        return None
    answers: dict[str, Callable[[], Any]] = {
        "bucketsync_status": lambda: serve.status(worker),
        "bucketsync_release": lambda: serve.release(worker),
        BEGIN_PEAK: begin_peak,
        PEAK: lambda: peak_since(*args),
    }
    return answers[method]()
