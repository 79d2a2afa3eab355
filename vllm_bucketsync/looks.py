"""How tensors look, for many at a time: whether they are as they were is cheap to ask.

At first it is one call of C for each question and tensor, and no statement of Python; not
even where a subclass has a ``__torch_function__``, as vLLM's parameters have. Later it is
one call for all but the addresses, where this torch has it: the check by which
``torch.compile`` knows the tensors that it compiled for again. Looks say where
elements are and what they mean; what the elements are worth is nobody's business here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

_LOOKS: tuple[Callable[[Any], object], ...] = (
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
            # Side by side: thousands of objects would each be fetched to be compared.
            self._addresses = _addresses_of(tensors)
            self._seen = [list(map(look, tensors)) for look in _LOOKS]
        # By first and last: the same parts are asked for again and again.
        self._checks: dict[tuple[int, int], Callable[[Sequence[torch.Tensor]], bool]] = {}

    def are_those_of(self, tensors: Sequence[torch.Tensor], *, first: int = 0) -> bool:
        """Whether tensors look as the ones did that were seen, from the ``first`` on."""
        end = first + len(tensors)
        with torch._C.DisableTorchFunctionSubclass():
            check = self._checks.get((first, end), _deny)
            if check(tensors):
                return _addresses_of(tensors) == self._addresses[first:end]
            is_same = _addresses_of(tensors) == self._addresses[first:end] and all(
                list(map(look, tensors)) == seen[first:end]
                for look, seen in zip(_LOOKS, self._seen, strict=True)
            )
            if is_same:
                self._checks[first, end] = _check_of(tensors)
        return is_same

    def __len__(self) -> int:
        """Return how many were seen."""
        return len(self._addresses)


def _addresses_of(tensors: Sequence[torch.Tensor]) -> array[int]:
    return array("Q", map(torch.Tensor.data_ptr, tensors))


def _check_of(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return what tells at once that dtypes, devices, shapes, strides and keys are these.

    That it denies it says nothing: it looks at more than matters here. It keeps no tensor.
    """
    first_of: dict[int, int] = {}
    firsts = [first_of.setdefault(id(one), position) for position, one in enumerate(tensors)]
    if len(first_of) == len(firsts):
        check = _guards_of(tensors)
        return lambda again: check(*again)
    # The guards take no tensor twice, and a state dict has a tied one under each name.
    once = list(first_of.values())
    check = _guards_of([tensors[position] for position in once])
    return lambda again: (
        all(one is again[first] for one, first in zip(again, firsts, strict=True))
        and check(*[again[position] for position in once])
    )


def _guards_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not tensors or not hasattr(guards, "TensorGuards"):
        return _deny
    try:
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    # A torch whose check wants to be told more; what it raises is its own affair.
    except Exception:  # noqa: BLE001
        return _deny
    check: Callable[..., bool] = made.check
    return check


def _deny(*_: object) -> bool:
    return False
