"""Builds tiny checkpoints with random weights, offline.

A checkpoint is decided by its kind and its seed: two seeds of one kind differ in
every tensor, far enough that greedy outputs differ. Biases, norms and router
buffers are random too, so that one which was not loaded shows up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

# 80 because the CPU attention kernel takes no 16, and 32 only for some dtypes.
HEAD_DIM = 80
# Not divisible by 64, so that vLLM pads the vocabulary.
PADDED_VOCAB_SIZE = 500
VOCAB_SIZE = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _qwen3(**changes: Any) -> Any:
    return transformers.Qwen3Config(**{**_COMMON, **changes})


def _qwen2(**changes: Any) -> Any:
    # Qwen2 derives its head size, so the hidden size has to give it.
    return transformers.Qwen2Config(**{**_COMMON, "hidden_size": 2 * HEAD_DIM, **changes})


def _llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**_COMMON, **changes})


def _qwen3_moe(**changes: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        **{**_COMMON, **_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, **changes}
    )


def _glm4_moe(**changes: Any) -> Any:
    glm = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    }
    return transformers.Glm4MoeConfig(**{**_COMMON, **_EXPERTS, **glm, **changes})


_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: _qwen3(vocab_size=PADDED_VOCAB_SIZE),
    "qwen3_tied": lambda: _qwen3(tie_word_embeddings=True),
    "qwen2": lambda: _qwen2(tie_word_embeddings=True),
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
}
KINDS = tuple(_CONFIGS)


def trainer_model(kind: str, *, seed: int) -> Any:
    """Return the transformers model that a trainer of this kind would hold."""
    config = _CONFIGS[kind]()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            _fill(name, tensor)
        model.tie_weights()
    return model.eval()


def checkpoint_tensors(kind: str, *, seed: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors under the names of files: one per expert.

    A tied ``lm_head.weight`` is left out, as ``save_pretrained`` does.
    """
    model = trainer_model(kind, seed=seed)
    return per_expert(fused_tensors(model))


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


def save_checkpoint(kind: str, directory: Path, *, seed: int) -> Path:
    """Write a checkpoint to ``directory`` and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[kind]()
    config.architectures = [type(_empty_model(config)).__name__]
    config.dtype = "float32"
    config.save_pretrained(directory)
    tensors = checkpoint_tensors(kind, seed=seed)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return directory


def _empty_model(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _fill(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or name.endswith("inv_freq"):
        return
    if "norm" in name:
        tensor.normal_(mean=1.0, std=0.2)
    elif name.endswith("bias") or "embed_tokens" in name or "lm_head" in name:
        tensor.normal_(std=0.5)
    else:
        tensor.normal_(std=1.5 / tensor.shape[-1] ** 0.5)
