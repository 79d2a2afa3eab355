"""Which PEFT configs an engine can apply, and why it cannot apply the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.lora.peft_helper import PEFTHelper

from ...errors import AdapterConfigError
from .. import compat

_NOTHING = "nothing was changed"
# Settings with which an adapter is more than pairs of matrices, and what vLLM takes.
_PLAIN: dict[str, tuple[object, str]] = {
    "peft_type": ("LORA", "train a LoRA"),
    "use_dora": (False, "train without DoRA, or push merged weights with push(…, merge=True)"),
    "bias": ("none", "train without biases, or push merged weights with push(…, merge=True)"),
    "lora_bias": (False, "train without biases, or push merged weights with push(…, merge=True)"),
    "modules_to_save": (None, "push merged weights with push(…, merge=True)"),
    "trainable_token_indices": (None, "push merged weights with push(…, merge=True)"),
}


def read_config(text: str, *, lora_config: Any, adapter: str) -> PEFTHelper:
    """Return a PEFT config as vLLM has it.

    Args:
        text: PEFT's ``adapter_config.json``.
        lora_config: vLLM's config of the engine's adapters.
        adapter: The adapter's name, for messages.

    Raises:
        AdapterConfigError: It cannot be applied. Nothing was changed.
    """
    config = _parsed(text, adapter)
    for setting, (expected, advice) in _PLAIN.items():
        found = config.get(setting, expected)
        # PEFT writes None, [] and {} for what is not used.
        if found != expected and not (not expected and not found):
            raise _refused(adapter, setting, expected=expected, found=found, advice=advice)
    _check_rank(config, lora_config, adapter)
    known = {field.name for field in fields(PEFTHelper)}
    for setting in ("rank_pattern", "alpha_pattern"):
        if config.get(setting) and setting not in known:
            advice = "this vLLM would scale every module alike; use one rank and one alpha"
            raise _refused(adapter, setting, expected={}, found=config[setting], advice=advice)
    try:
        # The tensors' own names tell which modules they are for.
        helper = PEFTHelper.from_dict({"target_modules": [], **config})
        helper.validate_legal(lora_config)
        # Patterns of ranks are regular expressions, which may be none.
        compat.rank_of(helper, "any.module")
    # vLLM's own refusals, whatever their kind.
    except Exception as error:
        raise AdapterConfigError(
            f"adapter {adapter!r} cannot be applied: {error}; {_NOTHING}; change its PEFT config",
            adapter=adapter,
            setting="config",
            found=str(error)[:1000],
        ) from error
    return helper


def _parsed(text: str, adapter: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(
            adapter, "config", expected="JSON", found=str(error), advice="send PEFT's LoraConfig"
        ) from error
    if not isinstance(config, dict):
        advice = "send PEFT's LoraConfig"
        raise _refused(adapter, "config", expected="a mapping", found=config, advice=advice)
    return config


def _check_rank(config: Mapping[str, Any], lora_config: Any, adapter: str) -> None:
    limit = int(lora_config.max_lora_rank)
    patterns = config.get("rank_pattern") or {}
    ranks = {"r": config.get("r")}
    if isinstance(patterns, dict):
        ranks |= {f"rank_pattern[{pattern!r}]": rank for pattern, rank in patterns.items()}
    for setting, rank in ranks.items():
        is_rank = isinstance(rank, int) and not isinstance(rank, bool)
        if not is_rank or not 0 < int(rank or 0) <= limit:
            raise _refused(
                adapter,
                setting,
                expected=f"1 to {limit}, the engine's max_lora_rank",
                found=rank,
                advice="train with a lower rank, or start the engine with a higher --max-lora-rank",
            )


def _refused(
    adapter: str, setting: str, *, expected: object, found: object, advice: str
) -> AdapterConfigError:
    return AdapterConfigError(
        f"adapter {adapter!r} has {setting} {found!r}; expected {expected}; {_NOTHING}; {advice}",
        adapter=adapter,
        setting=setting,
        expected=str(expected),
        found=str(found),
    )
