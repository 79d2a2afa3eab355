"""What each of vLLM's slots holds, as long as that is known for certain.

Whoever writes to a slot, vLLM or a test, does so by torch, and torch counts the writes to
each memory. So what was put there is there if, since then, every tensor of every slot is
the same object at the same address with the same count. The counts are of all slots at
once: a write to any of them that did not come by here makes all of them unknown.

What passes by the counts: a write through ``.data`` (vLLM makes none to slots), one by
address (only our own copies, which come by here), and a sleep that drops the memory's
contents. Whoever learns of such calls ``forget``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from .writes import address_of


class Contents:
    """What the slots of one manager hold.

    Attributes:
        places: Identity and address of each tensor, as they were looked at last. Views
            that are kept of a tensor keep its address from becoming another's.
    """

    def __init__(self, manager: Any) -> None:
        """Begin with nothing known.

        Args:
            manager: vLLM's ``LoRAModelManager``.
        """
        self.places: list[tuple[int, int]] = []
        self._manager = manager
        self._held: dict[int, Hashable] = {}
        # Kept, so that no other tensor can have the identity of one of them.
        self._tensors: list[torch.Tensor] = []
        self._counts: list[int] = []

    def forget(self) -> None:
        """Take note that nothing is known of any slot."""
        self._held = {}

    def known(self) -> dict[int, Hashable]:
        """Return what was put in each slot and is there, of those of which it is known."""
        if self._held:
            tensors = slot_tensors(self._manager)
            if places_of(tensors) != self.places or _counts(tensors) != self._counts:
                self.forget()
        return dict(self._held)

    def put(self, slot: int, what: Hashable, *, others: Mapping[int, Hashable]) -> None:
        """Take note of what is in a slot, and that what was in the others is there still.

        Args:
            slot: Which was written.
            what: Says all that matters of its contents, but for their values.
            others: What is in other slots: what ``known`` returned before the write.
        """
        self._tensors = slot_tensors(self._manager)
        self.places = places_of(self._tensors)
        # Nothing counts the writes to such.
        if any(tensor.is_inference() for tensor in self._tensors):
            self.forget()
            return
        self._counts = _counts(self._tensors)
        self._held = {**others, slot: what}


def slot_tensors(manager: Any) -> list[torch.Tensor]:
    """Return every tensor that vLLM's modules have for adapters, those of all slots in one."""
    return [
        tensor
        for module in manager.modules.values()
        for held in vars(module).values()
        for tensor in _tensors(held)
    ]


def by_memory(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the largest tensor of each memory, by the address of its storage."""
    found: dict[int, torch.Tensor] = {}
    for tensor in sorted(tensors, key=lambda one: -one.numel()):
        found.setdefault(address_of(tensor), tensor)
    return found


def _tensors(held: object) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, tuple | list):
        yield from (one for one in held if isinstance(one, torch.Tensor))


def places_of(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return identity and address of each tensor."""
    return [(id(one), one.data_ptr()) for one in tensors]


def _counts(tensors: list[torch.Tensor]) -> list[int]:
    return [one._version for one in tensors]
