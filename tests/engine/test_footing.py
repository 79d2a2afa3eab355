"""What an update stands on is found out once for each call, and does not outlive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import engines, tiny_models
from support.pushes import push

from vllm_bucketsync.errors import UnsupportedError
from vllm_bucketsync.worker import layerwise
from vllm_bucketsync.worker.footing import Footings
from vllm_bucketsync.worker.memory import WeightMemory
from vllm_bucketsync.worker.model_looks import ModelLooks
from vllm_bucketsync.worker.weights import WeightSink

KIND = "qwen2"


@pytest.fixture(scope="module")
def worker(checkpoint: Callable[[str, int], Path]) -> Iterator[Any]:
    extension = "vllm_bucketsync.WorkerExtension"
    with engines.running_engine(checkpoint(KIND, 0), worker_extension_cls=extension) as llm:
        yield engines.worker_of(llm)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[ModelLooks]:
    """Take note of every look."""
    seen: list[ModelLooks] = []
    look_at = WeightMemory.look_at

    def noted(memory: WeightMemory, worker: Any) -> ModelLooks:
        seen.append(look_at(memory, worker))
        return seen[-1]

    monkeypatch.setattr(WeightMemory, "look_at", noted)
    return seen


def test_one_look_ahead_serves_one_update_and_no_other_call(
    worker: Any, looks: list[ModelLooks]
) -> None:
    footings = Footings(worker, WeightMemory())

    with footings.during_a_call():
        footings.look_ahead()
        assert footings.find().looks is looks[0]
        assert len(looks) == 1
        # What was updated is another model, as far as anybody knows.
        footings.find()
        assert len(looks) == 2
    with footings.during_a_call():
        footings.look_ahead()
    with footings.during_a_call():
        footings.find()
    assert len(looks) == 4


def test_a_model_that_changed_between_two_calls_is_seen_to_have(worker: Any) -> None:
    memory = WeightMemory()
    footings = Footings(worker, memory)
    with footings.during_a_call():
        footings.look_ahead()
    before = memory.look_at(worker)
    module = worker.model_runner.get_model().model.norm
    old = module.weight

    module.weight = torch.nn.Parameter(old.detach().clone(), requires_grad=False)
    try:
        with footings.during_a_call():
            footings.look_ahead()
            assert footings.find().looks is not before
    finally:
        module.weight = old


def test_what_is_wrong_is_raised_where_it_is_asked_for_and_not_ahead(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    footings = Footings(worker, WeightMemory())
    monkeypatch.setattr(worker.vllm_config.parallel_config, "enable_eplb", True)
    with footings.during_a_call():
        footings.look_ahead()
        with pytest.raises(UnsupportedError, match="balances its experts"):
            footings.find()
    monkeypatch.undo()
    with footings.during_a_call():
        footings.look_ahead()
        assert footings.find().notes == ()


def test_a_reload_that_failed_is_put_back_before_the_look(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import layerwise as vllms

    memory = WeightMemory()
    footings = Footings(worker, memory)
    live = engines.live_tensors(worker)
    model = worker.model_runner.get_model()
    vllms.initialize_layerwise_reload(model)
    assert layerwise.is_open(model)

    with footings.during_a_call():
        footings.look_ahead()
        found = footings.find()

    assert engines.live_tensors(worker) == live
    assert ["put back" in note for note in found.notes] == [True]
    assert found.looks.are_those_of(worker)
    push(
        WeightSink(worker, memory=memory, footings=footings),
        tiny_models.checkpoint_tensors(KIND, seed=1),
    )
    assert engines.live_tensors(worker) != live
