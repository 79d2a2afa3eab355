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

from collections.abc import Hashable, Mapping
from operator import is_
from typing import Any

import torch

from .writes import address_of


class SlotTensors:
    """Every tensor that vLLM's modules have for adapters, those of all slots in one.

    Attributes:
        tensors: The tensors. Kept, so that no other can have the identity of one of them.
        are_uncounted: Nothing counts the writes to some: they were made in inference mode.
    """

    def __init__(self, manager: Any) -> None:
        """Look at all modules.

        Args:
            manager: vLLM's ``LoRAModelManager``.
        """
        self._manager = manager
        self._modules = list(manager.modules.values())
        self._sizes = [len(vars(module)) for module in self._modules]
        # A list may be changed in place: what was in it is kept beside it.
        self._held = [
            (vars(module), name, held, tuple(held) if isinstance(held, list) else None)
            for module in self._modules
            for name, held in vars(module).items()
            if _tensors_in(held)
        ]
        self.tensors = [one for _, _, held, _ in self._held for one in _tensors_in(held)]
        self.are_uncounted = any(one.is_inference() for one in self.tensors)
        self._addresses = [one.data_ptr() for one in self.tensors]

    def are_current(self) -> bool:
        """Whether the modules have the same tensors still, at the same addresses."""
        modules = list(self._manager.modules.values())
        # Modules and tensors are compared by identity.
        return (
            len(modules) == len(self._modules)
            and all(map(is_, modules, self._modules))
            and [len(vars(module)) for module in modules] == self._sizes
            and all(at.get(name) is held for at, name, held, _ in self._held)
            and all(
                len(held) == len(kept) and all(map(is_, held, kept))
                for _, _, held, kept in self._held
                if kept is not None
            )
            and [one.data_ptr() for one in self.tensors] == self._addresses
        )

    def counts(self) -> list[int]:
        """Return how often each memory was written to, unless they are uncounted."""
        return [one._version for one in self.tensors]

    def by_memory(self) -> dict[int, torch.Tensor]:
        """Return the largest tensor of each memory, by the address of its storage."""
        found: dict[int, torch.Tensor] = {}
        for tensor in sorted(self.tensors, key=lambda one: -one.numel()):
            found.setdefault(address_of(tensor), tensor)
        return found


class Contents:
    """What the slots of one manager hold.

    Attributes:
        slots: Their tensors: the same object, as long as the tensors are the same ones.
    """

    def __init__(self, manager: Any) -> None:
        """Begin with nothing known.

        Args:
            manager: vLLM's ``LoRAModelManager``.
        """
        self.slots = SlotTensors(manager)
        self._manager = manager
        self._held: dict[int, Hashable] = {}
        self._counts: list[int] = []

    def forget(self) -> None:
        """Take note that nothing is known of any slot."""
        self._held = {}

    def known(self) -> dict[int, Hashable]:
        """Look, and return what was put in each slot and is there, of those where that is known."""
        if not self._are_current() or (self._held and self.slots.counts() != self._counts):
            self.forget()
        return dict(self._held)

    def put(self, slot: int, what: Hashable, *, others: Mapping[int, Hashable]) -> None:
        """Take note of what is in a slot, and that what was in the others is there still.

        Args:
            slot: Which was written.
            what: Says all that matters of its contents, but for their values.
            others: What is in other slots: what ``known`` returned before the write.
        """
        if not self._are_current() or self.slots.are_uncounted:
            self.forget()
            return
        self._counts = self.slots.counts()
        self._held = {**others, slot: what}

    def _are_current(self) -> bool:
        """Whether the slots have the tensors that they had; look at the new ones if not."""
        if self.slots.are_current():
            return True
        self.slots = SlotTensors(self._manager)
        return False


def _tensors_in(held: object) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, tuple | list):
        return [one for one in held if isinstance(one, torch.Tensor)]
    return []
