"""How an online engine is updated: held back, changed, cleaned, let go on.

For whoever holds vLLM's ``EngineClient`` on its event loop: an ``AsyncLLM`` of the
trainer's process, and our route inside an API server. There the whole sequence is one
request, so a trainer that dies in the middle leaves no engine paused that is whole.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..errors import ChannelTimeoutError, EngineState
from .base import (
    REMOVE_METHOD,
    OwnPause,
    PauseMode,
    UpdateAnswer,
    UpdateRequest,
    has_committed,
    may_resume,
    verdict,
    without_method,
)

logger = logging.getLogger(__name__)


async def update(engine: Any, request: UpdateRequest, *, pause: OwnPause) -> UpdateAnswer:
    """Run one update, on the engine's own loop.

    Args:
        engine: vLLM's ``EngineClient``.
        request: What is asked for.
        pause: What is remembered of the engine from one update to the next.

    Raises:
        ChannelTimeoutError: The requests that ran did not end in time. Nothing was
            written, and the engine goes on.
    """
    if request.pause is None:
        return UpdateAnswer(results=await _call(engine, request))
    results: list[Any] = []
    state = EngineState.UNCHANGED
    was_paused = await engine.is_paused() and not pause.is_ours
    try:
        await _pause(engine, request.pause, timeout_s=request.timeout_s)
        state = EngineState.UNKNOWN
        try:
            results = await _call(engine, request)
        except Exception as error:
            if without_method(error) is not None:
                state = EngineState.UNCHANGED
            raise
        state = verdict(results)
        is_new = state is EngineState.COMMITTED
        drops_caches = not has_committed(results) or await finish(
            engine, request.weight_version if is_new else None
        )
    finally:
        resume_torn = request.resume_torn
        if may_resume(state, results, was_paused=was_paused, resume_torn=resume_torn):
            await engine.resume_generation()
            pause.is_ours = False
        else:
            pause.is_ours = not was_paused
            logger.warning("the engine stays paused: its weights are %s", state)
    return UpdateAnswer(results=results, drops_caches=drops_caches)


async def remove_adapter(engine: Any, name: str, *, timeout_s: float) -> list[Any]:
    """Make every worker forget an adapter, once the requests that run have ended.

    Args:
        engine: vLLM's ``EngineClient``.
        name: The adapter.
        timeout_s: For the requests that run, to end.

    Raises:
        ChannelTimeoutError: They did not end in time. The adapter is still there.
    """
    was_paused = await engine.is_paused()
    try:
        if not was_paused:
            await _pause(engine, PauseMode.WAIT, timeout_s=timeout_s)
        return await call_workers(engine, REMOVE_METHOD, name)
    finally:
        if not was_paused:
            await engine.resume_generation()


async def call_workers(engine: Any, method: str, *args: Any) -> list[Any]:
    """Run a method on every worker of every data-parallel replica.

    vLLM's own ``collective_rpc`` asks them all and returns what the first one said.
    """
    ask_all = getattr(getattr(engine, "engine_core", None), "call_utility_all_async", None)
    if ask_all is None:
        return list(await engine.collective_rpc(method, args=args))
    replicas = await ask_all("collective_rpc", method, None, args, None)
    return [result for results in replicas for result in results]


def num_workers(engine: Any) -> int:
    """Return tensor times pipeline parallel size, times the replicas that it drives."""
    replicas = getattr(getattr(engine, "engine_core", None), "engine_ranks_managed", [0])
    return int(engine.vllm_config.parallel_config.world_size) * max(1, len(replicas))


async def finish(engine: Any, version: str | None) -> bool:
    """Drop what was computed with the old weights, and record the version.

    Args:
        engine: vLLM's ``EngineClient``.
        version: What the engine's own weights are called; ``None`` where they stay.

    Returns:
        Whether the prefix cache is empty.
    """
    is_empty = await engine.reset_prefix_cache(reset_running_requests=True)
    await engine.reset_mm_cache()
    await engine.reset_encoder_cache()
    if version is not None and hasattr(engine, "update_weight_version"):
        await engine.update_weight_version(version)
    return bool(is_empty)


async def _pause(engine: Any, mode: PauseMode, *, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.pause_generation(mode=str(mode))
    except TimeoutError as error:
        raise ChannelTimeoutError(
            timeout_s=timeout_s,
            waiting_for="the engine's running requests to end",
            advice="nothing was written; raise connect_timeout_s, or push with pause='keep'",
        ) from error


async def _call(engine: Any, request: UpdateRequest) -> list[Any]:
    return await call_workers(engine, request.method, request.offer)
