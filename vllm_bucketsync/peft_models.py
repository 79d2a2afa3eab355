"""Turns what a user gives to ``push_lora`` into an adapter's tensors and its config.

PEFT is never imported: a model is known by what it has (``peft_config``,
``active_adapter``, ``state_dict``). Tensors get the names of PEFT's own files, without the
adapter's name and without what trainers wrap models in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from torch import nn

from .errors import AdapterConfigError, ConfigError, SourceError
from .inputs import open_source
from .messages import MAX_CONFIG_CHARS
from .recall import Recall
from .sources import Source
from .texts import with_article

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
# Trainers' wrappers hide the model behind one of these.
_WRAPPED = ("module", "_orig_mod")
_MAX_WRAPPERS = 8


def open_adapter(
    given: object,
    *,
    adapter_name: str | None = None,
    rename: Callable[[str], str] | None = None,
    recall: Recall | None = None,
) -> tuple[Source, str]:
    """Turn what a user gave into a source and a config.

    Args:
        given: A PEFT model; a pair of tensors (anything that ``open_source`` takes) and
            PEFT's config (a mapping, or an object with ``to_dict``); or the folder of a
            saved adapter.
        adapter_name: Which adapter of a PEFT model; its active one where ``None``. Of
            nothing else.
        rename: See ``open_source``.
        recall: See ``open_source``.

    Returns:
        The source, and the config as JSON.

    Raises:
        ConfigError: ``adapter_name`` came with what is one adapter.
        SourceError: It is none of these, or holds no tensors.
        AdapterConfigError: It is an adapter of another kind than LoRA.
    """
    tensors: object
    if adapter_name is not None and isinstance(given, str | Path | Sequence):
        kind = "folder" if isinstance(given, str | Path) else "pair of tensors and config"
        raise ConfigError(
            f"adapter_name is {adapter_name!r}, and a {kind} was given, which is one adapter; "
            f"it picks one of a PEFT model's; leave it out; name= is what requests call it"
        )
    match given:
        case (tensors, config):
            pass
        case str() | Path():
            tensors, config = _saved(Path(given).expanduser())
        case _:
            model = peft_model(given)
            if model is None:
                raise SourceError(
                    f"{with_article(type(given).__name__)} was given; expected a PEFT model, "
                    "a pair of "
                    f"tensors and PEFT's config, or the folder of a saved adapter"
                )
            name = active_adapter(model, adapter_name)
            tensors, config = _tensors_of(model, name), model.peft_config[name]
    text = config_text(config)
    _check_kind(text)
    return open_source(tensors, rename=rename, recall=recall), text


def peft_model(given: object) -> Any:
    """Return the PEFT model that was given, out of its wrappers; ``None`` if it is none."""
    model: Any = given
    for _ in range(_MAX_WRAPPERS):
        if isinstance(getattr(model, "peft_config", None), Mapping) and hasattr(
            model, "state_dict"
        ):
            return model
        model = next((getattr(model, name) for name in _WRAPPED if hasattr(model, name)), None)
        if model is None:
            break
    return None


def active_adapter(model: Any, wanted: str | None = None) -> str:
    """Return the name of one adapter of a PEFT model.

    Args:
        model: A PEFT model.
        wanted: The adapter; the only active one where ``None``.

    Raises:
        SourceError: There is no such adapter, or not one that is active alone.
    """
    known = list(model.peft_config)
    active: Any = wanted
    for attribute in ("active_adapter", "active_adapters"):
        if active is None:
            active = getattr(model, attribute, None)
            active = active() if callable(active) else active
    names = [active] if isinstance(active, str) else list(active or ())
    if len(names) != 1 or names[0] not in known:
        raise SourceError(
            f"adapter {wanted or names!r} was asked for, or is active; the model has "
            f"{', '.join(map(repr, known)) or 'none'}; name one of them as adapter_name="
        )
    found: str = names[0]
    return found


def config_text(config: object) -> str:
    """Return a PEFT config as JSON.

    Args:
        config: A mapping, or an object with ``to_dict``.

    Raises:
        SourceError: It is neither, or larger than any that makes sense.
    """
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise SourceError(
            f"the adapter's config is {with_article(type(config).__name__)}; expected PEFT's "
            "LoraConfig, or a "
            f"mapping such as the one in {CONFIG_FILE}"
        )
    try:
        text = json.dumps(dict(values), default=_plain, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise SourceError(f"the adapter's config cannot be written as JSON: {error}") from error
    if len(text) > MAX_CONFIG_CHARS:
        raise SourceError(
            f"the adapter's config has {len(text)} characters; at most {MAX_CONFIG_CHARS} are "
            f"allowed; name target modules by pattern"
        )
    return text


def _tensors_of(model: Any, name: str) -> dict[str, Any]:
    """Return an adapter's tensors, under the names that PEFT's files have."""
    found: dict[str, Any] = {}
    is_plain = isinstance(model, nn.Module) and _collect(model, "", name, found)
    if not is_plain:
        found = _picked(model.state_dict(), name)
    if not found:
        raise _no_lora(model, name)
    return found


def _collect(module: nn.Module, start: str, name: str, found: dict[str, Any]) -> bool:
    """Add an adapter's tensors to ``found``, as ``state_dict`` would name and order them.

    A model has thousands of modules, and a push has milliseconds.

    Returns:
        Whether that is all: ``False`` where a hook makes something else of the state.
    """
    if module._state_dict_hooks or module._state_dict_pre_hooks:
        return False
    for child_name, child in module._modules.items():
        if child is None or not (child._modules or child._parameters or child._buffers):
            continue
        path = start + child_name
        if not child_name.startswith("lora_"):
            if not _collect(child, f"{path}.", name, found):
                return False
        elif name in child._parameters:
            found[path] = child._parameters[name]
        elif (leaf := child._modules.get(name)) is None or _is_deep(leaf):
            found |= _picked(child.state_dict(prefix=f"{path}."), name)
        else:
            found |= {
                f"{path}.{key}": one for key, one in leaf._parameters.items() if one is not None
            }
    return True


def _is_deep(module: nn.Module) -> bool:
    """Whether there is more to the state of a module than its own parameters."""
    return bool(
        module._modules
        or module._buffers
        or module._state_dict_hooks
        or module._state_dict_pre_hooks
    )


def _picked(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what of a state is an adapter's, without the adapter's name."""
    found = {}
    for key, tensor in state.items():
        parts = key.split(".")
        for position, part in enumerate(parts[:-1]):
            if part.startswith("lora_") and parts[position + 1] == name:
                found[".".join(parts[: position + 1] + parts[position + 2 :])] = tensor
    return found


