"""How much memory the host can still give to this process, by what the kernel says.

In a container that is what its control group leaves, where that is less.
"""

from __future__ import annotations

from pathlib import Path

_KIB = 1024
# Limit, usage, and the file that tells how much of the usage is cache, in both versions.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes(root: str = "/") -> int:
    """Return the memory that can be had without anything being ended for it.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    meminfo = Path(root, "proc/meminfo").read_text(encoding="ascii")
    found = int(_field(meminfo, "MemAvailable:")) * _KIB
    left = _left_in_group(Path(root, "sys/fs/cgroup"))
    return found if left is None else min(found, left)


def _left_in_group(group: Path) -> int | None:
    """Return what the control group leaves; ``None`` where it sets no limit."""
    for limit, usage, stat, cache in _GROUPS:
        try:
            most = (group / limit).read_text(encoding="ascii").strip()
            used = int((group / usage).read_text(encoding="ascii"))
            cached = int(_field((group / stat).read_text(encoding="ascii"), cache))
        except (OSError, ValueError):
            continue
        # Cache is counted as used, and given up before anything is ended.
        return None if most == "max" else max(int(most) - used + cached, 0)
    return None


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return words[1]
    return "0"
