"""Adapters as tensors, files and requests; no engine is started, and none is prepared for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}


def save_tensors(tensors: Tensors, config: dict[str, Any], folder: Path) -> Path:
    """Write an adapter that PEFT has no model for, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def pair(name: str, inputs: int, outputs: int, *, rank: int, seed: torch.Generator) -> Tensors:
    """Return one module's two tensors, under PEFT's names."""
    return {
        f"base_model.model.{name}.lora_A.weight": torch.randn(rank, inputs, generator=seed) * 0.3,
        f"base_model.model.{name}.lora_B.weight": torch.randn(outputs, rank, generator=seed) * 0.3,
    }


def experts(seed: int, *, num_experts: int = 4, with_router: bool = True) -> Tensors:
    """Return an adapter for each expert of the tiny mixture-of-experts model, and some more."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        sizes = {"self_attn.q_proj": (64, 160), "self_attn.o_proj": (160, 64)}
        if with_router:
            sizes["mlp.gate"] = (64, 4)
        for expert in range(num_experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                sizes[f"mlp.experts.{expert}.{part}"] = (64, 64)
        for name, (inputs, outputs) in sizes.items():
            found |= pair(f"{prefix}.{name}", inputs, outputs, rank=4, seed=generator)
    return found


def request_of(report: Any) -> Any:
    """Return vLLM's request for an adapter that was pushed, as users make it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(**report.request_kwargs)


def trained(folder: Path, seed: int, **config: Any) -> Any:
    """Return a PEFT model over a checkpoint, decided by ``seed``."""
    import transformers
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": list(LINEAR)} | config
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))
