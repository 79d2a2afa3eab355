"""What ``WeightSync`` is given, checked before anybody is asked for anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import SupportsIndex

from .clients.base import PauseMode
from .config import Verify
from .errors import ConfigError, SourceError
from .handles import MAX_SHORT_CHARS
from .messages import MAX_PATTERNS, MAX_VERSION_CHARS
from .sources import Source
from .texts import utf8, with_article
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
    is_number = isinstance(version, SupportsIndex) and not isinstance(version, bool)
    if not (is_number or isinstance(version, str)):
        raise ConfigError(
            f"version is {version!r}; expected a whole number or a name; nothing was sent"
        )
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


def check_trace(path: str | Path | None) -> Path | None:
    """Return where a trace is to be written, or raise ``ConfigError`` where it cannot be."""
    if path is None:
        return None
    if not isinstance(path, str | Path):
        raise ConfigError(f"trace is {path!r}; expected the path of a file; nothing was sent")
    found = Path(path).expanduser()
    if found.is_dir() or not found.parent.is_dir():
        what = "is a folder" if found.is_dir() else "has a folder that does not exist"
        raise ConfigError(
            f"trace {str(path)!r} {what}; expected a file, in a folder that exists; nothing was "
            f"sent"
        )
    return found


def check_rename(rename: object) -> None:
    """Refuse what cannot be called with a name."""
    if rename is not None and not callable(rename):
        raise ConfigError(
            f"rename is {with_article(type(rename).__name__)}; expected a function of a name "
            "that returns "
            f"one; of a dict: lambda name: names.get(name, name)"
        )


def check_pause(pause: str) -> PauseMode:
    """Return a pause mode by vLLM's word for it, or raise ``ConfigError``."""
    try:
        return PauseMode(pause)
    except ValueError:
        raise ConfigError(
            f"pause is {pause!r}; expected one of {', '.join(PauseMode)}; they are vLLM's words"
        ) from None


def check_verify(verify: str) -> Verify:
    """Return what is to be verified, or raise ``ConfigError``."""
    try:
        return Verify(verify)
    except ValueError:
        raise ConfigError(f"verify is {verify!r}; expected one of {', '.join(Verify)}") from None


def check_declared(source: Source) -> None:
    """Refuse a stream for an atomic update: room is made before the first tensor is asked for.

    Raises:
        SourceError: The source does not say in advance what it holds. It is closed.
    """
    if source.declared is None:
        source.close()
        raise SourceError(
            "atomic=True needs to know every name, dtype and shape in advance, and the source is "
            "an iterator, which tells them one by one; nothing was asked for; pass the module, "
            "its state_dict, a list of (name, tensor) or a checkpoint, or push without atomic"
        )
