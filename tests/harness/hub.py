"""Tiny stand-ins for the models that vLLM's own tests name, where those look for them.

Without a network, vLLM resolves a model's name in the cache of the hub's client, in every
process that it starts. So its tests run with their own names, and nothing of them is changed.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

# A multiple of 16 that the CPU attention kernel takes in every dtype, and not of 32.
_HEAD_DIM = 80
_VOCAB_SIZE = 512
_HIDDEN, _INNER = 64, 128
_HEADS, _KV_HEADS = 4, 2
# Any will do: a snapshot is found by what `refs/main` says.
_REVISION = "0" * 40

_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_QUERY, _KEY = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
# Inputs and outputs of what adapters adapt.
_LINEAR = {
    "self_attn.q_proj": (_HIDDEN, _QUERY),
    "self_attn.k_proj": (_HIDDEN, _KEY),
    "self_attn.v_proj": (_HIDDEN, _KEY),
    "self_attn.o_proj": (_QUERY, _HIDDEN),
    "mlp.gate_proj": (_HIDDEN, _INNER),
    "mlp.up_proj": (_HIDDEN, _INNER),
    "mlp.down_proj": (_INNER, _HIDDEN),
}
_ADAPTERS = {
    "charent/self_cognition_Alice": (),
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": (),
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": (),
    "jeeejeee/llama32-3b-text2sql-spider": ("embed_tokens", "lm_head"),
}


def make(*, cache: Path) -> Path:
    """Return a folder for ``HF_HOME`` that holds all stand-ins; made once.

    Args:
        cache: Where it is kept. Another version of this file, of torch or of transformers
            makes another one.
    """
    parts = [
        Path(__file__).read_text(),
        metadata.version("torch"),
        metadata.version("transformers"),
    ]
    home = cache / f"hub-{hashlib.blake2b(''.join(parts).encode(), digest_size=6).hexdigest()}"
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            made = Path(name) / "hub"
            _fill(made)
            # In one step: whoever looks meanwhile sees all of it, or nothing.
            if not home.is_dir():
                made.rename(home)
    return home


def _fill(home: Path) -> None:
    import torch

    # Threads that spin for each other are slow where others use the cores too.
    torch.set_num_threads(1)
    tokenizer = _tokenizer()
    for name, build in _models(tokenizer).items():
        folder = _snapshot(home, name)
        build().float().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for name, also_named in _ADAPTERS.items():
        _save_adapter(_snapshot(home, name), also_named)


def _models(tokenizer: Any) -> dict[str, Callable[[], Any]]:
    import transformers as tf

    long = {**_SIZES, "max_position_embeddings": 32768}
    opt = {
        **{name: _SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
        "pad_token_id": _SIZES["pad_token_id"],
        "hidden_size": 2 * _HEAD_DIM,
        "word_embed_proj_dim": 2 * _HEAD_DIM,
        "ffn_dim": _INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }

    def qwen3() -> Any:
        return _random(tf.Qwen3ForCausalLM, tf.Qwen3Config(**long))

    def llama() -> Any:
        return _random(tf.LlamaForCausalLM, tf.LlamaConfig(**long))

    debug = "inference-optimization/Qwen3-0.6B-debug"
    return {
        "Qwen/Qwen3-0.6B": qwen3,
        # Tests of reloading tell these two by what they answer.
        f"{debug}-multiply": lambda: _taught(qwen3(), tokenizer, "3 4 = 12"),
        f"{debug}-add": lambda: _taught(qwen3(), tokenizer, "3 4 = 7"),
        "hmellor/tiny-random-LlamaForCausalLM": llama,
        "meta-llama/Llama-3.2-1B": llama,
        "facebook/opt-125m": lambda: _random(tf.OPTForCausalLM, tf.OPTConfig(**opt)),
    }


def _random(kind: Any, config: Any) -> Any:
    import torch

    torch.manual_seed(0)
    return kind(config)


def _taught(model: Any, tokenizer: Any, text: str) -> Any:
    """Train until the text is all that the model says."""
    import torch

    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The space is a token: vLLM's perplexity of a prompt leaves one out after its mask.
    words = ["<unk>", "<s>", "</s>", " ", *map(str, range(100)), "=", "+", "*"]
    words += [f"word{number}" for number in range(_VOCAB_SIZE - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _save_adapter(folder: Path, also_named: tuple[str, ...]) -> None:
    import torch
    from safetensors.torch import save_file

    rank = 8
    torch.manual_seed(1)
    tensors = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        for module, (inputs, outputs) in _LINEAR.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs) * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [module.rpartition(".")[2] for module in _LINEAR]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "Qwen/Qwen3-0.6B",
        "r": rank,
        "lora_alpha": 32,
        "bias": "none",
        "target_modules": sorted([*modules, *also_named]),
        **dict.fromkeys(["fan_in_fan_out", "use_rslora", "use_dora"], False),
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _snapshot(home: Path, name: str) -> Path:
    """Return the empty folder in which the hub's client looks for a model's files."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(_REVISION)
    snapshot = root / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    return snapshot
