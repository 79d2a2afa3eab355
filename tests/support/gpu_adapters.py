"""Adapters on a GPU: a model that takes them, what an engine answers, what its worker holds.

vLLM's kernels for adapters add up in any order, so answers are never the same to the last bit.
They are compared within ``TOLERANCE``; the bytes of slots are compared exactly.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.adapter_tensors import LINEAR
from support.gpu_engines import PROMPTS

from vllm_bucketsync.bench.engine.models import Model

DEVICE = "cuda"
# As wide and deep as a model of 0.6 billion parameters; a vocabulary that fills no block.
MODEL = Model(
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=2000,
)
# With this rank an adapter for every linear layer has 16.8 MiB, in 392 tensors.
RANK = 14
# The last is longer than a block of the prefix cache.
ALL_PROMPTS = (*PROMPTS, [7 + 11 * n % 450 for n in range(40)])
NUM_TOKENS = 6
# Of a log-probability; those of other weights differ by more, or are of other tokens.
TOLERANCE = 0.3


@dataclass(frozen=True)
class Answer:
    """What an engine answered to one prompt.

    Attributes:
        tokens: Greedy ones.
        tops: Of each of them, the likeliest five and their log-probabilities.
        num_cached: Tokens of the prompt that the prefix cache had.
    """

    tokens: tuple[int, ...]
    tops: tuple[dict[int, float], ...]
    num_cached: int

    @property
    def chosen(self) -> list[float]:
        """Log-probabilities of the tokens."""
        return [top[token] for token, top in zip(self.tokens, self.tops, strict=True)]

    def agrees(self, other: Answer) -> bool:
        """Whether both are of the same weights, as far as kernels allow to tell."""
        for mine, theirs, top, other_top in zip(
            self.tokens, other.tokens, self.tops, other.tops, strict=True
        ):
            for token in {mine, theirs}:
                # Not ``>``: it would take NaN for anything.
                if not abs(top.get(token, -1e9) - other_top.get(token, 1e9)) <= TOLERANCE:
                    return False
            if mine != theirs:
                # A tie: what follows has other tokens before it.
                break
        return True


def agree(some: Sequence[Answer], others: Sequence[Answer]) -> bool:
    """Whether all answers are of the same weights."""
    return all(one.agrees(other) for one, other in zip(some, others, strict=True))


def answers_of(
    llm: Any, request: Any = None, *, prompts: Sequence[list[int]] = ALL_PROMPTS
) -> list[Answer]:
    """Ask an engine all prompts at once.

    Args:
        llm: The engine.
        request: A ``LoRARequest`` or ``None``, or a list with one of them for each prompt.
        prompts: Token ids.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, logprobs=5, ignore_eos=True, detokenize=False
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        use_tqdm=False,
        lora_request=request,
    )
    return [
        Answer(
            tokens=tuple(answer.outputs[0].token_ids),
            tops=tuple(
                {token: one.logprob for token, one in top.items()}
                for top in answer.outputs[0].logprobs
            ),
            num_cached=answer.num_cached_tokens or 0,
        )
        for answer in answers
    ]


def base_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint of ``MODEL`` on the device: the seed decides every tensor."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    found = {}
    for name, shape in MODEL.shapes().items():
        tensor = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16)
        mean, std = (1.0, 0.2) if "norm" in name else (0.0, 1.5 / shape[-1] ** 0.5)
        # Logits of a few units, which bfloat16 tells apart.
        std = {"lm_head.weight": 0.1, "model.embed_tokens.weight": 0.5}.get(name, std)
        found[name] = tensor.normal_(mean=mean, std=std, generator=generator)
    return found


