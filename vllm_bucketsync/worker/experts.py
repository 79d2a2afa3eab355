"""Experts that a trainer holds in one tensor, for loaders that know them one by one.

transformers 5 keeps a layer's experts as ``experts.gate_up_proj`` and ``experts.down_proj``.
Some of vLLM's models load these names, others only those that files have; which, their
version decides, and a dry run or the first failure tells. One expert after the other, each as
``nn.Linear`` has it, gate above up: ``[experts, 2 * inner, width]``, ``[experts, width, inner]``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import compat

# Models whose loaders were seen to refuse fused experts.
_SPLIT: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_, _DOWN = compat.FUSED_EXPERTS

Weights = Iterable[tuple[str, torch.Tensor]]


def is_fused(name: str) -> bool:
    """Whether a checkpoint's name is that of all experts of a layer."""
    return name.endswith(compat.FUSED_EXPERTS)


def are_split(model: torch.nn.Module) -> bool:
    """Whether this model is given its experts one by one."""
    return model in _SPLIT


def split_from_now_on(model: torch.nn.Module, *, is_on: bool = True) -> None:
    """Give a model its experts one by one, or no longer."""
    if is_on:
        _SPLIT.add(model)
    else:
        _SPLIT.discard(model)


def load(model: torch.nn.Module, weights: Weights) -> Any:
    """Give tensors to a model's loaders, in the form that they know; return what those do."""
    if model in _SPLIT:
        weights = _one_by_one(weights)
    return model.load_weights(weights)  # type: ignore[operator]


def _one_by_one(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if tensor.ndim != 3 or not is_fused(name):
            yield name, tensor
            continue
        stem = name.rpartition(".")[0]
        for number, expert in enumerate(tensor):
            if name.endswith(_DOWN):
                yield f"{stem}.{number}.down_proj.weight", expert
            else:
                gate, up = expert.chunk(2)
                yield f"{stem}.{number}.gate_proj.weight", gate
                yield f"{stem}.{number}.up_proj.weight", up
