"""What makes a module not direct is seen while vLLM processes it, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support import engines
from support.toy_models import Group, Layer, Spec, ToyModel, Untouched

import torch  # isort: skip
from torch import nn

from vllm_bucketsync.worker import compat, layerwise
from vllm_bucketsync.worker.observe import MAX_OBJECTS, observe, reachable
from vllm_bucketsync.worker.plan import PlannedModule

SPEC = Spec("whole", (4, 6), torch.float32, (((4, 6), torch.float32, ()),), "Untouched", False)


def planned_of(module: nn.Module, **changes: Any) -> PlannedModule:
    given: dict[str, Any] = {
        "path": "layers.0",
        "module": module,
        "copies": (),
        "fills": (),
        "is_whole": True,
        "num_elements": 24,
        "num_bytes": 96,
    }
    return PlannedModule(**{**given, **changes})


def why(process: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    """Return what is observed of a layer whose quant method does something."""
    lines = compat.DIRECT_KINDS | {("Untouched", "cpu", None)}
    monkeypatch.setattr(compat, "DIRECT_KINDS", lines)
    monkeypatch.setattr(Untouched, "process_weights_after_loading", lambda self, layer: None)
    layer: Any = ToyModel([SPEC], Group(0, 1)).layers[0]
    layer.scale = torch.ones(1)
    layer.quant_method.kernel = SimpleNamespace(table=[torch.ones(2)], options={"a": 1})
    monkeypatch.setattr(
        Untouched, "process_weights_after_loading", lambda self, layer: process(layer)
    )
    with torch.no_grad(), engines.environment():
        scratch = layerwise.scratch_of(layer)
        scratch["weight"].copy_(torch.randn(4, 6))
        expected = scratch["weight"].clone()

        found = observe(
            planned_of(layer, **changes), scratch, lambda: layerwise.process(layer, scratch)
        )
    if not found:
        assert torch.equal(layer.weight, expected)
    return found


def _nothing(layer: Any) -> None: ...


def _copies_to_itself(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data)


def _uses_another_tensor(layer: Any) -> None:
    torch.ones(3).sum()


@pytest.mark.parametrize("process", [_nothing, _copies_to_itself, _uses_another_tensor])
def test_what_does_nothing_to_weights_is_direct(
    process: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why(process, monkeypatch) == ""


def _computes(layer: Any) -> None:
    layer.weight.sum()


def _writes(layer: Any) -> None:
    layer.weight.data.mul_(1)


def _writes_elsewhere(layer: Any) -> None:
    layer.weight.data[0].copy_(layer.weight.data[1])


def _takes_the_address(layer: Any) -> None:
    layer.weight.data_ptr()


def _goes_through_numpy(layer: Any) -> None:
    layer.weight.detach().numpy()[0] = 3


def _replaces_the_parameter(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)


def _makes_an_attribute(layer: Any) -> None:
    layer.packed = torch.ones(3)


def _makes_a_function(layer: Any) -> None:
    layer.apply_fast = lambda x: x


def _replaces_something_deep(layer: Any) -> None:
    layer.quant_method.kernel.table[0] = torch.ones(2)


def _changes_a_number(layer: Any) -> None:
    layer.quant_method.kernel.options["a"] = 2


def _changes_another_tensor(layer: Any) -> None:
    layer.scale.fill_(2)


def _moves_another_tensor(layer: Any) -> None:
    layer.scale.data = layer.scale.data.clone()


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (_computes, "computes with its weights"),
        (_writes, "computes with its weights"),
        (_writes_elsewhere, "computes with its weights"),
        (_takes_the_address, "takes the address"),
        (_goes_through_numpy, "takes the address"),
        (_replaces_the_parameter, "computes with its weights"),
        (_makes_an_attribute, "makes or replaces"),
        (_makes_a_function, "makes or replaces"),
        (_replaces_something_deep, "makes or replaces"),
        (_changes_a_number, "makes or replaces"),
        (_changes_another_tensor, "writes to something"),
        (_moves_another_tensor, "makes or replaces"),
    ],
)
def test_what_does_anything_is_not_direct(
    process: Callable[[Any], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in why(process, monkeypatch)


def test_bytes_that_differ_are_found_however_they_came_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def behind_torch(layer: Any) -> None:
        # What a kernel in C++ does: neither mode sees it.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            layer.weight.data.view(-1)[5] += 1

    assert why(behind_torch, monkeypatch) == "processing changes values"


def test_a_module_that_is_not_filled_whole_is_not_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gets no value" in why(_nothing, monkeypatch, is_whole=False)


@pytest.mark.parametrize(
    "live", [torch.zeros(6, 4).t(), torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 5)]
)
def test_a_layout_that_differs_is_not_direct(live: torch.Tensor) -> None:
    layer: Any = ToyModel([SPEC], Group(0, 1)).layers[0]
    layer.weight.data = live

    found = observe(planned_of(layer), {"weight": torch.zeros(4, 6)}, lambda: None)

    assert found == "weight is laid out differently when it is live"


def test_a_kind_that_is_not_listed_is_not_direct() -> None:
    layer = ToyModel([SPEC], Group(0, 1)).layers[0]

    found = observe(planned_of(layer), {"weight": torch.zeros(4, 6)}, lambda: None)

    assert found == "('Untouched', 'cpu', None) is not known to leave weights alone"


def test_an_object_too_large_to_compare_is_not_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    def grows(layer: Any) -> None: ...

    monkeypatch.setattr("vllm_bucketsync.worker.observe.MAX_OBJECTS", 3)
    assert MAX_OBJECTS > 3

    assert "makes or replaces" in why(grows, monkeypatch)


def test_modules_and_configs_are_named_and_not_entered() -> None:
    from vllm.config import CacheConfig

    layer: Any = ToyModel([SPEC], Group(0, 1)).layers[0]
    layer.quant_method.config = CacheConfig()
    layer.quant_method.owner = nn.Linear(2, 2)

    found = reachable(layer)

    assert ".quant_method.config" in found
    assert [
        path for path in found if path.startswith((".quant_method.config.", ".quant_method.owner."))
    ] == []


# --- the kinds that are listed: one test for each line ------------------------


def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's layers, and our list, take this machine for one with a GPU."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    fake = SimpleNamespace(
        device_type="cuda", is_cpu=lambda: False, is_xpu=lambda: False, is_cuda=lambda: True
    )
    for module in (compat, linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "current_platform", fake)


def _observed(layer: Any) -> str:
    scratch = {"weight": layer.weight.detach().clone()}

    def process() -> None:
        live = layer.weight
        layer.weight = nn.Parameter(scratch["weight"], requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
        live.data.copy_(layer.weight)
        layer.weight = live

    with torch.no_grad():
        return observe(planned_of(layer), scratch, process)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("linear", "UnquantizedLinearMethod"),
        ("vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ],
)
def test_unquantised_layers_on_cuda_are_direct(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    found = importlib.import_module(f"vllm.model_executor.layers.{module}")
    _on_cuda(monkeypatch)
    layer: Any = Layer((4, 6), torch.float32, lambda: None, getattr(found, name)(), has_bias=False)

    assert (name, "cuda", None) in compat.DIRECT_KINDS
    assert _observed(layer) == ""


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_module_without_a_quant_method_is_direct(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "current_platform", SimpleNamespace(device_type=platform))

    assert compat.why_not_known_as_direct(nn.LayerNorm(3)) == ""


def test_experts_are_listed_for_the_backend_that_keeps_their_layout() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    lines = {line for line in compat.DIRECT_KINDS if line[2] is not None}

    assert lines == {
        (UnquantizedFusedMoEMethod.__name__, "cuda", UnquantizedMoeBackend.TRITON.name)
    }


def test_a_target_is_named_within_its_module() -> None:
    # What ``leaf`` cuts off is the module's own path, also where it has none.
    bare = planned_of(nn.LayerNorm(3), path="")

    assert bare.leaf("weight") == "weight"
    assert planned_of(nn.LayerNorm(3), path="a.b").leaf("a.b.weight") == "weight"
