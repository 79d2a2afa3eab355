"""The doctor on what the kernel, the file system and the container allow."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_bucketsync.config import Settings
from vllm_bucketsync.doctor import machine
from vllm_bucketsync.doctor.findings import State
from vllm_bucketsync.rundir import STALE_AFTER_S, private_dir

MIB = 1024**2


def has_free(monkeypatch: pytest.MonkeyPatch, num_mib: int) -> None:
    space = SimpleNamespace(f_bavail=num_mib, f_blocks=4096, f_frsize=MIB)
    monkeypatch.setattr(os, "statvfs", lambda _: space)


def mounts(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("free_mib", "slot_size", "state"),
    [
        (1024, None, State.OK),
        (1023, None, State.WARN),
        (2, None, State.WARN),
        (1, None, State.FAILED),
        (64, "32MiB", State.OK),
        (63, "32MiB", State.FAILED),
    ],
)
def test_room_is_judged_by_what_the_slots_need(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    free_mib: int,
    slot_size: str | None,
    state: State,
) -> None:
    has_free(monkeypatch, free_mib)

    found = machine.check_shared_memory(Settings(slot_size=slot_size), root=str(tmp_path))

    assert found.state is state
    assert f"{free_mib:,} MiB of 4,096 MiB free" in found.found
    assert state is State.OK or "--shm-size" in found.advice


def test_the_file_system_is_the_innermost_one_and_has_to_be_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has_free(monkeypatch, 4096)
    mounts(
        tmp_path,
        "overlay / overlay rw 0 0",
        "tmpfs /dev tmpfs rw 0 0",
        "/dev/sda /scratch ext4 rw 0 0",
        "shm /scratch/mem tmpfs rw 0 0",
    )

    def check(directory: str) -> tuple[State, str]:
        found = machine.check_shared_memory(Settings(dir=directory), root=str(tmp_path))
        return found.state, found.found.partition(":")[0]

    assert check("/dev/shm") == (State.OK, "/dev/shm (tmpfs)")  # noqa: S108
    assert check("/scratch/mem/x") == (State.OK, "/scratch/mem/x (tmpfs)")
    assert check("/scratch/memory") == (State.WARN, "/scratch/memory (ext4)")
    assert check("/home") == (State.WARN, "/home (overlay)")


def test_a_directory_that_is_not_there_fails() -> None:
    found = machine.check_shared_memory(Settings(dir="/no/such/directory"))

    assert found.state is State.FAILED
    assert "VLLM_BUCKETSYNC_DIR" in found.advice


def test_the_private_directory_is_tried_and_not_left(tmp_path: Path) -> None:
    found = machine.check_private_dir(Settings(dir=str(tmp_path)))

    assert found.state is State.OK
    assert f"of uid {os.geteuid()}" in found.found
    assert list(tmp_path.iterdir()) == []


def test_a_private_directory_that_others_can_enter_fails(tmp_path: Path) -> None:
    private_dir(str(tmp_path)).chmod(0o755)

    found = machine.check_private_dir(Settings(dir=str(tmp_path)))

    assert found.state is State.FAILED
    assert "has mode 0755" in found.found
    assert "chmod 700" in found.advice


def left(tmp_path: Path, name: str, *, age_s: float) -> Path:
    path = private_dir(str(tmp_path)) / name
    path.write_bytes(b"x" * MIB)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_what_dead_owners_left_is_told_of_and_stays(tmp_path: Path) -> None:
    settings = Settings(dir=str(tmp_path))
    assert machine.check_stale_files(settings).state is State.OK
    stale = left(tmp_path, "dead.seg", age_s=2 * STALE_AFTER_S)
    left(tmp_path, "young.seg", age_s=0)

    found = machine.check_stale_files(settings)

    assert found.state is State.WARN
    assert found.found == f"1 of dead owners, 1 MiB: {stale}"
    assert "doctor --clean" in found.advice
    assert stale.exists()


def test_cleaning_removes_that_and_nothing_else(tmp_path: Path) -> None:
    settings = Settings(dir=str(tmp_path))
    stale = left(tmp_path, "dead.seg", age_s=2 * STALE_AFTER_S)
    young = left(tmp_path, "young.seg", age_s=0)
    foreign = left(tmp_path, "notes.txt", age_s=2 * STALE_AFTER_S)

    found = machine.clean_stale_files(settings)

    assert (found.state, stale.exists()) == (State.OK, False)
    assert str(stale) in found.found
    assert young.exists()
    assert foreign.exists()
    assert machine.clean_stale_files(settings).found == "none"


def test_the_limit_of_locked_memory_is_told_with_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["now"], limits["now"]))
    assert machine.check_memlock(has_gpu=True).found == "unlimited"

    limits["now"] = 65536
    assert "ulimit -l" in machine.check_memlock(has_gpu=True).advice
    assert machine.check_memlock(has_gpu=False).advice == ""


@pytest.mark.parametrize(
    ("scope", "text"),
    [("0", "may look at each other"), ("1", "only at their children"), (None, "no yama")],
)
def test_the_ptrace_scope_is_put_into_words(tmp_path: Path, scope: str | None, text: str) -> None:
    if scope is not None:
        (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")

    found = machine.check_ptrace_scope(root=str(tmp_path))

    assert found.state is State.OK
    assert text in found.found


def namespaces(root: Path, **numbers: int) -> None:
    (root / "proc/self/ns").mkdir(parents=True)
    for kind, number in numbers.items():
        (root / f"proc/self/ns/{kind}").symlink_to(f"{kind}:[{number}]")


def test_the_namespaces_of_the_host_are_no_container(tmp_path: Path) -> None:
    namespaces(tmp_path, pid=4026531836, ipc=4026531839, mnt=4026531841, user=4026531837)

    found = machine.check_namespaces({}, root=str(tmp_path))

    assert found.found.startswith("those of the host (pid 4026531836")
    assert found.advice == ""


@pytest.mark.parametrize("kind", ["pid", "ipc", "user"])
def test_a_namespace_of_its_own_is_a_container_with_advice(tmp_path: Path, kind: str) -> None:
    numbers = {"pid": 4026531836, "ipc": 4026531839, "user": 4026531837, "mnt": 1}
    namespaces(tmp_path, **(numbers | {kind: 4026532000}))

    found = machine.check_namespaces({}, root=str(tmp_path))

    assert found.state is State.OK
    assert f"namespaces of its own: {kind})" in found.found
    assert "--ipc=host" in found.advice


def test_what_runtimes_leave_is_a_container_too(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()

    found = machine.check_namespaces({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, root=str(tmp_path))

    assert "there is /.dockerenv, KUBERNETES_SERVICE_HOST" in found.found
    assert machine.check_namespaces({}, root=str(tmp_path / "elsewhere")).advice == ""
