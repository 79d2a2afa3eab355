"""An update by plan is, to the last bit, what vLLM's own loaders make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import engines, tiny_models
from support.pushes import Warm, load_all, metas_of, push, run
from support.worlds import Truth, World

# After the engines, whose environment vLLM reads when it is imported.
import torch  # isort: skip
from vllm.model_executor.layers import utils as layer_utils

from vllm_bucketsync.config import PlanMode
from vllm_bucketsync.errors import DuplicateTensorError, EngineState, LoadError, PlanError
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.worker import compat, layerwise, replay, sleeps, weights
from vllm_bucketsync.worker.dryrun import dry_run
from vllm_bucketsync.worker.memory import WeightMemory

every_kind = pytest.mark.parametrize("world", tiny_models.KINDS, indirect=True)
PLAIN_KINDS = ["qwen3", "qwen2"]


@pytest.fixture(scope="module")
def plain(
    request: pytest.FixtureRequest, checkpoint: Callable[[str, int], Path]
) -> Iterator[World]:
    """An engine that leaves linear layers in their checkpoint's layout, as a GPU does."""
    kind = request.param

    def leave_alone(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    names = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    lines = {(name, "cpu", None) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", leave_alone)
        patch.setattr(compat, "DIRECT_KINDS", compat.DIRECT_KINDS | lines)
        truths = {}
        for seed in (1, 0):
            with engines.running_engine(checkpoint(kind, seed)) as llm:
                live = engines.live_tensors(engines.worker_of(llm))
                truths[seed] = Truth(live, engines.greedy(llm))
        with engines.running_engine(checkpoint(kind, 0)) as llm:
            yield World(kind, llm, engines.worker_of(llm), truths)


# --- what is warm is exact ----------------------------------------------------


@every_kind
@pytest.mark.parametrize("slot_size_bytes", [512, 20_224])
def test_warm_updates_through_the_same_slots_are_exact(world: World, slot_size_bytes: int) -> None:
    memory, warm = WeightMemory(), Warm(slot_size_bytes=slot_size_bytes)
    addresses = world.addresses()

    for turn, seed in enumerate((1, 0, 1, 0)):
        report = warm.push(world.sink(memory=memory), world.tensors(seed))

        world.holds(seed)
        assert report.cloned_bytes == report.split.num_loaded == 0
        # Norms are in place once it was seen that they may be; linear layers are packed.
        assert (report.split.num_direct > 0) == (turn > 0)
        assert report.split.num_processed > 0
    assert world.addresses() == addresses


@pytest.mark.parametrize("plain", PLAIN_KINDS, indirect=True)
@pytest.mark.parametrize("slot_size_bytes", [512, 20_224, 1 << 23])
def test_plain_layouts_are_written_in_place_from_the_second_update_on(
    plain: World, slot_size_bytes: int
) -> None:
    memory, warm = WeightMemory(), Warm(slot_size_bytes=slot_size_bytes)
    total_bytes = sum(tensor.nbytes for tensor in plain.tensors(0).values())
    made: list[Any] = []

    for turn, seed in enumerate((1, 0, 1, 0)):
        report = warm.push(plain.sink(memory=memory), plain.tensors(seed))

        plain.holds(seed)
        assert report.split.direct_bytes == (total_bytes if turn else 0)
        made.append([bucket.prepared for bucket in warm.buckets])
    # Made ready for the first, anew once modules are known as direct, and then no more.
    assert all(one is other for one, other in zip(made[1], made[3], strict=True))


@pytest.mark.parametrize("plain", ["qwen3"], indirect=True)
def test_a_warm_direct_update_asks_nothing_of_vllm_and_casts_as_it_does(
    plain: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, warm = WeightMemory(), Warm()
    narrow = {n: t.to(torch.bfloat16) for n, t in plain.tensors(1).items()}
    push(plain.sink(mode=PlanMode.OFF), narrow)
    expected = plain.live()
    warm.push(plain.sink(memory=memory), narrow)
    warm.push(plain.sink(memory=memory), {n: t * 0 for n, t in narrow.items()})

    with monkeypatch.context() as patch:
        patch.setattr(plain.model, "load_weights", None, raising=False)
        patch.setattr(layerwise, "process", None)
        warm.push(plain.sink(memory=memory), narrow)

    assert plain.live() == expected
    push(plain.sink(), plain.tensors(0))


@pytest.mark.parametrize("world", ["qwen3", "qwen3_moe"], indirect=True)
@pytest.mark.parametrize("slot_size_bytes", [512, 1 << 23])
def test_the_scratch_of_one_module_lives_at_a_time(
    world: World, slot_size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most = [0], [0]
    scratch_of, process = layerwise.scratch_of, layerwise.process

    def made(module: torch.nn.Module) -> Any:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return scratch_of(module)

    def done(module: torch.nn.Module, scratch: Any) -> None:
        process(module, scratch)
        alive[0] -= 1

    monkeypatch.setattr(layerwise, "scratch_of", made)
    monkeypatch.setattr(layerwise, "process", done)
    push(world.sink(), world.tensors(1), slot_size_bytes=slot_size_bytes)

    assert (alive, most) == ([0], [1])
    world.holds(1)


@every_kind
def test_plans_can_be_turned_off_and_can_be_checked(world: World) -> None:
    memory = WeightMemory()
    for mode, seed in ((PlanMode.OFF, 1), (PlanMode.CHECK, 0), (PlanMode.CHECK, 1)):
        report = push(world.sink(memory=memory, mode=mode), world.tensors(seed))

        world.holds(seed)
        assert (report.split.num_loaded > 0) == (mode is PlanMode.OFF)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_plan_that_is_wrong_is_found_by_a_check(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = WeightMemory()
    push(world.sink(memory=memory), world.tensors(0))
    ran: Callable[..., Any] = replay._parts

    def swapped(piece: Any, copies: Any) -> Iterator[Any]:
        for copy, source, box in ran(piece, copies):
            wrong = piece.meta.name == name
            yield copy, source.flip(0) if wrong else source, box

    monkeypatch.setattr(replay, "_parts", swapped)
    with pytest.raises(PlanError, match="report it") as caught:
        push(world.sink(memory=memory, mode=PlanMode.CHECK), world.tensors(1))

    assert name.rpartition(".")[0] in str(caught.value.name)
    # The loaders have the last word.
    world.holds(1)


# --- what is told of a failure ------------------------------------------------


@pytest.mark.parametrize("plain", PLAIN_KINDS, indirect=True)
@pytest.mark.parametrize("num_loaded", [0, 1, 4])
def test_a_worker_is_torn_from_its_first_byte_on_and_not_before(
    plain: World, num_loaded: int
) -> None:
    memory = WeightMemory()
    for seed in (1, 0):
        push(plain.sink(memory=memory), plain.tensors(seed))
    before = plain.live(), plain.outputs()
    sink = plain.sink(memory=memory)

    sink.open(Manifest(metas_of(plain.tensors(1))))
    load_all(sink, list(plain.tensors(1).items())[:num_loaded], slot_size_bytes=512)
    state = sink.abort()

    is_same = (plain.live(), plain.outputs()) == before
    assert state is (EngineState.TORN if num_loaded else EngineState.UNCHANGED)
    assert is_same == (num_loaded == 0)
    push(plain.sink(memory=memory), plain.tensors(1))
    plain.holds(1)
    push(plain.sink(memory=memory), plain.tensors(0))


@pytest.mark.parametrize("world", ["qwen3_moe", "llama"], indirect=True)
def test_a_module_whose_scratch_is_half_full_is_as_it_was_after_an_abort(world: World) -> None:
    push(world.sink(), world.tensors(0))
    before = world.live(), world.addresses(), world.outputs()
    tensors = world.tensors(1)
    some = {name: tensors[name] for name in tensors if "layers.1." in name and "q_proj" in name}
    sink = world.sink()

    sink.open(Manifest(metas_of(some | tensors)))
    load_all(sink, some, slot_size_bytes=512)

    assert sink.abort() is EngineState.UNCHANGED
    assert (world.live(), world.addresses(), world.outputs()) == before


@pytest.mark.parametrize("world", ["qwen3_tied", "glm4_moe"], indirect=True)
@pytest.mark.parametrize(
    "breaks_at",
    ["restore_layer_on_meta", "_layerwise_process", "_copy_and_restore_kernel_tensors", "finish"],
)
@pytest.mark.parametrize("num_calls", [1, 9])
def test_an_abort_works_wherever_processing_by_plan_breaks(
    world: World, breaks_at: str, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.reload import layerwise as vllms

    push(world.sink(), world.tensors(0))
    before = world.live(), world.outputs(), world.addresses()
    owner, name = (layerwise, "finish") if breaks_at == "finish" else (vllms, breaks_at)
    original, sink, calls = getattr(owner, name), world.sink(), []

    def breaking(*args: Any, **options: Any) -> Any:
        # The dry run does some of it too, and is over before anything is loaded.
        calls.extend([args] if sink.has_begun else [])
        if len(calls) == num_calls or (calls and breaks_at == "finish"):
            raise RuntimeError("vLLM broke")
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaking)
        with pytest.raises(RuntimeError, match="vLLM broke"):
            run(sink, world.tensors(1), slot_size_bytes=20_000)
        state = sink.abort()

    is_first = (breaks_at, num_calls) == ("restore_layer_on_meta", 1)
    assert state is (EngineState.UNCHANGED if is_first else EngineState.TORN)
    assert world.addresses() == before[2]
    if is_first:
        assert (world.live(), world.outputs()) == before[:2]
    for seed in (0, 1):
        push(world.sink(), world.tensors(seed))
        world.holds(seed)


# --- streams that leave their manifest ----------------------------------------


@pytest.mark.parametrize("world", ["qwen3", "qwen2", "glm4_moe"], indirect=True)
@pytest.mark.parametrize("slot_size_bytes", [512, 20_224])
def test_a_stream_goes_on_through_the_loaders_wherever_it_leaves_the_plan(
    world: World, slot_size_bytes: int
) -> None:
    memory = WeightMemory()
    push(world.sink(memory=memory), world.tensors(0))
    for left_at in (0, 1, 2, 4, 7, 12, 15):
        seed = 1 + left_at & 1
        items = list(world.tensors(seed & 1).items())
        sink = world.sink(memory=memory, is_promise=False)

        sink.open(Manifest(metas_of(items)))
        load_all(sink, items[:left_at], slot_size_bytes=slot_size_bytes)
        sink.deviate(left_at)
        rest = items[: left_at - 1 if left_at else None : -1]
        load_all(sink, rest, slot_size_bytes=slot_size_bytes, first=left_at)
        sink.prepare()
        report = sink.commit()
        sink.release()

        world.holds(seed & 1)
        assert report.split.num_loaded > 0


@pytest.mark.parametrize("plain", PLAIN_KINDS, indirect=True)
@pytest.mark.parametrize("left_at", [3, 5, 6, 11])
def test_a_direct_module_that_has_got_a_part_is_handed_over_as_well(
    plain: World, left_at: int
) -> None:
    memory = WeightMemory()
    for seed in (1, 0):
        push(plain.sink(memory=memory), plain.tensors(seed))
    items = list(plain.tensors(1).items())
    sink = plain.sink(memory=memory, is_promise=False)

    sink.open(Manifest(metas_of(items)))
    load_all(sink, items[:left_at], slot_size_bytes=20_224)
    sink.deviate(left_at)
    load_all(sink, items[: left_at - 1 : -1], slot_size_bytes=20_224, first=left_at)
    sink.prepare()
    sink.commit()

    plain.holds(1)
    push(plain.sink(memory=memory), plain.tensors(0))


# --- what a plan may not do ---------------------------------------------------


def _with_loader(world: World, name: str, loader: Any, patch: pytest.MonkeyPatch) -> None:
    """Give a parameter another loader, also while it is on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    path, _, leaf = name.rpartition(".")
    module = world.model.get_submodule(path)
    patch.setattr(getattr(module, leaf), "weight_loader", loader, raising=False)
    kept = LAYERWISE_INFO[module].restore_metadata[0][leaf]
    patch.setattr(kept, "weight_loader", loader, raising=False)


def _adds_one(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight + 1)


def _adds_one_afterwards(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data.copy_(param.data + 1)


def _adds_one_in_place(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data.add_(1)


def _clears_first(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.fill_(7)
    param.data[1:].copy_(loaded_weight[1:])


_kept_by_a_loader: list[torch.Tensor] = []


def _keeps(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    _kept_by_a_loader.append(loaded_weight)
    param.data.copy_(loaded_weight)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    "loader", [_adds_one, _adds_one_afterwards, _adds_one_in_place, _clears_first, _keeps]
)
def test_a_loader_that_does_more_than_to_copy_is_run_each_time(
    world: World, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.input_layernorm.weight"
    changed: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
        _adds_one: lambda t: t + 1,
        _adds_one_afterwards: lambda t: t + 1,
        _adds_one_in_place: lambda t: t + 1,
        _clears_first: lambda t: torch.cat([torch.tensor([7.0]), t[1:]]),
        _keeps: lambda t: t,
    }
    memory = WeightMemory()
    with monkeypatch.context() as patch:
        _with_loader(world, name, loader, patch)
        for seed in (0, 1, 0):
            report = push(world.sink(memory=memory), world.tensors(seed))

            live = world.model.get_parameter(name)
            assert torch.equal(live, changed[loader](world.tensors(seed)[name]))
            assert report.split.num_loaded == 1
            assert report.split.num_direct + report.split.num_processed == 18
            _kept_by_a_loader.clear()
    push(world.sink(), world.tensors(1))
    world.holds(1)


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
@pytest.mark.parametrize("slot_size_bytes", [512, 25_000])
def test_a_loader_that_waits_for_all_parts_of_its_module_gets_none_of_a_later_bucket(
    world: World, slot_size_bytes: int, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: dict[int, torch.Tensor] = {}

    def load(param: torch.Tensor, loaded_weight: torch.Tensor, part: int) -> None:
        waiting[part] = loaded_weight
        if len(waiting) == 2:
            for rows, one in zip(param.data.chunk(2), (0, 1), strict=True):
                rows.copy_(waiting.pop(one))

    # Each half has 24,576 bytes, so that they come in buckets of their own.
    _with_loader(world, "model.layers.1.mlp.gate_up_proj.weight", load, monkeypatch)
    for seed in (1, 0):
        push(world.sink(), world.tensors(seed), slot_size_bytes=slot_size_bytes, declared=declared)
        world.holds(seed)
    assert waiting == {}


@pytest.mark.parametrize("world", ["qwen3_moe"], indirect=True)
def test_experts_that_a_partial_update_leaves_out_can_still_be_used(world: World) -> None:
    push(world.sink(), world.tensors(0))
    only = {"model.norm.weight": world.tensors(1)["model.norm.weight"]}

    for mode in PlanMode:
        push(world.sink("*", mode=mode), only)
        mixed = world.outputs()
        push(world.sink(), {**world.tensors(0), **only})
        assert world.outputs() == mixed
    push(world.sink(), world.tensors(0))
    world.holds(0)


@pytest.mark.parametrize("world", ["glm4_moe"], indirect=True)
@pytest.mark.parametrize("mode", PlanMode)
def test_weights_stay_where_only_the_live_tensors_of_their_module_come(
    world: World, mode: PlanMode
) -> None:
    gate: Any = world.model.get_submodule("model.layers.1.mlp.gate")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    memory = WeightMemory()
    for seed in (1, 0):
        push(world.sink(), world.tensors(0))
        before = gate.weight.clone()
        only = {name: world.tensors(seed)[name]}

        push(world.sink("*", memory=memory, mode=mode), only)

        assert torch.equal(gate.weight, before)
        assert torch.equal(gate.e_score_correction_bias, only[name])
        mixed = world.outputs()
        push(world.sink(mode=PlanMode.OFF), {**world.tensors(0), **only})
        assert world.outputs() == mixed


# --- for how long a plan holds ------------------------------------------------


def _replace_parameter(world: World) -> None:
    norm: Any = world.model.get_submodule("model.norm")
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)


def _move_data(world: World) -> None:
    norm: Any = world.model.get_submodule("model.norm")
    norm.weight.data = norm.weight.data.clone()


def _replace_quant_method(world: World) -> None:
    head: Any = world.model.get_submodule("lm_head")
    head.quant_method = type(head.quant_method)()


def _replace_kernel(world: World) -> None:
    head: Any = world.model.get_submodule("lm_head")
    head.quant_method.moe_kernel = object()


def _sleep_deeply(world: World) -> None:
    world.worker.sleep(level=2)


@pytest.mark.parametrize("plain", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [_replace_parameter, _move_data, _replace_quant_method, _replace_kernel, _sleep_deeply],
)
def test_a_plan_is_dropped_when_what_it_was_made_with_changes(
    plain: World, change: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps.watch(plain.worker)
    memory, warm = WeightMemory(), Warm()
    for seed in (0, 1):
        warm.push(plain.sink(memory=memory), plain.tensors(seed))
    dry_runs: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        dry_runs.append(args)
        return dry_run(*args, **options)

    monkeypatch.setattr(weights, "dry_run", counted)
    warm.push(plain.sink(memory=memory), plain.tensors(0))
    assert dry_runs == []

    change(plain)
    report = warm.push(plain.sink(memory=memory), plain.tensors(1))

    assert len(dry_runs) == 1
    assert report.split.num_direct == 0
    plain.holds(1)
    warm.push(plain.sink(memory=memory), plain.tensors(0))
    plain.holds(0)


@pytest.mark.parametrize("plain", ["qwen3"], indirect=True)
def test_a_plan_is_dropped_by_an_update_that_was_aborted(plain: World) -> None:
    memory = WeightMemory()
    for seed in (0, 1):
        push(plain.sink(memory=memory), plain.tensors(seed))
    sink = plain.sink(memory=memory)
    sink.open(Manifest(metas_of(plain.tensors(0))))
    load_all(sink, list(plain.tensors(0).items())[:1], slot_size_bytes=1 << 20)
    sink.abort()

    report = push(plain.sink(memory=memory), plain.tensors(0))

    assert report.split.num_direct == 0
    plain.holds(0)


@pytest.mark.parametrize("world", ["llama"], indirect=True)
def test_a_vllm_without_the_parts_that_plans_need_loads_through_its_loaders(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compat.can_plan()
    monkeypatch.setattr(compat, "_NEEDED_TO_PLAN", ("restore_layer_on_meta", "no such part"))

    report = push(world.sink(), world.tensors(1))

    assert not compat.can_plan()
    assert (report.split.num_direct, report.split.num_processed) == (0, 0)
    world.holds(1)


@pytest.mark.parametrize("world", ["llama"], indirect=True)
def test_a_source_that_reaches_two_modules_goes_through_the_loaders(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_weights: Any = world.model.load_weights
    pair = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"

    def doubling(given: Any) -> Any:
        def doubled() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in given:
                if name != pair[1]:
                    yield name, tensor
                if name == pair[0]:
                    yield pair[1], tensor

        return load_weights(doubled())

    tensors = {name: one for name, one in world.tensors(1).items() if name != pair[1]}
    with monkeypatch.context() as patch:
        patch.setattr(world.model, "load_weights", doubling, raising=False)
        report = push(world.sink(), tensors)

    assert report.split.num_loaded == 2
    push(world.sink(), {**tensors, pair[1]: tensors[pair[0]]}, slot_size_bytes=512)
    with pytest.raises(LoadError):
        push(world.sink(), tensors)


@pytest.mark.parametrize("world", ["glm4_moe"], indirect=True)
def test_what_came_by_plan_is_neither_missed_nor_taken_twice(world: World) -> None:
    memory = WeightMemory()
    push(world.sink(memory=memory), world.tensors(0))
    items = sorted(world.tensors(1).items(), key=lambda item: item[0] == "lm_head.weight")
    left_at = len(items) - 1
    assert any("e_score_correction_bias" in name for name, _ in items[:left_at])

    for repeated in (False, True):
        sink = world.sink(memory=memory, is_promise=False)
        sink.open(Manifest(metas_of(items)))
        load_all(sink, items[:left_at], slot_size_bytes=20_224)
        sink.deviate(left_at)
        rest = [items[0], *items[left_at:]] if repeated else items[left_at:]
        if repeated:
            with pytest.raises(DuplicateTensorError, match="comes twice"):
                load_all(sink, rest, slot_size_bytes=20_224, first=left_at)
            assert sink.abort() is EngineState.TORN
        else:
            load_all(sink, rest, slot_size_bytes=20_224, first=left_at)
            sink.prepare()
            sink.commit()
            world.holds(1)
    push(world.sink(), world.tensors(0))
    world.holds(0)
