"""Builds tiny checkpoints with random weights, offline.

A checkpoint is decided by its kind and its seed: two seeds of one kind differ in
every tensor, far enough that greedy outputs differ. Biases, norms and router
buffers are random too, so that one which was not loaded shows up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from . import quantised
from .tiny_configs import CONFIGS

# What every way of loading is tried with; ``tiny_configs.CONFIGS`` has more.
KINDS = ("qwen3", "qwen3_tied", "qwen2", "llama", "qwen3_moe", "glm4_moe")


def trainer_model(kind: str, *, seed: int) -> Any:
    """Return the transformers model that a trainer of this kind would hold."""
    config = CONFIGS[kind]()
    torch.manual_seed(seed)
    model = _auto(config).from_config(config).to(torch.float32)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            _fill(kind, name, tensor)
        model.tie_weights()
    return model.eval()


def checkpoint_tensors(kind: str, *, seed: int, files: str = "") -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors under the names of files: one per expert.

    A tied ``lm_head.weight`` is left out, as ``save_pretrained`` does. ``files`` is one of
    ``quantised.CONFIGS``, or nothing for plain weights.
    """
    model = trainer_model(kind, seed=seed)
    tensors = per_expert(fused_tensors(model))
    return quantised.quantised(tensors, files) if files else tensors


def fused_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return ``state_dict()`` as transformers 5 yields it: experts fused, no tied duplicate."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with fused experts cut into the names that files have."""
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                parts[f"{stem}.{expert}.gate_proj.weight"] = gate.clone()
                parts[f"{stem}.{expert}.up_proj.weight"] = up.clone()
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            for expert, down in enumerate(tensor):
                parts[f"{stem}.{expert}.down_proj.weight"] = down.clone()
        else:
            parts[name] = tensor
    return parts


def save_checkpoint(kind: str, directory: Path, *, seed: int, files: str = "") -> Path:
    """Write a checkpoint to ``directory`` and return it; see ``checkpoint_tensors``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[kind]()
    config.architectures = [type(_empty_model(config)).__name__]
    config.dtype = "bfloat16" if files else "float32"
    if files:
        config.quantization_config = quantised.CONFIGS[files]
    config.save_pretrained(directory)
    tensors = checkpoint_tensors(kind, seed=seed, files=files)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return directory


def _empty_model(config: Any) -> Any:
    with torch.device("meta"):
        return _auto(config).from_config(config)


def _auto(config: Any) -> Any:
    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


# They multiply by one more than their weight: the random ones lie around 0, not 1.
_PLUS_ONE = ("gemma3", "paligemma", "qwen3_next")


def _fill(kind: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or name.endswith("inv_freq"):
        return
    if "norm" in name:
        is_plus_one = kind in _PLUS_ONE and "linear_attn" not in name
        tensor.normal_(mean=0.0 if is_plus_one else 1.0, std=0.2)
    elif name.endswith("A_log"):
        tensor.normal_(std=0.3)
    elif kind in {"gemma3", "paligemma"} and "embed" in name:
        # It scales them up, and multiplies with them again at its end.
        tensor.normal_(std=0.1)
    elif name.endswith("bias") or "embed" in name or "lm_head" in name:
        tensor.normal_(std=0.5)
    else:
        tensor.normal_(std=1.5 / tensor.shape[-1] ** 0.5)
