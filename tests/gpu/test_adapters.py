"""A trainer on a GPU pushes adapters into a real engine on the same GPU.

They answer as the same ones that vLLM reads from disk, with CUDA graphs and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.gpu_engines import PROMPTS, running

from vllm_bucketsync import AdapterConfigError, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    # vLLM leaves sockets and contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEEDS = (1, 2, 3)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def trained(seed: int, **config: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_models.trainer_model("qwen3", seed=0).cuda()
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS} | config
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))


def outputs_of(llm: Any, request: Any = None) -> list[list[tuple[int, float]]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, detokenize=False)
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
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


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine, and what it answers without an adapter (0) and with those on disk."""
    from vllm.lora.request import LoRARequest

    root = tmp_path_factory.mktemp("adapters")
    base = tiny_models.save_checkpoint("qwen3", root / "base", seed=0)
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    settings |= {"max_loras": 2, "max_cpu_loras": 2}
    with running(base, enforce_eager=request.param, **settings) as llm:
        truth = {0: outputs_of(llm)}
        for seed in SEEDS:
            folder: Path = root / str(seed)
            trained(seed).save_pretrained(str(folder), save_embedding_layers=False)
            truth[seed] = outputs_of(llm, LoRARequest(f"disk-{seed}", seed, str(folder)))
        assert len(set(map(str, truth.values()))) == len(truth)
        yield llm, truth


@pytest.fixture(params=["auto", "shm"])
def sync(request: pytest.FixtureRequest, stage: Any) -> Iterator[WeightSync]:
    with WeightSync(stage[0], transport=request.param, slot_size="16KiB") as found:
        yield found


def test_adapters_answer_as_those_on_disk_whatever_becomes_of_the_trainer_s(
    stage: Any, sync: WeightSync
) -> None:
    llm, truth = stage
    reports = {}
    for seed in SEEDS:
        model = trained(seed)
        reports[seed] = sync.push_lora(model, name=f"policy-{seed}", version=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.fill_(float("nan"))
    # Room for two: each of them comes back from its pristine copy.
    for _ in range(2):
        for seed, report in reports.items():
            assert outputs_of(llm, report.lora_request()) == truth[seed]
    for seed in (2, 3, 1):
        report = sync.push_lora(trained(seed), name="policy-1", version=f"again {seed}")
        assert outputs_of(llm, report.lora_request()) == truth[seed]
    assert outputs_of(llm) == truth[0]

    weights = tiny_models.checkpoint_tensors("qwen3", seed=1)
    sync.push({name: tensor.cuda() for name, tensor in weights.items()}, version="other")
    assert outputs_of(llm, reports[2].lora_request()) not in truth.values()
    sync.push(tiny_models.trainer_model("qwen3", seed=0).cuda(), version="back")
    for seed in SEEDS:
        assert outputs_of(llm, reports[seed].lora_request()) == truth[seed]
        assert sync.remove_lora(f"policy-{seed}")


def test_what_the_engine_cannot_use_is_refused(stage: Any, sync: WeightSync) -> None:
    llm, truth = stage
    report = sync.push_lora(trained(1), name="policy", version=1)

    with pytest.raises(AdapterConfigError, match="max_lora_rank"):
        sync.push_lora(trained(2, r=16), name="policy", version=2)

    assert outputs_of(llm, report.lora_request()) == truth[1]
    assert sync.remove_lora("policy")
