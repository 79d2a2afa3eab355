"""Which GPU is meant: by its own name, never by its index.

An index counts the devices that one process sees; ``CUDA_VISIBLE_DEVICES`` makes it
mean another GPU in the next process.
"""

from __future__ import annotations

import torch


def uuid_of(device: torch.device | str) -> str:
    """Return a GPU's UUID, as ``nvidia-smi -L`` prints it; empty for other devices.

    A part of a GPU (MIG) has a UUID of its own.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        # ROCm builds of torch without it: the address on the bus tells GPUs apart, too.
        properties = torch.cuda.get_device_properties(device)
        place = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
        return "PCI-" + ":".join(f"{number:04x}" for number in place)
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def index_of(device: torch.device) -> int:
    """Return a GPU's index in this process; the current one's where none is said."""
    return torch.cuda.current_device() if device.index is None else device.index
