"""An updated engine is, to the last bit, one that was started from the new checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from support import engines, tiny_models
from support.pushes import load_all, metas_of, push, run
from support.worlds import World

from vllm_bucketsync.config import PlanMode
from vllm_bucketsync.errors import (
    DuplicateTensorError,
    EngineState,
    LoadError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.worker.dryrun import DryRunResult, dry_run
from vllm_bucketsync.worker.memory import WeightMemory

every_kind = pytest.mark.parametrize("world", tiny_models.KINDS, indirect=True)

# Less than any weight; some tensors each; everything at once.
SLOT_SIZES_BYTES = (512, 20_000, 1 << 23)


@every_kind
@pytest.mark.parametrize(
    ("slot_size_bytes", "declared"),
    [*((size, True) for size in SLOT_SIZES_BYTES), (SLOT_SIZES_BYTES[1], False)],
)
def test_three_updates_in_a_row_are_exact_for_any_slot_size(
    world: World, slot_size_bytes: int, declared: bool
) -> None:
    addresses = world.addresses()

    for seed in (1, 0, 1):
        push(world.sink(), world.tensors(seed), slot_size_bytes=slot_size_bytes, declared=declared)

        world.holds(seed)
    assert world.addresses() == addresses


@every_kind
def test_order_does_not_matter(world: World) -> None:
    for seed in (0, 1):
        reversed_tensors = dict(reversed(world.tensors(seed).items()))

        push(world.sink(), reversed_tensors, slot_size_bytes=20_000)

        world.holds(seed)


@pytest.mark.parametrize("world", ["qwen3_moe", "glm4_moe"], indirect=True)
@pytest.mark.parametrize("slot_size_bytes", SLOT_SIZES_BYTES)
def test_experts_fused_as_transformers_has_them_load_as_well(
    world: World, slot_size_bytes: int
) -> None:
    for seed in (0, 1):
        model = tiny_models.trainer_model(world.kind, seed=seed)
        tensors = tiny_models.fused_tensors(model)
        assert any(name.endswith(".experts.gate_up_proj") for name in tensors)

        push(world.sink(), tensors, slot_size_bytes=slot_size_bytes)

        world.holds(seed)


@pytest.mark.parametrize("world", ["qwen3_tied", "qwen2"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_tied_head_that_is_sent_too_is_skipped_and_listed(
    world: World, declared: bool, place: str
) -> None:
    for seed in (0, 1):
        tensors = world.tensors(seed)
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        sent = head | tensors if place == "first" else tensors | head

        report = push(world.sink(), sent, declared=declared)

        assert report.skipped == ("lm_head.weight",)
        world.holds(seed)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_cast_on_the_way_equals_a_cast_before(world: World) -> None:
    tensors = world.tensors(1)
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}

    push(world.sink(), {name: tensor.to(torch.float32) for name, tensor in narrow.items()})
    expected = world.live(), world.outputs()
    push(world.sink(), world.tensors(0))
    push(world.sink(), narrow)

    assert (world.live(), world.outputs()) == expected


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_a_buffer_that_the_model_has_no_place_for_is_skipped_and_listed(
    world: World, declared: bool
) -> None:
    for seed in (0, 1):
        tensors = world.tensors(seed)
        tensors["model.layers.0.running_scale"] = torch.ones(3)
        tensors["model.rotary_emb.inv_freq"] = torch.ones(40)
        tensors["extra.counter"] = torch.tensor(4)

        report = push(
            world.sink(),
            tensors,
            declared=declared,
            buffers=["model.layers.0.running_scale", "extra.counter"],
        )

        assert sorted(report.skipped) == [
            "extra.counter",
            "model.layers.0.running_scale",
            "model.rotary_emb.inv_freq",
        ]
        world.holds(seed)


@pytest.mark.parametrize("world", ["qwen3", "glm4_moe"], indirect=True)
def test_only_what_vllm_keeps_is_cloned(world: World) -> None:
    tensors = world.tensors(0)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())

    by_plan = push(world.sink(), tensors, slot_size_bytes=512)
    report = push(world.sink(mode=PlanMode.OFF), tensors, slot_size_bytes=1 << 23)
    in_small_ones = push(world.sink(mode=PlanMode.OFF), tensors, slot_size_bytes=200_000)

    assert by_plan.cloned_bytes == 0
    # The padded head waits for the end, so vLLM keeps it.
    padded = {"qwen3": 2 * tensors["lm_head.weight"].nbytes, "glm4_moe": 0}
    assert report.cloned_bytes == padded[world.kind]
    assert report.cloned_bytes <= in_small_ones.cloned_bytes < total_bytes


# --- what is refused, and leaves the engine as it was -------------------------


def _without(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def _with(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensor

    return change


UPDATES_THAT_DO_NOT_FIT = {
    "unknown": (_with("model.layers.0.wrong.weight", torch.ones(3)), UnknownTensorError),
    "shape": (_with("model.norm.weight", torch.ones(63)), TensorMismatchError),
    "part": (_without("model.layers.1.self_attn.q_proj.weight"), MissingTensorError),
    "missing": (_without("model.norm.weight"), MissingTensorError),
    "dropped": (_with("model.layers.0.mlp.bias", torch.ones(3)), UnknownTensorError),
}


@every_kind
@pytest.mark.parametrize("fault", UPDATES_THAT_DO_NOT_FIT)
def test_a_declared_update_that_does_not_fit_changes_nothing(world: World, fault: str) -> None:
    change, expected = UPDATES_THAT_DO_NOT_FIT[fault]
    tensors = world.tensors(1)
    change(tensors)
    before = world.live(), world.addresses(), world.outputs()
    sink = world.sink()

    with pytest.raises(expected, match="nothing was written"):
        sink.open(Manifest(metas_of(tensors)))
    state = sink.abort()

    assert state is EngineState.UNCHANGED
    assert (world.live(), world.addresses(), world.outputs()) == before


@pytest.mark.parametrize("world", ["qwen3", "glm4_moe"], indirect=True)
@pytest.mark.parametrize("fault", UPDATES_THAT_DO_NOT_FIT)
def test_a_streamed_update_that_does_not_fit_fails_and_the_next_one_mends_it(
    world: World, fault: str
) -> None:
    push(world.sink(), world.tensors(0))
    change, expected = UPDATES_THAT_DO_NOT_FIT[fault]
    tensors = world.tensors(1)
    change(tensors)
    sink = world.sink()

    with pytest.raises(expected):
        run(sink, tensors, slot_size_bytes=20_000, declared=False)
    state = sink.abort()

    assert state is EngineState.TORN
    push(world.sink(), world.tensors(0))
    world.holds(0)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_a_name_that_comes_twice_is_refused(world: World, declared: bool) -> None:
    name = "model.norm.weight"
    twice = [(name, torch.ones(64)), (name, torch.ones(64)), *world.tensors(1).items()]
    before = world.live()
    sink = world.sink()

    with pytest.raises(DuplicateTensorError, match=rf"'{name}' comes twice"):
        run(sink, twice, declared=declared, slot_size_bytes=256)
    state = sink.abort()

    if declared:
        assert state is EngineState.UNCHANGED
        assert world.live() == before
    else:
        # The first one was a whole module, and is in the model.
        assert state is EngineState.TORN
        push(world.sink(), world.tensors(0))


# --- failures in the middle ---------------------------------------------------


def _fail_after(world: World, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model's loader raise after it took ``calls`` tensors."""
    load_weights: Any = world.model.load_weights
    left = [calls]

    def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        def counted() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if not left[0]:
                    raise RuntimeError("the loader broke")
                left[0] -= 1
                yield name, tensor

        return load_weights(counted())

    monkeypatch.setattr(world.model, "load_weights", failing, raising=False)


