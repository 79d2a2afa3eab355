"""A ``vllm.AsyncLLM`` of this process, asked through its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..errors import ConfigError
from . import online
from .base import OwnPause, UpdateAnswer, UpdateRequest, without_extension


class AsyncLlmEngine:
    """Hands every question to the loop that the engine runs on, and waits for the answer.

    Attributes:
        is_in_process: Never: an ``AsyncLLM`` has its engine in another process.
        is_idle: Nobody can know: requests come from its loop.
        takes_arguments: It was made with arguments, not with flags.
        name: What messages call it.
    """

    is_in_process = False
    is_idle = False
    takes_arguments = True
    name = "the AsyncLLM"

    def __init__(self, llm: Any) -> None:
        """Take note of the engine, and of the loop if it is the running one.

        Args:
            llm: The engine. Its loop is the one that runs here, or else the one that
                its own tasks run on.
        """
        self._llm = llm
        self._config = llm.vllm_config.parallel_config
        self._pause = OwnPause()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def num_workers(self) -> int:
        """Return how many workers all of its replicas have."""
        return online.num_workers(self._llm)

    def check_ready(self) -> None:
        """See ``Engine``. Whether weights are asleep only the workers can tell."""
        self._running_loop()
        if not self._config.worker_extension_cls:
            raise without_extension("the AsyncLLM has no worker_extension_cls")

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """See ``Engine``."""
        answer: UpdateAnswer = self._ask(online.update(self._llm, request, pause=self._pause))
        return answer

    def call(self, method: str) -> list[Any]:
        """See ``Engine``."""
        return list(self._ask(online.call_workers(self._llm, method)))

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        """See ``Engine``."""
        return list(self._ask(online.remove_adapter(self._llm, name, timeout_s=timeout_s)))

    def close(self) -> None:
        """Hold nothing."""

    def _ask(self, question: Coroutine[Any, Any, Any]) -> Any:
        """Have a question answered on the engine's loop. No timeout."""
        try:
            loop = self._running_loop()
        except ConfigError:
            question.close()
            raise
        return asyncio.run_coroutine_threadsafe(question, loop).result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            task = getattr(self._llm, "output_handler", None)
            self._loop = None if task is None else task.get_loop()
        if self._loop is None or not self._loop.is_running():
            raise ConfigError(
                "the AsyncLLM's event loop does not run; make the WeightSync inside the loop "
                "that the engine was made on, and keep it running"
            )
        try:
            is_own = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_own = False
        if is_own:
            raise ConfigError(
                "push would wait for the very event loop that it blocks; await apush(...), or "
                "push from another thread"
            )
        return self._loop
