"""The one place that picks a transport, makes its memory, and opens it.

A new transport adds its file, its handle in ``handles.py``, and a line in each of the
functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from ..config import Settings
from ..errors import ConfigError, UnsupportedError
from ..handles import CudaBlocksHandle, CudaIpcHandle, Handle, InprocHandle, ShmHandle
from ..layout import BucketLayout
from ..messages import Hello
from ..probe import TransportProbe, machine_probe, own_probe
from . import cuda_blocks, cuda_ipc, inproc, parked, shm
from .base import OpenedRegion, OwnedRegion
from .slots import ON_DEVICE, ON_HOST, choose_slot_size

KINDS = ("inproc", "cuda_ipc", "shm")
# References take no room: offsets only have to be apart, and no tensor is split.
_INPROC_SLOT_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, and why it is used.

    Attributes:
        kind: Its name.
        reason: For people.
        is_zero_copy: Tensors are read where they lie, as far as they can be.
        failures: What failed before it; a part of ``reason``.
    """

    kind: str
    reason: str
    is_zero_copy: bool = False
    failures: str = ""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"zero-copy {self.kind}" if self.is_zero_copy else self.kind

    def after(self, failed: Choice, reason: str) -> Self:
        """Return this choice as the one that is left after another failed."""
        failures = f"{failed.failures}{failed.name} failed ({reason}); "
        return replace(self, reason=failures + self.reason, failures=failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is known of an update's transport before any worker was asked.

    Attributes:
        transport: The setting.
        is_in_process: The only worker lives in this process.
        device: Where the tensors are; ``None`` where that is not known yet.
        is_zero_copy: Tensors may be read where they lie.
    """

    transport: str
    is_in_process: bool = False
    device: torch.device | None = None
    is_zero_copy: bool = False

    def check(self) -> None:
        """Refuse a setting that cannot be met, whatever the workers are.

        Raises:
            ConfigError: It cannot.
        """
        if self.is_in_process and self.transport != "auto":
            raise ConfigError(
                f"transport is {self.transport!r}, but the engine lives in this process and takes "
                f"references; leave it at 'auto', or run the engine with "
                f"VLLM_ENABLE_V1_MULTIPROCESSING=1"
            )

    @property
    def gpu(self) -> torch.device:
        """The GPU whose memory carries buckets: that of the tensors, or else the current."""
        if self.device is not None and self.device.type == "cuda":
            return self.device
        return torch.device("cuda")


def candidates(wish: Wish, hellos: Sequence[Hello]) -> list[Choice]:
    """Return the transports to try, the best first.

    Args:
        wish: What is known on this side.
        hellos: What every worker said of itself.

    Raises:
        UnsupportedError: The only transport that may be used cannot work.
    """
    if wish.is_in_process:
        return [Choice("inproc", "the worker lives in this process and takes references")]
    if wish.transport == "shm":
        return [Choice("shm", "asked for")]
    why_not = _why_not_cuda_ipc(wish, hellos)
    if wish.transport == "cuda_ipc":
        if why_not is not None:
            raise UnsupportedError(
                f"transport 'cuda_ipc' cannot be used: {why_not}; nothing was written; set "
                f"transport to 'auto' to take shared memory where it has to be"
            )
        return _with_zero_copy(wish, [Choice("cuda_ipc", "asked for")])
    if why_not is not None:
        return [Choice("shm", f"no CUDA IPC: {why_not}")]
    found = [
        Choice("cuda_ipc", "the tensors are on a GPU that every worker may reach"),
        Choice("shm", "works between processes on every device"),
    ]
    return _with_zero_copy(wish, found)


def _with_zero_copy(wish: Wish, choices: list[Choice]) -> list[Choice]:
    if not wish.is_zero_copy:
        return choices
    reason = "asked for: workers read the tensors where they lie"
    return [replace(choices[0], reason=reason, is_zero_copy=True), *choices]


def openable(device: torch.device | str, probe: TransportProbe | None = None) -> tuple[str, ...]:
    """Return the transports that a worker on ``device`` may be able to open.

    Args:
        device: The worker's.
        probe: What its process was found to have; its own where ``None``.
    """
    probe = own_probe() if probe is None else probe
    has_ipc = torch.device(device).type == "cuda" and probe.kind == "cuda_ipc"
    return tuple(kind for kind in KINDS if kind != "cuda_ipc" or has_ipc)


def slot_size_for(kind: str | None, settings: Settings, needed_bytes: int | None) -> int:
    """Return the size of a slot in bytes that ``create_slots`` begins with.

    Args:
        kind: The transport; ``None`` where none was chosen yet.
        settings: Number and size of the slots.
        needed_bytes: Bytes of the update; ``None`` where that is not known.
    """
    cut = ON_DEVICE if kind == "cuda_ipc" else ON_HOST
    return choose_slot_size(settings, needed_bytes, cut=cut)


def create_slots(
    kind: str, *, settings: Settings, needed_bytes: int | None, wish: Wish
) -> tuple[OwnedRegion, BucketLayout, int]:
    """Make a region with slots.

    Args:
        kind: The transport.
        settings: Number and size of the slots, and where they may be.
        needed_bytes: Bytes of the update; ``None`` where that is not known.
        wish: On which GPU, where it is device memory.

    Returns:
        The region, what to plan with, and how many slots it has.

    Raises:
        RegionError: There is no memory for it; nothing is left behind.
        UnsupportedError: No transport is called ``kind``, or it cannot work here.
    """
    if kind == "cuda_ipc":
        device_region, size = cuda_ipc.create_slots(settings, needed_bytes, device=wish.gpu)
        return device_region, BucketLayout(size), settings.num_slots
    if kind == "shm":
        region, slot_size_bytes = shm.create_slots(settings, needed_bytes)
        return region, BucketLayout(slot_size_bytes), settings.num_slots
    if kind == "inproc":
        # One tensor at a time: the source may reuse its memory for the next one.
        layout = BucketLayout(_INPROC_SLOT_BYTES, max_entries=1)
        return inproc.InprocRegion.create(_INPROC_SLOT_BYTES), layout, 1
    raise _unknown(kind)


def open_region(kind: str, handle: Handle, *, device: torch.device) -> OpenedRegion:
    """Open a region that another end made.

    Args:
        kind: The transport.
        handle: Which region.
        device: What its bytes will be copied to.

    Raises:
        RegionError: It cannot be opened, or is not what the handle says.
        UnsupportedError: No transport is called ``kind``, or the handle is another's.
    """
    if kind == "cuda_ipc" and isinstance(handle, CudaIpcHandle) and device.type == "cuda":
        return cuda_ipc.OpenedCuda.open(handle, device=device)
    if kind == "cuda_ipc" and isinstance(handle, CudaBlocksHandle) and device.type == "cuda":
        return cuda_blocks.OpenedBlocks.open(handle, device=device)
    if kind == "shm" and isinstance(handle, ShmHandle):
        return shm.OpenedShm.open(handle, device=device)
    if kind == "inproc" and isinstance(handle, InprocHandle):
        return inproc.OpenedInproc.open(handle)
    raise _unknown(kind)


def reclaim() -> int:
    """Free the memory of closed regions that no worker has mapped any more.

    Returns:
        Bytes that workers still have to let go of.
    """
    return parked.free_unused()


def _why_not_cuda_ipc(wish: Wish, hellos: Sequence[Hello]) -> str | None:
    """Say why CUDA IPC cannot carry an update, or ``None`` if only trying can tell."""
    is_forced = wish.transport == "cuda_ipc"
    probe = machine_probe()
    if probe.kind != "cuda_ipc":
        return f"here in the trainer, {probe.reason}"
    for hello in hellos:
        if "cuda_ipc" not in hello.transports:
            return f"rank {hello.rank} is on {hello.device}: {hello.transport_reason or 'no GPU'}"
    if wish.device is not None and wish.device.type != "cuda" and not is_forced:
        return f"the tensors are on {wish.device.type}"
    if wish.device is None and not torch.cuda.is_initialized() and not is_forced:
        return "a stream is sent by a trainer that does not use CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU in the trainer"
    return None


def _unknown(kind: str) -> UnsupportedError:
    return UnsupportedError(
        f"transport {kind!r} is not known here; known are {', '.join(KINDS)}; install the same "
        f"version of vllm_bucketsync on both sides"
    )
