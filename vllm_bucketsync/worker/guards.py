"""What an engine must not be doing while its weights are replaced."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import EngineAsleepError, EngineBusyError, UnsupportedError
from . import compat


def refuse_unfit(worker: Any) -> None:
    """Refuse an engine whose weights cannot be replaced now.

    Args:
        worker: vLLM's worker.

    Raises:
        EngineAsleepError: The weights are asleep: a copy into them would crash.
        EngineBusyError: vLLM's own weight update is open.
        UnsupportedError: The engine balances its experts, has weights on the host, or has
            them in a form that vLLM cannot load again; or vLLM cannot reload at all.
    """
    compat.check_layerwise_reload()
    if worker.vllm_config.parallel_config.enable_eplb:
        raise UnsupportedError(
            "the engine balances its experts (enable_eplb), and vLLM loads experts into the "
            "places that they had at the start; nothing was written; start it without "
            "--enable-eplb"
        )
    if (setting := compat.offloads_weights(worker.vllm_config)) is not None:
        raise UnsupportedError(
            f"the engine keeps a part of its weights on the host ({setting}), and vLLM's reload "
            f"does not know of that; nothing was written; start it without {setting}"
        )
    quantisation = compat.quantisation(worker.vllm_config)
    if quantisation in compat.LOADED_ONCE:
        raise UnsupportedError(
            f"the engine's weights are quantised by {quantisation}, while a loader of its own reads "
            f"them from files, and vLLM cannot load such weights again; nothing was written; "
            f"start it with another quantisation, or with none"
        )
    refuse_at_work(worker)


def refuse_at_work(worker: Any) -> None:
    """Refuse an engine that must not be changed now, whatever it is that is changed.

    Args:
        worker: vLLM's worker.

    Raises:
        EngineAsleepError: The weights are asleep: a copy to the device would crash.
        EngineBusyError: vLLM's own weight update is open.
    """
    if getattr(worker, "_weight_update_active", False):
        raise EngineBusyError(
            "vLLM's own weight update is open in this engine; nothing was written; call "
            "finish_weight_update first"
        )
    if weights_are_asleep(worker):
        raise EngineAsleepError(
            "the engine's weights are asleep; nothing was written; call "
            "wake_up(tags=['weights']) first"
        )


def weights_are_asleep(worker: Any) -> bool:
    """Whether a sleep took the memory of this worker's weights away."""
    allocations = _allocations()
    if allocations:
        return any(data.tag == "weights" and data.is_asleep for data in allocations)
    # Not the property: it would create the backend, which some platforms refuse.
    backend = vars(worker).get("_sleep_mode_backend")
    return backend is not None and backend.state() != "RUNNING"


def _allocations() -> list[Any]:
    """What the sleep allocators hold, without importing or creating any."""
    found: list[Any] = []
    for module, cls in (("cumem", "CuMemAllocator"), ("xpumem", "XpuMemAllocator")):
        loaded = sys.modules.get(f"vllm.device_allocator.{module}")
        instance = getattr(getattr(loaded, cls, None), "instance", None)
        found.extend(getattr(instance, "pointer_to_data", {}).values())
    return found
