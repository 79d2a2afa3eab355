"""Settings of tiny models, by kind: a family, and what of it matters to whoever loads weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

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
_ROUTED: dict[str, Any] = _EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
# Block-quantised weights, and kernels for fp8, want multiples of 128.
_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}


def _qwen3(**changes: Any) -> Any:
    return transformers.Qwen3Config(**{**_COMMON, **changes})


def _qwen2(**changes: Any) -> Any:
    # Qwen2 derives its head size, so the hidden size has to give it.
    return transformers.Qwen2Config(**{**_COMMON, "hidden_size": 2 * HEAD_DIM, **changes})


def _llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**_COMMON, **changes})


def _gemma3(**changes: Any) -> Any:
    gemma = {"query_pre_attn_scalar": HEAD_DIM, "sliding_window": 32}
    kinds = ["sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(**{**_COMMON, **gemma, "layer_types": kinds, **changes})


def _qwen3_moe(**changes: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        **{**_COMMON, **_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, **changes}
    )


def _glm4_moe(**changes: Any) -> Any:
    glm = {"use_qk_norm": True, "attention_bias": True}
    return transformers.Glm4MoeConfig(**{**_COMMON, **_ROUTED, **glm, **changes})


def _deepseek_v3(**changes: Any) -> Any:
    """Multi-head latent attention, at the sizes that its kernels are made for."""
    latent: dict[str, Any] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    common = {name: value for name, value in _COMMON.items() if name != "head_dim"}
    latent |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return transformers.DeepseekV3Config(**{**common, **_ROUTED, **latent, **changes})


def _qwen3_next(**changes: Any) -> Any:
    """Linear attention beside full attention, and experts with a shared one."""
    linear = {
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 128,
    }
    return transformers.Qwen3NextConfig(**{**_COMMON, **_EXPERTS, **linear, **changes})


def _mamba2(**changes: Any) -> Any:
    mamba = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "num_heads": 4,
        "expand": 2,
        "state_size": 64,
        "n_groups": 1,
        "conv_kernel": 4,
        "tie_word_embeddings": False,
    }
    return transformers.Mamba2Config(**{**mamba, **changes})


def _qwen2_vl(**changes: Any) -> Any:
    """A language model within a wrapper that sees images, under names of two levels."""
    text = {**_COMMON, "hidden_size": 2 * HEAD_DIM, "rope_parameters": _mrope()}
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 2 * HEAD_DIM,
        "num_heads": 2,
        "mlp_ratio": 2,
    }
    tokens = {"image_token_id": 490, "video_token_id": 491, "vision_start_token_id": 492}
    more = {"vision_end_token_id": 493, "tie_word_embeddings": False}
    return transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, **tokens, **more, **changes
    )


def _paligemma(**changes: Any) -> Any:
    """The same, of parts that vLLM can load where there is no torchvision."""
    text = {**_COMMON, "model_type": "gemma"}
    vision = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 64,
        "model_type": "siglip_vision_model",
    }
    more = {"image_token_index": 490, "projection_dim": 64, "tie_word_embeddings": True}
    return transformers.PaliGemmaConfig(text_config=text, vision_config=vision, **more, **changes)


def _mrope() -> dict[str, Any]:
    return {"rope_type": "default", "mrope_section": [8, 16, 16], "rope_theta": 10000.0}


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: _qwen3(vocab_size=PADDED_VOCAB_SIZE),
    "qwen3_tied": lambda: _qwen3(tie_word_embeddings=True),
    "qwen3_wide": lambda: _qwen3(**_WIDE),
    "qwen2": lambda: _qwen2(tie_word_embeddings=True),
    "llama": _llama,
    "gemma3": lambda: _gemma3(tie_word_embeddings=True),
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe_wide": lambda: _qwen3_moe(**_WIDE, moe_intermediate_size=256),
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "qwen3_next": _qwen3_next,
    "mamba2": _mamba2,
    "qwen2_vl": _qwen2_vl,
    "paligemma": _paligemma,
}
