"""POSIX shared memory: a file in memory, mapped by both ends.

Made with ``open`` and ``mmap`` alone: ``multiprocessing.shared_memory`` would hand the
file to a resource tracker, which removes it when any process that attached it ends.

- All memory is reserved before it is used: a full file system is an error with advice
  at creation instead of a SIGBUS in the middle of an update.
- The owner holds a lock on the file for as long as it lives. That is how others find
  out whether it does, and how ``rundir.remove_stale`` knows what to remove.
- Nothing unmaps: a tensor of torch keeps the mapping alive, but does not keep it from
  being closed. The memory goes when the last tensor that views it does.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import torch

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import ConfigError, LocalProtocolError, RegionError
from vllm_bucketsync.handles import ShmHandle
from vllm_bucketsync.rundir import (
    SEGMENT_SUFFIX,
    Watch,
    create_file,
    is_locked,
    lock,
    remove_dir_if_empty,
    unlock,
)

from .base import CANARY_BYTES, HEADER_BYTES, check_bounds, view_of
from .pinned import HostCopies, Pin
from .slots import ON_HOST, create_shrinking

# Page tables are filled at once: a first touch costs ten times a later one.
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_CPU = torch.device("cpu")
_ZEROS_BYTES = 1 << 20


class ShmRegion:
    """The sender's end. Its owner unlinks and closes it.

    Attributes:
        handle: Opens the region in another process of the host.
        held_bytes: Memory that it takes.
    """

    def __init__(self, fd: int, *, handle: ShmHandle, memory: mmap.mmap, directory: str) -> None:
        """Use ``create``."""
        self.handle = handle
        self.held_bytes = HEADER_BYTES + handle.num_bytes
        self._fd: int | None = fd
        self._directory = directory
        self._data: torch.Tensor | None = _data_of(memory, handle.num_bytes)
        self._copies: HostCopies | None = None

    @classmethod
    def create(cls, num_bytes: int, *, directory: str) -> ShmRegion:
        """Make a file of random name, reserve its memory and map it.

        Args:
            num_bytes: Room for data; a header page is added.
            directory: Setting ``dir``.

        Raises:
            ConfigError: ``num_bytes`` is not positive, or the directory cannot be used.
            RegionError: The memory cannot be had; its ``errno`` says why. Nothing is
                left behind.
        """
        if num_bytes <= 0:
            raise ConfigError(f"a region of {num_bytes} bytes was asked for; expected more")
        make = partial(cls._create_at, num_bytes=num_bytes, directory=directory)
        return create_file(directory, SEGMENT_SUFFIX, make)

    @classmethod
    def _create_at(cls, path: Path, *, num_bytes: int, directory: str) -> ShmRegion:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            lock(fd)
            _reserve(fd, HEADER_BYTES + num_bytes)
            memory = mmap.mmap(fd, HEADER_BYTES + num_bytes, flags=_MAP_FLAGS)
        except BaseException as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError | ValueError | OverflowError):
                raise _creation_error(error, path=path, num_bytes=num_bytes) from error
            raise
        canary = secrets.token_bytes(CANARY_BYTES)
        memory[:CANARY_BYTES] = canary
        handle = ShmHandle(id=path.stem, path=str(path), num_bytes=num_bytes, canary=canary)
        return cls(fd, handle=handle, memory=memory, directory=directory)

    @property
    def num_bytes(self) -> int:
        """Room for data, in bytes."""
        return self.handle.num_bytes

    @property
    def data(self) -> torch.Tensor | None:
        """Its memory: ``[num_bytes]``, uint8; ``None`` after its end."""
        return self._data

    def write(self, offset_bytes: int, data: torch.Tensor) -> None:
        """Copy bytes into the region.

        Args:
            offset_bytes: Where they go, a multiple of ``ALIGNMENT_BYTES``.
            data: ``[n]``, uint8, contiguous, on any device. From a GPU it is only
                begun: ``flush`` waits for it.

        Raises:
            LocalProtocolError: They would not fit, or the region is closed. Nothing was
                written.
        """
        if self._data is None:
            raise LocalProtocolError(f"region {self.handle.id} was written to after its end")
        size = data.numel()
        check_bounds(offset_bytes, size, capacity_bytes=self.num_bytes, error=LocalProtocolError)
        target = self._data[offset_bytes : offset_bytes + size]
        if data.is_cpu and data.is_contiguous():
            # On one thread, whatever torch is set to: its pools, in two processes that
            # share their cores, wait for each other (seen: ten times slower on two cores).
            ctypes.memmove(target.data_ptr(), data.data_ptr(), size)
        elif data.is_cuda:
            with self.enqueuing({data.device}):
                target.copy_(data, non_blocking=True)
                data.record_stream(torch.cuda.current_stream(data.device))
        else:
            target.copy_(data)

    @contextmanager
    def enqueuing(self, devices: AbstractSet[torch.device]) -> Iterator[None]:
        """Let copies from GPUs go through side streams; see ``OwnedRegion``."""
        gpus = [device for device in devices if device.type == "cuda"]
        if not gpus or self._data is None:
            yield
            return
        if self._copies is None:
            self._copies = HostCopies(Pin.of(self._data, device=gpus[0]))
        with self._copies.streams_of(gpus):
            yield

    def flush(self, slot: int) -> None:
        """Wait for what was written from a GPU, whatever the slot: readers see it then."""
        if self._copies is not None:
            self._copies.wait()

    def watch(self) -> Watch:
        """Return what tells whether a receiver still holds the region."""
        if self._fd is None:
            raise LocalProtocolError(f"region {self.handle.id} was watched after its end")
        return Watch(self._fd)

    def unlink(self) -> None:
        """Remove the file: every receiver has opened it. Idempotent."""
        Path(self.handle.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the file and give the memory up. Idempotent."""
        if self._fd is None:
            return
        self.unlink()
        try:
            if self._copies is not None:
                self._copies.close()
        finally:
            self._give_up(self._fd)

    def _give_up(self, fd: int) -> None:
        # The mapping holds a copy of the descriptor, and somebody may hold the mapping.
        unlock(fd)
        os.close(fd)
        self._fd = self._data = self._copies = None
        remove_dir_if_empty(self._directory)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()


