"""Every single change of a model is noticed, and a whole update in between is none.

On a real engine in this process, whose model is put back after every change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# First, because it sets what vLLM reads from the environment when it is imported.
from support import engines, tiny_models  # isort: skip
import torch
from support.pushes import metas_of, push
from torch import nn

from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.worker import sleeps
from vllm_bucketsync.worker.memory import MAX_RESULTS, WeightMemory
from vllm_bucketsync.worker.model_looks import ModelLooks
from vllm_bucketsync.worker.weights import WeightSink

KIND = "qwen3_moe"
NORM, EXPERTS = "model.norm", "model.layers.1.mlp.experts"

Undo = Callable[[], None]
Change = Callable[[nn.Module], Undo]


@pytest.fixture(scope="module")
def worker(checkpoint: Callable[[str, int], Path]) -> Iterator[Any]:
    extension = "vllm_bucketsync.WorkerExtension"
    with engines.running_engine(checkpoint(KIND, 0), worker_extension_cls=extension) as llm:
        yield engines.worker_of(llm)


def model_of(worker: Any) -> nn.Module:
    model: nn.Module = worker.model_runner.get_model()
    return model


def experts_of(model: nn.Module) -> nn.Module:
    """Return the module of a layer that has the expert map."""
    found: list[nn.Module] = [
        module
        for path, module in model.named_modules()
        if path.startswith(EXPERTS) and "_expert_map" in module._buffers
    ]
    assert len(found) == 1
    return found[0]


def with_entry(table: dict[str, Any], name: str, value: Any) -> Undo:
    """Put one entry into a module's table, and return what puts it back."""
    before = dict(table)
    table[name] = value

    def undo() -> None:
        table.clear()
        table.update(before)

    return undo


def with_data(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Undo:
    """Let a parameter have other data, and return what puts its own back."""
    weight = model.get_parameter(f"{NORM}.weight")
    data = weight.data
    weight.data = make(data)

    def undo() -> None:
        weight.data = data

    return undo


def replace_parameter(model: nn.Module) -> Undo:
    norm = model.get_submodule(NORM)
    same = nn.Parameter(model.get_parameter(f"{NORM}.weight").data, requires_grad=False)
    return with_entry(norm._parameters, "weight", same)


def add_parameter(model: nn.Module) -> Undo:
    return with_entry(model.get_submodule(NORM)._parameters, "scale", nn.Parameter(torch.ones(1)))


def take_parameter_away(model: nn.Module) -> Undo:
    table: Any = model.get_submodule(NORM)._parameters
    undo = with_entry(table, "weight", None)
    del table["weight"]
    return undo


def rename_parameter(model: nn.Module) -> Undo:
    table: Any = model.get_submodule(NORM)._parameters
    undo = with_entry(table, "gain", table["weight"])
    del table["weight"]
    return undo


def swap_parameters(model: nn.Module) -> Undo:
    first, second = (
        model.get_submodule(f"model.layers.{layer}.input_layernorm")._parameters for layer in (0, 1)
    )
    first["weight"], second["weight"] = second["weight"], first["weight"]

    def undo() -> None:
        first["weight"], second["weight"] = second["weight"], first["weight"]

    return undo


def replace_buffer(model: nn.Module) -> Undo:
    module, name, buffer = some_buffer(model)
    return with_entry(module._buffers, name, buffer.clone())


def move_buffer(model: nn.Module) -> Undo:
    _, _, buffer = some_buffer(model)
    data = buffer.data
    buffer.data = data.clone()

    def undo() -> None:
        buffer.data = data

    return undo


def add_buffer(model: nn.Module) -> Undo:
    return with_entry(model.get_submodule(NORM)._buffers, "scale", torch.ones(1))


def take_buffer_away(model: nn.Module) -> Undo:
    module, name, buffer = some_buffer(model)
    undo = with_entry(module._buffers, name, buffer)
    del module._buffers[name]
    return undo


def some_buffer(model: nn.Module) -> tuple[nn.Module, str, torch.Tensor]:
    return next(
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    )


def set_expert_map(model: nn.Module) -> Undo:
    return with_entry(experts_of(model)._buffers, "_expert_map", torch.zeros(4, dtype=torch.int32))


def replace_module(model: nn.Module) -> Undo:
    norm = model.get_submodule(NORM)
    like = type(norm).__new__(type(norm))
    like.__dict__.update(norm.__dict__)
    return with_entry(model.get_submodule("model")._modules, "norm", like)


def add_module(model: nn.Module) -> Undo:
    return with_entry(model.get_submodule(NORM)._modules, "inner", nn.Identity())


def take_module_away(model: nn.Module) -> Undo:
    table = model.get_submodule("model")._modules
    undo = with_entry(table, "norm", None)
    table["norm"] = None
    return undo


def replace_quant_method(model: nn.Module) -> Undo:
    head: Any = model.get_submodule("lm_head")
    before, head.quant_method = head.quant_method, type(head.quant_method)()

    def undo() -> None:
        head.quant_method = before

    return undo


def give_quant_method(model: nn.Module) -> Undo:
    norm: Any = model.get_submodule(NORM)
    assert "quant_method" not in vars(norm)
    norm.quant_method = object()

    def undo() -> None:
        del norm.quant_method

    return undo


CHANGES: dict[str, Change] = {
    "a parameter is another object": replace_parameter,
    "a parameter's data was moved": lambda model: with_data(model, torch.clone),
    "a parameter's shape": lambda model: with_data(model, lambda data: data.view(2, -1)),
    "a parameter's length": lambda model: with_data(model, lambda data: data[:-1]),
    "a parameter's strides": lambda model: with_data(
        model, lambda data: data.as_strided(data.shape, (0,))
    ),
    "a parameter's dtype": lambda model: with_data(
        model, lambda data: data.view(torch.bfloat16)[: data.numel()]
    ),
    "a parameter was added": add_parameter,
    "a parameter was taken away": take_parameter_away,
    "a parameter has another name": rename_parameter,
    "two parameters changed places": swap_parameters,
    "a buffer is another object": replace_buffer,
    "a buffer's data was moved": move_buffer,
    "a buffer was added": add_buffer,
    "a buffer was taken away": take_buffer_away,
    "there is an expert map": set_expert_map,
    "a module is another one with the same tensors": replace_module,
    "a module was added": add_module,
    "a module was taken away": take_module_away,
    "a quant method is another one": replace_quant_method,
    "a module has got a quant method": give_quant_method,
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


class OtherWorker:
    """A worker with the same model, of which something else differs."""

    def __init__(self, worker: Any, *, rank: int | None = None, **parallel: Any) -> None:
        config = worker.vllm_config.parallel_config
        names = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
        own = {name: getattr(config, name) for name in names}
        self.model_runner = worker.model_runner
        self.rank = worker.rank if rank is None else rank
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**own | parallel))


