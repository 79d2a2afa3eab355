"""REINFORCE with a vLLM engine that samples from the trainer's newest weights.

    python rl.py MODEL              push all weights before each step
    python rl.py MODEL --adapter    train a LoRA adapter, and push only that

Each update does four things: push the policy, sample from it with vLLM, score the samples,
and take one gradient step. The reward is the share of generated words that name an animal,
so it can be seen to rise within minutes, on a CPU, with a tiny model of random weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from vllm_bucketsync import WeightSync

PROMPTS = ("the old fox sleeps under", "a small bird sings while", "every sailor knows the")
ANIMALS = {"fox", "bear", "wolf", "horse", "bird", "fish", "cat", "dog", "owl", "crow"}
SAMPLES_PER_PROMPT, TOKENS_PER_SAMPLE = 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update came to.

    Attributes:
        reward: Mean over all samples, between 0 and 1.
        push_s: Seconds until the engine had the weights.
        mismatch: Largest difference between a sampled token's log-probability as vLLM has
            it and as the trainer computes it. It stays near 0 while both hold one policy.
        sample: The first text that was generated.
    """

    reward: float
    push_s: float
    mismatch: float
    sample: str

    def __str__(self) -> str:
        """Return it as a line."""
        return f"reward {self.reward:.3f}  push {1e3 * self.push_s:5.1f} ms  {self.sample}"


def train(
    checkpoint: str,
    *,
    use_adapter: bool = False,
    num_updates: int = 20,
    seed: int = 0,
    tell: Callable[[Update], None] = print,
) -> list[Update]:
    """Train a policy with samples of a real engine, and return what each update came to."""
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if use_adapter:
        policy = with_adapter(policy)
    parameters = [one for one in policy.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=5e-3 if use_adapter else 3e-3)
    engine = LLM(
        checkpoint,
        worker_extension_cls="vllm_bucketsync.WorkerExtension",
        enable_lora=use_adapter,
        dtype="float32",
        seed=seed,
        enforce_eager=True,
        max_model_len=64,
    )
    updates = []
    with WeightSync(engine) as sync:
        for number in range(num_updates):
            begun = time.perf_counter()
            request = push(sync, policy, version=number, use_adapter=use_adapter)
            push_s = time.perf_counter() - begun
            groups = sample(engine, request, seed=seed + 1000 * number)
            reward, mismatch = learn(policy, optimizer, groups)
            text = groups[0].prompt + groups[0].outputs[0].text
            update = Update(reward=reward, push_s=push_s, mismatch=mismatch, sample=text)
            updates.append(update)
            tell(update)
    return updates


def with_adapter(policy: Any) -> Any:
    """Return the policy with a LoRA adapter, which is all that is trained then."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(policy, config)


def push(sync: WeightSync, policy: Any, *, version: int, use_adapter: bool) -> LoRARequest | None:
    """Give the engine the newest policy, and return what requests need to use it."""
    if use_adapter:
        report = sync.push_lora(policy, name="policy", version=version)
        return LoRARequest(**report.request_kwargs)
    sync.push(policy, version=version)
    return None


def sample(engine: LLM, request: LoRARequest | None, *, seed: int) -> Sequence[Any]:
    """Return vLLM's samples, a group for each prompt, with their log-probabilities."""
    params = SamplingParams(
        n=SAMPLES_PER_PROMPT, max_tokens=TOKENS_PER_SAMPLE, ignore_eos=True, logprobs=0, seed=seed
    )
    found: Sequence[Any] = engine.generate(
        list(PROMPTS), params, lora_request=request, use_tqdm=False
    )
    return found


def learn(policy: Any, optimizer: Any, groups: Sequence[Any]) -> tuple[float, float]:
    """Take one step of REINFORCE; return the mean reward, and the mismatch of both ends."""
    rewards, differences = [], []
    optimizer.zero_grad()
    for group in groups:
        scores = torch.tensor([reward_of(one.text) for one in group.outputs])
        tokens = torch.tensor([list(one.token_ids) for one in group.outputs])
        log_probs = log_probs_of(policy, group.prompt_token_ids, tokens)
        # The group's mean is the baseline.
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        loss = -(advantages[:, None] * log_probs).mean() / len(groups)
        loss.backward()
        rewards.append(scores.mean())
        differences.append((log_probs.detach() - sampled_log_probs(group)).abs().max())
    optimizer.step()
    return float(torch.stack(rewards).mean()), float(torch.stack(differences).max())


def reward_of(text: str) -> float:
    """Return the share of words that name an animal: put your own reward here."""
    return sum(word in ANIMALS for word in text.split()) / TOKENS_PER_SAMPLE


def log_probs_of(policy: Any, prompt: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """Return the policy's log-probability of each token, in the shape of ``tokens``."""
    prompts = torch.tensor([prompt]).expand(len(tokens), -1)
    logits: torch.Tensor = policy(torch.cat([prompts, tokens], dim=1)).logits
    logits = logits[:, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def sampled_log_probs(group: Any) -> torch.Tensor:
    """Return the log-probabilities that vLLM sampled with, in the shape of the tokens."""
    # vLLM tells, for each token, of those that could have been: here of the sampled one alone.
    return torch.tensor(
        [[only.logprob for one in each.logprobs for only in one.values()] for each in group.outputs]
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="REINFORCE with vLLM in the loop")
    options.add_argument("model", help="folder of a checkpoint")
    options.add_argument("--adapter", action="store_true", help="train a LoRA adapter alone")
    given = options.parse_args()
    train(given.model, use_adapter=given.adapter)
