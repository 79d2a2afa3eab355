"""A ``vllm.LLM`` of this process, with its workers in it or in others."""

from __future__ import annotations

from typing import Any

from ..errors import EngineState
from .base import (
    REMOVE_METHOD,
    UpdateAnswer,
    UpdateRequest,
    has_committed,
    verdict,
    without_extension,
)


class LlmEngine:
    """Asks an ``LLM`` through its own methods.

    Attributes:
        is_in_process: Whether its worker runs on the calling thread.
        takes_arguments: It was made with arguments, not with flags.
        name: What messages call it.
    """

    takes_arguments = True
    name = "the LLM"

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._config = llm.llm_engine.vllm_config.parallel_config
        # vLLM's in-process client holds the engine core itself, the others its address.
        core = getattr(llm.llm_engine, "engine_core", None)
        executor = getattr(getattr(core, "engine_core", None), "model_executor", None)
        self.is_in_process = hasattr(executor, "driver_worker") and self.num_workers() == 1

    @property
    def _has_encoder(self) -> bool:
        """Whether the engine may keep what an encoder made, of images for one."""
        config = getattr(self._llm.llm_engine.vllm_config, "model_config", None)
        kinds = ("is_multimodal_model", "is_encoder_decoder")
        return any(getattr(config, kind, True) for kind in kinds)

    @property
    def _keeps_nothing(self) -> bool:
        """Whether it was started without a prefix cache: there is nothing to drop."""
        config = getattr(self._llm.llm_engine.vllm_config, "cache_config", None)
        return getattr(config, "enable_prefix_caching", None) is False

    @property
    def is_idle(self) -> bool:
        """See ``Engine``. Requests come from this process, and one thread drives an ``LLM``."""
        engine = self._llm.llm_engine
        # Replicas would be asked, and might be somewhere else.
        is_alone = getattr(engine, "dp_group", None) is None
        return is_alone and not engine.has_unfinished_requests()

    def num_workers(self) -> int:
        """Return tensor times pipeline parallel size, times the replicas it drives."""
        replicas = getattr(self._llm.llm_engine.engine_core, "engine_ranks_managed", [0])
        return int(self._config.world_size) * max(1, len(replicas))

    def check_ready(self) -> None:
        """See ``Engine``. Whether weights are asleep only the workers can tell.

        vLLM says so of an engine whose weights were woken up and whose cache was not.
        """
        if not self._config.worker_extension_cls:
            raise without_extension("the LLM has no worker_extension_cls")

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """See ``Engine``. An ``LLM`` runs requests only while it is asked to: no pause."""
        engine = self._llm.llm_engine
        # While the trainer makes ready, where nothing can fill the cache again meanwhile.
        is_early = request.pause is not None and self.is_idle
        drops_caches = is_early and (self._keeps_nothing or _drop_prefix_cache(engine))
        results = list(self._llm.collective_rpc(request.method, args=(request.offer,)))
        if not has_committed(results):
            return UpdateAnswer(results=results)
        drops_caches = drops_caches or _drop_prefix_cache(engine)
        if self._has_encoder:
            engine.reset_mm_cache()
            engine.reset_encoder_cache()
        is_new = verdict(results) is EngineState.COMMITTED and request.weight_version is not None
        if is_new and hasattr(engine, "set_weight_version"):
            engine.set_weight_version(request.weight_version)
        return UpdateAnswer(results=results, drops_caches=drops_caches)

    def call(self, method: str) -> list[Any]:
        """See ``Engine``."""
        return list(self._llm.collective_rpc(method))

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        """See ``Engine``. An ``LLM`` runs no request meanwhile."""
        return list(self._llm.collective_rpc(REMOVE_METHOD, args=(name,)))

    def close(self) -> None:
        """Hold nothing."""


def _drop_prefix_cache(engine: Any) -> bool:
    """Return whether nothing is cached any more."""
    return bool(engine.reset_prefix_cache(reset_running_requests=True))
