"""How tensors look, for many at a time: whether they are as they were is cheap to ask.

One call of C for each question and tensor, and no statement of Python; not even where a
subclass has a ``__torch_function__``, as vLLM's parameters have. Looks say where
elements are and what they mean; what the elements are worth is nobody's business here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

_LOOKS: tuple[Callable[[Any], object], ...] = (
    torch.Tensor.data_ptr,
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)


class Looks:
    """Addresses, dtypes, shapes, strides, and what conjugates or negates. Keeps no tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._seen = [list(map(look, tensors)) for look in _LOOKS]

    def are_those_of(self, tensors: Sequence[torch.Tensor], *, first: int = 0) -> bool:
        """Whether tensors look as the ones did that were seen, from the ``first`` on."""
        end = first + len(tensors)
        with torch._C.DisableTorchFunctionSubclass():
            return all(
                list(map(look, tensors)) == seen[first:end]
                for look, seen in zip(_LOOKS, self._seen, strict=True)
            )

    def __len__(self) -> int:
        """Return how many were seen."""
        return len(self._seen[0])
