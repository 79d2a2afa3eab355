"""Over random layers and shardings, a plan does what vLLM's layerwise loaders do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import engines, toy_models
from support.pushes import Warm, load_all, metas_of, push
from support.toy_models import BY_LOADERS, Group, Spec, ToyModel

import torch  # isort: skip

from vllm_bucketsync.config import PlanMode, Verify
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.staging import StagedSink
from vllm_bucketsync.worker import compat
from vllm_bucketsync.worker.memory import WeightMemory
from vllm_bucketsync.worker.weights import WeightSink

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _untouched_is_known_as_direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lines = compat.DIRECT_KINDS | {("Untouched", "cpu", None)}
    monkeypatch.setattr(compat, "DIRECT_KINDS", lines)
    with engines.environment():
        yield


@st.composite
def specs(draw: st.DrawFn, group: Group) -> Spec:
    kind = draw(st.sampled_from(sorted(toy_models.LOADERS)))
    rows, columns, experts = (draw(st.integers(1, 9)) for _ in range(3))
    # Some tensors are larger than a slot of 512 bytes.
    columns *= draw(st.sampled_from([1, 40]))
    shape, sources = _shapes(kind, group.size, rows, columns, experts)
    dtype = draw(DTYPES)
    return Spec(
        kind,
        shape,
        dtype,
        tuple((source, draw(DTYPES), arguments) for source, arguments in sources),
        draw(st.sampled_from([None, "Untouched", "Packing"])),
        has_bias=draw(st.booleans()),
    )


def _shapes(
    kind: str, size: int, rows: int, columns: int, experts: int
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return a weight's shape on one of ``size`` ranks, and its sources' with arguments."""
    cells = [(expert, half) for expert in range(experts) for half in (0, 1)]
    heads = [((rows * size, columns), (0, 1)), ((experts, columns), (rows, size))]
    known: dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {
        "column": ((rows, columns), [((rows * size, columns), ())]),
        "row": ((rows, columns), [((rows, columns * size), ())]),
        "stacked": ((rows + experts, columns), list(heads)),
        "expert": (
            (experts, 2 * rows, columns),
            [((rows * size, columns), cell) for cell in cells],
        ),
        "fused_experts": ((experts, rows, columns), [((experts, columns, rows * size), ())]),
        "padded": ((rows + experts, columns), [((rows, columns), ())]),
        "turned": ((rows, columns), [((columns, rows), ())]),
        "spread": ((rows, columns), [((1, columns), ())]),
    }
    return known.get(kind, ((rows, columns), [((rows, columns), ())]))


@st.composite
def models(draw: st.DrawFn) -> tuple[ToyModel, ToyModel]:
    """The same model twice."""
    size = draw(st.sampled_from([1, 2, 4]))
    group = Group(draw(st.integers(0, size - 1)), size)
    layers = draw(st.lists(specs(group), min_size=1, max_size=5))
    return ToyModel(layers, group), ToyModel(layers, group)


def live(model: ToyModel) -> dict[str, bytes]:
    found = {name: engines.tensor_bytes(one) for name, one in model.named_parameters()}
    layer: Any
    packed = {}
    for number, layer in enumerate(model.layers):
        if "packed" in vars(layer):
            packed[f"packed {number}"] = engines.tensor_bytes(layer.packed)
    return found | packed


@settings(max_examples=40, deadline=None)
@given(models(), st.sampled_from([512, 2048, 1 << 16]))
def test_updates_by_plan_are_those_of_the_loaders(
    twins: tuple[ToyModel, ToyModel], slot_size_bytes: int
) -> None:
    by_plan, by_loaders = twins
    memory, warm = WeightMemory(), Warm(slot_size_bytes=slot_size_bytes)
    worker, other = toy_models.worker_of(by_plan), toy_models.worker_of(by_loaders)
    addresses = [one.data_ptr() for one in by_plan.parameters()]
    num_odd = sum(spec.kind in BY_LOADERS for spec in by_plan.specs)

    for seed in range(3):
        sources = by_plan.sources(seed)
        report = warm.push(WeightSink(worker, memory=memory), sources)
        push(WeightSink(other, mode=PlanMode.OFF), sources)

        assert live(by_plan) == live(by_loaders)
        split = report.split
        assert split.num_loaded == num_odd
        assert split.num_direct + split.num_processed == len(by_plan.specs) - num_odd
        plain = [s for s in by_plan.specs if s.kind not in BY_LOADERS and s.method != "Packing"]
        assert split.num_direct == (len(plain) if seed else 0)
    assert [one.data_ptr() for one in by_plan.parameters()] == addresses