class OpenedShm:
    """A receiver's end. Whoever opened it closes it.

    Attributes:
        id: The handle's id.
        num_bytes: Room for data, in bytes.
        held_bytes: Memory that it takes.
    """

    def __init__(self, fd: int, *, handle: ShmHandle, memory: mmap.mmap) -> None:
        """Use ``open``."""
        self.id = handle.id
        self.num_bytes = handle.num_bytes
        self.held_bytes = HEADER_BYTES + handle.num_bytes
        self._fd: int | None = fd
        self._data: torch.Tensor | None = _data_of(memory, handle.num_bytes)
        self._pin: Pin | None = None

    @classmethod
    def open(cls, handle: ShmHandle, *, device: torch.device = _CPU) -> OpenedShm:
        """Map a region, after making sure that it is the one that was meant.

        Args:
            handle: What the sender offers.
            device: What the bytes will be copied to. For a GPU the memory is pinned,
                where that is possible.

        Raises:
            RegionError: It is not there, not ours, or not what the handle says. Nothing
                is left open.
        """
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(handle.path, flags)
        except (OSError, ValueError) as error:
            raise RegionError(
                f"shared memory {handle.path!r} cannot be opened: {error}; trainer and worker "
                f"must see the same directory, and run as the same user"
            ) from error
        try:
            opened = cls(fd, handle=handle, memory=_map_checked(fd, handle))
        except BaseException:
            os.close(fd)
            raise
        if device.type == "cuda" and opened._data is not None:
            opened._pin = Pin.of(opened._data, device=device)
        return opened

    def await_writes(self, slot: int) -> None:
        """Do nothing: a slot is announced when its bytes are there."""

    def hold(self) -> Watch:
        """Return a hold on the region, which its owner can see; closed by the caller.

        Raises:
            RegionError: The file system cannot do it.
        """
        if self._fd is None:
            raise LocalProtocolError(f"region {self.id} was held after it was closed")
        watch = Watch(self._fd)
        try:
            watch.hold()
        except OSError as error:
            watch.close()
            raise RegionError(f"region {self.id} cannot be held: {error}") from error
        return watch

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of the region, in place; see ``OpenedRegion``."""
        return view_of(self._data, offset_bytes, num_bytes, region=self.id)

    def owner_is_alive(self) -> bool:
        """Return whether the sender still holds the region's lock."""
        return self._fd is not None and is_locked(self._fd)

    def close(self) -> None:
        """Let the region go. Idempotent. Views that somebody kept stay readable."""
        if self._fd is None:
            return
        if self._pin is not None:
            self._pin.undo()
        os.close(self._fd)
        self._fd = self._data = self._pin = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()


