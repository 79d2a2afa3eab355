"""What vLLM finalises last is left out only where that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# First, because it sets what vLLM reads from the environment when it is imported.
from support import engines, tiny_models  # isort: skip
import torch
from support.pushes import push
from vllm.model_executor.layers.attention import Attention

from vllm_bucketsync.worker import compat
from vllm_bucketsync.worker.memory import WeightMemory
from vllm_bucketsync.worker.model_looks import ModelLooks
from vllm_bucketsync.worker.weights import WeightSink

KIND = "qwen3"
HOOK = "process_weights_after_loading"


@pytest.fixture(scope="module")
def worker(checkpoint: Callable[[str, int], Path]) -> Iterator[Any]:
    extension = "vllm_bucketsync.WorkerExtension"
    with engines.running_engine(checkpoint(KIND, 0), worker_extension_cls=extension) as llm:
        yield engines.worker_of(llm)


@pytest.fixture
def attention(worker: Any) -> list[Any]:
    model = worker.model_runner.get_model()
    return [one for one in model.modules() if isinstance(one, Attention)]


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """Every attention module that was finalised, while its class still has vLLM's own hook."""
    seen: list[torch.nn.Module] = []
    scales = Attention.process_weights_after_loading.__globals__["set_default_quant_scales"]

    def watched(layer: torch.nn.Module, register_buffer: bool = False) -> None:
        seen.append(layer)
        scales(layer, register_buffer=register_buffer)

    monkeypatch.setitem(
        Attention.process_weights_after_loading.__globals__, "set_default_quant_scales", watched
    )
    return seen


def test_attention_is_finalised_by_the_first_update_and_by_no_other(
    worker: Any, attention: list[Any], processed: list[torch.nn.Module]
) -> None:
    memory, counts = WeightMemory(), []
    for seed in (1, 0, 1):
        push(WeightSink(worker, memory=memory), tiny_models.checkpoint_tensors(KIND, seed=seed))
        counts.append(len(processed))
        processed.clear()

    assert counts == [len(attention), 0, 0]


def test_a_scale_that_somebody_wrote_to_is_set_again(
    worker: Any, attention: list[Any], processed: list[torch.nn.Module]
) -> None:
    finalised = ModelLooks(worker).finalised
    finalised.renew(torch.float32)
    processed.clear()
    attention[1]._k_scale.fill_(2.0)

    finalised.renew(torch.float32)

    assert processed == [attention[1]]
    assert attention[1]._k_scale.item() == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("calculate_kv_scales", True),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("quant_config", object()),
        ("impl", object()),
    ],
)
def test_attention_whose_scales_may_matter_is_finalised_every_time(
    attention: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    assert compat.finalises_to_constants(attention[0])

    monkeypatch.setitem(vars(attention[0]), name, value)

    assert not compat.finalises_to_constants(attention[0])


def test_a_backend_with_weights_of_its_own_is_finalised_every_time(
    attention: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(attention[0].impl), HOOK, lambda self, dtype: None, raising=False)

    assert not compat.finalises_to_constants(attention[0])


def test_another_kind_of_attention_is_finalised_every_time(attention: list[Any]) -> None:
    class Special(Attention):  # type: ignore[misc]
        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            pass

    special = torch.nn.Module()
    special.__class__ = Special

    assert not compat.finalises_to_constants(special)