def _no_lora(model: Any, name: str) -> Exception:
    config = model.peft_config[name]
    kind = str(getattr(getattr(config, "peft_type", "LORA"), "value", "LORA"))
    if kind != "LORA":
        return _wrong_kind(kind)
    return SourceError(
        f"adapter {name!r} has no tensor called lora_…; its target_modules matched nothing"
    )


def _check_kind(text: str) -> None:
    kind = json.loads(text).get("peft_type", "LORA")
    if kind != "LORA":
        raise _wrong_kind(kind)


def _wrong_kind(kind: object) -> AdapterConfigError:
    return AdapterConfigError(
        f"the adapter's peft_type is {kind!r}; expected 'LORA', which is what vLLM applies; "
        f"nothing was sent; train a LoRA, or push merged weights with push(…, merge=True)",
        setting="peft_type",
        expected="LORA",
        found=str(kind),
    )


def _saved(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    file = folder / TENSOR_FILE
    if not file.is_file():
        raise SourceError(
            f"{str(folder)!r} holds no {TENSOR_FILE}; expected the folder of an adapter as "
            f"save_pretrained writes it"
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{folder / CONFIG_FILE} cannot be read: {error}; save the adapter again"
        ) from error
    return file, config


def _plain(value: object) -> object:
    """Return what JSON has no word for as something that it has."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value)


def carries_adapter(module: Any) -> bool:
    """Return whether a module wraps another one to add what an adapter learned."""
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
