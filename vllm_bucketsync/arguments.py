"""What ``WeightSync`` is given, checked before anybody is asked for anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .clients.base import PauseMode
from .errors import ConfigError, utf8
from .handles import MAX_SHORT_CHARS
from .messages import MAX_PATTERNS, MAX_VERSION_CHARS
from .versions import check_ordered


def check_patterns(partial: Sequence[str]) -> tuple[str, ...]:
    """Refuse one pattern in place of several: its every letter would be one, ``*`` too."""
    if isinstance(partial, str):
        raise ConfigError(f"partial is {partial!r}; expected a list of patterns: [{partial!r}]")
    if not isinstance(partial, Iterable) or not all(isinstance(one, str) for one in partial):
        raise ConfigError(f"partial is {partial!r}; expected a list of patterns, each a str")
    patterns = tuple(partial)
    longest = max(map(len, patterns), default=0)
    if longest > MAX_SHORT_CHARS or len(patterns) > MAX_PATTERNS:
        raise ConfigError(
            f"partial has {len(patterns)} patterns of up to {longest} characters; at most "
            f"{MAX_PATTERNS} of {MAX_SHORT_CHARS} are allowed; one with a * stands for many"
        )
    return patterns


def is_count(value: object) -> bool:
    """Return whether a value can be a number of workers."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_version(version: int | str) -> str:
    """Return a version as vLLM gets it, or raise ``ConfigError``."""
    text = str(version)
    if utf8(text) != text:
        raise ConfigError(f"version {text!r} cannot be written as UTF-8")
    if len(text) > MAX_VERSION_CHARS:
        raise ConfigError(
            f"version has {len(text)} characters; at most {MAX_VERSION_CHARS} are allowed"
        )
    return text


def check_order(version: int | str, *, require_newer: bool) -> str:
    """Return a version as ``check_version`` does; refuse a name where it has to be newer."""
    text = check_version(version)
    if require_newer:
        check_ordered(text)
    return text


def check_pause(pause: str) -> PauseMode:
    """Return a pause mode by vLLM's word for it, or raise ``ConfigError``."""
    try:
        return PauseMode(pause)
    except ValueError:
        raise ConfigError(
            f"pause is {pause!r}; expected one of {', '.join(PauseMode)}; they are vLLM's words"
        ) from None
