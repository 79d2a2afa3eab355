"""Each fault of vLLM that is worked around here is still there, and is worked around."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.pushes import load_all, push
from support.worlds import World

from vllm_bucketsync.errors import (
    EngineAsleepError,
    EngineBusyError,
    EngineState,
    UnsupportedError,
)
from vllm_bucketsync.worker import caches, compat, guards, layerwise

moe = pytest.mark.parametrize("world", ["qwen3_moe"], indirect=True)
tied = pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)


# --- faults of the CPU engine's own reload ------------------------------------


@moe
def test_without_new_kernels_the_experts_would_be_wrong_where_there_are_kernels(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(world.sink(), world.tensors(0))
    world.holds(0)

    with monkeypatch.context() as patch:
        patch.setattr(compat, "take_moe_kernels", lambda model: [])
        push(world.sink(), world.tensors(0))
    # vLLM 0.27 computes experts on the CPU without a kernel.
    assert (world.outputs() != world.truths[0].outputs) is any(_have_kernels(world))

    push(world.sink(), world.tensors(0))
    world.holds(0)


@tied
def test_without_packing_again_a_tied_head_of_its_own_would_give_old_logits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(world.sink(), world.tensors(0))
    world.holds(0)

    with monkeypatch.context() as patch:
        patch.setattr(compat, "rebuild_tied_heads", lambda model: None)
        push(world.sink(), world.tensors(1))
    assert world.live() == world.truths[1].live
    # In vLLM 0.27 the head is the embedding itself, and is packed with it.
    head, embedding = map(world.model.get_submodule, ("lm_head", "model.embed_tokens"))
    is_of_its_own = head is not embedding
    assert (world.outputs() != world.truths[1].outputs) is is_of_its_own

    push(world.sink(), world.tensors(1))
    world.holds(1)


def _kernels(world: World) -> list[Any]:
    methods = {id(m.quant_method): m.quant_method for m in _with_kernels(world)}
    return [method.moe_kernel for method in methods.values()]


def _have_kernels(world: World) -> list[bool]:
    return [kernel is not None for kernel in _kernels(world)]


def _with_kernels(world: World) -> list[Any]:
    modules: list[Any] = list(world.model.modules())
    return [m for m in modules if hasattr(getattr(m, "quant_method", None), "moe_kernel")]


@moe
def test_an_abort_before_any_expert_was_replaced_gives_the_kernels_back(world: World) -> None:
    before = _kernels(world), world.outputs()
    some = {name: tensor for name, tensor in world.tensors(1).items() if ".q_proj." in name}
    sink = world.sink()

    sink.open(None)
    load_all(sink, some, slot_size_bytes=1 << 20)
    during = _kernels(world)
    state = sink.abort()

    assert len(before[0]) == 2
    assert during == [None, None]
    assert state is EngineState.UNCHANGED
    assert all(one is two for one, two in zip(_kernels(world), before[0], strict=True))
    assert world.outputs() == before[1]


@moe
def test_after_a_torn_update_every_expert_that_had_a_kernel_has_one(world: World) -> None:
    before = _have_kernels(world)
    tensors = world.tensors(1)
    first_layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.")}
    sink = world.sink()

    sink.open(None)
    load_all(sink, first_layer, slot_size_bytes=1 << 20)
    state = sink.abort()

    assert state is EngineState.TORN
    assert _have_kernels(world) == before
    world.outputs()
    push(world.sink(), world.tensors(0))
    world.holds(0)


@moe
def test_a_module_that_broke_while_it_was_packed_leaves_an_engine_that_can_be_mended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(layer: Any) -> None:
        raise RuntimeError("packing broke")

    before = _have_kernels(world)
    method = _with_kernels(world)[0].quant_method
    sink = world.sink()
    sink.open(None)

    with monkeypatch.context() as patch:
        patch.setattr(method, "process_weights_after_loading", breaking)
        with pytest.raises(Exception, match="packing broke"):
            load_all(sink, world.tensors(1), slot_size_bytes=1 << 20)
        state = sink.abort()

    assert state is EngineState.TORN
    assert _have_kernels(world) == before
    world.outputs()
    push(world.sink(), world.tensors(0))
    world.holds(0)


# --- refusals -----------------------------------------------------------------


class _Worker:
    """What the guards look at, of vLLM's worker."""

    def __init__(
        self, *, enable_eplb: bool = False, config: dict[str, Any] | None = None, **attributes: Any
    ) -> None:
        parallel = SimpleNamespace(enable_eplb=enable_eplb)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, **(config or {}))
        vars(self).update(attributes)


