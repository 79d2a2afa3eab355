"""What was measured on: processors, the GPU, and versions."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from vllm_bucketsync import __version__
from vllm_bucketsync.doctor.environment import VLLM_DISTRIBUTIONS, version_of

from .memory import processor


def usable_cpus() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return what is known of this machine, as data that JSON can hold.

    Args:
        device: Where the tensors are; of a GPU its name and memory are told.
    """
    found: dict[str, Any] = {
        "system": platform.platform(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "load_average": os.getloadavg()[0],
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory}
    return found


def versions(*, with_vllm: bool = False) -> dict[str, str]:
    """Return the versions of what was measured, and of what it was measured with."""
    found = {
        "vllm_bucketsync": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if with_vllm:
        found["vllm"] = _vllm_version()
    return found


def _vllm_version() -> str:
    for name in VLLM_DISTRIBUTIONS:
        if (found := version_of(name)) is not None:
            return f"{found}{'' if name == 'vllm' else ' (CPU build)'}"
    return "unknown"
