"""What an engine must not be doing while its weights are replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ..errors import EngineAsleepError, EngineBusyError, UnsupportedError
from . import compat

# Quantisations that a model's own loaders know nothing of: a loader of files makes them.
LOADED_ONCE = frozenset({"bitsandbytes", "gguf"})
# Those that updated engines were compared with, to the last bit (``tests/gpu``).
COMPARED = frozenset({"fp8"})


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
    if (setting := _offloads(worker.vllm_config)) is not None:
        raise UnsupportedError(
            f"the engine keeps a part of its weights on the host ({setting}), and vLLM's reload "
            f"does not know of that; nothing was written; start it without {setting}"
        )
    quantisation = _quantisation(worker.vllm_config)
    if quantisation in LOADED_ONCE:
        raise UnsupportedError(
            f"the engine's weights are quantised by {quantisation} while they are read from files, "
            f"and vLLM cannot load such weights again; nothing was written; start it with another "
            f"quantisation, or with none"
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


def notes_of(worker: Any) -> Iterator[str]:
    """Yield what a user should know of an engine that is not refused."""
    quantisation = _quantisation(worker.vllm_config)
    if quantisation is not None and quantisation not in COMPARED:
        yield (
            f"weights quantised by {quantisation} are loaded as vLLM's own reload does it; no "
            f"engine of that kind was compared with one that was started from them"
        )
    if num_drafting := compat.num_draft_tensors(worker):
        yield (
            f"the engine's drafter keeps {num_drafting} tensors of its own as they were: fewer of "
            f"its drafts will be accepted; what the engine says is right"
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


def _quantisation(vllm_config: Any) -> str | None:
    """Return what the engine's weights are quantised by; ``None``: by nothing."""
    name = getattr(getattr(vllm_config, "model_config", None), "quantization", None)
    return None if name is None else str(name)


def _offloads(vllm_config: Any) -> str | None:
    """Return the setting by which an engine keeps weights on the host, or ``None``."""
    offload = getattr(vllm_config, "offload_config", None)
    owners = {
        # Older versions have it among the settings of the cache.
        "cpu_offload_gb": (
            getattr(offload, "uva", None),
            getattr(vllm_config, "cache_config", None),
        ),
        "offload_group_size": (getattr(offload, "prefetch", None),),
    }
    for name, found in owners.items():
        if any(getattr(owner, name, 0) for owner in found):
            return name
    return None
