"""Tensors with the names and proportions of an 8B dense decoder, as small as asked."""

from __future__ import annotations

import math
from bisect import bisect_left

import torch

from vllm_bucketsync.errors import ConfigError

# The proportions of one of 8B: 4096 wide, 32 layers, a quarter of the heads for keys and
# values, 14336 wide in its MLPs, a vocabulary of 128256.
NUM_LAYERS = 32
_WIDTH_STEP = 8
_MAX_WIDTH = 1 << 30
_KV_PER_WIDTH = 1 / 4
_MLP_PER_WIDTH = 7 / 2
_VOCABULARY_PER_WIDTH = 31
MIN_BYTES = 1024**2


def decoder_shapes(num_bytes: int, *, dtype: str = "bfloat16") -> dict[str, tuple[int, ...]]:
    """Return the tensors of the narrowest decoder that has at least ``num_bytes``.

    Width shrinks and the number of tensors stays, so that what each tensor costs weighs
    more than in the model of 8B that it stands for.

    Args:
        num_bytes: Bytes of all tensors together, at least.
        dtype: Of every tensor, as torch names it.

    Raises:
        ConfigError: It is too few or too many bytes for a decoder.
    """
    if num_bytes < MIN_BYTES:
        raise ConfigError(f"size is {num_bytes} bytes; expected at least {MIN_BYTES}")
    num_needed = -(-num_bytes // getattr(torch, dtype).itemsize)
    widths = range(_WIDTH_STEP, _MAX_WIDTH, _WIDTH_STEP)
    narrowest = bisect_left(widths, num_needed, key=lambda width: num_elements(_shapes(width)))
    if narrowest == len(widths):
        raise ConfigError(f"size is {num_bytes} bytes; no decoder is that large")
    return _shapes(widths[narrowest])


def make_tensors(
    shapes: dict[str, tuple[int, ...]], *, dtype: str = "bfloat16", device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Make the tensors, with every page of them touched."""
    return {
        name: torch.full(shape, 1.0 + index, dtype=getattr(torch, dtype), device=device)
        for index, (name, shape) in enumerate(shapes.items())
    }


def num_elements(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the elements of all tensors together."""
    return sum(math.prod(shape) for shape in shapes.values())


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
