"""Adapters of experts reach their slots: one by one, and stacked in one tensor.

The CPU build has no kernel that computes with them. So slots are compared, byte for byte, with
those of the same adapter that vLLM read from disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import engines
from support.adapter_tensors import CONFIG, Tensors, experts, pair, save_tensors
from support.adapters import LORA, from_disk, manager_of, put
from support.lora_slots import slot_hashes

from vllm_bucketsync import AdapterError, AdapterTensorError
from vllm_bucketsync.adapters import id_of
from vllm_bucketsync.worker.lora import shelf


def stacked_experts(seed: int) -> Tensors:
    """Return what PEFT makes of a layer whose experts are one parameter."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        found |= pair(name, 64, 64, rank=4 * 4, seed=generator)
        found |= pair(f"{name}.base_layer", 64, 128, rank=4 * 4, seed=generator)
    return found


MOE = {
    "each expert by itself": ({}, experts, False, {}),
    "stacked, taken apart": ({"enable_mixed_moe_lora_format": True}, stacked_experts, True, {}),
    "single, where stacked ones may come": (
        {"enable_mixed_moe_lora_format": True},
        experts,
        False,
        {},
    ),
    "stacked in the model as well": ({}, stacked_experts, False, {"is_3d_moe_weight": True}),
}


@pytest.mark.parametrize("case", MOE)
def test_experts_get_what_the_same_adapter_on_disk_gives_them(
    case: str,
    checkpoint: Callable[[str, int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, make, is_stacked, attributes = MOE[case]
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    for name, value in attributes.items():
        monkeypatch.setattr(Qwen3MoeForCausalLM, name, value)
    folder = save_tensors(make(1), CONFIG, tmp_path)
    number = id_of("policy")
    with engines.running_experts(checkpoint("qwen3_moe", 0), **LORA, **settings) as llm:
        worker = engines.worker_of(llm)
        llm.llm_engine.add_lora(from_disk(folder, 1, is_3d_lora_weight=is_stacked))
        truth = slot_hashes(worker, 1)
        for seed in (2, 1):
            put(llm, make(seed), slot_size_bytes=4096)
            assert (slot_hashes(worker, number) == truth) is (seed == 1)
        kept = shelf.shelf_of(worker)
        kept.restore()
        assert slot_hashes(worker, number) == truth

        for part in ("experts.3.up_proj", "experts.base_layer"):
            lacking = {name: one for name, one in make(1).items() if part not in name}
            if len(lacking) < len(make(1)):
                with pytest.raises(AdapterTensorError, match="for every expert and projection"):
                    put(llm, lacking)
        if make is stacked_experts:
            with pytest.raises(AdapterTensorError, match=r"expected \[16, 64\]"):
                put(llm, {name: one[:8] if "_A" in name else one for name, one in make(1).items()})
        assert slot_hashes(worker, number) == truth


def test_stacked_experts_are_refused_with_vllm_s_reason_where_it_cannot_take_them_apart(
    checkpoint: Callable[[str, int], Path],
) -> None:
    with engines.running_experts(checkpoint("qwen3_moe", 0), **LORA) as llm:
        with pytest.raises(AdapterError, match="--enable-mixed-moe-lora-format"):
            put(llm, stacked_experts(1))
        assert manager_of(llm).list_adapters() == {}
