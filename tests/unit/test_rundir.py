"""The private directory is ours alone, and only what dead owners left is removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Child

from vllm_bucketsync import rundir
from vllm_bucketsync.errors import ConfigError, RegionError
from vllm_bucketsync.rundir import (
    Watch,
    create_file,
    private_dir,
    remove_dir_if_empty,
    remove_stale,
)

OLD_S = 60.0


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def private(base: str) -> Path:
    return private_dir(base)


def make_old(path: Path) -> Path:
    then = time.time() - OLD_S
    os.utime(path, (then, then), follow_symlinks=False)
    return path


@pytest.fixture
def dead_socket(private: Path) -> Path:
    path = private / "dead.sock"
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))
        owner.listen()
    return make_old(path)


@pytest.fixture
def live_socket(private: Path) -> Iterator[Path]:
    path = private / "live.sock"
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))
        owner.listen()
        yield make_old(path)


def test_the_private_directory_is_named_after_the_user_and_open_to_nobody_else(base: str) -> None:
    path = private_dir(base)

    assert path == Path(base) / f"vllm_bucketsync-{os.geteuid()}"
    assert path.stat().st_mode & 0o7777 == 0o700
    assert private_dir(base) == path


def test_a_directory_that_others_can_enter_is_refused_with_the_command_that_helps(
    private: Path, base: str
) -> None:
    private.chmod(0o750)

    with pytest.raises(ConfigError, match=r"0750.*chmod 700 "):
        private_dir(base)
    with pytest.raises(ConfigError, match="0750"):
        remove_stale(base)


def test_a_link_is_refused_even_if_it_leads_to_a_private_directory(base: str) -> None:
    elsewhere = Path(base) / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (Path(base) / f"vllm_bucketsync-{os.geteuid()}").symlink_to(elsewhere)

    with pytest.raises(ConfigError, match="link"):
        private_dir(base)


def test_a_file_in_its_place_is_refused(base: str) -> None:
    (Path(base) / f"vllm_bucketsync-{os.geteuid()}").touch()

    with pytest.raises(ConfigError, match="not a directory"):
        private_dir(base)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(private: Path, base: str) -> None:
    os.chown(private, 12345, 12345)

    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        private_dir(base)


@pytest.mark.parametrize("name", ["missing", "file", "file/below"])
def test_a_base_that_cannot_be_used_is_named_with_its_setting(base: str, name: str) -> None:
    (Path(base) / "file").touch()
    directory = f"{base}/{name}"

    with pytest.raises(ConfigError, match=rf"{directory}.*dir=.*VLLM_BUCKETSYNC_DIR"):
        private_dir(directory)


def test_names_are_random_and_long_enough_not_to_be_guessed(base: str) -> None:
    names = {create_file(base, ".seg", lambda path: path.stem) for _ in range(100)}

    assert len(names) == 100
    assert {len(name) for name in names} == {24}


def test_creation_is_tried_again_when_the_directory_was_removed_just_then(base: str) -> None:
    removals = iter(range(3))

    def make(path: Path) -> Path:
        if next(removals, None) is not None:
            path.parent.rmdir()
        path.touch()
        return path

    assert create_file(base, ".seg", make).exists()


def test_creation_gives_up_when_the_directory_is_removed_again_and_again(base: str) -> None:
    def make(path: Path) -> None:
        path.parent.rmdir()
        path.touch()

    with pytest.raises(ConfigError, match="again and again"):
        create_file(base, ".seg", make)


@pytest.mark.parametrize("num_removals", [0, 1, 3])
def test_creation_survives_others_who_remove_the_directory_meanwhile(
    base: str, num_removals: int
) -> None:
    left = num_removals

    def make(path: Path) -> Path:
        nonlocal left
        if left:
            left -= 1
            remove_dir_if_empty(base)
        path.touch(exist_ok=False)
        return path

    assert create_file(base, ".seg", make).exists()
    assert left == 0


def test_a_directory_that_is_removed_again_and_again_is_an_error_that_says_so(base: str) -> None:
    def make(path: Path) -> Path:
        remove_dir_if_empty(base)
        path.touch(exist_ok=False)
        return path

    with pytest.raises(ConfigError, match="removed again and again"):
        create_file(base, ".seg", make)


def test_errors_of_ours_pass_through_creation_and_strange_ones_name_the_setting(base: str) -> None:
    def fail_as_ours(path: Path) -> None:
        raise RegionError("full")

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(RegionError, match="full"):
        create_file(base, ".seg", fail_as_ours)
    with pytest.raises(ConfigError, match=r"Permission denied.*VLLM_BUCKETSYNC_DIR"):
        create_file(base, ".seg", fail)


def test_a_socket_is_stale_when_nobody_listens(
    base: str, dead_socket: Path, live_socket: Path
) -> None:
    assert remove_stale(base) == [str(dead_socket)]
    assert not dead_socket.exists()
    assert live_socket.exists()


def test_a_segment_is_stale_when_nobody_holds_its_lock(base: str, private: Path) -> None:
    dead, live = make_old_segment(private, "dead.seg"), make_old_segment(private, "live.seg")

    with live.open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert remove_stale(base) == [str(dead)]
        assert live.exists()

    assert remove_stale(base) == [str(live)]
    assert not private.exists()


def make_old_segment(private: Path, name: str) -> Path:
    path = private / name
    path.touch(mode=0o600)
    return make_old(path)


def test_what_may_just_be_coming_into_being_is_left_alone(base: str, private: Path) -> None:
    young = private / "young.seg"
    young.touch()
    old = make_old_segment(private, "old.seg")

    assert remove_stale(base) == [str(old)]
    assert young.exists()


def test_what_is_not_of_our_kind_is_left_alone(base: str, private: Path, dead_socket: Path) -> None:
    outside = make_old_segment(Path(base), "outside.seg")
    strangers = [
        private / "link.seg",
        private / "link.sock",
        private / "directory.seg",
        private / "pipe.seg",
        private / "notes.txt",
        private / "plain.sock",
    ]
    strangers[0].symlink_to(outside)
    strangers[1].symlink_to(dead_socket)
    strangers[2].mkdir()
    os.mkfifo(strangers[3])
    strangers[4].touch()
    strangers[5].touch()
    for path in strangers:
        make_old(path)

    assert remove_stale(base) == [str(dead_socket)]
    assert outside.exists()
    assert all(path.is_symlink() or path.exists() for path in strangers)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_files_of_somebody_else_are_left_alone(base: str, private: Path) -> None:
    path = make_old_segment(private, "theirs.seg")
    os.chown(path, 12345, 12345)

    assert remove_stale(base) == []
    assert path.exists()


def test_files_that_vanish_meanwhile_do_no_harm(
    base: str, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make_old_segment(private, f"{i}.seg") for i in range(3)]
    is_unowned = rundir._is_unowned

    def remove_behind(path: Path) -> bool:
        if path == paths[1]:
            path.unlink()
            return True
        return is_unowned(path)

    monkeypatch.setattr(rundir, "_is_unowned", remove_behind)

    assert remove_stale(base) == [str(paths[0]), str(paths[2])]


def test_nothing_is_made_where_there_is_nothing_to_remove(base: str) -> None:
    assert remove_stale(base) == []
    assert remove_stale(f"{base}/missing") == []
    assert list(Path(base).iterdir()) == []


def test_the_directory_goes_only_when_it_is_empty(base: str, private: Path) -> None:
    file = private / "a.seg"
    file.touch()

    remove_dir_if_empty(base)
    assert private.exists()

    file.unlink()
    remove_dir_if_empty(base)
    remove_dir_if_empty(base)
    assert not private.exists()


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    """A file, opened three times: by its owner, and by two users."""
    made = [opened(tmp_path / "file") for _ in range(3)]
    yield made
    for fd in made:
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.fixture
def watches(fds: list[int]) -> Iterator[list[Watch]]:
    made = [Watch(fd) for fd in fds]
    yield made
    for watch in made:
        watch.close()


def test_a_file_is_held_while_one_of_its_users_holds_it(watches: list[Watch]) -> None:
    owner, first, second = watches
    assert not owner.is_held()
    first.hold()
    second.hold()
    # Any number of them, and each as often as it likes.
    first.hold()

    assert owner.is_held()
    first.close()
    assert owner.is_held()
    first.close()


def test_a_hold_is_not_one_s_own_to_see(watches: list[Watch]) -> None:
    owner, first, second = watches
    first.hold()

    assert not first.is_held()
    assert second.is_held()
    assert owner.is_held()


def test_a_hold_ends_with_the_last_copy_of_its_descriptor(
    watches: list[Watch], fds: list[int]
) -> None:
    owner, first, _ = watches
    first.hold()

    os.close(fds[1])
    assert owner.is_held()
    first.close()
    assert not owner.is_held()


def test_an_owner_that_watches_goes_on_watching_when_it_has_closed_the_file(
    watches: list[Watch], fds: list[int]
) -> None:
    owner, first, _ = watches
    first.hold()
    os.close(fds[0])

    assert owner.is_held()
    os.close(fds[1])
    first.close()
    assert not owner.is_held()


def test_holding_and_owning_are_apart(watches: list[Watch], fds: list[int]) -> None:
    owner, first, _ = watches
    rundir.lock(fds[0])
    assert not owner.is_held()
    first.hold()

    assert rundir.is_locked(fds[1])
    rundir.unlock(fds[0])
    assert not rundir.is_locked(fds[1])
    assert owner.is_held()


def test_a_closed_watch_is_asked_nothing(watches: list[Watch]) -> None:
    watches[0].close()

    for ask in (watches[0].hold, watches[0].is_held):
        with pytest.raises(ValueError, match="closed"):
            ask()


HOLDER = """
import os, sys
from vllm_bucketsync.rundir import Watch
watch = Watch(os.open(sys.argv[1], os.O_RDWR))
watch.hold()
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_the_kernel_forgets_the_hold_of_a_process_that_is_gone(
    watches: list[Watch], tmp_path: Path, end: str
) -> None:
    owner, first, _ = watches
    with Child(HOLDER, str(tmp_path / "file")) as child:
        assert not owner.is_held()
        assert child.line() == "held"
        assert owner.is_held()
        child.stop()
        # A stopped one still has it mapped.
        assert owner.is_held()
        child.resume()
        if end == "killed":
            child.kill()
        else:
            child.tell("")
        status, errors = child.end()

    assert (status, errors) == (-9 if end == "killed" else 0, "")
    assert not owner.is_held()
    first.hold()
    assert owner.is_held()
