"""An ``AsyncLLM`` on a loop of its own, so that a test can ask it while it pushes."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from support import engines

T = TypeVar("T")


class Running:
    """A running ``AsyncLLM``.

    Attributes:
        llm: The engine. Its methods are for its loop's thread: use ``run``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, llm: Any) -> None:
        self.llm = llm
        self._loop = loop
        self._num_asked = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def ask(
        self, prompt: Sequence[int], request: Any = None, *, num_tokens: int = 6
    ) -> Future[list[tuple[int, float]]]:
        """Begin to generate, greedily, and return once the first token is there."""
        begun = threading.Event()
        answer = asyncio.run_coroutine_threadsafe(
            self._generate(prompt, request, num_tokens, begun.set), self._loop
        )
        if not begun.wait(60):
            raise TimeoutError("no token came")
        return answer

    async def _generate(
        self, prompt: Sequence[int], request: Any, num_tokens: int, begin: Callable[[], None]
    ) -> list[tuple[int, float]]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, logprobs=1, ignore_eos=True, detokenize=False
        )
        self._num_asked += 1
        async for answer in self.llm.generate(
            {"prompt_token_ids": list(prompt)}, params, str(self._num_asked), lora_request=request
        ):
            begin()
            last = answer.outputs[0]
        return [
            (token, logprobs[token].logprob)
            for token, logprobs in zip(last.token_ids, last.logprobs, strict=True)
        ]


@contextmanager
def running_async(checkpoint: Path, *, num_ranks: int = 1, **settings: Any) -> Iterator[Running]:
    """Yield an ``AsyncLLM`` with ``num_ranks`` workers; end it, and its loop's thread."""
    environment = engines.ENVIRONMENT | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if num_ranks == 1 else "0|1",
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), str(Path.cwd()))),
    }
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="the engine's loop", daemon=True)
    thread.start()
    try:
        with mock.patch.dict(os.environ, environment):
            llm = asyncio.run_coroutine_threadsafe(
                _start(checkpoint, tensor_parallel_size=num_ranks, **settings), loop
            ).result(240)
            try:
                yield Running(loop, llm)
            finally:
                asyncio.run_coroutine_threadsafe(_end(llm), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
        # vLLM leaves sockets to the garbage collector: here, where their warnings are ignored.
        gc.collect()


async def _end(llm: Any) -> None:
    llm.shutdown()
    # vLLM leaves its ZeroMQ context to the garbage collector, which warns.
    llm.engine_core.resources.ctx.destroy(linger=0)


async def _start(checkpoint: Path, **settings: Any) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    ordinary = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.2,
        "enable_prefix_caching": True,
    }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint), **{**ordinary, **settings}))
