"""Attacks a trainer's socket and directory from outside: nobody gets in, and nothing is harmed.

Workers are threads here; sockets, files, users and both ends are the real ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.stepping import hello
from support.thread_engine import KeepingSink, ThreadEngine

from vllm_bucketsync import serve
from vllm_bucketsync.channel import Dialer
from vllm_bucketsync.clients.base import UpdateAnswer, UpdateRequest
from vllm_bucketsync.codec import decode_command, encode
from vllm_bucketsync.errors import BucketSyncError, ConfigError, RegionError
from vllm_bucketsync.messages import PROTOCOL_VERSION, Abort, Commit, Open
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.transport.shm import OpenedShm

TENSORS = {"a": torch.arange(1000.0), "b": torch.ones(3)}
STRANGER = 12345
IS_ROOT = os.geteuid() == 0
PATIENCE_S = 20.0

Attack = Callable[[dict[str, Any]], None]


class AttackedEngine(ThreadEngine):
    """Lets an attack have its offer before its workers do."""

    def __init__(self, attack: Attack) -> None:
        super().__init__()
        self._attack = attack

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        self._attack(request.offer)
        return super().update(request)


@pytest.fixture
def attacked(shm_dir: str) -> Callable[[Attack], ThreadEngine]:
    """Push once while an attack is under way; return the engine, after a look at its weights."""

    def push(attack: Attack) -> ThreadEngine:
        engine = AttackedEngine(attack)
        with WeightSync(engine, dir=shm_dir, connect_timeout_s=20) as sync:
            sync.push(TENSORS, version=1)
        engine.close()
        return engine

    return push


def say_hello(offer: dict[str, Any], **changes: Any) -> Dialer:
    dialer = Dialer(offer["endpoints"]["*"])
    said = hello(**{"token": offer["token"], "transports": ("shm",), **changes})
    dialer.send(encode(said))
    return dialer


def check_good(engine: ThreadEngine) -> None:
    assert engine.workers[0].version == "1"
    sink = engine.sinks[-1]
    for name, tensor in TENSORS.items():
        assert sink.tensors[name].numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("token", ["", "0" * 32, "\x00", "é"])
def test_a_wrong_token_gets_a_refusal_and_no_handle(
    token: str, attacked: Callable[[Attack], ThreadEngine]
) -> None:
    heard: list[Any] = []
    threads: list[threading.Thread] = []

    def attack(offer: dict[str, Any]) -> None:
        def wait() -> None:
            with say_hello(offer, token=token) as dialer:
                data = dialer.receive(PATIENCE_S)
                heard.append(None if data is None else decode_command(data))

        threads.append(threading.Thread(target=wait))
        threads[0].start()

    check_good(attacked(attack))
    threads[0].join(PATIENCE_S)
    assert [type(one) for one in heard] == [Abort]


@pytest.mark.parametrize(
    "changes",
    [{"protocol": 2}, {"protocol": 1 << 60}, {"boot_id": "another"}, {"engine": 7}],
    ids=["older", "newer", "another host", "another engine"],
)
def test_a_worker_that_cannot_take_part_ends_the_push_and_is_named(
    changes: dict[str, Any], shm_dir: str, short_patience: None
) -> None:
    dialers: list[Dialer] = []
    engine = AttackedEngine(lambda offer: dialers.append(say_hello(offer, **changes)))
    with WeightSync(engine, dir=shm_dir, idle_timeout_s=0.3) as sync:
        with pytest.raises(BucketSyncError, match="pid 1000") as caught:
            sync.push(TENSORS, version=1)
        assert caught.value.engine_state in {"unchanged", "unknown"}
        dialers[0].close()
        assert engine.workers[0].version is None
        engine._attack = lambda offer: None
        sync.push(TENSORS, version=1)
    check_good(engine)
    engine.close()


def test_a_second_worker_of_the_same_rank_ends_the_push_and_nothing_is_committed(
    shm_dir: str, short_patience: None
) -> None:
    dialers: list[Dialer] = []
    engine = AttackedEngine(lambda offer: dialers.append(say_hello(offer)))
    with WeightSync(engine, dir=shm_dir, idle_timeout_s=0.3) as sync:
        with pytest.raises(BucketSyncError, match="same rank") as caught:
            sync.push(TENSORS, version=1)
        assert caught.value.engine_state in {"unchanged", "unknown"}
        heard = []
        with dialers[0] as dialer, contextlib.suppress(BucketSyncError):
            while (data := dialer.receive(1.0)) is not None:
                heard.append(decode_command(data))
        # Whoever has the token is a worker. Two of a rank are one too many.
        assert isinstance(heard[-1], Abort)
        assert not any(isinstance(one, Commit) for one in heard)
        assert engine.workers[0].version is None
        engine._attack = lambda offer: None
        sync.push(TENSORS, version=1)
    check_good(engine)
    engine.close()


def test_the_live_endpoint_of_another_job_is_neither_taken_over_nor_disturbed(
    shm_dir: str,
) -> None:
    with WeightSync(first := ThreadEngine(), dir=shm_dir) as one:
        one.push(TENSORS, version=1)
        listener: Any = one._listener
        with WeightSync(second := ThreadEngine(), dir=shm_dir) as other:
            other.push(TENSORS, version=1)
            assert other._listener is not None
            assert other._listener.endpoint != listener.endpoint
            # A worker that is sent to the other job's trainer has not its token.
            offer = second.requests[-1].offer | {"endpoints": {"*": listener.endpoint}}
            worker = serve.Worker(make_sink=lambda opened: KeepingSink())
            offer |= {"connect_timeout_s": 0.3, "idle_timeout_s": 0.3}
            result = serve.update(worker, offer)
            assert result["state"] == "unchanged"
            assert worker.version is None
        one.push(TENSORS, version=1)
    for engine in (first, second):
        check_good(engine)
        engine.close()


@pytest.mark.skipif(not IS_ROOT, reason="only root can become somebody else")
def test_another_user_reaches_neither_the_socket_nor_the_memory(shm_dir: str) -> None:
    Path(shm_dir).chmod(0o755)
    tried: list[str] = []

    def attack(offer: dict[str, Any]) -> None:
        path = offer["endpoints"]["*"].removeprefix("ipc://")
        code = f"""
