"""Tensors that a model holds in another dtype than they are sent in: told, or refused.

Casts between floats are vLLM's own business: checkpoints rely on them, and a report
tells them. One between a float and an integer truncates, and is a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..layout import TensorMeta
from ..messages import Cast
from . import problems
from .completeness import ModuleTargets
from .problems import Problem
from .record import Copy

# Of those that are cast: what a report can show.
MAX_NAMES = 8


def casts_of(
    copies: Iterable[Copy], *, metas: Sequence[TensorMeta], modules: Iterable[ModuleTargets]
) -> tuple[Cast, ...]:
    """Return what the model holds in another dtype than it is sent in, by pairs of dtypes.

    Args:
        copies: What reaches the model.
        metas: What is sent.
        modules: What the model has for it.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    held = _dtypes(modules)
    for copy in copies:
        meta = metas[copy.source]
        dtype = _name(held[copy.target]) if copy.target in held else meta.dtype
        if dtype != meta.dtype:
            found.setdefault((meta.dtype, dtype), {})[meta.name] = None
    return tuple(
        Cast(sent=sent, held=dtype, num_tensors=len(names), names=tuple(names)[:MAX_NAMES])
        for (sent, dtype), names in found.items()
    )


def truncations(
    copies: Iterable[Copy], *, metas: Sequence[TensorMeta], modules: Iterable[ModuleTargets]
) -> Iterator[Problem]:
    """Yield what a cast would truncate: a float's bits sent as integers, or the reverse.

    A tensor is judged by the first place that it reaches.

    Args:
        copies: What reaches the model.
        metas: What is sent.
        modules: What the model has for it.
    """
    held = _dtypes(modules)
    seen: set[int] = set()
    for copy in copies:
        if copy.target not in held or copy.source in seen:
            continue
        seen.add(copy.source)
        meta, dtype = metas[copy.source], held[copy.target]
        if _is_inexact(getattr(torch, meta.dtype)) != _is_inexact(dtype):
            yield problems.miscast(meta, target=copy.target, expected=_name(dtype))


def _dtypes(modules: Iterable[ModuleTargets]) -> dict[str, torch.dtype]:
    return {one.name: one.tensor.dtype for entry in modules for one in entry.targets.values()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
