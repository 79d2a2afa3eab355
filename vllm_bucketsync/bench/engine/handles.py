"""Handles of torch's own for tensors on a GPU, one each, as plain data.

The plain way that frameworks start with. The parts of a handle go by the names that torch
gives them, and its classes stay out, so that nothing has to be pickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

# What is the same for every tensor here, or is the receiver's to say.
_LEFT_OUT = frozenset({"tensor_cls", "storage_cls", "storage_device"})

Exported = dict[str, Any]


def export(tensors: Iterable[tuple[str, torch.Tensor]]) -> Exported:
    """Return a handle for every tensor; each is good for one ``opened`` elsewhere.

    Args:
        tensors: Names and tensors on a GPU, which have to live until that has ended.

    Returns:
        ``names``, ``fields`` and, for every name, a row of ``rows``: primitives only.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

    parameters = list(inspect.signature(rebuild_cuda_tensor).parameters)
    kept = [index for index, name in enumerate(parameters) if name not in _LEFT_OUT]
    names, rows = [], []
    for name, tensor in tensors:
        _, parts = reduce_tensor(tensor)
        names.append(name)
        rows.append([_primitive(parts[index]) for index in kept])
    return {"names": names, "fields": [parameters[index] for index in kept], "rows": rows}


def opened(exported: Exported, *, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, opened when it is asked for.

    Args:
        exported: What ``export`` returned in another process.
        device: Where the memory is, as this process counts.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = torch.cuda.current_device() if device.index is None else device.index
    fields: Sequence[str] = exported["fields"]
    for name, row in zip(exported["names"], exported["rows"], strict=True):
        parts = dict(zip(fields, row, strict=True))
        parts["dtype"] = getattr(torch, parts["dtype"])
        yield (
            name,
            rebuild_cuda_tensor(
                tensor_cls=torch.Tensor,
                storage_cls=torch.storage.TypedStorage,
                storage_device=index,
                **parts,
            ),
        )


def _primitive(part: Any) -> Any:
    if isinstance(part, torch.dtype):
        return str(part).removeprefix("torch.")
    return list(part) if isinstance(part, tuple) else part
