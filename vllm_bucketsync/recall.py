"""Remembers what the last declared source was, so that the same one need not be examined.

Names, dtypes and shapes only: no tensor is kept alive from one push to the next, since
a trainer may want its memory back.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from .layout import Manifest
from .looks import Looks
from .tensors import is_as_described, is_sharded, show_the_same


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A declared source.

    Attributes:
        keys: What the trainer calls its tensors, in order; told apart by more than the
            name where there is more.
        rename: What turned the names into the checkpoint's.
        manifest: What is sent.
        sent: Positions among ``keys`` of what is sent.
        twins: Positions of a tied tensor, and of the one that is sent for it.
        is_each_once: Tied tensors are sent once; else each for every name that it has.
    """

    keys: Sequence[object]
    rename: Callable[[str], str] | None
    manifest: Manifest
    sent: Sequence[int]
    twins: Sequence[tuple[int, int]] = ()
    is_each_once: bool = False


class Recall:
    """One source, remembered. Empty at first.

    The very same tensors at the very same addresses are known at a glance, which costs a
    fifth of examining them.

    Attributes:
        described: What it was.
        devices: Where its tensors were.
        is_sharded: Some of them have to be gathered.
    """

    def __init__(self) -> None:
        self.described: Described | None = None
        self.devices: frozenset[torch.device] = frozenset()
        self.is_sharded = False
        self._forms: list[tuple[torch.dtype, torch.Size]] = []
        self._glances = _Glances()

    @property
    def seen(self) -> object:
        """What stays the same object for as long as the tensors look as they did."""
        return self._glances

    def note(self, described: Described, tensors: Sequence[object]) -> None:
        """Remember this one, in place of the last.

        Args:
            described: What it is.
            tensors: What its keys stand for, examined.
        """
        self.described = described
        self._forms = [
            (getattr(torch, meta.dtype), torch.Size(meta.shape))
            for meta in described.manifest.metas
        ]
        self._look(tensors)

    def find(
        self,
        keys: Sequence[object],
        tensors: Sequence[object],
        rename: Callable[[str], str] | None,
    ) -> Described | None:
        """Return what is remembered, if these tensors are described by it to the letter.

        ``None`` says nothing of them: describe them, and see what is wrong if anything is.
        """
        known = self.described
        if known is None or known.rename is not rename or known.keys != keys:
            return None
        are_tied = all(
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and (
                one is other
                or (
                    # Of any other layout nobody can tell an address.
                    one.layout is other.layout is torch.strided
                    and one.data_ptr() == other.data_ptr() != 0
                    and show_the_same(one, other)
                )
            )
            for one, other in ((tensors[a], tensors[b]) for a, b in known.twins)
        )
        if not are_tied:
            return None
        if not self._glances.are([tensors[one] for one in known.sent]):
            if not all(
                is_as_described(tensors[position], dtype=dtype, shape=shape)
                for position, (dtype, shape) in zip(known.sent, self._forms, strict=True)
            ):
                return None
            if known.is_each_once and self._may_be_tied([tensors[one] for one in known.sent]):
                return None
            self._look(tensors)
        return known

    def are_unchanged(self, tensors: Sequence[object], *, first: int) -> bool:
        """Whether tensors that are sent, from the ``first`` on, are as they were found.

        Where they are not, ``seen`` is another from then on.
        """
        is_same = not self.is_sharded and self._glances.are(tensors, first=first)
        if not is_same:
            self._glances = _Glances()
        return is_same

    def _may_be_tied(self, tensors: Sequence[Any]) -> bool:
        """Whether two of these, all as described, may have become one since the last push."""
        # An empty one has no address, nor has what is a part of something.
        seen = map(id, tensors) if self.is_sharded else filter(None, map(_address_of, tensors))
        found = list(seen)
        return len(set(found)) < len(found)

    def _look(self, tensors: Sequence[object]) -> None:
        """Take note of how tensors that were examined look."""
        sent = () if self.described is None else self.described.sent
        found = [tensors[position] for position in sent]
        self.devices = frozenset(one.device for one in found if isinstance(one, torch.Tensor))
        self.is_sharded = any(is_sharded(one) for one in found)
        # A part of a DTensor has no address that says anything: it is examined each time.
        known = [] if self.is_sharded else found
        self._glances = _Glances([one for one in known if isinstance(one, torch.Tensor)])


_address_of = torch.Tensor.data_ptr


class _Glances:
    """Which tensors they were, and how they looked when they were examined.

    Nothing of them is kept alive: an identity counts for as long as none has died.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._all_live = [True]
        forget = self._all_live.clear
        self._refs = [ref(one, lambda _: forget()) for one in tensors]
        # Numbers side by side: thousands of objects would each be fetched to be compared.
        self._ids = array("Q", map(id, tensors))
        self._looks = Looks(tensors)

    def are(self, tensors: Sequence[Any], *, first: int = 0) -> bool:
        """Whether these are the very same, from the ``first`` on, and look the same."""
        # Identity before the rest: whatever is the same object is a tensor.
        is_same = array("Q", map(id, tensors)) == self._ids[first : first + len(tensors)]
        return bool(self._all_live) and is_same and self._looks.are_those_of(tensors, first=first)