import os, socket
for what in (
    lambda: socket.socket(socket.AF_UNIX).connect({path!r}),
    lambda: os.listdir(os.path.dirname({path!r})),
    lambda: os.open({path!r}, os.O_RDWR),
    lambda: os.rename({path!r}, {path!r} + "2"),
    lambda: os.symlink("/", os.path.dirname({path!r}) + "/x.seg"),
):
    try:
        what()
    except PermissionError:
        print("refused")
"""
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code],
            user=STRANGER,
            group=STRANGER,
            extra_groups=[],
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        tried.extend(done.stdout.split())

    engine = AttackedEngine(attack)
    with WeightSync(engine, dir=shm_dir) as sync:
        sync.push(TENSORS, version=1)
    assert tried == ["refused"] * 5
    check_good(engine)
    engine.close()


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777], ids=oct)
def test_modes_are_private_whatever_the_umask(mask: int, shm_dir: str) -> None:
    modes: dict[str, int] = {}

    def attack(offer: dict[str, Any]) -> None:
        for path in Path(shm_dir).rglob("*"):
            modes[path.suffix] = stat.S_IMODE(path.lstat().st_mode)

    engine = AttackedEngine(attack)
    before = os.umask(mask)
    try:
        with WeightSync(engine, dir=shm_dir, slot_size=4096) as sync:
            sync.push(TENSORS, version=1)
    finally:
        os.umask(before)
    assert modes
    assert all(mode & 0o077 == 0 for mode in modes.values())
    check_good(engine)
    engine.close()


def _link(path: Path, target: Path) -> None:
    target.mkdir()
    path.symlink_to(target)


def _foreign(path: Path, _: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, STRANGER, STRANGER)


def _open(path: Path, _: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "a link": _link,
    "a dangling link": lambda path, target: path.symlink_to(target),
    "a file": lambda path, _: path.touch(),
    "open to all": _open,
    **({"somebody else's": _foreign} if IS_ROOT else {}),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_what_was_planted_in_the_directory_s_place_is_not_used(
    plant: Callable[[Path, Path], None], shm_dir: str, tmp_path: Path
) -> None:
    place, target = Path(shm_dir) / f"vllm_bucketsync-{os.geteuid()}", tmp_path / "target"
    plant(place, target)
    engine = ThreadEngine()
    with WeightSync(engine, dir=shm_dir) as sync:
        with pytest.raises(ConfigError, match=str(place)) as caught:
            sync.push(TENSORS, version=1)
        assert caught.value.engine_state in {None, "unchanged"}
        assert engine.requests == []
        assert list(tmp_path.rglob("*/*")) == []

        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
        sync.push(TENSORS, version=1)
    check_good(engine)
    engine.close()


def test_files_that_others_have_put_beside_ours_are_left_alone(shm_dir: str) -> None:
    place = Path(shm_dir) / f"vllm_bucketsync-{os.geteuid()}"
    place.mkdir(mode=0o700)
    planted = [place / "0.sock", place / "0.seg", place / "notes"]
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(planted[0]))
        live.listen()
        for path in planted[1:]:
            path.write_bytes(b"mine")
        (place / "dangling.seg").symlink_to("/nowhere")
        engine = ThreadEngine()
        with WeightSync(engine, dir=shm_dir) as sync:
            sync.push(TENSORS, version=1)
        check_good(engine)
        engine.close()
    assert [path.read_bytes() for path in planted[1:]] == [b"mine"] * 2
    for path in list(place.iterdir()):
        path.unlink()
    place.rmdir()


@pytest.mark.parametrize(
    ("directory", "match"),
    [
        ("{}/missing", "No such file"),
        ("{}/" + "x" * 150, "kernel allows 107"),
        ("{}/\udcff", "No such file"),
        ("/proc/self", "No such file"),
    ],
    ids=["missing", "long", "no text", "not writable"],
)
def test_a_directory_that_cannot_be_used_is_named_before_the_engine_is_asked(
    directory: str, match: str, shm_dir: str
) -> None:
    path = directory.format(shm_dir)
    if "xxx" in path:
        Path(path).mkdir()
    engine = ThreadEngine()
    with WeightSync(engine, dir=path) as sync:
        with pytest.raises(ConfigError, match=match) as caught:
            sync.push(TENSORS, version=1)
        assert "VLLM_BUCKETSYNC_DIR" in str(caught.value)
    assert engine.requests == []
    engine.close()
    for made in sorted(Path(shm_dir).rglob("*"), reverse=True):
        made.rmdir()


STRANGE_FILES = [
    "/dev/zero", "/dev/null", "/proc/self/mem", "/proc/self/fd/0", "/etc/passwd", "/", "",
    "relative.seg", "a\x00b", "/proc/kcore", "{}/fifo", "{}/link", "{}/short", "{}/other",
]  # fmt: skip


@pytest.mark.parametrize("file", STRANGE_FILES)
def test_a_handle_that_leads_elsewhere_opens_nothing_and_reads_nothing(
    file: str, shm_dir: str
) -> None:
    base = Path(shm_dir)
    os.mkfifo(base / "fifo")
    (base / "other").write_bytes(bytes(4096 + 512))
    (base / "link").symlink_to(base / "other")
    (base / "short").write_bytes(b"x")
    offered: list[Open] = []

    class Watching(ThreadEngine):
        def _make_sink(self, opened: Open) -> Any:
            offered.append(opened)
            return super()._make_sink(opened)

    engine = Watching()
    with WeightSync(engine, dir=shm_dir, slot_size=512) as sync:
        sync.push({"a": torch.ones(8)}, version=1)
        (handle,) = offered[0].handles
        changed: Any = msgspec.structs.replace
        false = changed(handle, id="another", path=file.format(shm_dir), num_bytes=512)
        num_fds = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(RegionError):
            OpenedShm.open(false)
        assert len(list(Path("/proc/self/fd").iterdir())) == num_fds
    engine.close()
    for name in ("fifo", "link", "short", "other"):
        (base / name).unlink()


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": PROTOCOL_VERSION + 1},
        {"protocol": None},
        {"token": None},
        {"token": "x" * 100_000},
        {"endpoints": {"*": "ipc:///proc/self/mem"}},
        {"endpoints": {"*": "ipc://" + "/x" * 100}},
        {"endpoints": {"*": "tcp://127.0.0.1:80"}},
        {"endpoints": {"*": "inproc://x"}},
        {"endpoints": {}},
        {"endpoints": []},
        {"connect_timeout_s": float("inf")},
        {"connect_timeout_s": -1.0},
        {"idle_timeout_s": "soon"},
        {"engine": 1 << 70},
        {"extra": {"__reduce__": "os.system"}},
    ],
    ids=str,
)
def test_an_offer_of_anybody_is_an_answer_at_once(change: dict[str, Any], shm_dir: str) -> None:
    offer: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "token": "t",
        "endpoints": {"*": f"ipc://{shm_dir}/nobody.sock"},
        "engine": 0,
        "connect_timeout_s": 0.3,
        "idle_timeout_s": 0.3,
    }
    worker = serve.Worker(make_sink=lambda opened: KeepingSink())

    result = serve.update(worker, offer | change)

    assert (result["ok"], result["state"]) == (False, "unchanged")
    assert result["error"]["message"]
