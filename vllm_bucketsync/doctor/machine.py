"""What the kernel, the file system and the container allow, read without a device."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from vllm_bucketsync.config import MIN_SHRUNK_SLOT_SIZE_BYTES, Settings
from vllm_bucketsync.errors import ConfigError
from vllm_bucketsync.rundir import find_stale, private_dir, remove_dir_if_empty, remove_stale

from .findings import Finding, State

_MIB = 1024**2
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
# The kernel's own numbers of the namespaces that it starts with.
_FIRST_NAMESPACES = {"pid": 4026531836, "ipc": 4026531839, "user": 4026531837}
# Files that container runtimes leave where they run.
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container", "SINGULARITY_NAME")
_PTRACE_SCOPES = {
    "0": "processes of one user may look at each other",
    "1": "only at their children",
    "2": "only with a capability",
    "3": "not at all",
}


def check_shared_memory(settings: Settings, *, root: str = "/") -> Finding:
    """Tell whether there is room for the slots.

    Args:
        settings: Where, how many, how large.
        root: Where ``proc`` is.
    """
    name = "shared memory"
    try:
        space = os.statvfs(settings.dir)
    except OSError as error:
        found = f"{settings.dir} cannot be used: {error.strerror}"
        advice = "set VLLM_BUCKETSYNC_DIR to a directory in memory that exists"
        return Finding(name=name, state=State.FAILED, found=found, advice=advice)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    kind = _file_system(Path(settings.dir), root=Path(root))
    found = f"{settings.dir} ({kind or 'unknown'}): {_mib(free)} of {_mib(total)} free"
    wanted, least = settings.num_slots * settings.slot_size_bytes, _least_bytes(settings)
    more = (
        "make room, set VLLM_BUCKETSYNC_DIR to a directory with more, or start Docker with a "
        "larger --shm-size"
    )
    if free < least:
        found = f"{found}; {settings.num_slots} slots need {_mib(least)} at least"
        return Finding(name=name, state=State.FAILED, found=found, advice=more)
    if free < wanted:
        found = f"{found}; slots of their full size would take {_mib(wanted)}, and shrink"
        return Finding(name=name, state=State.WARN, found=found, advice=more)
    if kind is not None and kind not in _MEMORY_FILE_SYSTEMS:
        advice = "updates are written to a disk there; set VLLM_BUCKETSYNC_DIR to one in memory"
        return Finding(name=name, state=State.WARN, found=found, advice=advice)
    return Finding(name=name, state=State.OK, found=found)


def check_private_dir(settings: Settings) -> Finding:
    """Tell whether the private directory can be had, and for whom."""
    name = "private directory"
    try:
        path = private_dir(settings.dir)
    except ConfigError as error:
        found, _, advice = str(error).partition("; ")
        return Finding(name=name, state=State.FAILED, found=found, advice=advice)
    remove_dir_if_empty(settings.dir)
    return Finding(
        name=name,
        state=State.OK,
        found=f"{path}, of uid {os.geteuid()}",
        advice="trainer and engine have to run as this user",
    )


def check_stale_files(settings: Settings) -> Finding:
    """Tell what dead owners of our user left."""
    name = "stale files"
    try:
        stale = find_stale(settings.dir)
    except ConfigError as error:
        return Finding(name=name, state=State.SKIPPED, found=str(error).partition("; ")[0])
    if not stale:
        return Finding(name=name, state=State.OK, found="none")
    found = f"{len(stale)} of dead owners, {_mib(_size_of(stale))}: {_some(stale)}"
    advice = "remove them with vllm-bucketsync doctor --clean; the next update would, too"
    return Finding(name=name, state=State.WARN, found=found, advice=advice)


def clean_stale_files(settings: Settings) -> Finding:
    """Remove what dead owners of our user left, and tell what that was."""
    name = "stale files"
    try:
        removed = remove_stale(settings.dir)
    except ConfigError as error:
        found, _, advice = str(error).partition("; ")
        return Finding(name=name, state=State.FAILED, found=found, advice=advice)
    found = f"{len(removed)} of dead owners were removed: {_some(removed)}" if removed else "none"
    return Finding(name=name, state=State.OK, found=found)


def check_memlock(*, has_gpu: bool) -> Finding:
    """Tell how much memory may be locked, which is what pinning it needs.

    Args:
        has_gpu: A GPU is here: without one nothing is pinned.
    """
    name = "memlock"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding(name=name, state=State.OK, found="unlimited")
    # Whether the driver minds the limit is seen where memory is pinned.
    advice = (
        "if shared memory cannot be pinned for a GPU, raise it: ulimit -l unlimited, or docker "
        "run --ulimit memlock=-1"
    )
    found = f"{limit:,} bytes" + ("" if has_gpu else "; without a GPU nothing is pinned")
    return Finding(name=name, state=State.OK, found=found, advice=advice if has_gpu else "")


def check_ptrace_scope(*, root: str = "/") -> Finding:
    """Tell the kernel's ptrace scope, which others' ways of sharing memory depend on.

    Args:
        root: Where ``proc`` is.
    """
    scope = _read(Path(root) / "proc/sys/kernel/yama/ptrace_scope")
    found = "not restricted: this kernel has no yama"
    if scope is not None:
        found = f"{scope}: {_PTRACE_SCOPES.get(scope, 'unknown')}; nothing of ours needs more"
    return Finding(name="ptrace scope", state=State.OK, found=found)


def check_namespaces(environ: Mapping[str, str] | None = None, *, root: str = "/") -> Finding:
    """Tell whether this is a container, and what trainer and engine have to share then.

    Args:
        environ: The environment; the process's own where ``None``.
        root: Where ``proc`` is, and the files that runtimes leave.
    """
    environ = os.environ if environ is None else environ
    own = {kind: _namespace(Path(root), kind) for kind in ("pid", "ipc", "mnt", "user")}
    private = [kind for kind, first in _FIRST_NAMESPACES.items() if own[kind] not in {None, first}]
    signs = [f"/{file}" for file in _CONTAINER_FILES if (Path(root) / file).exists()]
    signs += [variable for variable in _CONTAINER_VARIABLES if environ.get(variable)]
    numbers = ", ".join(f"{kind} {number}" for kind, number in own.items() if number is not None)
    if not private and not signs:
        found = f"those of the host ({numbers or 'none can be read'})"
        return Finding(name="namespaces", state=State.OK, found=found)
    why = [f"namespaces of its own: {', '.join(private)}"] if private else []
    why += [f"there is {', '.join(signs)}"] if signs else []
    return Finding(
        name="namespaces",
        state=State.OK,
        found=f"a container ({'; '.join(why)}); {numbers or 'no number can be read'}",
        advice="an engine of another container has to see the same directory: docker run "
        "--ipc=host, or --ipc=container:NAME, or one volume and VLLM_BUCKETSYNC_DIR",
    )


def _least_bytes(settings: Settings) -> int:
    """Return what the slots need at least: one that was asked for does not shrink."""
    shrunk = min(settings.slot_size_bytes, MIN_SHRUNK_SLOT_SIZE_BYTES)
    return settings.num_slots * (shrunk if settings.slot_size is None else settings.slot_size_bytes)


def _file_system(path: Path, *, root: Path) -> str | None:
    """Return the kind of file system that a directory is in; ``None`` where none is told."""
    found: tuple[int, str | None] = (-1, None)
    for line in (_read(root / "proc/self/mounts") or "").splitlines():
        _, place, kind, *_ = [*line.split(" "), "", ""]
        if path == Path(place) or Path(place) in path.parents:
            # The last of two mounts of one place is the one that is seen.
            found = max(found, (len(place), kind), key=lambda one: one[0])
    return found[1]


def _namespace(root: Path, kind: str) -> int | None:
    try:
        text = str((root / f"proc/self/ns/{kind}").readlink())
        return int(text.partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _size_of(paths: list[str]) -> int:
    return sum(Path(path).lstat().st_size for path in paths if os.path.lexists(path))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes // _MIB:,} MiB"


def _some(paths: list[str], *, most: int = 3) -> str:
    rest = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + rest
