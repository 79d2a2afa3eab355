"""What a worker remembers of its old weights, and how it is made to forget."""

from __future__ import annotations

from typing import Any


def drop_caches(worker: Any) -> tuple[str, ...]:
    """Drop what this worker computed with the old weights.

    Those are the encoder and multimodal caches. The prefix cache is the scheduler's:
    the client resets it. Adapters are dropped where the engine has LoRA, as vLLM's
    own reloads do, and are loaded again when they are next asked for.

    Args:
        worker: vLLM's worker.

    Returns:
        Notes for whoever asked for the update.
    """
    runner = worker.model_runner
    for name in ("reset_encoder_cache", "reset_mm_cache"):
        reset = getattr(runner, name, None)
        if reset is not None:
            reset()
    if worker.vllm_config.lora_config is None or not hasattr(runner, "reset_lora_state"):
        return ()
    num_adapters = len(runner.list_loras())
    runner.reset_lora_state()
    if not num_adapters:
        return ()
    return (f"{num_adapters} adapters were dropped with the old weights",)
