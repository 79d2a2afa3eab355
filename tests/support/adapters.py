"""Adapters for the tiny models, and what engines say and hold with them.

The oracle is always vLLM's own loader: an engine that reads the adapter from a folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# First, because it sets what vLLM reads from the environment when it is imported.
from support import engines, tiny_models  # isort: skip
import torch
from safetensors.torch import save_file
from support.pushes import push

from vllm_bucketsync.adapters import spec_of
from vllm_bucketsync.layout import BucketLayout
from vllm_bucketsync.messages import Open
from vllm_bucketsync.worker import sleeps
from vllm_bucketsync.worker.lora.sink import AdapterSink

Outputs = list[list[tuple[int, float]]]
Tensors = dict[str, torch.Tensor]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# On the CPU, vLLM computes requests without an adapter with the last slot's embedding and head
# (an index of -1 in torch_ops), so tests that ask the base model as well leave these two out.
EVERYTHING = (*LINEAR, "embed_tokens", "lm_head")
# Room in the CPU cache for as many as there are slots: the third one evicts.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}


def peft_model(
    seed: int,
    *,
    kind: str = "qwen3",
    base: int = 0,
    targets: Sequence[str] = LINEAR,
    **config: Any,
) -> Any:
    """Return a trainer's PEFT model whose adapter is decided by ``seed``, and far from zero."""
    from peft import LoraConfig, get_peft_model

    model = tiny_models.trainer_model(kind, seed=base)
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": list(targets)} | config
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))


def saved(model: Any, folder: Path) -> Path:
    """Write a PEFT model's adapter as PEFT does, and return its folder."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


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


def from_disk(folder: Path, number: int = 1, **settings: Any) -> Any:
    """Return vLLM's request for an adapter in a folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"disk-{number}", number, str(folder), **settings)


def outputs_of(
    llm: Any, request: Any = None, *, prompts: Sequence[Sequence[int]] = engines.PROMPTS
) -> Outputs:
    """Return greedy tokens and log-probabilities of some prompts."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True, detokenize=False
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        use_tqdm=False,
        lora_request=request,
    )
    return [
        [
            (token, logprobs[token].logprob)
            for token, logprobs in zip(
                answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True
            )
        ]
        for answer in answers
    ]


def manager_of(llm: Any) -> Any:
    """Return vLLM's LoRA model manager of an in-process engine."""
    return engines.worker_of(llm).model_runner.lora_manager._adapter_manager


def slot_bytes(llm: Any, lora_int_id: int) -> dict[str, bytes]:
    """Return the bytes of every tensor in an active adapter's slot, by module."""
    manager = manager_of(llm)
    slot = manager.lora_index_to_id.index(lora_int_id)
    found = {}
    for name, module in manager.modules.items():
        for attribute, held in sorted(vars(module).items()):
            if attribute.endswith(("_a_stacked", "_b_stacked")):
                tensors = held if isinstance(held, tuple) else (held,)
                if isinstance(held, list):
                    # Views, one for each slot and expert, of what the others are.
                    continue
                for index, tensor in enumerate(tensors):
                    found[f"{name}.{attribute}.{index}"] = engines.tensor_bytes(tensor[slot])
    return found


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}


def opened(
    name: str = "policy", *, config: dict[str, Any] | None = None, is_declared: bool = True
) -> Open:
    """Return the offer of an adapter."""
    return Open(
        update_id="u",
        version="1",
        kind="adapter",
        transport="shm",
        handles=(),
        regions=(),
        layout=BucketLayout(256),
        is_declared=is_declared,
        adapter=spec_of(name, version="1", config=json.dumps(config or CONFIG)),
    )


def sink_of(worker: Any, offer: Open | None = None, cls: type = AdapterSink) -> Any:
    """Return a sink for one update of an adapter."""
    return cls(worker, offer or opened(), sleeps=sleeps.watch(worker))


def tensors_of(seed: int) -> Tensors:
    """Return the tensors of a PEFT model's adapter, under the names of PEFT's files."""
    model = peft_model(seed)
    return {
        name.replace(".default", ""): tensor.detach()
        for name, tensor in model.state_dict().items()
        if "lora_" in name
    }


def request_for(name: str = "policy") -> Any:
    """Return vLLM's request for an adapter that a sink has put."""
    from vllm.lora.request import LoRARequest

    spec = spec_of(name, version="1")
    return LoRARequest(spec.name, spec.lora_int_id, spec.lora_path)


def put(llm: Any, tensors: Tensors, **settings: Any) -> Any:
    """Run one update of an adapter through a bucket that is poisoned after each load."""
    worker = engines.worker_of(llm)
    return push(sink_of(worker), tensors, **settings)
