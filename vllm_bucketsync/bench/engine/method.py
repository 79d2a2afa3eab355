"""What a way to bring weights into an engine is, to the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_bucketsync.errors import LoadError

from .trainer import Trainer

# What one run has to tell beside its time, as data that JSON can hold.
Details = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What every method works on.

    Attributes:
        llm: A ``vllm.LLM`` with one worker, in a process of its own.
        trainer: The tensors.
        settings: Of ``WeightSync``: slot size and number of slots.
    """

    llm: Any
    trainer: Trainer
    settings: Mapping[str, Any]

    @property
    def has_gpu(self) -> bool:
        """Whether the tensors and the model are on a GPU."""
        return self.trainer.device.type == "cuda"


class Method(Protocol):
    """One row of the result. Made for one stage; ``close`` gives back what ``prepare`` took."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""

    @property
    def what(self) -> str:
        """What is in its time."""

    @property
    def is_floor(self) -> bool:
        """Whether it only moves bytes: the engine gets no weights, and nothing is compared."""

    def why_not(self) -> str | None:
        """Return why it is not possible here; ``None`` if it may be."""

    def prepare(self) -> None:
        """Make what is made once, outside of every time."""

    def run(self) -> Details:
        """Bring the trainer's tensors over; what this takes is what is measured."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


def ask(llm: Any, method: str, *args: Any) -> dict[str, Any]:
    """Call a method of ``BenchExtension`` on the only worker.

    Raises:
        LoadError: It failed there.
    """
    (answer,) = llm.collective_rpc(method, args=args)
    if not answer["ok"]:
        raise LoadError(f"the engine's worker failed in {method}: {answer['error']}")
    found: dict[str, Any] = answer
    return found
