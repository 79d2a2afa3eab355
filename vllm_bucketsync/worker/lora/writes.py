"""Every write to a tensor that torch makes for a while, on the calling thread, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Write:
    """One operation that writes, in place or to an ``out``.

    Attributes:
        name: The operation's, as ``aten::copy_``.
        target: What it wrote to. Kept, so that its memory is nobody else's.
        operands: Its other arguments, in order.
    """

    name: str
    target: torch.Tensor
    operands: tuple[Any, ...]

    @property
    def memory(self) -> int:
        """The address of the target's storage."""
        return address_of(self.target)

    @property
    def is_copy(self) -> bool:
        """Whether each element becomes that of a tensor of the same shape and dtype."""
        if self.name != "aten::copy_" or not isinstance(self.operands[0], torch.Tensor):
            return False
        source = self.operands[0]
        return source.shape == self.target.shape and source.dtype == self.target.dtype

    @property
    def is_zero(self) -> bool:
        """Whether each element becomes 0."""
        if self.name == "aten::zero_":
            return True
        if self.name not in {"aten::fill_", "aten::copy_"}:
            return False
        value = self.operands[0]
        if isinstance(value, torch.Tensor):
            return value.dim() == 0 and not value.item()
        return not value

    @property
    def factor(self) -> float | None:
        """By what number each element is multiplied; ``None`` if it is another operation."""
        is_product = self.name == "aten::mul_" and isinstance(self.operands[0], int | float)
        return self.operands[0] if is_product else None


class Writes(TorchDispatchMode):
    """Takes note of writes while it is entered.

    Below everything that torch offers: whatever is called, its writes come by here. What
    writes to memory past torch does not.

    Attributes:
        found: The writes, in order.
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Write] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note what it writes to."""
        given = dict(kwargs or {})
        result = func(*args, **given)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            is_positional = position < len(args)
            value = args[position] if is_positional else given.get(argument.name)
            others = {name: one for name, one in given.items() if name != argument.name}
            operands = (*(one for at, one in enumerate(args) if at != position), *others.values())
            for target in value if isinstance(value, list | tuple) else [value]:
                if isinstance(target, torch.Tensor):
                    self.found.append(Write(func._schema.name, target, operands))
        return result


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage: the same for all views of it."""
    return tensor.untyped_storage().data_ptr()
