"""Experts in one tensor reach a model whose loaders know them one by one only."""

from __future__ import annotations

import pytest
from support import tiny_models
from support.pushes import push
from support.worlds import World

from vllm_bucketsync.errors import UnknownTensorError
from vllm_bucketsync.worker import experts

deepseek = pytest.mark.parametrize("world", ["deepseek_v3"], indirect=True)


@deepseek
@pytest.mark.parametrize("declared", [False, True], ids=["streamed", "declared"])
@pytest.mark.parametrize("slot_size_bytes", [20_000, 1 << 23])
def test_fused_experts_are_given_one_by_one_where_the_model_takes_them_so(
    world: World, declared: bool, slot_size_bytes: int
) -> None:
    # As if nothing had been pushed yet.
    experts.split_from_now_on(world.model, is_on=False)
    for seed in (1, 0):
        model = tiny_models.trainer_model(world.kind, seed=seed)
        tensors = tiny_models.fused_tensors(model)
        assert any(experts.is_fused(name) for name in tensors)

        push(world.sink(), tensors, declared=declared, slot_size_bytes=slot_size_bytes)

        world.holds(seed)


@deepseek
def test_fused_experts_that_the_model_has_no_place_for_are_told_by_the_name_they_came_under(
    world: World,
) -> None:
    experts.split_from_now_on(world.model, is_on=False)
    tensors = tiny_models.fused_tensors(tiny_models.trainer_model(world.kind, seed=1))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    wrong = tensors | {name.replace("layers.1", "layers.7"): tensors[name]}
    before = world.live()

    with pytest.raises(UnknownTensorError, match=r"layers\.7\.mlp\.experts\.gate_up_proj"):
        push(world.sink(), wrong)

    assert world.live() == before
    assert not experts.are_split(world.model)