@pytest.mark.parametrize("world", ["qwen2", "qwen3_moe"], indirect=True)
@pytest.mark.parametrize("num_loaded", [0, 1, 3, 9])
def test_after_a_loader_raised_the_state_is_told_truly_and_the_next_update_is_exact(
    world: World, num_loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(world.sink(), world.tensors(0))
    before = world.live(), world.outputs()
    # Loaded last to first, so that whole modules come late.
    tensors = dict(reversed(world.tensors(1).items()))
    sink = world.sink(mode=PlanMode.OFF)
    sink.open(Manifest(metas_of(tensors)))

    with monkeypatch.context() as patch:
        _fail_after(world, num_loaded, patch)
        with pytest.raises(LoadError, match="the loader broke"):
            load_all(sink, tensors, slot_size_bytes=1 << 23)
        state = sink.abort()

    if state is EngineState.UNCHANGED:
        assert (world.live(), world.outputs()) == before
    else:
        assert (world.live(), world.outputs()) != before
    assert state is EngineState.UNCHANGED or num_loaded
    for seed in (0, 1):
        push(world.sink(), world.tensors(seed))
        world.holds(seed)


@pytest.mark.parametrize("world", ["qwen3_tied", "glm4_moe"], indirect=True)
@pytest.mark.parametrize("breaks_at", ["begin", "process", "restore", "finalise"])
def test_an_abort_works_wherever_vllm_raised(
    world: World, breaks_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    push(world.sink(), world.tensors(0))
    before = world.live(), world.outputs(), world.addresses()
    tensors = world.tensors(1)
    sink = world.sink(mode=PlanMode.OFF)
    name = {
        "begin": "restore_layer_on_meta",
        "process": "materialize_layer",
        "restore": "_copy_and_restore_kernel_tensors",
        "finalise": "_finalize_attention_layer",
    }[breaks_at]
    original = getattr(layerwise, name)
    calls: list[Any] = []

    def breaking(*args: Any) -> Any:
        result = original(*args)
        # The dry run begins a reload too, but is over before anything is loaded.
        if sink.has_begun:
            calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("vLLM broke")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(layerwise, name, breaking)
        with pytest.raises((LoadError, RuntimeError), match="vLLM broke"):
            run(sink, tensors, slot_size_bytes=20_000)
        state = sink.abort()

    assert world.addresses() == before[2]
    assert state is (EngineState.UNCHANGED if breaks_at == "begin" else EngineState.TORN)
    if state is EngineState.UNCHANGED:
        assert (world.live(), world.outputs()) == before[:2]
    for seed in (0, 1):
        push(world.sink(), world.tensors(seed))
        world.holds(seed)


@pytest.mark.parametrize("world", ["qwen2", "glm4_moe"], indirect=True)
def test_a_bias_that_was_written_straight_into_the_model_is_restored_by_an_abort(
    world: World,
) -> None:
    push(world.sink(), world.tensors(0))
    before = world.live(), world.outputs()
    old_biases = _biases(world)
    tensors = {name: tensor for name, tensor in world.tensors(1).items() if "bias" in name}
    sink = world.sink()

    sink.open(None)
    load_all(sink, tensors, slot_size_bytes=1 << 20)
    during = _biases(world)
    state = sink.abort()

    assert during.keys() == old_biases.keys() != set()
    assert all(during[name] != old for name, old in old_biases.items())
    assert state is EngineState.UNCHANGED
    assert (world.live(), world.outputs()) == before
    # A wrapper left on a live tensor would hold on to the buckets of this update.
    assert _wrapped_loaders(world) == []


def _biases(world: World) -> dict[str, bytes]:
    return {
        name: engines.tensor_bytes(parameter)
        for name, parameter in world.model.named_parameters()
        if name.endswith("bias")
    }


def _wrapped_loaders(world: World) -> list[str]:
    return [
        name
        for name, parameter in world.model.named_parameters()
        if getattr(getattr(parameter, "weight_loader", None), "__name__", "")
        == "online_process_loader"
    ]


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_reload_that_another_left_open_is_put_back_first(world: World) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    push(world.sink(), world.tensors(0))
    layerwise.initialize_layerwise_reload(world.model)
    with torch.no_grad():
        world.model.load_weights([("model.norm.weight", torch.ones(64))])  # type: ignore[operator]
        world.model.load_weights(  # type: ignore[operator]
            [("model.layers.0.self_attn.q_proj.weight", torch.ones(160, 64))]
        )

    report = push(world.sink(), world.tensors(1))

    assert "the rest of another reload" in report.notes[0]
    world.holds(1)


# --- partial updates, deviations, memory --------------------------------------


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_partial_names_what_may_keep_its_value(world: World, declared: bool) -> None:
    push(world.sink(), world.tensors(0))
    expected = {**world.tensors(0), "model.norm.weight": world.tensors(1)["model.norm.weight"]}
    one = {"model.norm.weight": expected["model.norm.weight"]}

    with pytest.raises(MissingTensorError):
        push(world.sink("model.layers.*"), one)
    push(world.sink("model.layers.*", "model.embed*", "lm_head.*"), one, declared=declared)
    after = world.live(), world.outputs()
    push(world.sink(), expected)

    assert (world.live(), world.outputs()) == after


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_a_pattern_that_names_nothing_is_a_note(world: World, declared: bool) -> None:
    patterns = ("model.layers.*", "model.nrom.*", "lm_haed.*")

    report = push(world.sink(*patterns), world.tensors(1), declared=declared)

    note = "partial names 'model.nrom.*', 'lm_haed.*', which matches no parameter that this"
    assert any(one.startswith(note) for one in report.notes)
    assert not any("partial" in one for one in push(world.sink(), world.tensors(0)).notes)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_a_module_in_part_is_an_error_even_where_partial_names_it(
    world: World, declared: bool
) -> None:
    push(world.sink(), world.tensors(0))
    name = "model.layers.0.self_attn.q_proj.weight"
    sink = world.sink("*")

    with pytest.raises(MissingTensorError, match=r"weight would get 10240/20480") as caught:
        run(sink, {name: torch.ones(160, 64)}, declared=declared)
    state = sink.abort()

    assert name in str(caught.value)
    assert state is EngineState.UNCHANGED
    world.holds(0)


@pytest.mark.parametrize("world", ["glm4_moe"], indirect=True)
def test_a_router_bias_may_stay_where_partial_names_it(world: World) -> None:
    push(world.sink(), world.tensors(0))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = world.tensors(1)
    old = world.tensors(0)[bias]
    del tensors[bias]

    for declared in (True, False):
        with pytest.raises(MissingTensorError, match="e_score_correction_bias"):
            push(world.sink(), tensors, declared=declared)
    push(world.sink("*.e_score_correction_bias"), tensors)
    after = world.live(), world.outputs()
    push(world.sink(), {**tensors, bias: old})

    assert (world.live(), world.outputs()) == after


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_stream_may_leave_its_manifest(world: World) -> None:
    push(world.sink(), world.tensors(0))
    tensors = world.tensors(1)
    metas = metas_of(tensors)
    sink = world.sink()

    sink.open(Manifest(metas))
    items = list(tensors.items())
    load_all(sink, items[:5], slot_size_bytes=20_000)
    sink.deviate(5)
    load_all(sink, items[:4:-1], slot_size_bytes=20_000, first=5)
    sink.prepare()
    sink.commit()

    world.holds(1)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_stream_that_left_its_manifest_is_checked_at_the_end(world: World) -> None:
    tensors = world.tensors(1)
    metas = metas_of(tensors)
    sink = world.sink()

    sink.open(Manifest(metas))
    items = list(tensors.items())
    load_all(sink, items[:5], slot_size_bytes=20_000)
    sink.deviate(5)
    load_all(sink, items[5:-1], slot_size_bytes=20_000, first=5)

    with pytest.raises(MissingTensorError, match=items[-1][0]):
        sink.prepare()
    assert sink.abort() is EngineState.TORN
    push(world.sink(), world.tensors(0))


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_an_empty_update_is_refused(world: World) -> None:
    before = world.live()

    for declared in (True, False):
        with pytest.raises(MissingTensorError, match="would get no value"):
            push(world.sink(), {}, declared=declared)

    assert world.live() == before


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_loader_that_does_nothing_is_not_taken_for_success(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}

    monkeypatch.setattr(world.model, "load_weights", nothing, raising=False)

    for declared in (True, False):
        with pytest.raises(UnknownTensorError, match="would drop"):
            push(world.sink(), world.tensors(1), declared=declared)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_a_dry_run_is_kept_until_the_model_changes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_bucketsync.worker import weights

    runs: list[Manifest] = []

    def counted(worker: Any, manifest: Manifest, *, partial: Sequence[str]) -> DryRunResult:
        runs.append(manifest)
        return dry_run(worker, manifest, partial=partial)

    monkeypatch.setattr(weights, "dry_run", counted)
    memory = WeightMemory()

    for seed in (0, 1, 0):
        push(world.sink(memory=memory), world.tensors(seed))
        world.holds(seed)
    assert len(runs) == 1

    norm: Any = world.model.get_submodule("model.norm")
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    push(world.sink(memory=memory), world.tensors(1))
    assert len(runs) == 2
    world.holds(1)
    push(world.sink("lm_head.*", memory=memory), world.tensors(1))
    assert len(runs) == 3
    memory.forget()
    push(world.sink(memory=memory), world.tensors(1))
    assert len(runs) == 4
