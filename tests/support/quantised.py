"""Checkpoints whose linear weights are stored as fp8, with scales, as files have them."""

from __future__ import annotations

import re
from typing import Any

import torch

_BLOCK = 128
_MAX = torch.finfo(torch.float8_e4m3fn).max
# What checkpoints leave as it is: embeddings, heads, norms and routers.
_QUANTISED = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")

# Routers, which vLLM would otherwise take for quantised; for models of as many layers at most.
_ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(8)]
# By the name of the files' kind: what ``config.json`` says of them.
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": _ROUTERS,
    },
    "fp8_block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": _ROUTERS,
    },
}


def quantised(tensors: dict[str, torch.Tensor], files: str) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors with its linear weights in fp8, and the scales of these."""
    block = "weight_block_size" in CONFIGS[files]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not _QUANTISED.search(name):
            # What the engine computes in: files of this kind hold no fp32 weights.
            found[name] = tensor.to(torch.bfloat16)
        elif block:
            found[name], found[f"{name}_scale_inv"] = _by_block(tensor)
        else:
            found[name], found[f"{name}_scale"] = _whole(tensor)
    return found


def _whole(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = tensor.abs().max() / _MAX
    return (tensor / scale).to(torch.float8_e4m3fn), scale.float()


def _by_block(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (size // _BLOCK for size in tensor.shape)
    blocks = tensor.view(rows, _BLOCK, columns, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / _MAX
    plain = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return plain.view(tensor.shape), scale.float().contiguous()
