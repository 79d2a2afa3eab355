"""The one place that picks a transport, makes its memory, and opens it.

A new transport adds its file, its handle in ``messages.py``, and a line in each of the
three functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..config import Settings
from ..errors import ConfigError, UnsupportedError
from ..layout import BucketLayout
from ..messages import Handle, InprocHandle, ShmHandle
from . import inproc, shm
from .base import OpenedRegion, OwnedRegion

KINDS = ("inproc", "shm")
# References take no room: offsets only have to be apart, and no tensor is split.
_INPROC_SLOT_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, and why it is used.

    Attributes:
        kind: Its name.
        reason: For people.
    """

    kind: str
    reason: str

    def after(self, failed: Choice, reasons: Sequence[str]) -> Self:
        """Return this choice as the one that is left after another failed."""
        return replace(self, reason=f"{failed.kind} failed ({'; '.join(reasons)}); {self.reason}")


def candidates(transport: str, *, is_in_process: bool) -> list[Choice]:
    """Return the transports to try, the best first.

    Args:
        transport: The setting.
        is_in_process: The only worker lives in this process.

    Raises:
        ConfigError: The setting cannot be met.
    """
    if is_in_process and transport != "auto":
        raise ConfigError(
            f"transport is {transport!r}, but the engine lives in this process and takes "
            f"references; leave it at 'auto', or run the engine with "
            f"VLLM_ENABLE_V1_MULTIPROCESSING=1"
        )
    if is_in_process:
        return [Choice("inproc", "the worker lives in this process and takes references")]
    why = "asked for" if transport == "shm" else "works between processes on every device"
    return [Choice("shm", why)]


def create_slots(
    kind: str, *, settings: Settings, needed_bytes: int | None
) -> tuple[OwnedRegion, BucketLayout, int]:
    """Make a region with slots.

    Args:
        kind: The transport.
        settings: Number and size of the slots, and where they may be.
        needed_bytes: Bytes of the update; ``None`` where that is not known.

    Returns:
        The region, what to plan with, and how many slots it has.

    Raises:
        RegionError: There is no memory for it; nothing is left behind.
        UnsupportedError: No transport is called ``kind``.
    """
    if kind == "shm":
        region, slot_size_bytes = shm.create_slots(settings, needed_bytes)
        return region, BucketLayout(slot_size_bytes), settings.num_slots
    if kind == "inproc":
        # One tensor at a time: the source may reuse its memory for the next one.
        layout = BucketLayout(_INPROC_SLOT_BYTES, max_entries=1)
        return inproc.InprocRegion.create(_INPROC_SLOT_BYTES), layout, 1
    raise _unknown(kind)


def open_region(kind: str, handle: Handle) -> OpenedRegion:
    """Open a region that another end made.

    Raises:
        RegionError: It cannot be opened, or is not what the handle says.
        UnsupportedError: No transport is called ``kind``, or the handle is another's.
    """
    if kind == "shm" and isinstance(handle, ShmHandle):
        return shm.OpenedShm.open(handle)
    if kind == "inproc" and isinstance(handle, InprocHandle):
        return inproc.OpenedInproc.open(handle)
    raise _unknown(kind)


def _unknown(kind: str) -> UnsupportedError:
    return UnsupportedError(
        f"transport {kind!r} is not known here; known are {', '.join(KINDS)}; install the same "
        f"version of vllm_bucketsync on both sides"
    )
