"""What a worker's slots hold of an adapter; runs in the worker, whatever its device."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def slot_hashes(worker: Any, lora_int_id: int) -> dict[str, str]:
    """Return a hash of the bytes of every tensor in an active adapter's slot, by module."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(lora_int_id)
    found = {}
    for name, module in manager.modules.items():
        for attribute, held in sorted(vars(module).items()):
            # A list has views, one for each slot and expert, of what the others are.
            if not attribute.endswith(("_a_stacked", "_b_stacked")) or isinstance(held, list):
                continue
            tensors = held if isinstance(held, tuple) else (held,)
            for index, tensor in enumerate(tensors):
                found[f"{name}.{attribute}.{index}"] = _hash(tensor[slot])
    return found


def held_ids(worker: Any) -> tuple[list[int], list[int]]:
    """Return the numbers of adapters in vLLM's cache on the host, and in slots."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return sorted(manager.list_adapters()), sorted(manager._active_adapters)


def _hash(tensor: torch.Tensor) -> str:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.cpu().numpy().tobytes()).hexdigest()
