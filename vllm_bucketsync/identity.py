"""Who this process is to others: its host and the kernel's boot.

Memory can be shared only between processes of one boot of one kernel. Read when first
asked for, never at import.
"""

from __future__ import annotations

import os
import socket
from functools import cached_property
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Host:
    """This host.

    Attributes:
        host_id: Its name.
        boot_id: The kernel's id of the running boot; empty where there is none.
        pid: This process's id, as it sees it.
    """

    @property
    def pid(self) -> int:
        """Read anew: a forked child is another process."""
        return os.getpid()

    @cached_property
    def host_id(self) -> str:
        """Read once."""
        return socket.gethostname()

    @cached_property
    def boot_id(self) -> str:
        """Read once."""
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""


HOST = _Host()


def doing(pid: int | None) -> str:
    """Return what the kernel says that a process does, in a few words for messages.

    Returns:
        Empty where it cannot be told: it is gone, or in another PID namespace.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # Behind the name, which may hold anything, a parenthesis included.
    state = stat.rpartition(")")[2].split()[0]
    return "stopped by a signal" if state in {"T", "t"} else "alive"
