"""Tells what kind of engine a user named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..config import api_key_from_env
from ..errors import ConfigError
from .async_llm import AsyncLlmEngine
from .base import Engine
from .http import HttpEngine
from .llm import LlmEngine

_CONTRACT = ("update", "call", "num_workers", "check_ready")


def connect(named: object, *, api_key: str | None = None) -> list[Engine]:
    """Return a client for each engine that a user named.

    Args:
        named: A ``vllm.LLM``, a ``vllm.AsyncLLM``, a server's URL, anything with the
            methods of ``Engine``, or several of them.
        api_key: What servers ask for; the environment's where ``None``.

    Raises:
        ConfigError: One of them is nothing that can be asked.
    """
    several = named if isinstance(named, list | tuple) else [named]
    engines = [_connect(one, api_key=api_key) for one in cast(Sequence[Any], several)]
    if not engines:
        raise ConfigError("no engine was named; expected an LLM, a server's URL, or several")
    if len(engines) > 1 and any(engine.is_in_process for engine in engines):
        raise ConfigError(
            "an in-process LLM can only be updated alone; run it with "
            "VLLM_ENABLE_V1_MULTIPROCESSING=1"
        )
    return engines


def _connect(named: Any, *, api_key: str | None) -> Engine:
    if isinstance(named, str):
        return HttpEngine(named, api_key=api_key_from_env() if api_key is None else api_key)
    if hasattr(named, "collective_rpc") and hasattr(named, "llm_engine"):
        return LlmEngine(named)
    if hasattr(named, "collective_rpc") and hasattr(named, "pause_generation"):
        return AsyncLlmEngine(named)
    if all(hasattr(named, name) for name in _CONTRACT):
        return cast(Engine, named)
    raise ConfigError(
        f"{type(named).__name__} is no engine; expected a vllm.LLM, a vllm.AsyncLLM, or the base "
        f"URL of a vLLM server such as 'http://localhost:8000'"
    )
