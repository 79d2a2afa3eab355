"""Proves that an ``AsyncLLM`` is asked through its own loop, and never by blocking it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.thread_engine import ThreadEngine

from vllm_bucketsync.clients.async_llm import AsyncLlmEngine
from vllm_bucketsync.clients.connect import connect
from vllm_bucketsync.errors import ConfigError, UnsupportedError
from vllm_bucketsync.sync import WeightSync


class FakeAsyncLlm:
    """What we use of vLLM's, around workers that are threads."""

    def __init__(self) -> None:
        self.vllm_config = self
        self.parallel_config = self
        self.engine_core = self
        self.world_size = 1
        self.worker_extension_cls = "vllm_bucketsync.WorkerExtension"
        self.is_held = False
        self.output_handler: Any = None
        self.engine = ThreadEngine()
        self.asked: list[Any] = []
        self.threads: set[int] = set()

    def _note(self, what: str) -> None:
        self.asked.append(what)
        self.threads.add(threading.get_ident())

    async def is_paused(self) -> bool:
        return self.is_held

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self._note(method)
        return await asyncio.to_thread(self.engine.call, method, *args)

    async def pause_generation(self, *, mode: str) -> None:
        self._note(f"pause {mode}")

    async def resume_generation(self) -> None:
        self._note("resume")

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self._note("prefix")
        return True

    async def reset_mm_cache(self) -> None:
        self._note("mm")

    async def reset_encoder_cache(self) -> None:
        self._note("encoder")

    async def update_weight_version(self, version: str) -> None:
        self._note(f"version {version}")


PUSHED = [
    "pause keep",
    "update_weights_from_bucket",
    "prefix",
    "mm",
    "encoder",
    "version 1",
    "resume",
]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    found = asyncio.new_event_loop()
    thread = threading.Thread(target=found.run_forever)
    thread.start()
    yield found
    found.call_soon_threadsafe(found.stop)
    thread.join(10)
    found.close()


def made_on(loop: asyncio.AbstractEventLoop) -> tuple[FakeAsyncLlm, WeightSync]:
    async def make() -> tuple[FakeAsyncLlm, WeightSync]:
        llm = FakeAsyncLlm()
        return llm, WeightSync(llm)

    return asyncio.run_coroutine_threadsafe(make(), loop).result(10)


def test_a_push_from_another_thread_runs_everything_on_the_engines_loop(
    loop: asyncio.AbstractEventLoop,
) -> None:
    llm, sync = made_on(loop)
    with sync:
        report = sync.push({"a": torch.ones(2)}, version=1, pause="keep")

    assert llm.asked == PUSHED
    assert llm.threads == {loop._thread_id}  # type: ignore[attr-defined]
    assert report.engines == ("the AsyncLLM",)
    llm.engine.close()


def test_an_async_push_leaves_the_loop_free() -> None:
    async def run() -> tuple[list[str], int]:
        llm, ticks = FakeAsyncLlm(), 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        with WeightSync(llm) as sync:
            await sync.apush({"a": torch.ones(2)}, version=1, pause="keep")
        ticking.cancel()
        llm.engine.close()
        return llm.asked, ticks

    asked, ticks = asyncio.run(run())

    assert asked == PUSHED
    assert ticks > 1


def test_a_push_on_the_loops_own_thread_is_refused_at_once() -> None:
    async def run() -> FakeAsyncLlm:
        llm = FakeAsyncLlm()
        with WeightSync(llm) as sync, pytest.raises(ConfigError, match=r"await apush\("):
            sync.push({"a": torch.ones(2)}, version=1)
        return llm

    assert asyncio.run(run()).asked == []


def test_the_loop_is_found_by_the_engines_own_task(loop: asyncio.AbstractEventLoop) -> None:
    llm = FakeAsyncLlm()

    async def start() -> None:
        llm.output_handler = asyncio.create_task(asyncio.sleep(60))

    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    with WeightSync(llm) as sync:
        sync.push({"a": torch.ones(2)}, version=1, pause="keep")
    loop.call_soon_threadsafe(llm.output_handler.cancel)

    assert llm.asked == PUSHED
    llm.engine.close()


def test_an_engine_whose_loop_does_not_run_is_refused() -> None:
    engine = AsyncLlmEngine(FakeAsyncLlm())

    with pytest.raises(ConfigError, match="event loop does not run"):
        engine.check_ready()


def test_an_engine_that_cannot_be_updated_says_why(loop: asyncio.AbstractEventLoop) -> None:
    async def make(**changes: Any) -> Any:
        llm = FakeAsyncLlm()
        vars(llm).update(changes)
        return connect(llm)[0]

    def engine(**changes: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(make(**changes), loop).result(10)

    with pytest.raises(UnsupportedError, match="--worker-extension-cls"):
        engine(worker_extension_cls="").check_ready()
    assert engine(world_size=3, engine_ranks_managed=[0, 1]).num_workers() == 6
