"""Engines inside the test process: one at a time, since vLLM keeps its groups in globals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

# First, because it sets what vLLM reads from the environment when it is imported.
from support import engines, tiny_models
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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, int], Path] = {}

    def make(kind: str, seed: int) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = tiny_models.save_checkpoint(
                kind, root / f"{kind}-{seed}", seed=seed
            )
        return made[kind, seed]

    return make


@pytest.fixture(scope="session")
def truth(checkpoint: Callable[[str, int], Path]) -> Callable[[str, int], Truth]:
    known: dict[tuple[str, int], Truth] = {}

    def find(kind: str, seed: int) -> Truth:
        if (kind, seed) not in known:
            with engines.running_engine(checkpoint(kind, seed)) as llm:
                live = engines.live_tensors(engines.worker_of(llm))
                known[kind, seed] = Truth(live, engines.greedy(llm))
        return known[kind, seed]

    return find


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str, int], Path],
    truth: Callable[[str, int], Truth],
) -> Iterator[World]:
    kind = request.param
    truths = {seed: truth(kind, seed) for seed in (0, 1)}
    with engines.running_engine(checkpoint(kind, 0)) as llm:
        yield World(kind, llm, engines.worker_of(llm), truths)
