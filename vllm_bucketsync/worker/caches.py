"""What a worker remembers of its old weights, and how it is made to forget."""

from __future__ import annotations

from typing import Any

from .lora.shelf import find_shelf


def drop_caches(worker: Any) -> tuple[str, ...]:
    """Drop what this worker computed with the old weights.

    Those are the encoder and multimodal caches. The prefix cache is the scheduler's:
    the client resets it. Where the engine has LoRA, vLLM's own reloads drop every adapter;
    those that were pushed come back at once, the others when they are next asked for.

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
    forget = getattr(runner, "reset_lora_state", None)
    if worker.vllm_config.lora_config is None or forget is None:
        return ()
    shelf = find_shelf(worker)
    if shelf is None:
        num_dropped = len(runner.list_loras())
        forget()
    else:
        num_dropped = shelf.restore(forget=forget)
    if not num_dropped:
        return ()
    return (f"{num_dropped} adapters were dropped with the old weights",)
