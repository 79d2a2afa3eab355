"""Which transport this process can be expected to use, told without touching a device.

Runs when vLLM loads its plugins: in processes that may still fork, and before a device
was chosen. So it reads the environment, ``/proc`` and ``/dev``, and neither torch nor
NVML. It can only rule transports out; whether CUDA IPC works is seen when a worker opens
the first region and finds the sender's canary in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from .config import ENV_PREFIX
from .texts import utf8

Fact = str | int | bool | None

# Settings of torch that say where its memory comes from; reported, since ours does not.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_VARIABLES = (*_ALLOCATOR_VARIABLES, "CUDA_VISIBLE_DEVICES", f"{ENV_PREFIX}TRANSPORT")
_NO_DEVICES = frozenset({"", "-1", "NoDevFiles", "none", "void"})
_MIB = 1024**2
TRANSPORT_ENV = f"{ENV_PREFIX}TRANSPORT"


@dataclass(frozen=True, slots=True)
class TransportProbe:
    """What a process can be expected to use.

    Attributes:
        kind: ``cuda_ipc`` or ``shm``.
        reason: Why, for people.
        facts: What it was told by, as data that JSON can hold.
    """

    kind: str
    reason: str
    facts: dict[str, Fact]

    def as_dict(self) -> dict[str, object]:
        """Return everything as data that JSON can hold."""
        return asdict(self)


@cache
def own_probe() -> TransportProbe:
    """Return the probe of this process, made when first asked for."""
    return probe(os.environ)


@cache
def machine_probe() -> TransportProbe:
    """Return the same without what is asked for by environment.

    For a trainer, whose settings take its environment as a default only.
    """
    return probe({name: value for name, value in os.environ.items() if name != TRANSPORT_ENV})


def probe(
    environ: Mapping[str, str], *, root: str = "/", platform: str = sys.platform
) -> TransportProbe:
    """Find out what can be told without a device. Never raises.

    Args:
        environ: The environment.
        root: Where ``proc`` and ``dev`` are.
        platform: As ``sys.platform``.
    """
    facts = _facts(environ, Path(root), platform)
    why_not = _why_not_cuda_ipc(facts)
    if why_not is not None:
        return TransportProbe("shm", why_not, facts)
    return TransportProbe("cuda_ipc", "a GPU is here and nothing rules CUDA IPC out", facts)


def _facts(environ: Mapping[str, str], root: Path, platform: str) -> dict[str, Fact]:
    shm = root / "dev/shm"
    # Facts travel, and an environment may hold bytes that are no UTF-8.
    said = {name: utf8(environ[name]) for name in _VARIABLES if name in environ}
    visible = said.get("CUDA_VISIBLE_DEVICES")
    return {
        "platform": platform,
        "is_wsl": _is_wsl(root),
        "num_nvidia_devices": _count(root / "dev", "nvidia[0-9]*"),
        "has_nvidia_control": _exists(root / "dev/nvidiactl"),
        "has_amd_devices": _exists(root / "dev/kfd"),
        "visible_devices": visible,
        "has_mig_devices": visible is not None and "MIG-" in visible,
        "allocator": next(filter(None, map(said.get, _ALLOCATOR_VARIABLES)), None),
        "shm_free_mib": _free_mib(shm),
        "shm_is_writable": os.access(shm, os.W_OK | os.X_OK),
        "ptrace_scope": _read(root / "proc/sys/kernel/yama/ptrace_scope"),
        "transport": said.get(f"{ENV_PREFIX}TRANSPORT") or None,
    }


def _why_not_cuda_ipc(facts: Mapping[str, Fact]) -> str | None:
    visible = facts["visible_devices"]
    if facts["transport"] == "shm":
        return f"{TRANSPORT_ENV} is 'shm'"
    if facts["platform"] != "linux":
        return f"CUDA IPC needs Linux, and this is {facts['platform']}"
    if facts["is_wsl"]:
        return "this is WSL2, whose CUDA has no IPC"
    has_gpu = facts["num_nvidia_devices"] or facts["has_nvidia_control"] or facts["has_amd_devices"]
    if not has_gpu:
        return "no GPU's device files are in /dev"
    if isinstance(visible, str) and visible.strip() in _NO_DEVICES:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU"
    return None


def _is_wsl(root: Path) -> bool:
    return _exists(root / "dev/dxg") or "microsoft" in (_read(root / "proc/version") or "").lower()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    # What may not be looked at is as good as missing.
    except OSError:
        return False


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _count(directory: Path, pattern: str) -> int:
    try:
        return sum(1 for _ in directory.glob(pattern))
    except OSError:
        return 0


def _free_mib(directory: Path) -> int | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize // _MIB
