"""How an adapter is named: to requests, to vLLM, and to its prefix cache.

The number follows from the name alone, so that every trainer and every worker gives one
adapter the same number, whatever was pushed before, and whoever was restarted.
"""

from __future__ import annotations

import hashlib

from .errors import AdapterError, ConfigError
from .messages import MAX_ADAPTER_NAME_CHARS, AdapterSpec
from .texts import utf8

# vLLM takes it for a path: what begins with it is ours, anything else is a folder.
SCHEME = "bucketsync://"
# vLLM counts its own from 1, and holds them in 32 bits.
FIRST_ID = 1 << 30


def spec_of(name: str, *, version: str, config: str = "") -> AdapterSpec:
    """Return what travels of an adapter beside its tensors.

    Args:
        name: What requests call it.
        version: Its version. It goes into the path, which is part of the key that vLLM's
            prefix cache has for a prompt.
        config: PEFT's ``adapter_config.json``, as text.
    """
    return AdapterSpec(
        name=name, lora_int_id=id_of(name), lora_path=f"{SCHEME}{name}@{version}", config=config
    )


def id_of(name: str) -> int:
    """Return the number of an adapter: from 2^30 up to 2^31 - 1."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return FIRST_ID + int.from_bytes(digest) % FIRST_ID


def check_name(name: str) -> str:
    """Return an adapter's name, or raise ``ConfigError`` where requests could not have it."""
    if not isinstance(name, str) or not name.isprintable() or utf8(name) != name or not name:
        raise ConfigError(
            f"the adapter's name is {name!r}; expected a str of printable characters, as "
            f"requests are to have it"
        )
    if len(name) > MAX_ADAPTER_NAME_CHARS:
        raise ConfigError(
            f"the adapter's name has {len(name)} characters; at most {MAX_ADAPTER_NAME_CHARS} are "
            f"allowed"
        )
    return name


def check_spec(spec: AdapterSpec, *, version: str) -> None:
    """Refuse a name, number and path that do not belong together: they came from outside.

    A number of vLLM's own would replace somebody else's adapter, and a path of its own be
    read as a folder, or fetched.

    Args:
        spec: What was received.
        version: The version that came with it.

    Raises:
        AdapterError: It is not what ``spec_of`` makes of its name and the version.
    """
    try:
        check_name(spec.name)
    except ConfigError as error:
        raise AdapterError(f"{error}; nothing was changed", adapter=spec.name) from error
    expected = spec_of(spec.name, version=version)
    if (spec.lora_int_id, spec.lora_path) != (expected.lora_int_id, expected.lora_path):
        raise AdapterError(
            f"adapter {spec.name!r} came with the number {spec.lora_int_id} and the path "
            f"{spec.lora_path!r}; expected {expected.lora_int_id} and {expected.lora_path!r}; "
            f"nothing was changed; let push_lora make them",
            adapter=spec.name,
        )


def is_ours(lora_path: str) -> bool:
    """Return whether a path is one of an adapter that was pushed."""
    return lora_path.startswith(SCHEME)
