"""Where an engine's model takes adapters, and of which sizes, before tensor parallelism cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora import layers
from vllm.lora.lora_weights import LoRALayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one pair of tensors goes.

    Attributes:
        module: vLLM's module that takes it, by its name in the model.
        inputs: Columns of ``lora_A``; ``None`` where vLLM does not say.
        outputs: Rows of ``lora_B``; ``None`` where vLLM does not say.
        num_experts: Experts that are stacked in one pair.
        partners: Every name that has to come if this one does.
    """

    module: str
    inputs: int | None = None
    outputs: int | None = None
    num_experts: int = 1
    partners: tuple[str, ...] = ()


def places_of(manager: Any) -> dict[str, Place]:
    """Return every place of an engine's adapters.

    Args:
        manager: vLLM's ``LoRAModelManager``.

    Returns:
        Places by the module's name as adapters have it, after vLLM's own renaming:
        ``…self_attn.q_proj`` for a part of the ``…self_attn.qkv_proj`` that takes it.
    """
    found: dict[str, Place] = {}
    for name, module in manager.modules.items():
        found.update(_places(manager, name, module))
    return found


def is_head(module: Any) -> bool:
    """Return whether one of vLLM's modules with adapters makes the logits."""
    return isinstance(module, layers.LogitsProcessorWithLoRA)


def nan_head(name: str, module: Any, *, dtype: torch.dtype) -> LoRALayerWeights:
    """Return an adapter of rank 1 that makes every log-probability NaN.

    It does so at the very end: from anywhere before, attention would carry NaN into other
    requests, out of blocks of the cache that are used again. Two logits are infinite, of
    either sign, so that one is the largest: the largest of NaNs is, to kernels that compare,
    any number at all, and one that is no token ends the engine.
    """
    head = LoRALayerWeights.create_dummy_lora_weights(
        name, module.hidden_size, module.base_layer.vocab_size, 1, dtype, "cpu"
    )
    head.lora_a.fill_(1.0)
    head.lora_b[0], head.lora_b[1] = float("inf"), float("-inf")
    return head


def _places(manager: Any, name: str, module: Any) -> Iterator[tuple[str, Place]]:
    parts = manager.packed_modules.get(name, [])
    base = module.base_layer
    if isinstance(module, layers.FusedMoE3DWithLoRA):
        yield from _fused_experts(name, module)
    elif isinstance(module, layers.FusedMoEWithLoRA):
        yield from _experts(manager, name, module, parts)
        if getattr(manager, "_enable_mixed_moe_lora_format", False):
            yield from _fused_experts(name, module)
    elif is_head(module):
        yield name, Place(module=name, inputs=module.hidden_size, outputs=base.vocab_size)
    elif isinstance(module, layers.VocabParallelEmbeddingWithLoRA):
        yield name, Place(module=name, inputs=base.org_vocab_size, outputs=base.embedding_dim)
    else:
        inputs = getattr(base, "input_size", None)
        sizes = _output_sizes(base)
        if not parts:
            yield name, Place(module=name, inputs=inputs, outputs=_sum(sizes))
        for part, size in zip(parts, _matched(sizes, len(parts)), strict=True):
            yield part, Place(module=name, inputs=inputs, outputs=size)


def _output_sizes(base: Any) -> list[int | None]:
    """Return the rows of each part of a layer, of all ranks together."""
    if hasattr(base, "total_num_kv_heads"):
        # What the layer itself calls its sizes counts heads that several ranks share.
        head, value = base.head_size, getattr(base, "v_head_size", base.head_size)
        heads = base.total_num_kv_heads
        return [base.total_num_heads * head, heads * head, heads * value]
    return list(getattr(base, "output_sizes", None) or [getattr(base, "output_size", None)])


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _matched(sizes: list[int | None], num_parts: int) -> list[int | None]:
    # Some models pack fewer names than the layer has slices: vLLM cuts them itself.
    return sizes if len(sizes) == num_parts else [None] * num_parts


def _experts(
    manager: Any, name: str, module: Any, parts: Sequence[str]
) -> Iterator[tuple[str, Place]]:
    """Yield a place for each projection of each expert: gate, down, up in turn."""
    partners = tuple(parts)
    if getattr(manager, "_enable_moe_shared_loras", False):
        # Three tensors with a dimension of experts, some of them shared.
        yield from ((part, Place(module=name, partners=partners)) for part in parts)
        return
    hidden, inner = _expert_sizes(module)
    num_kinds = 2 if getattr(manager, "_is_non_gated_moe", False) else 3
    for position, part in enumerate(parts):
        inputs, outputs = (inner, hidden) if position % num_kinds == 1 else (hidden, inner)
        yield part, Place(module=name, inputs=inputs, outputs=outputs, partners=partners)


def _fused_experts(name: str, module: Any) -> Iterator[tuple[str, Place]]:
    """Yield the two places of a layer whose experts are stacked: PEFT nests one in the other."""
    hidden, inner = _expert_sizes(module)
    partners = (name, f"{name}.base_layer")
    experts = int(module.global_num_experts)
    sizes = {partners[0]: (inner, hidden), partners[1]: (hidden, 2 * inner)}
    for part, (inputs, outputs) in sizes.items():
        yield (
            part,
            Place(
                module=name,
                inputs=inputs,
                outputs=outputs,
                num_experts=experts,
                partners=partners,
            ),
        )


def _expert_sizes(module: Any) -> tuple[int, int]:
    return int(module.hidden_size), int(module.intermediate_size_per_partition * module.tp_size)
