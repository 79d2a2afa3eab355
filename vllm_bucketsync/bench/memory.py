"""What the kernel says of this process and this machine, in ``/proc``."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CPUINFO = Path("/proc/cpuinfo")
# Makes the kernel count the peak anew (proc(5), clear_refs).
_RESET_PEAK = "5"


def begin_peak() -> int | None:
    """Begin to count this process's peak anew.

    Returns:
        Resident bytes now, shared memory included, for ``peak_since``; ``None`` where
        the kernel does not let us.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return None
    return _field(_STATUS, "VmRSS")


def peak_since(begin_bytes: int | None) -> int | None:
    """Return how far the resident bytes rose above what ``begin_peak`` returned."""
    if begin_bytes is None:
        return None
    return max(_field(_STATUS, "VmHWM") - begin_bytes, 0)


def processor() -> str:
    """Return the name of the first processor; empty where the kernel does not say."""
    return _text(_CPUINFO, "model name")


def _field(path: Path, name: str) -> int:
    return int(_text(path, name).split()[0]) * 1024


def _text(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
