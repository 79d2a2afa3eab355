"""How an adapter is named: to requests, to vLLM, and to its prefix cache.

The number follows from the name alone, so that every trainer and every worker gives one
adapter the same number, whatever was pushed before, and whoever was restarted.
"""

from __future__ import annotations

import hashlib

from .messages import AdapterSpec

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


def is_ours(lora_path: str) -> bool:
    """Return whether a path is one of an adapter that was pushed."""
    return lora_path.startswith(SCHEME)