def _allocator(*allocations: tuple[str, bool]) -> ModuleType:
    data = {
        number: SimpleNamespace(tag=tag, is_asleep=is_asleep)
        for number, (tag, is_asleep) in enumerate(allocations)
    }
    module = ModuleType("cumem")
    vars(module)["CuMemAllocator"] = SimpleNamespace(instance=SimpleNamespace(pointer_to_data=data))
    return module


def test_an_ordinary_engine_is_not_refused() -> None:
    guards.refuse_unfit(_Worker())


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (_Worker(enable_eplb=True), UnsupportedError),
        (_Worker(_weight_update_active=True), EngineBusyError),
        (
            _Worker(_sleep_mode_backend=SimpleNamespace(state=lambda: "SUSPENDED")),
            EngineAsleepError,
        ),
    ],
)
def test_an_engine_that_cannot_take_weights_now_is_refused(
    worker: _Worker, expected: type[Exception]
) -> None:
    with pytest.raises(expected, match="nothing was written"):
        guards.refuse_unfit(worker)


@pytest.mark.parametrize("setting", ["cpu_offload_gb", "offload_group_size"])
def test_weights_on_the_host_are_refused_by_the_setting_that_put_them_there(setting: str) -> None:
    from vllm.config import OffloadConfig

    offload = OffloadConfig()
    guards.refuse_unfit(_Worker(config={"offload_config": offload}))
    setattr(offload.uva if setting == "cpu_offload_gb" else offload.prefetch, setting, 1)

    with pytest.raises(UnsupportedError, match=rf"{setting}.*nothing was written.*start it"):
        guards.refuse_unfit(_Worker(config={"offload_config": offload}))


def test_before_there_was_a_setting_for_it_weights_on_the_host_are_refused_as_well() -> None:
    cache = SimpleNamespace(cpu_offload_gb=2)

    with pytest.raises(UnsupportedError, match="cpu_offload_gb"):
        guards.refuse_unfit(_Worker(config={"cache_config": cache}))


@pytest.mark.parametrize("name", sorted(guards.LOADED_ONCE))
def test_weights_that_vllm_cannot_load_again_are_refused(name: str) -> None:
    config = {"model_config": SimpleNamespace(quantization=name)}

    with pytest.raises(UnsupportedError, match=rf"{name}.*nothing was written.*start it"):
        guards.refuse_unfit(_Worker(config=config))


@tied
def test_a_quantisation_that_nobody_compared_is_loaded_and_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push(world.sink(), world.tensors(1)).notes == ()

    monkeypatch.setattr(world.worker.vllm_config.model_config, "quantization", "fancy")
    (note,) = push(world.sink(), world.tensors(0)).notes

    assert "quantised by fancy" in note
    monkeypatch.setattr(world.worker.vllm_config.model_config, "quantization", "fp8")
    assert push(world.sink(), world.tensors(0)).notes == ()


@tied
def test_a_drafter_that_keeps_weights_of_its_own_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = torch.nn.Module()
    draft.embed = world.model.get_submodule("model.embed_tokens")
    monkeypatch.setattr(world.worker.model_runner, "get_draft_model", lambda: draft, raising=False)
    assert push(world.sink(), world.tensors(1)).notes == ()

    draft.own = torch.nn.Linear(2, 2)
    (note,) = push(world.sink(), world.tensors(0)).notes

    assert note.startswith("the engine's drafter keeps 2 tensors of its own as they were")
    monkeypatch.undo()
    assert push(world.sink(), world.tensors(0)).notes == ()


@tied
def test_a_worker_says_whether_vllm_s_own_update_is_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.worker._weight_update_active is False
    monkeypatch.setattr(world.worker, "_weight_update_active", True)
    before = world.live()

    with pytest.raises(EngineBusyError, match=r"nothing was written; call finish_weight_update"):
        push(world.sink(), world.tensors(1))

    assert world.live() == before