def create_slots(settings: Settings, needed_bytes: int | None) -> tuple[ShmRegion, int]:
    """Make a region of ``settings.num_slots`` slots, sized by the rule of ``slots``.

    A default size is halved while the memory cannot be had.

    Args:
        settings: Slot size, number of slots, directory.
        needed_bytes: Bytes of the whole update with alignment; ``None`` where a stream
            did not say.

    Returns:
        The region, and the size of a slot in bytes.

    Raises:
        ConfigError: The directory cannot be used.
        RegionError: Not even the smallest slots can be had. Nothing is left behind.
    """

    def make(num_bytes: int) -> ShmRegion:
        return ShmRegion.create(num_bytes, directory=settings.dir)

    return create_shrinking(settings, needed_bytes, cut=ON_HOST, make=make)


def _reserve(fd: int, num_bytes: int) -> None:
    """Take a file's memory now, so that no write to its mapping can find it missing.

    Raises:
        OSError: There is not so much.
    """
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        # What a file system says that cannot do it. Where it does not fit, zeros do not.
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        zeros = memoryview(bytes(min(num_bytes, _ZEROS_BYTES)))
        written = 0
        while written < num_bytes:
            written += os.pwrite(fd, zeros[: num_bytes - written], written)


def _data_of(memory: mmap.mmap, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES, count=num_bytes)


def _map_checked(fd: int, handle: ShmHandle) -> mmap.mmap:
    found = os.fstat(fd)
    size = HEADER_BYTES + handle.num_bytes
    wrong = ""
    if not stat.S_ISREG(found.st_mode):
        wrong = "it is not a regular file"
    elif found.st_uid not in {0, os.geteuid()}:
        wrong = f"it belongs to uid {found.st_uid}, expected {os.geteuid()} or root"
    elif not handle.num_bytes:
        wrong = "it has no room for data"
    elif found.st_size != size:
        wrong = f"it has {found.st_size} bytes, expected {size}"
    if not wrong:
        try:
            memory = mmap.mmap(fd, size, flags=_MAP_FLAGS)
        except (OSError, ValueError, OverflowError) as error:
            raise RegionError(f"shared memory {handle.path!r} cannot be mapped: {error}") from error
        if memory[:CANARY_BYTES] == handle.canary:
            return memory
        wrong = "another region's canary is in it"
    raise RegionError(f"shared memory {handle.path!r} is not the one that was offered: {wrong}")


def _creation_error(error: Exception, *, path: Path, num_bytes: int) -> Exception:
    if isinstance(error, FileNotFoundError):
        return error
    size = HEADER_BYTES + num_bytes
    free = os.statvfs(path.parent)
    found = RegionError(
        f"shared memory of {size} bytes cannot be had in {str(path.parent)!r}: {error}; "
        f"{free.f_bavail * free.f_frsize} bytes are free there; lower slot_size or num_slots, "
        f"set VLLM_BUCKETSYNC_DIR to a directory with more room, or start Docker with a "
        f"larger --shm-size"
    )
    found.errno = getattr(error, "errno", None) or errno.ENOMEM
    return found