def save_base(folder: Path, *, seed: int) -> Path:
    """Write a checkpoint of ``MODEL``, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    MODEL.write_config(folder, dtype="bfloat16")
    tensors = {name: tensor.cpu() for name, tensor in base_tensors(seed).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def called(seed: int) -> str:
    """Return what PEFT calls an adapter. Of one called by a number it saves only a part."""
    return f"adapter_{seed}"


def trainer(checkpoint: Path, seeds: Sequence[int]) -> Any:
    """Return a PEFT model on the device, with an adapter for each seed, in bfloat16."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    settings: dict[str, Any] = {
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "target_modules": list(LINEAR),
        "init_lora_weights": False,
    }
    found: Any = None
    for seed in seeds:
        torch.manual_seed(seed)
        lora, name = LoraConfig(**settings), called(seed)
        if found is None:
            found = get_peft_model(model, lora, adapter_name=name, autocast_adapter_dtype=False)
        else:
            found.add_adapter(name, lora, autocast_adapter_dtype=False)
    return found


def adapter_tensors(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one of a trainer's adapters, under the names of PEFT's files."""
    return {
        name.replace(f".{called(seed)}.", "."): tensor.detach()
        for name, tensor in model.state_dict().items()
        if "lora_" in name and called(seed) in name
    }


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return what tells whether a bit of any tensor has changed."""
    return {
        name: hash(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        for name, tensor in tensors.items()
    }


def poison(sync: Any) -> None:
    """Fill the trainer's slots with NaN, as other data would: nobody may still read them."""
    sync._slots._region.data.fill_(0xFF)
    synchronise()


def synchronise() -> None:
    """Wait for the device."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def memory(worker: Any = None) -> dict[str, int]:
    """Return what this process, or a worker's, has of the device's and the host's memory."""
    del worker
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    if not torch.cuda.is_available():
        return {"rss": rss} | dict.fromkeys(("allocated", "reserved", "peak", "free"), 0)
    torch.cuda.synchronize()
    return {
        "rss": rss,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
        "free": torch.cuda.mem_get_info()[0],
    }


def forget_peak(worker: Any = None) -> None:
    """Begin to measure the peak anew, here or in a worker."""
    del worker
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


_PROFILES: list[cProfile.Profile] = []


def begin_profile(worker: Any = None) -> None:
    """Profile this thread from now on, here or in a worker."""
    del worker
    _PROFILES.append(cProfile.Profile())
    _PROFILES[-1].enable()


def end_profile(worker: Any = None) -> str:
    """End it, and return where the time went."""
    del worker
    profile, text = _PROFILES.pop(), io.StringIO()
    profile.disable()
    stats = pstats.Stats(profile, stream=text)
    stats.sort_stats("cumulative").print_stats(45)
    stats.sort_stats("tottime").print_stats(25)
    return text.getvalue()


class Record:
    """Measured numbers, printed, and written to ``$OUT`` where that is set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: dict[str, Any] = {}

    def note(self, key: str, value: Any) -> None:
        """Add a result; what was found so far is written at once."""
        self._found[key] = value
        print(f"{self._name}: {key}: {json.dumps(value)}")  # noqa: T201
        self.write("json", json.dumps(self._found, indent=2))

    def write(self, suffix: str, text: str) -> None:
        """Write a file of this name."""
        if "OUT" in os.environ:
            (Path(os.environ["OUT"]) / f"{self._name}.{suffix}").write_text(text)


@dataclass(frozen=True)
class Truth:
    """What vLLM's own loader of adapters makes an engine answer and hold.

    Attributes:
        answers: By the seed of an adapter; those without one are 0.
        slots: Hashes of the slots' bytes, by seed.
    """

    answers: dict[int, list[Answer]]
    slots: dict[int, Any]

    def seed_of(self, found: Sequence[Answer]) -> list[int]:
        """Return the seeds of the adapters whose answers these are: there should be one."""
        return [seed for seed, answers in self.answers.items() if agree(found, answers)]

    def others(self, found: Sequence[Answer], seeds: Sequence[int | None]) -> list[int]:
        """Return which of the answers are not those of their prompts' seeds; ``None`` is any."""
        return [
            at
            for at, (one, seed) in enumerate(zip(found, seeds, strict=True))
            if seed is not None and not one.agrees(self.answers[seed][at])
        ]

    def confused(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of seeds that could be taken for one another."""
        for seed, answers in self.answers.items():
            yield from ((seed, other) for other in self.seed_of(answers) if other != seed)
