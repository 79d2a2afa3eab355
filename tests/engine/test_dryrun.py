"""A dry run foretells what vLLM's loaders do, finds every fault at once, and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support import tiny_models
from support.pushes import metas_of, push
from support.worlds import World

from vllm_bucketsync.errors import (
    DuplicateTensorError,
    LoadError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.worker import compat, layerwise
from vllm_bucketsync.worker.dryrun import DryRunResult, dry_run
from vllm_bucketsync.worker.problems import MAX_PROBLEMS

every_kind = pytest.mark.parametrize("world", tiny_models.KINDS, indirect=True)
qwen3 = pytest.mark.parametrize("world", ["qwen3"], indirect=True)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def _dry_run(world: World, tensors: Any, *partial: str) -> DryRunResult:
    with compat.engine_context(world.worker.vllm_config):
        return dry_run(world.worker, Manifest(metas_of(tensors)), partial=partial)


def _refusal(world: World, tensors: Any, *partial: str) -> LoadError:
    sink = world.sink(*partial)
    with pytest.raises(LoadError) as caught:
        sink.open(Manifest(metas_of(tensors)))
    return caught.value


def _loaded_by_vllm(world: World, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what vLLM's own loaders make of real tensors, before any post-processing."""
    from vllm.model_executor.model_loader.reload import layerwise as vllm_layerwise

    found: dict[str, torch.Tensor] = {}
    with compat.engine_context(world.worker.vllm_config), compat.processing_switched_off():
        vllm_layerwise.initialize_layerwise_reload(world.model)
        world.model.load_weights(tensors.items())  # type: ignore[operator]
        for layer in layerwise.open_layers(world.model):
            vllm_layerwise.materialize_layer(layer.module, layer.info)
            for name, bound in layer.info.loaded_weights:
                bound.arguments["param"] = tensor = getattr(layer.module, name)
                layerwise.original_loader(tensor)(*bound.args, **bound.kwargs)
                found[f"{layer.path}.{name}"] = tensor.detach().clone()
        layerwise.put_back(world.model)
    return found