@settings(max_examples=30, deadline=None)
@given(models(), st.sampled_from([512, 2048, 1 << 16]), st.sampled_from(Verify))
def test_staged_updates_are_those_of_the_loaders_and_touch_nothing_before(
    twins: tuple[ToyModel, ToyModel], slot_size_bytes: int, verify: Verify
) -> None:
    by_plan, by_loaders = twins
    memory = WeightMemory()
    worker, other = toy_models.worker_of(by_plan), toy_models.worker_of(by_loaders)

    for seed in range(3):
        sources = by_plan.sources(seed)
        before = live(by_plan)
        inner = WeightSink(worker, memory=memory, verify=verify)
        sink = StagedSink(inner, device=worker.device, verify=verify)
        sink.open(Manifest(metas_of(sources)))
        load_all(sink, sources, slot_size_bytes=slot_size_bytes)
        sink.prepare()
        assert live(by_plan) == before
        report = sink.commit()
        sink.release()
        push(WeightSink(other, mode=PlanMode.OFF), sources)

        assert live(by_plan) == live(by_loaders)
        # No more than this rank's part of a sharded source, as it is in the checkpoint.
        wide = 4 * sum(one.numel() for one in by_plan.parameters())
        num_places = sum(len(spec.sources) * max(spec.shape) + 1 for spec in by_plan.specs)
        has_odd = any(spec.kind in BY_LOADERS for spec in by_plan.specs)
        assert has_odd or report.staged.num_bytes <= wide + 256 * num_places
        compared = report.checked.num_direct + report.checked.num_processed
        num_odd = sum(spec.kind in BY_LOADERS for spec in by_plan.specs)
        assert compared == (len(by_plan.specs) - num_odd if verify is Verify.DIGEST else 0)


@settings(max_examples=25, deadline=None)
@given(models(), st.sampled_from([512, 1 << 16]), st.data())
def test_a_stream_that_leaves_its_plan_anywhere_is_loaded_right(
    twins: tuple[ToyModel, ToyModel], slot_size_bytes: int, data: st.DataObject
) -> None:
    by_plan, by_loaders = twins
    memory = WeightMemory()
    worker, other = toy_models.worker_of(by_plan), toy_models.worker_of(by_loaders)
    for seed in range(2):
        push(WeightSink(worker, memory=memory), by_plan.sources(seed))
    items = list(by_plan.sources(2).items())
    left_at = data.draw(st.integers(0, len(items) - 1))
    rest = data.draw(st.permutations(items[left_at:]))
    sink = WeightSink(worker, memory=memory, is_promise=False)

    sink.open(Manifest(metas_of(items)))
    load_all(sink, items[:left_at], slot_size_bytes=slot_size_bytes)
    sink.deviate(left_at)
    load_all(sink, rest, slot_size_bytes=slot_size_bytes, first=left_at)
    sink.prepare()
    sink.commit()
    push(WeightSink(other, mode=PlanMode.OFF), dict(items))

    assert live(by_plan) == live(by_loaders)


@settings(max_examples=15, deadline=None)
@given(models(), st.data())
def test_a_check_finds_nothing_where_nothing_is_wrong(
    twins: tuple[ToyModel, ToyModel], data: st.DataObject
) -> None:
    model, _ = twins
    worker, memory = toy_models.worker_of(model), WeightMemory()

    for seed in range(2):
        push(WeightSink(worker, memory=memory, mode=PlanMode.CHECK), model.sources(seed))
