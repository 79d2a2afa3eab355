"""Remembers what the last declared source was, so that the same one need not be examined.

Names, dtypes and shapes only: no tensor is kept alive from one push to the next, since
a trainer may want its memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .layout import Manifest
from .tensors import is_as_described


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
    """

    keys: Sequence[object]
    rename: Callable[[str], str] | None
    manifest: Manifest
    sent: Sequence[int]
    twins: Sequence[tuple[int, int]] = ()


class Recall:
    """One source, remembered. Empty at first.

    Attributes:
        described: What it was.
    """

    def __init__(self) -> None:
        self.described: Described | None = None
        self._forms: list[tuple[torch.dtype, torch.Size]] = []

    def note(self, described: Described) -> None:
        """Remember this one, in place of the last."""
        self.described = described
        self._forms = [
            (getattr(torch, meta.dtype), torch.Size(meta.shape))
            for meta in described.manifest.metas
        ]

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
            and (one is other or one.data_ptr() == other.data_ptr() != 0)
            for one, other in ((tensors[a], tensors[b]) for a, b in known.twins)
        )
        are_alike = are_tied and all(
            is_as_described(tensors[position], dtype=dtype, shape=shape)
            for position, (dtype, shape) in zip(known.sent, self._forms, strict=True)
        )
        return known if are_alike else None
