"""Loads an update a second time, through vLLM's own loaders, and compares every byte.

For whoever does not trust a plan: ``VLLM_BUCKETSYNC_PLAN=check``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import PlanError
from ..sinks import Piece
from . import compat
from .completeness import Waiver
from .loaders import Loaders
from .observe import reachable

_PROCESS = "process_weights_after_loading"


class Check:
    """What one update brought, kept for a second load.

    What kernels make of weights is out of sight (packed copies in C++), so every quant
    method's post-processing is watched until ``release``: what it is given is compared.
    """

    def __init__(self, worker: Any, waiver: Waiver, skipped: Mapping[str, str]) -> None:
        self._worker = worker
        self._model: torch.nn.Module = worker.model_runner.get_model()
        self._waiver = waiver
        self._skipped = skipped
        self._pieces: list[Piece] = []
        self._given: dict[str, torch.Tensor] = {}
        self._watched = list(self._watch())

    def keep(self, pieces: Sequence[Piece]) -> None:
        """Copy what a bucket holds."""
        wanted = (piece for piece in pieces if piece.meta.name not in self._skipped)
        self._pieces += [replace(piece, data=piece.data.clone()) for piece in wanted]

    def compare(self) -> None:
        """Load everything through vLLM's loaders, and compare what the model holds.

        Raises:
            PlanError: A tensor differs. The model holds what the loaders made of it.
        """
        by_plan = self._held()
        loaders = Loaders(self._worker, self._model, self._waiver)
        try:
            loaders.begin()
            loaders.feed(self._pieces, is_declared=True)
            loaders.finalise()
        except BaseException:
            loaders.abort()
            raise
        by_loaders = self._held()
        for name, one in by_plan.items():
            other = by_loaders.get(name)
            if other is None or not _is_same(one, other):
                raise PlanError(
                    f"{name} of the engine holds other bytes by plan than by vLLM's own loaders, "
                    f"which have the last word; report it, and set VLLM_BUCKETSYNC_PLAN=off",
                    name=name,
                )

    def release(self) -> None:
        """Stop watching. Idempotent."""
        while self._watched:
            vars(self._watched.pop()).pop(_PROCESS, None)
        self._pieces, self._given = [], {}

    def _held(self) -> dict[str, torch.Tensor]:
        given, self._given = self._given, {}
        return given | dict(_snapshot(self._model))

    def _watch(self) -> Iterator[Any]:
        paths = {module: path for path, module in self._model.named_modules()}
        methods = {id(one): one for one in map(_quant_method, paths) if one is not None}
        for method in methods.values():
            setattr(method, _PROCESS, self._watching(getattr(method, _PROCESS), paths))
            yield method

    def _watching(
        self, process: Callable[..., Any], paths: Mapping[torch.nn.Module, str]
    ) -> Callable[..., Any]:
        def watched(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            tensors = {**layer._parameters, **layer._buffers}
            for name, one in tensors.items():
                # What is written straight into the live model may come later.
                if one is not None and name not in compat.live_tensor_names():
                    key = f"{paths.get(layer)}.{name} before processing"
                    self._given[key] = one.detach().clone()
            return process(layer, *args, **kwargs)

        return watched


def _quant_method(module: torch.nn.Module) -> Any:
    method = getattr(module, "quant_method", None)
    return method if callable(getattr(method, _PROCESS, None)) else None


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
