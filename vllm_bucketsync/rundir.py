"""The private directory that holds sockets and shared memory, and what dead owners left.

``<dir>/vllm_bucketsync-<uid>/``, mode 0700. Whether the owner of a file lives is asked
of the kernel: a socket's owner accepts connections, a segment's owner holds a lock.
Unlike a pid that was written down, both answers are right across PID namespaces, and
neither can be fooled by a pid that was given out again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from .errors import BucketSyncError, ConfigError

SOCKET_SUFFIX = ".sock"
SEGMENT_SUFFIX = ".seg"
# A younger file may be one that is just being made: it is not yet locked or listened on.
STALE_AFTER_S = 10.0
# Random part of a file's name, in bytes: more than the 64 bits that nobody guesses.
_NAME_BYTES = 12
# l_type, l_whence, l_start, l_len, l_pid, as Linux has them on 64 bits.
_LOCK_FORMAT = "hhqqi4x"
# Each fails only if another process removes the directory within the same microseconds.
_NUM_ATTEMPTS = 1000

T = TypeVar("T")


def private_dir(directory: str) -> Path:
    """Return the private directory, made where it was missing.

    Args:
        directory: Setting ``dir``; it has to exist.

    Raises:
        ConfigError: It cannot be made, or is not ours alone.
    """
    path = _private_path(directory)
    with _config_errors(directory):
        for _ in range(_NUM_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            # Another process may have removed it between the two calls.
            with contextlib.suppress(FileNotFoundError):
                _check_private(path)
                return path
    raise _unusable(directory, "it is removed again and again")


def create_file(directory: str, suffix: str, make: Callable[[Path], T]) -> T:
    """Make a file with a random name in the private directory.

    Args:
        directory: Setting ``dir``.
        suffix: How the name ends.
        make: Makes the file at the path that it is given. A ``FileNotFoundError`` from
            it means that the directory was removed just then; it is called again.

    Returns:
        What ``make`` returned.

    Raises:
        ConfigError: The directory cannot be had, or ``make`` failed with an ``OSError``
            that is none of ours.
    """
    with _config_errors(directory):
        for _ in range(_NUM_ATTEMPTS):
            path = private_dir(directory) / f"{secrets.token_hex(_NAME_BYTES)}{suffix}"
            with contextlib.suppress(FileNotFoundError):
                return make(path)
    raise _unusable(directory, "it is removed again and again")


def find_stale(directory: str) -> list[str]:
    """Return what dead owners left, and leave it there.

    Only files of our own user, older than ``STALE_AFTER_S``, whose owner is certainly
    dead. Never follows a link, never waits.

    Args:
        directory: Setting ``dir``.

    Returns:
        Paths of the files.

    Raises:
        ConfigError: The private directory is not ours alone.
    """
    path = _private_path(directory)
    found: list[str] = []
    with _config_errors(directory), contextlib.suppress(FileNotFoundError):
        _check_private(path)
        for file in sorted(path.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if _is_stale(file):
                    found.append(str(file))
    return found


def remove_stale(directory: str) -> list[str]:
    """Remove what ``find_stale`` finds, and the private directory if it is empty then.

    Args:
        directory: Setting ``dir``.

    Returns:
        Paths of the removed files.

    Raises:
        ConfigError: The private directory is not ours alone, or a file cannot be removed.
    """
    removed: list[str] = []
    with _config_errors(directory):
        for file in find_stale(directory):
            # Another process may clean up at the same time.
            with contextlib.suppress(FileNotFoundError):
                Path(file).unlink()
                removed.append(file)
    if removed:
        remove_dir_if_empty(directory)
    return removed


def remove_dir_if_empty(directory: str) -> None:
    """Remove the private directory unless something is in it."""
    # Not empty, gone already, or not ours to remove: all of them are fine.
    with contextlib.suppress(OSError):
        _private_path(directory).rmdir()


def lock(fd: int) -> None:
    """Mark an open file as owned, until every copy of ``fd`` is closed.

    Raises:
        OSError: Somebody else holds it.
    """
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Give an open file up, also where a copy of ``fd`` stays open."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_locked(fd: int) -> bool:
    """Return whether an owner holds the file. ``fd`` must be an opening of one's own."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


class Watch:
    """A copy of an open file's descriptor, by which users of the file are told.

    Beside ``lock``, which is its owner's: any number of openings may ``hold`` the file,
    and each other one can ask whether somebody does. The kernel forgets a hold with the
    last copy of its descriptor, so also when its process is killed.
    """

    def __init__(self, fd: int) -> None:
        """Copy the descriptor; ``fd`` stays its owner's."""
        self._fd: int | None = os.dup(fd)

    def hold(self) -> None:
        """Use the file until every copy of this opening's descriptor is closed.

        Raises:
            OSError: This file system has no such locks.
        """
        fcntl.fcntl(self._opened(), fcntl.F_OFD_SETLK, _byte_lock(fcntl.F_RDLCK))

    def is_held(self) -> bool:
        """Return whether another opening holds the file; nobody can where locks are missing."""
        try:
            found = fcntl.fcntl(self._opened(), fcntl.F_OFD_GETLK, _byte_lock(fcntl.F_WRLCK))
        except OSError:
            return False
        return bool(struct.unpack(_LOCK_FORMAT, found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the copy. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _opened(self) -> int:
        if self._fd is None:
            raise ValueError("a closed descriptor was asked")
        return self._fd


def _byte_lock(kind: int) -> bytes:
    """Return a ``struct flock`` for the first byte of a file."""
    return struct.pack(_LOCK_FORMAT, kind, os.SEEK_SET, 0, 1, 0)


def _private_path(directory: str) -> Path:
    return Path(directory) / f"vllm_bucketsync-{os.geteuid()}"


def _check_private(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is a link or a file, not a directory of ours; remove it")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to uid {found.st_uid}, expected {os.geteuid()}; have it removed, "
            f"or set dir= or VLLM_BUCKETSYNC_DIR to another directory"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so that others can get in; "
            f"expected 0700; look for files that are not yours, then chmod 700 {path}"
        )


def _is_stale(path: Path) -> bool:
    found = path.lstat()
    if found.st_uid != os.geteuid() or time.time() - found.st_mtime < STALE_AFTER_S:
        return False
    if path.suffix == SOCKET_SUFFIX and stat.S_ISSOCK(found.st_mode):
        return _refuses(path)
    if path.suffix == SEGMENT_SUFFIX and stat.S_ISREG(found.st_mode):
        return _is_unowned(path)
    return False


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            # A full backlog, a path that is too long for us: nobody is known to be dead.
            return False
    return False


def _is_unowned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not is_locked(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _config_errors(directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Some of ours are OSErrors too, and say more.
        if isinstance(error, BucketSyncError):
            raise
        raise _unusable(directory, error.strerror or str(error)) from error


def _unusable(directory: str, why: str) -> ConfigError:
    return ConfigError(
        f"no private directory can be had in {directory!r}: {why}; set dir= or "
        f"VLLM_BUCKETSYNC_DIR to a directory that exists and can be written to"
    )
