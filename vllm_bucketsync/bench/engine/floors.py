"""Plain copies of the same bytes, as rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm_bucketsync.bench.floors import DeviceCopy, HostCopies, TensorCopies

from .method import Details, Stage


class _Copies(Protocol):
    def run(self) -> float: ...


class Floor:
    """One way to copy as many bytes as the weights have.

    Attributes:
        name: What it is called on the command line.
        what: What is in its time.
        is_floor: ``True``.
    """

    is_floor = True

    def __init__(
        self, name: str, *, what: str, make: Callable[[], _Copies], why_not: str | None = None
    ) -> None:
        self.name = name
        self.what = what
        self._make = make
        self._why_not = why_not
        self._copies: _Copies | None = None

    def why_not(self) -> str | None:
        """Return what it was made with."""
        return self._why_not

    def prepare(self) -> None:
        """Make its memory."""
        self._copies = self._make()

    def run(self) -> Details:
        """Copy."""
        if self._copies is None:
            raise RuntimeError("Floor.prepare was not called")
        self._copies.run()
        return {}

    def close(self) -> None:
        """Give the memory back."""
        self._copies = None


def floors(stage: Stage) -> list[Floor]:
    """Return what there is for a stage."""
    trainer = stage.trainer
    return [
        Floor(
            "copy",
            what="plain copies of as many bytes, from one buffer of at most 2 GiB to another",
            make=lambda: DeviceCopy(trainer.num_bytes, trainer.device),
        ),
        Floor(
            "copies",
            what="a copy_ of every tensor, into a buffer of at most 2 GiB that is used over again",
            make=lambda: TensorCopies(list(trainer.tensors.values())),
        ),
        Floor(
            "host_copies",
            what="copies of as many bytes to a pinned host buffer of at most 1 GiB, then up again",
            make=lambda: HostCopies(trainer.num_bytes, trainer.device),
            why_not=None if stage.has_gpu else "the tensors and the model are on the CPU",
        ),
    ]
