"""A running engine, and what one that was started from the right checkpoint would be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# First, because it sets what vLLM reads from the environment when it is imported.
from support import engines, tiny_models  # isort: skip
import torch

from vllm_bucketsync.worker.weights import WeightSink

Outputs = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Truth:
    """What an engine that was started from a checkpoint holds and says."""

    live: dict[str, bytes]
    outputs: Outputs


@dataclass(frozen=True)
class World:
    """A running engine that was started from seed 0, and the truth for seeds 0 and 1."""

    kind: str
    llm: Any = field(repr=False)
    worker: Any = field(repr=False)
    truths: dict[int, Truth] = field(repr=False)

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.worker.model_runner.get_model()
        return model

    def sink(self, *partial: str, **settings: Any) -> WeightSink:
        return WeightSink(self.worker, partial=partial, **settings)

    def live(self) -> dict[str, bytes]:
        return engines.live_tensors(self.worker)

    def addresses(self) -> dict[str, tuple[int, int]]:
        return engines.live_addresses(self.worker)

    def outputs(self) -> Outputs:
        return engines.greedy(self.llm)

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        return tiny_models.checkpoint_tensors(self.kind, seed=seed)

    def holds(self, seed: int) -> None:
        """Assert that the engine is, to the last bit, as if started from that seed."""
        truth = self.truths[seed]
        live = self.live()
        assert live.keys() == truth.live.keys()
        assert [name for name in live if live[name] != truth.live[name]] == []
        assert self.outputs() == truth.outputs
