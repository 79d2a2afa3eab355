"""The models that are measured: their configurations, and the tensors of their checkpoints.

Shapes are those of Qwen3 and Qwen3-MoE, since every vLLM that is supported has them, and
weights are random: nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What decides a decoder's tensors.

    Attributes:
        hidden_size: Width.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        intermediate_size: Width of an MLP, or of one expert where there are experts.
        vocab_size: Rows of the embedding and of the untied head.
        num_experts: Of each layer; 0 for a dense model.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 151_936
    num_experts: int = 0

    def shapes(self) -> Shapes:
        """Return the tensors of a checkpoint, in its order: one per expert and projection."""
        found: Shapes = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            found |= self._layer(f"model.layers.{layer}")
        return found | {
            "model.norm.weight": (self.hidden_size,),
            "lm_head.weight": (self.vocab_size, self.hidden_size),
        }

    def write_config(self, folder: Path, *, dtype: str) -> None:
        """Write the ``config.json`` that an engine starts from, without any weights."""
        (folder / "config.json").write_text(json.dumps(self._config(dtype), indent=2))

    def _layer(self, prefix: str) -> Shapes:
        width, heads = self.hidden_size, self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        found: Shapes = {
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.self_attn.q_proj.weight": (heads, width),
            f"{prefix}.self_attn.k_proj.weight": (kv, width),
            f"{prefix}.self_attn.v_proj.weight": (kv, width),
            f"{prefix}.self_attn.q_norm.weight": (self.head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (self.head_dim,),
            f"{prefix}.self_attn.o_proj.weight": (width, heads),
            f"{prefix}.post_attention_layernorm.weight": (width,),
        }
        if not self.num_experts:
            return found | self._mlp(f"{prefix}.mlp")
        found[f"{prefix}.mlp.gate.weight"] = (self.num_experts, width)
        for expert in range(self.num_experts):
            found |= self._mlp(f"{prefix}.mlp.experts.{expert}")
        return found

    def _mlp(self, prefix: str) -> Shapes:
        width, inner = self.hidden_size, self.intermediate_size
        return {
            f"{prefix}.gate_proj.weight": (inner, width),
            f"{prefix}.up_proj.weight": (inner, width),
            f"{prefix}.down_proj.weight": (width, inner),
        }

    def _config(self, dtype: str) -> dict[str, Any]:
        found = {
            "architectures": ["Qwen3MoeForCausalLM" if self.num_experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.num_experts else "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "dtype": dtype,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if self.num_experts:
            found |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": min(8, self.num_experts),
                "moe_intermediate_size": self.intermediate_size,
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
            }
        return found


MODELS = {
    # The attention kernel of the CPU build takes heads of 80 and no smaller multiple of 16.
    "tiny": Model(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=80,
        intermediate_size=96,
        vocab_size=512,
    ),
    "0.6b": Model(
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
    ),
    "8b": Model(
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12_288,
    ),
    "moe31b": Model(
        hidden_size=2048,
        num_layers=24,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=768,
        num_experts=128,
    ),
}