def test_sleeping_weights_are_refused_and_a_sleeping_cache_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "vllm.device_allocator.cumem"

    monkeypatch.setitem(sys.modules, name, _allocator(("weights", True), ("kv_cache", True)))
    with pytest.raises(EngineAsleepError, match="wake_up"):
        guards.refuse_unfit(_Worker())

    monkeypatch.setitem(sys.modules, name, _allocator(("weights", False), ("kv_cache", True)))
    backend = SimpleNamespace(state=lambda: "SUSPENDED")
    guards.refuse_unfit(_Worker(_sleep_mode_backend=backend))


def test_a_vllm_without_the_parts_that_are_needed_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.model_loader.reload import layerwise as vllm_layerwise

    monkeypatch.delattr(vllm_layerwise, "LOADING_LAYERS")

    with pytest.raises(UnsupportedError, match="has no LOADING_LAYERS"):
        guards.refuse_unfit(_Worker())


# --- what is skipped rightly, caches, hooks -----------------------------------


@moe
def test_names_that_belong_elsewhere_are_told_from_unknown_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    def why(name: str) -> str | None:
        return compat.why_skipped(world.worker, world.model, name)

    norm = world.model.get_submodule("model")
    hf_config = world.worker.model_config.hf_config
    parallel = world.worker.vllm_config.parallel_config

    assert why("model.layers.0.wrong.weight") is None
    assert why("model.rotary_emb.inv_freq") == "vLLM computes it"
    assert why("model.layers.2.mlp.gate.weight") is None
    monkeypatch.setattr(hf_config, "num_nextn_predict_layers", 1, raising=False)
    assert why("model.layers.2.mlp.gate.weight") == "it belongs to a draft head"
    assert why("model.layers.0.mlp.experts.9.up_proj.weight") is None
    monkeypatch.setattr(parallel, "enable_expert_parallel", True)
    assert why("model.layers.0.mlp.experts.9.up_proj.weight") == "another worker has that expert"
    monkeypatch.setitem(norm._modules, "norm", PPMissingLayer())
    assert why("model.norm.weight") == "another pipeline stage has it"


def _runner(called: list[str], *, adapters: int) -> Any:
    return SimpleNamespace(
        reset_encoder_cache=lambda: called.append("encoder"),
        reset_mm_cache=lambda: called.append("mm"),
        reset_lora_state=lambda: called.append("lora"),
        list_loras=lambda: set(range(adapters)),
    )


@pytest.mark.parametrize(
    ("lora_config", "adapters", "expected", "notes"),
    [
        (None, 0, ["encoder", "mm"], ()),
        ("some", 0, ["encoder", "mm", "lora"], ()),
        ("some", 2, ["encoder", "mm", "lora"], ("2 adapters were dropped with the old weights",)),
    ],
)
def test_caches_of_the_old_weights_are_dropped_and_adapters_where_there_can_be_any(
    lora_config: Any, adapters: int, expected: list[str], notes: tuple[str, ...]
) -> None:
    called: list[str] = []
    worker = SimpleNamespace(
        model_runner=_runner(called, adapters=adapters),
        vllm_config=SimpleNamespace(lora_config=lora_config),
    )

    assert caches.drop_caches(worker) == notes
    assert called == expected


@tied
def test_a_models_own_step_after_loading_runs_once_an_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(
        world.model, "process_weights_after_loading", lambda: called.append(1), raising=False
    )

    push(world.sink(), world.tensors(1))

    assert called == [1]


@tied
def test_attributes_that_loaders_read_survive_the_clone(world: World) -> None:
    reload = layerwise.LayerwiseReload(world.model, world.worker.model_config)
    bucket = torch.ones(160, 64)
    name = "model.layers.0.self_attn.q_proj.weight"

    with compat.engine_context(world.worker.vllm_config):
        reload.begin()
        reload.feed([(name, bucket)])
        reload.keep_out_of({bucket.untyped_storage().data_ptr()})
        kept = [
            value
            for layer in reload.waiting()
            for _, bound in layer.info.loaded_weights
            for value in bound.arguments.values()
            if isinstance(value, torch.Tensor) and not value.is_meta
        ]
        is_torn = reload.abort()

    assert [tensor.shape for tensor in kept] == [bucket.shape]
    assert kept[0].untyped_storage().data_ptr() != bucket.untyped_storage().data_ptr()
    assert kept[0].shard_id == "q"  # type: ignore[attr-defined]
    assert reload.cloned_bytes == bucket.nbytes
    assert not is_torn
