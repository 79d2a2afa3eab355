"""Engines inside the test process: one at a time, since vLLM keeps its groups in globals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import engines, tiny_models
from support.worlds import Truth, World


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, int], Path] = {}

    def make(kind: str, seed: int) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = tiny_models.save_checkpoint(kind, root / f"{kind}-{seed}", seed=seed)
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
    extension = "vllm_bucketsync.WorkerExtension"
    with engines.running_engine(checkpoint(kind, 0), worker_extension_cls=extension) as llm:
        yield World(kind, llm, engines.worker_of(llm), truths)
