"""Settings: what they mean, what they default to, and every environment variable.

The environment is read when ``Settings.from_env`` is called, never at import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any

from .errors import ConfigError
from .layout import ALIGNMENT_BYTES, aligned

ENV_PREFIX = "VLLM_BUCKETSYNC_"
DEFAULT_SLOT_SIZE_BYTES = 512 * 1024**2
# A slot that shrank to less than this would cost more in messages than in bytes.
MIN_SHRUNK_SLOT_SIZE_BYTES = 1024**2
TRANSPORTS = ("auto", "cuda_ipc", "shm")
PLAN_ENV = f"{ENV_PREFIX}PLAN"
# vLLM's own, which its servers read as well.
API_KEY_ENV = "VLLM_API_KEY"

_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}
# As many digits as no memory will ever need: int() refuses thousands of them.
_SIZE = re.compile(r"\s*(\d{1,30})\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one ``WeightSync`` works.

    Attributes:
        transport: ``auto``, or the only one that may be used.
        slot_size: Bytes of one slot, as a number or as ``"512MiB"``. ``None`` takes
            512 MiB, on a GPU 1 GiB, never more than the update needs, and halves it (down to 1 MiB)
            while the memory for ``num_slots`` of them cannot be had. A size that was
            asked for is never shrunk.
        num_slots: Slots of a region: one is filled while others are loaded.
        dir: Directory for shared memory and sockets. A per-user directory with mode
            0700 is made in it.
        connect_timeout_s: Until every worker has said hello, in seconds. Covers a
            drain and a queued update.
        idle_timeout_s: Without any progress, in seconds. Covers a gather.
        commit_timeout_s: From the commit to the last worker's report, in seconds.
            Covers post-processing and requantisation.
    """

    transport: str = "auto"
    slot_size: int | str | None = None
    num_slots: int = 2
    dir: str = "/dev/shm"  # noqa: S108 - the one directory that is memory on every Linux
    connect_timeout_s: float = 60.0
    idle_timeout_s: float = 300.0
    commit_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigError: One is out of range; the text names it and its variable.
        """
        if self.transport not in TRANSPORTS:
            raise _wrong("transport", self.transport, f"one of {', '.join(TRANSPORTS)}")
        self._check_slot_size()
        if not _is_number(self.num_slots, int) or not 1 <= self.num_slots <= 64:
            raise _wrong("num_slots", self.num_slots, "a whole number from 1 to 64")
        is_path = isinstance(self.dir, str | os.PathLike) and "\0" not in str(self.dir)
        if not is_path or not Path(self.dir).is_absolute():
            raise _wrong("dir", self.dir, "an absolute path")
        for name in ("connect_timeout_s", "idle_timeout_s", "commit_timeout_s"):
            value = getattr(self, name)
            if not _is_number(value, int | float) or not 0 < value < 1e6:
                raise _wrong(name, value, "a number of seconds above 0 and below a million")

    def _check_slot_size(self) -> None:
        if self.slot_size is None:
            return
        try:
            is_enough = parse_size(self.slot_size) >= ALIGNMENT_BYTES
        except ConfigError:
            expected = "bytes, or a number with KiB, MiB, GiB or TiB"
            raise _wrong("slot_size", self.slot_size, expected) from None
        if not is_enough:
            raise _wrong("slot_size", self.slot_size, f"at least {ALIGNMENT_BYTES} bytes")

    @property
    def slot_size_bytes(self) -> int:
        """The slot size asked for, or the default: rounded up to the alignment."""
        size = DEFAULT_SLOT_SIZE_BYTES if self.slot_size is None else parse_size(self.slot_size)
        return aligned(size)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Take what is given, then ``VLLM_BUCKETSYNC_…``, then the defaults.

        Args:
            environ: The environment; the process's own where ``None``.
            given: Settings by name; ``None`` means not given.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        environ = os.environ if environ is None else environ
        known = {field.name: field.default for field in fields(cls)}
        unknown = sorted(given.keys() - known.keys())
        if unknown:
            raise ConfigError(
                f"no setting is called {', '.join(map(repr, unknown))}; there are "
                f"{', '.join(known)}"
            )
        values = {name: value for name, value in given.items() if value is not None}
        for name, default in known.items():
            text = environ.get(ENV_PREFIX + name.upper())
            if name not in values and text:
                values[name] = _parse(name, text, type(default))
        return cls(**values)


class PlanMode(StrEnum):
    """Whether workers load by plan, as ``VLLM_BUCKETSYNC_PLAN`` in the engine's environment says.

    Attributes:
        AUTO: Where a plan is possible.
        OFF: Never: every tensor goes through vLLM's own loaders.
        CHECK: By plan, then by vLLM's loaders, and a byte that differs is an error. Takes
            several times as long, and memory for all that is sent.
    """

    AUTO = "auto"
    OFF = "off"
    CHECK = "check"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> PlanMode:
        """Return what the environment says; the process's own where it is ``None``.

        Raises:
            ConfigError: It says something else.
        """
        text = (os.environ if environ is None else environ).get(PLAN_ENV) or cls.AUTO
        if text not in set(cls):
            raise ConfigError(
                f"{PLAN_ENV} is {text!r}; expected one of {', '.join(cls)}, in the environment "
                f"of the engine"
            )
        return cls(text)


class Verify(StrEnum):
    """How an update is checked, beyond what always is.

    Attributes:
        NONE: Not at all.
        DIGEST: Every byte that arrives, and every tensor that is filled by plan, by digests.
    """

    NONE = "none"
    DIGEST = "digest"


def api_key_from_env(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key of vLLM's servers that the environment has; ``None`` where it has none.

    Args:
        environ: The environment; the process's own where ``None``.
    """
    return (os.environ if environ is None else environ).get(API_KEY_ENV) or None


def parse_size(size: int | str) -> int:
    """Return a size in bytes; ``"512MiB"`` and ``536870912`` are the same.

    Raises:
        ConfigError: It is no size; units are binary (KiB, MiB, GiB, TiB).
    """
    if _is_number(size, int):
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(
            f"{size!r} is not a size; expected bytes, or a number with KiB, MiB, GiB or TiB"
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def _parse(name: str, text: str, kind: type) -> Any:
    if kind not in {int, float}:
        return text
    try:
        return kind(text)
    except ValueError:
        raise _wrong(name, text, "a number") from None


def _is_number(value: object, kind: type | UnionType) -> bool:
    """Whether a value is a number; ``True`` counts as none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _wrong(name: str, found: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} is {found!r}; expected {expected}; set it as {name}= or in "
        f"{ENV_PREFIX}{name.upper()}"
    )
