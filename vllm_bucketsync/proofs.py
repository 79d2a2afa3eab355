"""What tensors have to hold, by the digests of what was copied into them.

A copy is noted while its source is there, and looked at when the source may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .digests import Digests, KnownDigests
from .errors import LocalProtocolError, VerifyError
from .tensors import byte_view

# Digests are fetched after so many bytes: until then a 32nd of them is kept.
_FETCH_BYTES = 1024**3
_MAX_PROBLEMS = 16
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Noted:
    """One copy.

    Attributes:
        name: The tensor that was written to.
        source: The tensor that was read.
        to: The part that was written: a view, valid when it is looked at.
    """

    name: str
    source: str
    to: torch.Tensor


class Proof:
    """A set of copies.

    Attributes:
        num_bytes: What they write.
    """

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        # What a digest was asked for, and not fetched yet, is ``None``.
        self._expected: list[int | None] = []
        self._digests = Digests()
        self.num_bytes = 0

    def note(
        self,
        name: str,
        to: torch.Tensor,
        *,
        source: str,
        data: torch.Tensor,
        known: KnownDigests | None = None,
    ) -> None:
        """Take note of a copy.

        Args:
            name: The tensor that is written to.
            to: The part of it that is written, a view. It is kept.
            source: The tensor that is read.
            data: What is copied, of the same shape; cast where the dtype is another. Not
                needed after ``seal``.
            known: Digests of what the sources lie in: what they have is not read again.
        """
        self._noted.append(_Noted(name, source, to))
        digest = None
        if known and data.dtype == to.dtype and data.is_contiguous():
            digest = known.get((data.data_ptr(), data.nbytes))
        self._expected.append(digest)
        if digest is None:
            self._digests.add(byte_view(data.detach().to(to.dtype)))
        self.num_bytes += to.nbytes

    def seal(self) -> None:
        """Fetch the digests of what was noted since: its sources may change now. Waits."""
        seal_all([self])

    def absorb(self, other: Proof) -> None:
        """Take over what another one has noted and sealed; it is not used any more."""
        self._noted += other._noted
        self._expected += other._expected
        self.num_bytes += other.num_bytes

    def check(self, *, state: str) -> None:
        """Look at everything that was noted and sealed.

        Args:
            state: What the model holds, for the text.

        Raises:
            VerifyError: A part does not hold what was copied there.
            LocalProtocolError: ``seal`` was not called: nothing is known to compare with.
        """
        expected = [one for one in self._expected if one is not None]
        if len(expected) < len(self._noted):
            raise LocalProtocolError("parts were to be compared whose sources were not digested")
        wrong = [
            one
            for one in zip(self._noted, expected, self._found(), strict=True)
            if one[1] != one[2]
        ]
        if not wrong:
            return
        problems = [_problem(*one) for one in wrong[:_MAX_PROBLEMS]]
        raise VerifyError(
            f"{problems[0]}; {len(wrong)} of {len(self._noted)} parts differ; {state}; push "
            f"again, and look for failing memory if it comes back",
            name=wrong[0][0].name,
            problems=problems,
        )

    def _found(self) -> list[int]:
        found: list[int] = []
        waiting_bytes = 0
        for noted in self._noted:
            self._digests.add(byte_view(noted.to))
            waiting_bytes += noted.to.nbytes
            if waiting_bytes >= _FETCH_BYTES:
                found += self._digests.take()
                waiting_bytes = 0
        return found + self._digests.take()


def seal_all(proofs: Sequence[Proof]) -> None:
    """Seal several proofs with a single fetch; see ``Proof.seal``."""
    together = Digests()
    for proof in proofs:
        together.absorb(proof._digests)
    found = iter(together.take())
    for proof in proofs:
        proof._expected = [next(found) if one is None else one for one in proof._expected]


def _problem(noted: _Noted, expected: int, found: int) -> str:
    return (
        f"{noted.name} does not hold what was sent as {noted.source!r}: the digest of "
        f"{noted.to.nbytes} bytes at element {noted.to.storage_offset()} of its memory is "
        f"{found & _MASK:#018x}, expected {expected & _MASK:#018x}"
    )