@every_kind
@pytest.mark.parametrize("form", ["per_expert", "fused"])
def test_the_record_replayed_gives_what_vllms_loaders_give(world: World, form: str) -> None:
    push(world.sink(), world.tensors(0))
    before = world.live(), world.addresses(), world.outputs()
    tensors = tiny_models.fused_tensors(tiny_models.trainer_model(world.kind, seed=1))
    if form == "per_expert":
        tensors = tiny_models.per_expert(tensors)
    values = list(tensors.values())

    result = _dry_run(world, tensors)

    assert result.problems == ()
    assert (world.live(), world.addresses(), world.outputs()) == before
    assert {copy.source for copy in result.record.copies} == set(range(len(tensors)))
    assert not result.record.impure
    assert result.record.skipped == {}
    expected = _loaded_by_vllm(world, tensors)
    push(world.sink(), world.tensors(0))
    replayed = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for fill in result.record.fills:
        if fill.target in replayed:
            box = fill.target_box
            whole = replayed[fill.target]
            whole.as_strided(box.shape, box.strides, box.offset).fill_(fill.value)
    for copy in result.record.copies:
        source, target = copy.source_box, copy.target_box
        view = values[copy.source].as_strided(source.shape, source.strides, source.offset)
        if copy.target in replayed:
            whole = replayed[copy.target]
            whole.as_strided(target.shape, target.strides, target.offset).copy_(view)
        else:
            assert copy.is_live
    assert all(torch.equal(replayed[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("world", ["glm4_moe"], indirect=True)
def test_a_copy_into_the_live_model_is_recorded_and_not_made(world: World) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = world.live()

    result = _dry_run(world, world.tensors(1))

    live = [copy for copy in result.record.copies if copy.is_live]
    assert bias in {copy.target for copy in live}
    assert world.live() == before


@qwen3
def test_all_faults_are_found_in_one_pass_first_things_first(world: World) -> None:
    tensors = world.tensors(1)
    before = world.live(), world.addresses()
    tensors["model.layers.0.self_attn.q_prj.weight"] = tensors.pop(Q_PROJ)
    tensors["model.norm.weight"] = torch.ones(63)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.ones(64, 95)
    tensors["model.layers.1.mlp.gate_proj.weight"] = torch.ones(48, 64)
    tensors["model.embed_tokens.weight"] = torch.ones(512, 64)
    del tensors["model.layers.1.input_layernorm.weight"]
    pairs = [*tensors.items(), ("model.layers.0.input_layernorm.weight", torch.ones(64))]

    error = _refusal(world, pairs)

    assert isinstance(error, DuplicateTensorError)
    assert error.problems == (
        (
            "'model.layers.0.input_layernorm.weight' comes twice; the second would be dropped, "
            "or undo the first; send it once"
        ),
        (
            "'model.embed_tokens.weight' does not fit: expected (500, 64), got (512, 64), for "
            "model.embed_tokens.weight of the engine; send the whole tensor in its "
            "checkpoint's shape"
        ),
        (
            "'model.layers.1.mlp.gate_proj.weight' does not fit: expected (96, 64), got "
            "(48, 64), for model.layers.1.mlp.gate_up_proj.weight of the engine; send the whole "
            "tensor in its checkpoint's shape"
        ),
        (
            "'model.layers.1.mlp.down_proj.weight' does not fit: expected (64, 96), got "
            "(64, 95), for model.layers.1.mlp.down_proj.weight of the engine; send the whole "
            "tensor in its checkpoint's shape"
        ),
        (
            "'model.norm.weight' does not fit: expected (64,), got (63,), for model.norm.weight "
            "of the engine; send the whole tensor in its checkpoint's shape"
        ),
        (
            "the engine's model has no place for 'model.layers.0.self_attn.q_prj.weight'; close "
            "to it are 'model.layers.0.self_attn.q_proj.weight', "
            "'model.layers.0.self_attn.v_proj.weight', "
            "'model.layers.0.self_attn.o_proj.weight'; rename it with rename=, or leave it out"
        ),
        (
            "model.layers.0.self_attn.qkv_proj.weight would get 10240/20480 elements: of its "
            "parts only 'model.layers.0.self_attn.k_proj.weight', "
            "'model.layers.0.self_attn.v_proj.weight' came; a module is sent as a whole, or "
            "not at all where partial= names it; send the rest of it"
        ),
        (
            "model.layers.1.input_layernorm.weight (64,) of the engine would get no value; send "
            "it, or name it in partial= if it may keep its old one"
        ),
    )
    assert str(error).startswith("8 problems; nothing was written:\n  ")
    assert (world.live(), world.addresses()) == before


@qwen3
def test_a_wrong_shape_says_both(world: World) -> None:
    error = _refusal(world, {**world.tensors(1), Q_PROJ: torch.ones(80, 64)})

    assert isinstance(error, TensorMismatchError)
    assert (error.name, error.expected, error.got) == (Q_PROJ, "(160, 64)", "(80, 64)")
    assert len(error.problems) == 1


@qwen3
def test_a_shape_that_torch_would_spread_over_the_parameter_is_refused(world: World) -> None:
    embedding = "model.embed_tokens.weight"

    error = _refusal(world, {**world.tensors(1), embedding: torch.ones(500, 1)})

    assert isinstance(error, TensorMismatchError)
    assert (error.expected, error.got) == ("(500, 64)", "(500, 1)")


@pytest.mark.parametrize("world", ["qwen3_moe"], indirect=True)
def test_two_forms_of_the_same_experts_are_a_duplicate(world: World) -> None:
    model = tiny_models.trainer_model(world.kind, seed=1)
    both = {**world.tensors(1), **tiny_models.fused_tensors(model)}

    error = _refusal(world, both)

    assert isinstance(error, DuplicateTensorError)
    assert "would land in the same part of model.layers.0.mlp.experts" in error.problems[0]
    assert len(error.problems) == 4


@pytest.mark.parametrize("world", ["qwen3_moe"], indirect=True)
def test_an_expert_that_is_missing_is_named_by_its_module(world: World) -> None:
    tensors = world.tensors(1)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]

    error = _refusal(world, tensors)

    assert isinstance(error, MissingTensorError)
    assert "w13_weight would get 28672/32768 elements" in error.problems[0]


@pytest.mark.parametrize("world", ["qwen2"], indirect=True)
def test_a_weight_without_its_bias_is_a_module_in_part(world: World) -> None:
    tensors = world.tensors(1)
    for part in ("q", "k", "v"):
        del tensors[f"model.layers.0.self_attn.{part}_proj.bias"]

    error = _refusal(world, tensors, "*.bias")

    assert isinstance(error, MissingTensorError)
    assert "qkv_proj.bias would get 0/320 elements" in error.problems[0]


@qwen3
def test_too_many_faults_are_cut_short(world: World) -> None:
    tensors = {f"wrong.{number}": torch.ones(1) for number in range(100)}

    error = _refusal(world, tensors)

    assert isinstance(error, UnknownTensorError)
    assert len(error.problems) <= MAX_PROBLEMS + 1


@qwen3
def test_a_prefix_that_every_name_has_is_told_once_with_what_to_do(world: World) -> None:
    right = world.tensors(1)

    error = _refusal(world, {f"actor.{name}": one for name, one in right.items()})

    hint = (
        f"all {len(right)} names start with 'actor.', and those of the engine do not; remove it "
        f"with rename="
    )
    assert str(error).splitlines()[1].strip() == hint
    # Not where only some have it, nor where the names are wrong without it, too.
    some = {f"actor.{name}" if "mlp" in name else name: one for name, one in right.items()}
    others = {f"actor.{name}.w": one for name, one in right.items()}
    assert "names start with" not in str(_refusal(world, some)) + str(_refusal(world, others))


@qwen3
def test_faults_of_one_kind_are_told_by_the_first_and_all_are_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = world.tensors(1)
    wrong = [f"wrong.{number}" for number in range(7)]
    tensors |= {name: torch.ones(1) for name in wrong}
    del tensors["model.layers.1.input_layernorm.weight"], tensors["model.norm.weight"]

    error = _refusal(world, tensors)

    advice = "rename it with rename=, or leave it out"
    assert str(error).splitlines() == [
        "9 problems; nothing was written:",
        f"  the engine's model has no place for 'wrong.0'; {advice}",
        "  and 6 more like it: 'wrong.1', 'wrong.2', 'wrong.3', 'wrong.4' and 2 more",
        # Of two, the second is no longer than its name would be.
        *(f"  {text}" for text in error.problems[7:]),
    ]
    assert len(error.problems) == 9
    (record,) = [one for one in caplog.records if "wrong.6" in one.getMessage()]
    assert all(text in record.getMessage() for text in error.problems)


@qwen3
def test_a_fault_that_is_told_in_full_is_not_logged_twice(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    error = _refusal(world, {**world.tensors(1), "wrong": torch.ones(1)})

    assert len(error.problems) == 1
    assert caplog.records == []


@qwen3
def test_a_pattern_that_names_nothing_is_told_with_what_is_missing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = world.tensors(1)
    del tensors["model.norm.weight"]
    note = "partial names 'model.nrom.*', which matches no parameter that this worker has"

    error = _refusal(world, tensors, "model.nrom.*", "model.layers.*")

    assert str(error).endswith(f"nothing was written; {note}")
    assert note in caplog.text


@qwen3
def test_a_good_manifest_takes_one_call_of_the_models_loader(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    load_weights: Any = world.model.load_weights

    def counted(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        calls.append(1)
        return load_weights(weights)

    monkeypatch.setattr(world.model, "load_weights", counted, raising=False)

    assert _dry_run(world, world.tensors(1)).problems == ()
    assert len(calls) == 1


@qwen3
def test_a_loader_that_first_lists_everything_hides_no_culprit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = world.tensors(1)
    tensors["model.norm.weight"] = torch.ones(63)
    items = list(tensors.items())
    items.insert(3, ("model.wrong.weight", torch.ones(3)))
    load_weights: Any = world.model.load_weights
    monkeypatch.setattr(
        world.model, "load_weights", lambda weights: load_weights(list(weights)), raising=False
    )

    error = _refusal(world, items)

    assert len(error.problems) == 2
    assert "'model.wrong.weight'" in error.problems[0]
    assert "'model.norm.weight' does not fit" in error.problems[1]


@qwen3
@pytest.mark.parametrize("reads", ["computes", "reads values"])
def test_a_loader_that_does_more_than_to_copy_is_impure_and_loads_all_the_same(
    world: World, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    def adds_one(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if reads == "reads values" and float(loaded_weight.sum()) < -1e9:
            raise ValueError
        param.data.copy_(1 + loaded_weight)

    norm = world.model.get_submodule("model.norm")
    meta = LAYERWISE_INFO[norm].restore_metadata[0]["weight"]
    monkeypatch.setattr(meta, "weight_loader", adds_one, raising=False)
    tensors = world.tensors(1)
    position = list(tensors).index("model.norm.weight")

    result = _dry_run(world, tensors)
    push(world.sink(), tensors)

    assert result.problems == ()
    assert result.record.impure == {position}
    assert result.record.unverified == ({position} if reads == "reads values" else set())
    weight = norm.get_parameter("weight")
    assert torch.equal(weight.data, 1 + tensors["model.norm.weight"])
    monkeypatch.undo()
    push(world.sink(), tensors)
    world.holds(1)


@qwen3
def test_floats_sent_as_integers_are_refused_and_other_floats_are_not(world: World) -> None:
    before = world.live()
    good = world.tensors(1)

    error = _refusal(world, good | {Q_PROJ: good[Q_PROJ].to(torch.int64)})

    assert isinstance(error, TensorMismatchError)
    assert (error.name, error.expected, error.got) == (Q_PROJ, "float32", "int64")
    assert world.live() == before
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in good.items()}
    assert _dry_run(world, halved).problems == ()


def enlarged(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor with more along one dimension, as of a wider model."""
    return torch.cat([tensor, tensor.narrow(dim, 0, tensor.shape[dim] // 4)], dim)


LAYER = "model.layers.0"
DENSE = [
    (f"{LAYER}.mlp.gate_proj.weight", 0),
    (f"{LAYER}.mlp.down_proj.weight", 1),
    (f"{LAYER}.self_attn.q_proj.weight", 0),
    (f"{LAYER}.self_attn.k_proj.weight", 0),
    (f"{LAYER}.self_attn.o_proj.weight", 1),
]
EXPERTS = [
    (f"{LAYER}.mlp.experts.1.gate_proj.weight", 0),
    (f"{LAYER}.mlp.experts.1.down_proj.weight", 1),
]


@pytest.mark.parametrize(
    ("world", "name", "dim"),
    [*(("qwen3", *one) for one in DENSE), *(("qwen3_moe", *one) for one in EXPERTS)],
    indirect=["world"],
)
def test_a_tensor_of_which_a_part_would_be_left_out_is_refused(
    world: World, name: str, dim: int
) -> None:
    tensors = tiny_models.per_expert(world.tensors(1))
    right = tensors[name]
    before = world.live()

    error = _refusal(world, tensors | {name: enlarged(right, dim)})

    assert isinstance(error, TensorMismatchError)
    # Of experts vLLM's loaders ask it themselves, and say which shape they want.
    counted = f"at most {right.numel()} elements", f"{enlarged(right, dim).numel()} elements"
    shapes = str(tuple(right.shape)), str(tuple(enlarged(right, dim).shape))
    assert (error.expected, error.got) == (shapes if world.kind == "qwen3_moe" else counted)
    assert error.name == name
    assert world.live() == before
    assert _dry_run(world, tensors).problems == ()


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_tensor_may_have_more_than_is_read_where_that_is_named(world: World) -> None:
    name = f"{LAYER}.mlp.down_proj.weight"
    tensors = world.tensors(1)
    larger = tensors | {name: enlarged(tensors[name], 1)}

    assert len(_dry_run(world, larger).problems) == 1
    assert _dry_run(world, larger, name).problems == ()
    assert _dry_run(world, larger, "*.gate_up_proj.weight").problems != ()
