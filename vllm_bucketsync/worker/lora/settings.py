"""Which PEFT configs an engine can apply, and why it cannot apply the others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

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
    # Only newer vLLM refuses these itself; the others would compute something else.
    "alora_invocation_tokens": (None, "train without aLoRA: vLLM would apply it to every token"),
    "layer_replication": (None, "train without it: the engine's model has each layer once"),
    "use_bdlora": (None, "train without BD-LoRA"),
    "use_qalora": (False, "train without QA-LoRA"),
}
# With these, the base weights stay as they were. All others that PEFT has (PiSSA, OLoRA, CorDA,
# LoftQ, LoRA-GA) take from the trainer's base weights what they put in the adapter.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")


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
    _check_start(config, adapter)
    _check_numbers(config, adapter)
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
        config = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _refused(
            adapter, "config", expected="JSON", found=str(error), advice="send PEFT's LoraConfig"
        ) from error
    if not isinstance(config, dict):
        advice = "send PEFT's LoraConfig"
        raise _refused(adapter, "config", expected="a mapping", found=config, advice=advice)
    return config


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _check_start(config: Mapping[str, Any], adapter: str) -> None:
    found = config.get("init_lora_weights")
    if isinstance(found, str) and found.lower() not in _PLAIN_STARTS:
        raise _refused(
            adapter,
            "init_lora_weights",
            expected=f"true, false or one of {', '.join(_PLAIN_STARTS)}",
            found=found,
            advice="it changes the base weights: convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, or set it to true if the engine's base "
            "weights are the changed ones",
        )


def _check_numbers(config: Mapping[str, Any], adapter: str) -> None:
    """Refuse scales that vLLM would compute something else with, or NaN."""
    alphas = {"lora_alpha": config.get("lora_alpha")} | _pattern(config, "alpha_pattern", adapter)
    for setting, alpha in alphas.items():
        if not _is_finite(alpha):
            advice = "train with a number"
            raise _refused(adapter, setting, expected="a finite number", found=alpha, advice=advice)
    found = config.get("use_rslora")
    if not isinstance(found, bool | None):
        advice = "send PEFT's LoraConfig"
        raise _refused(adapter, "use_rslora", expected="true or false", found=found, advice=advice)


def _pattern(config: Mapping[str, Any], setting: str, adapter: str) -> dict[str, Any]:
    """Return the values of a setting by module, each under its own name for messages."""
    found = config.get(setting) or {}
    if not isinstance(found, dict):
        advice = "send PEFT's LoraConfig"
        raise _refused(adapter, setting, expected="a mapping", found=found, advice=advice)
    return {f"{setting}[{pattern!r}]": value for pattern, value in found.items()}


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _check_rank(config: Mapping[str, Any], lora_config: Any, adapter: str) -> None:
    limit = int(lora_config.max_lora_rank)
    ranks = {"r": config.get("r")} | _pattern(config, "rank_pattern", adapter)
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
