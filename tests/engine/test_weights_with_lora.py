"""An engine that can take adapters takes base weights as any other does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import engines, tiny_models
from support.pushes import push
from support.worlds import Truth
from vllm.lora.layers import BaseLayerWithLoRA

from vllm_bucketsync import MissingTensorError, TensorMismatchError, UnknownTensorError
from vllm_bucketsync.worker.weights import WeightSink


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied"])
def test_base_weights_reach_the_layers_that_adapters_wrap(
    kind: str, checkpoint: Callable[[str, int], Path], truth: Callable[[str, int], Truth]
) -> None:
    expected = {seed: truth(kind, seed).outputs for seed in (0, 1)}
    with engines.running_engine(checkpoint(kind, 0), enable_lora=True, max_lora_rank=8) as llm:
        worker = engines.worker_of(llm)
        addresses = engines.live_addresses(worker)
        assert any(".base_layer." in name for name in addresses)
        for seed, declared in ((1, True), (0, False)):
            tensors = tiny_models.checkpoint_tensors(kind, seed=seed)
            if kind == "qwen3_tied":
                tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

            report = push(WeightSink(worker), tensors, slot_size_bytes=20_000, declared=declared)

            assert report.skipped == (("lm_head.weight",) if kind == "qwen3_tied" else ())
            assert engines.greedy(llm) == expected[seed]
            assert engines.live_addresses(worker) == addresses
        del llm, worker


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_experts_that_adapters_wrap_get_what_an_engine_is_started_with(
    declared: bool, checkpoint: Callable[[str, int], Path]
) -> None:
    # The CPU build has no kernel that computes with such experts: bytes are compared.
    settings = {"enable_lora": True, "max_lora_rank": 8}
    live = {}
    for seed in (1, 0):
        with engines.running_experts(checkpoint("qwen3_moe", seed), **settings) as llm:
            live[seed] = engines.live_tensors(engines.worker_of(llm))
            if seed == 1:
                continue
            worker = engines.worker_of(llm)
            addresses = engines.live_addresses(worker)
            for new in (1, 0, 1):
                tensors = tiny_models.checkpoint_tensors("qwen3_moe", seed=new)
                push(WeightSink(worker), tensors, slot_size_bytes=20_000, declared=declared)
                assert engines.live_tensors(worker) == live[new]
                assert engines.live_addresses(worker) == addresses
            del worker
        del llm


LAYER = "model.layers.0.self_attn"


def test_users_see_and_write_the_names_that_parameters_have_without_lora(
    checkpoint: Callable[[str, int], Path],
) -> None:
    with engines.running_engine(checkpoint("qwen3", 0), enable_lora=True, max_lora_rank=8) as llm:
        worker = engines.worker_of(llm)
        before = engines.live_tensors(worker)
        tensors = tiny_models.checkpoint_tensors("qwen3", seed=1)

        wrong = dict(tensors) | {f"{LAYER}.q_porj.weight": tensors[f"{LAYER}.q_proj.weight"]}
        with pytest.raises(UnknownTensorError) as unknown:
            push(WeightSink(worker), wrong)
        assert f"'{LAYER}.q_proj.weight'" in str(unknown.value)

        lacking = {name: one for name, one in tensors.items() if "o_proj" not in name}
        with pytest.raises(MissingTensorError) as missing:
            push(WeightSink(worker), lacking)
        assert "base_layer" not in str(unknown.value) + str(missing.value)
        assert f"{LAYER}.o_proj.weight" in str(missing.value)

        misfit = tensors | {f"{LAYER}.o_proj.weight": torch.ones(3, 3)}
        with pytest.raises(TensorMismatchError) as mismatch:
            push(WeightSink(worker), misfit)
        assert "base_layer" not in str(mismatch.value)
        assert engines.live_tensors(worker) == before

        lacking = {name: one for name, one in tensors.items() if "embed_tokens" not in name}
        for pattern in ("*.embed_tokens.weight", "*.embed_tokens.base_layer.weight"):
            push(WeightSink(worker, partial=[pattern]), lacking)
            after = engines.live_tensors(worker)
            changed = {name.split()[1] for name in after if after[name] != before[name]}
            assert "model.embed_tokens.base_layer.weight" not in changed
            assert "model.norm.weight" in changed
        del worker
    del llm


def test_loaders_that_know_nothing_of_wrappers_do_as_well(
    checkpoint: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In vLLM 0.26, names of a checkpoint reach no layer that is wrapped.
    monkeypatch.delattr(BaseLayerWithLoRA, "load_weights", raising=False)
    with engines.running_engine(checkpoint("qwen3", 1), enable_lora=True, max_lora_rank=8) as llm:
        expected = engines.live_tensors(engines.worker_of(llm))
    with engines.running_engine(checkpoint("qwen3", 0), enable_lora=True, max_lora_rank=8) as llm:
        push(WeightSink(engines.worker_of(llm)), tiny_models.checkpoint_tensors("qwen3", seed=1))
        assert engines.live_tensors(engines.worker_of(llm)) == expected
    del llm
