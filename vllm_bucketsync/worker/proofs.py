"""What ``verify`` compares of a load by plan, and what it reports of it.

Modules that are written in place are looked at when everything is loaded, before the vote.
A module that is put together aside is looked at when it is whole, before vLLM processes it:
afterwards it holds other bytes. What vLLM's own loaders take is not looked at, and listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..digests import KnownDigests
from ..messages import MAX_NOTES, Checked
from ..proofs import Proof, seal_all
from ..sinks import Bucket
from .plan import PlannedModule

_TORN = "part of the update may be in the model"


@dataclass(frozen=True, slots=True)
class Written:
    """A copy straight into a live tensor.

    Attributes:
        planned: The module.
        leaf: The tensor's name there.
        to: The part of it, a view.
        source: The tensor that is read.
        data: What is copied.
    """

    planned: PlannedModule
    leaf: str
    to: torch.Tensor
    source: str
    data: torch.Tensor


class Proofs:
    """The proofs of one update."""

    def __init__(self) -> None:
        self._direct: dict[PlannedModule, Proof] = defaultdict(Proof)
        self._aside: dict[PlannedModule, Proof] = defaultdict(Proof)
        self._known: KnownDigests = {}
        self._unchecked: dict[str, None] = {}
        self._num_direct = self._direct_bytes = 0
        self._num_processed = self._processed_bytes = 0

    def begin(self, bucket: Bucket) -> None:
        """Take note of what is known of a bucket that is about to be loaded."""
        self._known = bucket.known_digests()

    def note_written(self, written: Sequence[Written]) -> None:
        """Take note of copies into live tensors; of modules that are processed, too."""
        for one in written:
            proofs = self._direct if one.planned.is_direct else self._aside
            name = _name(one.planned, one.leaf)
            proofs[one.planned].note(
                name, one.to, source=one.source, data=one.data, known=self._known
            )

    def note_aside(
        self,
        planned: PlannedModule,
        leaf: str,
        to: torch.Tensor,
        *,
        source: str,
        data: torch.Tensor,
    ) -> None:
        """Take note of a copy into a module's scratch; see ``Proof.note``."""
        name = _name(planned, leaf)
        self._aside[planned].note(name, to, source=source, data=data, known=self._known)

    def note_unchecked(self, names: Iterable[str]) -> None:
        """Take note of tensors that nothing looks at."""
        self._unchecked.update(dict.fromkeys(names))

    def give_up(self, modules: Iterable[PlannedModule], *, names: Iterable[str]) -> None:
        """Forget modules that vLLM's own loaders fill after all, from these tensors."""
        for planned in modules:
            self._direct.pop(planned, None)
            self._aside.pop(planned, None)
        self.note_unchecked(names)

    def seal(self) -> None:
        """Fetch the digests of what came: the bucket is given back."""
        seal_all([*self._direct.values(), *self._aside.values()])

    def check_aside(self, planned: PlannedModule) -> None:
        """Look at a module that is whole, before it is processed.

        Raises:
            VerifyError: It does not hold what was sent.
        """
        proof = self._aside.pop(planned, None)
        if proof is not None:
            proof.seal()
            proof.check(state=_TORN)
            self._num_processed += 1
            self._processed_bytes += proof.num_bytes

    def check_live(self) -> None:
        """Look at every module that was written in place.

        Raises:
            VerifyError: One does not hold what was sent.
        """
        together = Proof()
        for proof in self._direct.values():
            together.absorb(proof)
        together.check(state=_TORN)
        self._num_direct, self._direct_bytes = len(self._direct), together.num_bytes

    def report(self) -> Checked:
        """Return what was looked at; what arrived is the receiver's to count."""
        return Checked(
            num_direct=self._num_direct,
            direct_bytes=self._direct_bytes,
            num_processed=self._num_processed,
            processed_bytes=self._processed_bytes,
            num_unchecked=len(self._unchecked),
            unchecked=tuple(self._unchecked)[:MAX_NOTES],
        )

    def release(self) -> None:
        """Drop everything. Idempotent."""
        self._direct.clear()
        self._aside.clear()


def _name(planned: PlannedModule, leaf: str) -> str:
    return f"{planned.path}.{leaf}" if planned.path else leaf
