"""A trainer pushes into an engine of its own process, which takes references.

From the model object that a trainer has; the bytes and the outputs are those of an engine
that was started from the new checkpoint.
"""

from __future__ import annotations

import pytest
import torch
from support import engines, tiny_models
from support.bytes_of import bytes_of
from support.worlds import World

from vllm_bucketsync import MissingTensorError, WeightSync
from vllm_bucketsync.worker import compat


# Biases and a tied head; other kinds are rows of ``test_conformance.py``.
@pytest.mark.parametrize("world", ["qwen2"], indirect=True)
def test_a_pushed_module_is_what_the_engine_then_runs(world: World) -> None:
    with WeightSync(world.llm) as sync:
        for seed in (1, 0, 1):
            model = tiny_models.trainer_model(world.kind, seed=seed)
            before = {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}

            report = sync.push(model, version=seed)

            world.holds(seed)
            assert report.transport == "inproc"
            assert {n: bytes_of(t) for n, t in model.state_dict().items()} == before


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_source_that_fails_is_raised_through_vllm_and_the_next_push_mends(world: World) -> None:
    def failing() -> object:
        yield "model.norm.weight", torch.ones(64)
        raise LookupError("no such shard")

    with WeightSync(world.llm) as sync:
        with pytest.raises(LookupError, match="no such shard"):
            sync.push(failing(), version="bad")
        sync.push(world.tensors(0), version="good")

        world.holds(0)
        assert not sync.status()[0]["is_torn"]
        assert sync.status()[0]["region_bytes"] == 0
    assert engines.greedy(world.llm) == world.truths[0].outputs


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_stream_is_not_refused_for_what_the_last_one_lacked(world: World) -> None:
    tensors = world.tensors(1)
    some = dict(list(tensors.items())[:-1])
    with WeightSync(world.llm) as sync:
        with pytest.raises(MissingTensorError):
            sync.push(iter(some.items()), version="lacking")
        sync.push(iter(tensors.items()), version="whole")
        world.holds(1)

        sync.push(iter(some.items()), version="partial", partial=["*"])
        sync.push(iter(world.tensors(0).items()), version="whole again")
        world.holds(0)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_trainer_s_thread_has_set_is_not_for_the_engine(
    world: World, is_streamed: bool
) -> None:
    with WeightSync(world.llm) as sync:
        for seed in (1, 0):
            source = world.tensors(seed)
            with torch.device("meta"), torch.inference_mode():
                sync.push(iter(source.items()) if is_streamed else source, version=seed)
            world.holds(seed)
    config = engines.worker_of(world.llm).vllm_config
    with torch.device("meta"), torch.inference_mode(), compat.engine_context(config):
        made = torch.empty(1)
    assert (made.device.type, made.is_inference()) == ("cpu", False)
    assert engines.greedy(world.llm) == world.truths[0].outputs


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_partial_update_is_marked_and_mends_nothing_unless_everything_came(
    world: World, is_streamed: bool
) -> None:
    whole = world.tensors(1)
    part = {name: one for name, one in whole.items() if name != "model.norm.weight"}
    patterns = ["*.norm.weight", "*.nothing"]

    def given(tensors: dict[str, torch.Tensor]) -> object:
        return iter(tensors.items()) if is_streamed else tensors

    def failing() -> object:
        yield from list(whole.items())[: len(whole) // 2]
        raise LookupError("no such shard")

    with WeightSync(world.llm, slot_size=4096) as sync:
        with pytest.raises(LookupError):
            sync.push(failing(), version="bad")
        report = sync.push(given(part), version="part", partial=patterns)
        assert report.left_as_is == ("*.norm.weight",)
        status = sync.status()[0]
        assert (status["is_torn"], status["left_as_is"]) == (True, ["*.norm.weight"])

        report = sync.push(given(whole), version="whole", partial=patterns)
        assert report.left_as_is == ()
        status = sync.status()[0]
        assert (status["is_torn"], status["left_as_is"]) == (False, [])
        world.holds(1)
