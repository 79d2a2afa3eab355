"""Tensors with the names and proportions of an 8B dense decoder, as small as asked."""

from __future__ import annotations

import torch

from vllm_bucketsync.errors import ConfigError

# One of 8B: 4096 wide, 32 layers, 8 of 32 heads for keys and values, 14336 and 128k wide.
NUM_LAYERS = 32
_WIDTH_STEP = 8
_KV_PER_WIDTH = 1 / 4
_MLP_PER_WIDTH = 7 / 2
_VOCABULARY_PER_WIDTH = 31
MIN_BYTES = 1024**2
DTYPES = ("bfloat16", "float16", "float32")


def decoder_shapes(num_bytes: int, *, dtype: str = "bfloat16") -> dict[str, tuple[int, ...]]:
    """Return the tensors of the narrowest decoder that has at least ``num_bytes``.

    Width shrinks and the number of tensors stays, so that what each tensor costs weighs
    more than in the model of 8B that it stands for.

    Args:
        num_bytes: Bytes of all tensors together, at least.
        dtype: One of ``DTYPES``.

    Raises:
        ConfigError: It is too few bytes for every layer to have some.
    """
    if num_bytes < MIN_BYTES:
        raise ConfigError(f"size is {num_bytes} bytes; expected at least {MIN_BYTES}")
    item_bytes = getattr(torch, dtype).itemsize
    width = _WIDTH_STEP
    while num_elements(shapes := _shapes(width)) * item_bytes < num_bytes:
        width += _WIDTH_STEP
    return shapes


def make_tensors(
    shapes: dict[str, tuple[int, ...]], *, dtype: str = "bfloat16"
) -> dict[str, torch.Tensor]:
    """Make the tensors, with every page of them touched."""
    return {
        name: torch.full(shape, 1.0 + index, dtype=getattr(torch, dtype))
        for index, (name, shape) in enumerate(shapes.items())
    }


def num_elements(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the elements of all tensors together."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    kv, mlp = int(width * _KV_PER_WIDTH), int(width * _MLP_PER_WIDTH)
    vocabulary = width * _VOCABULARY_PER_WIDTH
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.self_attn.q_proj.weight": (width, width),
            f"{prefix}.self_attn.k_proj.weight": (kv, width),
            f"{prefix}.self_attn.v_proj.weight": (kv, width),
            f"{prefix}.self_attn.o_proj.weight": (width, width),
            f"{prefix}.post_attention_layernorm.weight": (width,),
            f"{prefix}.mlp.gate_proj.weight": (mlp, width),
            f"{prefix}.mlp.up_proj.weight": (mlp, width),
            f"{prefix}.mlp.down_proj.weight": (width, mlp),
        }
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