PARTS: list[dict[str, Any]] = [
    {"rank": 1},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"enable_expert_parallel": True},
]


@every_change
def test_a_change_is_noticed_until_it_is_taken_back(worker: Any, change: Change) -> None:
    looks = ModelLooks(worker)
    assert looks.are_those_of(worker)

    undo = change(model_of(worker))
    try:
        assert not looks.are_those_of(worker)
        assert ModelLooks(worker).are_those_of(worker)
    finally:
        undo()

    assert looks.are_those_of(worker)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: next(iter(part)))
def test_another_part_of_the_model_is_noticed(worker: Any, part: dict[str, Any]) -> None:
    looks = ModelLooks(worker)

    assert looks.are_those_of(OtherWorker(worker))
    assert not looks.are_those_of(OtherWorker(worker, **part))


def test_another_model_with_the_same_parts_is_noticed(worker: Any) -> None:
    looks, model = ModelLooks(worker), model_of(worker)
    like = type(model).__new__(type(model))
    like.__dict__.update(model.__dict__)

    other = OtherWorker(worker)
    other.model_runner = SimpleNamespace(get_model=lambda: like)

    assert not looks.are_those_of(other)


def test_the_order_of_a_table_alone_is_no_change(worker: Any) -> None:
    looks = ModelLooks(worker)

    for module in model_of(worker).modules():
        for table in (module._parameters, module._buffers):
            entries: list[tuple[str, Any]] = list(table.items())
            table.clear()
            table.update(reversed(entries))

    assert looks.are_those_of(worker)


def test_a_whole_update_by_plan_is_no_change(worker: Any) -> None:
    memory, looks = WeightMemory(), []
    # The first may put tensors in their places.
    for seed in (1, 0, 1):
        push(
            WeightSink(worker, memory=memory),
            tiny_models.checkpoint_tensors(KIND, seed=seed),
        )
        looks.append(memory.look_at(worker))

    assert looks[1] is looks[2]
    assert ModelLooks(worker).are_those_of(worker)


class Kept:
    """A memory of one dry run that was good, and how often it had to be made."""

    def __init__(self) -> None:
        self.memory = WeightMemory()
        self.num_runs = 0
        self._manifest = Manifest(metas_of({"weight": torch.ones(1)}))

    def _run(self) -> Any:
        self.num_runs += 1
        return SimpleNamespace(problems=(), is_current=lambda: True)

    def ask(self, worker: Any, *partial: str) -> int:
        """Ask for the result as an update does; return how often it was made so far."""
        self.memory.look_at(worker)
        self.memory.result_for(self._manifest, partial=partial, dry_run=self._run)
        return self.num_runs


@every_change
def test_a_result_is_kept_until_a_change_and_not_beyond_it(worker: Any, change: Change) -> None:
    kept = Kept()
    assert [kept.ask(worker), kept.ask(worker)] == [1, 1]

    undo = change(model_of(worker))
    try:
        assert [kept.ask(worker), kept.ask(worker)] == [2, 2]
    finally:
        undo()

    # What was made for the model of before is gone, too.
    assert [kept.ask(worker), kept.ask(worker)] == [3, 3]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: next(iter(part)))
def test_a_result_is_of_one_part_of_the_model(worker: Any, part: dict[str, Any]) -> None:
    kept = Kept()
    kept.ask(worker)

    assert kept.ask(OtherWorker(worker, **part)) == 2


def test_all_results_are_dropped_together_and_no_more_are_kept_than_are_needed(
    worker: Any,
) -> None:
    kept = Kept()
    patterns = ["a", "b"]
    assert len(patterns) == MAX_RESULTS
    for pattern in patterns * 2:
        kept.ask(worker, pattern)
    assert kept.num_runs == 2

    undo = replace_quant_method(model_of(worker))
    undo_later = [kept.ask(worker, pattern) for pattern in patterns]
    undo()

    assert undo_later == [3, 4]
    assert [kept.ask(worker, pattern) for pattern in [*patterns, "c", "a"]] == [5, 6, 7, 8]


def test_a_result_is_dropped_by_a_deep_sleep_once_and_by_no_other(worker: Any) -> None:
    sleeps.watch(worker)
    kept = Kept()
    kept.ask(worker)

    worker.sleep(level=1)
    assert kept.ask(worker) == 1
    worker.sleep(level=2)
    assert [kept.ask(worker), kept.ask(worker)] == [2, 2]


def test_a_torn_model_is_looked_at_anew(worker: Any) -> None:
    kept = Kept()
    kept.ask(worker)
    before = kept.memory.look_at(worker)

    kept.memory.forget()

    assert kept.memory.look_at(worker) is not before
    assert kept.ask(worker) == 2
