"""Loads an update a second time, through vLLM's own loaders, and compares every byte.

For whoever does not trust a plan: ``VLLM_BUCKETSYNC_PLAN=check``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import PlanError
from ..sinks import Piece
from .completeness import Waiver
from .loaders import Loaders
from .observe import reachable


class Check:
    """What one update brought, kept for a second load."""

    def __init__(self, worker: Any, waiver: Waiver, skipped: Mapping[str, str]) -> None:
        self._worker = worker
        self._model: torch.nn.Module = worker.model_runner.get_model()
        self._waiver = waiver
        self._skipped = skipped
        self._pieces: list[Piece] = []

    def keep(self, pieces: Sequence[Piece]) -> None:
        """Copy what a bucket holds."""
        wanted = (piece for piece in pieces if piece.meta.name not in self._skipped)
        self._pieces += [replace(piece, data=piece.data.clone()) for piece in wanted]

    def compare(self) -> None:
        """Load everything through vLLM's loaders, and compare what the model holds.

        Raises:
            PlanError: A tensor differs. The model holds what the loaders made of it.
        """
        by_plan = dict(_snapshot(self._model))
        loaders = Loaders(self._worker, self._model, self._waiver)
        try:
            loaders.begin()
            loaders.feed(self._pieces, is_declared=True)
            loaders.finalise()
        except BaseException:
            loaders.abort()
            raise
        by_loaders = dict(_snapshot(self._model))
        for name in sorted(by_plan.keys() | by_loaders.keys()):
            one, other = by_plan.get(name), by_loaders.get(name)
            if one is None or other is None or not _is_same(one, other):
                raise PlanError(
                    f"{name} of the engine holds other bytes by plan than by vLLM's own loaders, "
                    f"which have the last word; report it, and set VLLM_BUCKETSYNC_PLAN=off",
                    name=name,
                )


def _snapshot(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a copy of every tensor of a model, those that only its kernels hold included."""
    for path, module in model.named_modules():
        for name, value in reachable(module).items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                yield f"{path}{name}", value.detach().clone()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    plain = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*plain)
