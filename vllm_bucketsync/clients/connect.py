"""Tells what kind of engine a user named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from ..config import api_key_from_env
from ..errors import ConfigError
from .async_llm import AsyncLlmEngine
from .base import Engine
from .http import HttpEngine
from .llm import LlmEngine

_PORTS = {"http": 80, "https": 443}
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
        raise ConfigError("no engine was given; expected an LLM, a server's URL, or several")
    twice = _named_twice(several, engines)
    if twice is not None:
        raise ConfigError(f"{twice} was named twice; an update reaches an engine once")
    if len(engines) > 1 and any(engine.is_in_process for engine in engines):
        raise ConfigError(
            "an in-process LLM can only be updated alone; run it with "
            "VLLM_ENABLE_V1_MULTIPROCESSING=1"
        )
    return engines


def _named_twice(several: Sequence[Any], engines: Sequence[Engine]) -> str | None:
    """Return the name of an engine that is there twice: the same object, or the same URL."""
    seen: set[object] = set()
    for named, engine in zip(several, engines, strict=True):
        key = _normal(engine.name) if isinstance(named, str) else id(named)
        if key in seen:
            return engine.name
        seen.add(key)
    return None


def _normal(url: str) -> str:
    """Return a URL as any other spelling of it: hosts have no case, and ports a default."""
    parts = urlsplit(url)
    try:
        port = parts.port or _PORTS[parts.scheme]
    # A Unix socket, or what is found to be no URL when it is asked.
    except (KeyError, ValueError):
        return url
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


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
        f"{type(named).__name__} is not an engine; expected a vllm.LLM, a vllm.AsyncLLM, or "
        "the base "
        f"URL of a vLLM server such as 'http://localhost:8000'"
    )
