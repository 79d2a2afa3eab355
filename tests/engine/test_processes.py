"""A trainer pushes into a real engine whose workers are processes of their own.

Prefix caching is on: outputs that still came from the old weights' cache would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.process_engines import EXTENSION, Holding, running_processes
from support.pushes import Failing

from vllm_bucketsync import (
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
    UnsupportedError,
    WeightSync,
)

pytestmark = pytest.mark.timeout(400)

# Biases, which vLLM writes straight into the live model, and tied embeddings; experts.
CASES = {"qwen2 on one rank": ("qwen2", 1), "qwen3_moe on two ranks": ("qwen3_moe", 2)}


@dataclass(frozen=True)
class Stage:
    """A running engine, and what one that was started from seed 1 holds."""

    kind: str
    llm: Any
    new: Holding
    new_folder: Path


@pytest.fixture(scope="module", params=list(CASES))
def stage(
    request: pytest.FixtureRequest, checkpoint: Callable[[str, int], Path]
) -> Iterator[Stage]:
    kind, num_ranks = CASES[request.param]
    folder = checkpoint(kind, 1)
    with running_processes(folder, num_ranks=num_ranks, worker_extension_cls=EXTENSION) as llm:
        new = Holding.of(llm)
    with running_processes(
        checkpoint(kind, 0), num_ranks=num_ranks, worker_extension_cls=EXTENSION
    ) as llm:
        yield Stage(kind, llm, new, folder)


def tensors(stage: Stage, seed: int) -> dict[str, torch.Tensor]:
    return tiny_models.checkpoint_tensors(stage.kind, seed=seed)


def test_pushes_of_every_source_make_the_engine_one_that_was_started_from_them(
    stage: Stage,
) -> None:
    old = Holding.of(stage.llm)
    assert old.outputs != stage.new.outputs
    assert old.live != stage.new.live

    sources: list[Callable[[], Any]] = [
        lambda: tensors(stage, 1),
        lambda: iter(tensors(stage, 1).items()),
        lambda: tiny_models.trainer_model(stage.kind, seed=1),
        lambda: stage.new_folder,
    ]
    for slot_size in (1024, "48KiB", None):
        with WeightSync(stage.llm, slot_size=slot_size) as sync:
            for number, source in enumerate(sources):
                report = sync.push(source(), version=number)
                assert Holding.of(stage.llm) == stage.new
                assert report.transport == "shm"
                assert report.num_workers == len(stage.new.live)
                assert stage.llm.llm_engine.get_weight_version() == str(number)

                sync.push(tensors(stage, 0), version="old")
                assert Holding.of(stage.llm) == old


def test_a_push_that_does_not_fit_changes_nothing_on_any_rank(stage: Stage) -> None:
    before = Holding.of(stage.llm)
    good = tensors(stage, 1)
    query = "model.layers.0.self_attn.q_proj.weight"
    without = {name: tensor for name, tensor in good.items() if name != query}
    wrong = {
        "part of a module": (MissingTensorError, without),
        "a name": (UnknownTensorError, good | {"model.layers.7.nothing": torch.ones(1)}),
        "a shape": (TensorMismatchError, good | {query: torch.ones(3, 5)}),
    }
    with WeightSync(stage.llm) as sync:
        for kind, source in wrong.values():
            with pytest.raises(kind, match="nothing was written") as caught:
                sync.push(source, version="wrong")
            assert caught.value.engine_state == "unchanged"
            assert caught.value.rank in range(len(stage.new.live))
            assert Holding.of(stage.llm) == before

        report = sync.push(good, version="dry", dry_run=True)
        assert (report.num_tensors, report.num_buckets) == (len(good), 0)
        assert Holding.of(stage.llm) == before


def test_a_source_that_fails_half_way_leaves_a_torn_engine_that_the_next_push_mends(
    stage: Stage,
) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        items = list(tensors(stage, 1).items())
        yield from items[: len(items) // 2]
        raise OSError("the gather failed")

    with WeightSync(stage.llm, slot_size=4096) as sync:
        with pytest.raises(OSError, match="the gather failed") as caught:
            sync.push(failing(), version="half")
        assert "torn" in caught.value.__notes__[-1]
        assert [status["is_torn"] for status in sync.status()] == [True] * len(stage.new.live)

        sync.push(tensors(stage, 1), version="whole")
        assert [status["is_torn"] for status in sync.status()] == [False] * len(stage.new.live)
        assert Holding.of(stage.llm) == stage.new


def test_an_atomic_push_changes_every_rank_or_none(stage: Stage) -> None:
    num_ranks = len(stage.new.live)
    with WeightSync(stage.llm, slot_size=4096) as sync:
        sync.push(tensors(stage, 0), version="old")
        old = Holding.of(stage.llm)
        new = tensors(stage, 1)
        with pytest.raises(ConnectionError) as caught:
            sync.push(Failing(new, after=len(new) // 2), version="half", atomic=True)
        assert "unchanged" in caught.value.__notes__[-1]
        assert Holding.of(stage.llm) == old
        assert [one["is_torn"] for one in sync.status()] == [False] * num_ranks

        report = sync.push(new, version="new", atomic=True, verify="digest")

        assert Holding.of(stage.llm) == stage.new
        # A sharded tensor waits in parts; what every rank has, on every rank.
        staged = [one.staged_bytes for one in report.workers]
        assert len(staged) == num_ranks
        assert max(staged) < report.num_bytes * (1 if num_ranks == 1 else 0.7) + 256 * len(new)
        assert [one.verified_bytes for one in report.workers] == [report.num_bytes] * num_ranks
        assert [one.num_unverified for one in report.workers] == [0] * num_ranks


def test_weights_change_between_waking_them_up_and_waking_the_cache_up(stage: Stage) -> None:
    with WeightSync(stage.llm) as sync:
        sync.push(tensors(stage, 0), version="before the sleep")
        stage.llm.sleep(level=1)
        stage.llm.wake_up(tags=["weights"])
        sync.push(tensors(stage, 1), version="while the cache sleeps")
        stage.llm.wake_up(tags=["kv_cache"])

        assert Holding.of(stage.llm) == stage.new


def test_an_engine_without_the_extension_is_refused_and_stays_well(
    checkpoint: Callable[[str, int], Path],
) -> None:
    with running_processes(checkpoint("qwen3", 0)) as llm, WeightSync(llm) as sync:
        with pytest.raises(UnsupportedError, match="worker_extension_cls="):
            sync.push({"a": torch.ones(1)}, version=1)
        assert llm.collective_rpc("check_health") == [None]
