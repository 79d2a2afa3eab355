"""Which of two versions of some weights is newer, where that can be told.

Versions are the user's names. Whole numbers, also written as text, have an order; other
names have none, and are never compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import ConfigError, OlderVersionError

_NUMBER = re.compile(r"-?[0-9]{1,256}")


def number_of(version: str | None) -> int | None:
    """Return a version as a number, or ``None`` for a name that has no order."""
    is_number = version is not None and _NUMBER.fullmatch(version) is not None
    return int(version) if is_number and version is not None else None


def goes_back(version: str, held: Iterable[str | None]) -> bool:
    """Return whether a version is older than one of those that are held."""
    new = number_of(version)
    return new is not None and any(new < old for old in map(number_of, held) if old is not None)


def check_ordered(version: str) -> None:
    """Refuse a version that cannot be newer than any other.

    Raises:
        ConfigError: It is a name without an order.
    """
    if number_of(version) is None:
        raise ConfigError(
            f"require_newer=True needs versions that have an order, whole numbers or text of "
            f"them, and version is {version!r}; number the versions, or leave require_newer out"
        )


def check_newer(version: str, held: Iterable[str | None]) -> None:
    """Refuse a version that is not newer than what one engine holds.

    An engine whose workers hold different versions is given the newest of them again:
    that repairs it.

    Args:
        version: What is to be sent, as ``check_ordered`` has let it pass.
        held: What each worker of the engine holds; ``None`` before its first update.

    Raises:
        ConfigError: A worker's version is a name without an order.
        OlderVersionError: The version is older, or the same.
    """
    new, olds = number_of(version), list(held)
    strange = next((old for old in olds if old is not None and number_of(old) is None), None)
    if strange is not None:
        raise ConfigError(
            f"require_newer=True cannot compare version {version!r} with {strange!r}, which the "
            f"engine holds and which is not a whole number; push once without require_newer"
        )
    numbers = [number_of(old) for old in olds]
    known = [number for number in numbers if number is not None]
    if new is None or not known:
        return
    is_mending = new == max(known) and len(set(numbers)) > 1
    if new <= max(known) and not is_mending:
        raise OlderVersionError(
            f"version {version!r} is not newer than {max(known)}, which the engine holds; nothing "
            f"was written; push without require_newer to go back",
            version=version,
            held=str(max(known)),
        )
