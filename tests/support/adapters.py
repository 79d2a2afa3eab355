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
from support.adapter_tensors import CONFIG, LINEAR, Tensors
from support.pushes import push

from vllm_bucketsync.adapters import spec_of
from vllm_bucketsync.layout import BucketLayout
from vllm_bucketsync.messages import Open
from vllm_bucketsync.worker import sleeps
from vllm_bucketsync.worker.lora.sink import AdapterSink

Outputs = list[list[tuple[int, float]]]

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
