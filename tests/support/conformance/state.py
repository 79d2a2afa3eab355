"""What a worker computes with: every parameter, buffer and tensor that was derived from them.

These functions run in the worker, which may be another process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

# Marks the path of a tensor that is no parameter and no buffer.
DERIVED = " -> "
# Neither weights nor made of them, by a part of their name, and what they are.
EXPLAINED = {
    "kv_cache": "what requests left in the cache",
    "workspace": "scratch of a kernel",
    "punica_wrapper": "which adapter each token of the last batch asked for",
    "adapter_enabled": "which slots of adapters are in use: an engine's warm-up leaves some",
}
# How deep objects within a module are looked into: a quant method, its kernel, that one's parts.
_MAX_DEPTH = 5
_OWN = frozenset({"_parameters", "_buffers", "_modules"})


def hashes(worker: Any) -> dict[str, str]:
    """Return a hash of each tensor by its path; dtype, shape and strides are in the key."""
    return {
        f"{path} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}": _hash(tensor)
        for path, tensor, _ in tensors(worker)
    }


def addresses(worker: Any) -> dict[str, int]:
    """Return where each tensor lies that has to stay there, by its path.

    Parameters and buffers always; where the engine captures CUDA graphs, also what was
    derived from them on the device. What is derived for the host is read anew there.
    """
    has_graphs = not worker.model_config.enforce_eager
    return {
        path: tensor.data_ptr()
        for path, tensor, is_own in tensors(worker)
        if is_own or (has_graphs and tensor.is_cuda)
    }


def tensors(worker: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield path, tensor, and whether it is a parameter or buffer, of the worker's models.

    A tensor comes under each of its paths.
    """
    for prefix, model in _models(worker):
        seen: set[int] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            own = {**module._parameters, **module._buffers}
            for name, tensor in own.items():
                if tensor is not None:
                    yield f"{prefix}{path}.{name}", tensor, True
            rest = {key: one for key, one in vars(module).items() if key not in _OWN}
            for inner, tensor in _within(rest, seen, 0):
                yield f"{prefix}{path}{DERIVED}{inner[1:]}", tensor, False


def _models(worker: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    yield "", worker.model_runner.get_model()
    draft = getattr(worker, "get_draft_model", lambda: None)()
    if draft is not None:
        yield "draft ", draft


def _within(value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors within an object that is no module, each object once."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield "", value
        return
    if id(value) in seen or depth > _MAX_DEPTH:
        return
    for key, one in _members(value):
        if not any(part in key for part in EXPLAINED):
            if not isinstance(value, dict | list | tuple):
                seen.add(id(value))
            for inner, tensor in _within(one, seen, depth + 1):
                yield f".{key}{inner}", tensor


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(position), one) for position, one in enumerate(value))
    elif _is_of_a_layer(value):
        yield from vars(value).items()


def _is_of_a_layer(value: Any) -> bool:
    """Whether an object is a part of vLLM's layers: no module, class, or setting."""
    return (
        type(value).__module__.startswith("vllm.")
        and not type(value).__module__.startswith(("vllm.config", "vllm.platforms"))
        and not isinstance(value, torch.nn.Module | type)
        and hasattr(value, "__dict__")
    )


def _hash(tensor: torch.Tensor) -> str:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(plain.tobytes(), digest_size=16).hexdigest()
