"""Tensors that are larger than what the engine reads of them.

vLLM's loaders cut a rank's part out of a tensor, and never ask how long the tensor is: of one
that is too long they leave the rest, in silence. The engine would compute with a part of what
was trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..layout import TensorMeta
from . import problems
from .coverage import cover
from .problems import Problem
from .record import Copy


def num_shards(worker: Any) -> int:
    """Return how many workers at most have a part each of one tensor."""
    parallel = worker.vllm_config.parallel_config
    count = int(parallel.tensor_parallel_size)
    if getattr(parallel, "enable_expert_parallel", False):
        # Experts are spread over the replicas, too.
        count *= int(getattr(parallel, "data_parallel_size", 1))
        count *= int(getattr(parallel, "prefill_context_parallel_size", 1))
    return count


def too_large(
    copies: Iterable[Copy],
    *,
    metas: Sequence[TensorMeta],
    shards: int,
    impure: Collection[int],
    partial: Sequence[str],
) -> list[Problem]:
    """Return the tensors of which all workers together leave something.

    Only those that this rank reads from their first element on: the first rank's part is as
    large as any. What a loader computes with is not looked at.

    Args:
        copies: What is read, and where it goes.
        metas: The tensors.
        shards: See ``num_shards``.
        impure: Sources that more is done with than to copy them.
        partial: Patterns of parameters that may get less than a tensor has.
    """
    by_source: dict[int, list[Copy]] = {}
    for copy in copies:
        by_source.setdefault(copy.source, []).append(copy)
    found = []
    for source, parts in by_source.items():
        meta = metas[source]
        boxes = [part.source_box for part in parts]
        if source in impure or min(box.offset for box in boxes) > 0:
            continue
        target, num_read = parts[0].target, cover(boxes).num_elements
        is_left = num_read * shards < math.prod(meta.shape)
        if is_left and not any(fnmatchcase(target, pattern) for pattern in partial):
            found.append(
                problems.too_large(meta, target=target, num_read=num_read, num_shards=shards)
            )
    return found
