"""Between real processes: messages arrive, deadlines hold, and a peer's death is seen at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.processes import Child

from vllm_bucketsync import channel, sockets
from vllm_bucketsync.channel import Dialer, Listener, Lost, Received
from vllm_bucketsync.codec import MAX_MESSAGE_BYTES
from vllm_bucketsync.errors import ConfigError, LocalProtocolError, PeerLostError, TransportError
from vllm_bucketsync.rundir import remove_stale

PATIENCE_S = 20.0
AT_ONCE_S = 1.0
SHORT_HEARTBEAT_S = 0.3

DIALER = """
import sys
from vllm_bucketsync.channel import Dialer
dialer = Dialer(sys.argv[1], heartbeat_timeout_s=float(sys.argv[2]))
for i in range(int(sys.argv[3])):
    dialer.send(b"%d" % i)
print("said", flush=True)
"""
DIALER_THAT_WAITS = (
    DIALER
    + """
from vllm_bucketsync.errors import PeerLostError
try:
    print(dialer.receive(60))
except PeerLostError:
    print("lost", flush=True)
"""
)
LISTENER = """
import sys
from vllm_bucketsync.channel import Listener
listener = Listener(sys.argv[1], heartbeat_timeout_s=float(sys.argv[2]))
print(listener.endpoint, flush=True)
peer = listener.receive(30).peer
for i in range(int(sys.argv[3])):
    listener.send(peer, b"%d" % i)
print("said", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def listener(shm_dir: str) -> Iterator[Listener]:
    with Listener(shm_dir) as found:
        yield found


def dial(
    listener: Listener,
    *,
    num_messages: int = 1,
    heartbeat_timeout_s: float = 15.0,
    code: str = DIALER_THAT_WAITS,
) -> Child:
    return Child(code, listener.endpoint, str(heartbeat_timeout_s), str(num_messages))


def receive(listener: Listener) -> Received:
    event = listener.receive(PATIENCE_S)
    assert isinstance(event, Received)
    return event


def texts(begin: int, end: int) -> list[bytes]:
    """Return what a child says, from its message ``begin`` on."""
    return [b"%d" % i for i in range(begin, end)]


def receive_loss(listener: Listener) -> Lost:
    event = listener.receive(PATIENCE_S)
    assert isinstance(event, Lost)
    return event


def test_messages_go_both_ways_in_order(listener: Listener) -> None:
    with Dialer(listener.endpoint) as dialer:
        dialer.send(b"")
        for i in range(100):
            dialer.send(b"%d" % i)
        peer = receive(listener).peer

        assert [receive(listener).data for _ in range(100)] == texts(0, 100)
        assert listener.peer_pid(peer) == dialer.peer_pid == os.getpid()

        big = os.urandom(MAX_MESSAGE_BYTES)
        listener.send(peer, b"first")
        listener.send(peer, big)
        assert dialer.receive(PATIENCE_S) == b"first"
        assert dialer.receive(PATIENCE_S) == big
        dialer.send(big)
        assert receive(listener).data == big


def test_the_endpoint_is_a_socket_in_the_private_directory(listener: Listener) -> None:
    path = Path(listener.endpoint.removeprefix("ipc://"))

    assert path.is_socket()
    assert path.parent.name == f"vllm_bucketsync-{os.geteuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_receive_ends_at_its_deadline(listener: Listener) -> None:
    with Dialer(listener.endpoint) as dialer:
        for wait in (listener.receive, dialer.receive):
            for timeout_s in (0.0, 0.0004, 0.15):
                begin = time.monotonic()
                assert wait(timeout_s) is None
                assert timeout_s <= time.monotonic() - begin < timeout_s + 0.2


def test_a_killed_worker_is_seen_at_once_after_everything_that_it_had_sent(
    listener: Listener,
) -> None:
    with dial(listener, num_messages=500) as child:
        peer = receive(listener).peer
        assert child.line() == "said"
        # Its socket is flushed by now, or will be cut: what arrives has no gap.
        begin = time.monotonic()
        child.kill()
        seen = []
        while isinstance(event := listener.receive(PATIENCE_S), Received):
            seen.append(event.data)
        took_s = time.monotonic() - begin

        assert event == Lost(peer, child.pid)
        assert took_s < AT_ONCE_S
        assert seen == texts(1, len(seen) + 1)
        assert listener.receive(0) is None
        assert listener.peer_pid(peer) is None
        with pytest.raises(PeerLostError):
            listener.send(peer, b"too late")


def test_everything_is_delivered_that_a_worker_had_handed_over_before_its_death(
    listener: Listener,
) -> None:
    with dial(listener, num_messages=200, code=DIALER + "dialer.close()\n") as child:
        assert child.end() == (0, "")

        seen = [receive(listener).data for _ in range(200)]
        assert seen == texts(0, 200)
        receive_loss(listener)


def test_a_killed_trainer_is_seen_at_once_after_everything_that_it_had_sent(
    shm_dir: str,
) -> None:
    with Child(LISTENER, shm_dir, "15", "200") as child, Dialer(child.line()) as dialer:
        dialer.send(b"hello")
        assert child.line() == "said"
        assert dialer.receive(PATIENCE_S) == b"0"
        begin = time.monotonic()
        child.kill()
        child.end()
        assert [dialer.receive(PATIENCE_S) for _ in range(199)] == texts(1, 200)
        with pytest.raises(PeerLostError, match=f"pid {child.pid}") as caught:
            dialer.receive(PATIENCE_S)

        assert time.monotonic() - begin < AT_ONCE_S
        assert caught.value.pid == child.pid
        with pytest.raises(PeerLostError):
            dialer.send(b"too late")
    make_old_and_remove(shm_dir, expected=1)


def make_old_and_remove(shm_dir: str, *, expected: int) -> None:
    for path in Path(shm_dir).glob("*/*"):
        os.utime(path, (time.time() - 60,) * 2)
    assert len(remove_stale(shm_dir)) == expected


def test_a_listener_that_is_closed_is_seen_at_once(shm_dir: str) -> None:
    listener = Listener(shm_dir)
    with Dialer(listener.endpoint) as dialer:
        dialer.send(b"hello")
        listener.send(receive(listener).peer, b"last words")
        listener.close()

        assert dialer.receive(PATIENCE_S) == b"last words"
        with pytest.raises(PeerLostError):
            dialer.receive(PATIENCE_S)


def test_a_stopped_worker_is_lost_when_its_heartbeats_fail(shm_dir: str) -> None:
    with (
        Listener(shm_dir, heartbeat_timeout_s=SHORT_HEARTBEAT_S) as listener,
        dial(listener) as child,
    ):
        peer = receive(listener).peer
        child.line()
        child.stop()
        begin = time.monotonic()

        assert receive_loss(listener) == Lost(peer, child.pid)
        assert time.monotonic() - begin < SHORT_HEARTBEAT_S + AT_ONCE_S

        child.resume()
        assert child.line() == "lost"


def test_a_stopped_trainer_is_lost_when_its_heartbeats_fail(shm_dir: str) -> None:
    with (
        Child(LISTENER, shm_dir, "15", "1") as child,
        Dialer(child.line(), heartbeat_timeout_s=SHORT_HEARTBEAT_S) as dialer,
    ):
        dialer.send(b"hello")
        assert dialer.receive(PATIENCE_S) == b"0"
        child.stop()
        begin = time.monotonic()

        with pytest.raises(PeerLostError, match=r"no sign of life for 0\.3 s"):
            dialer.receive(PATIENCE_S)
        assert time.monotonic() - begin < SHORT_HEARTBEAT_S + AT_ONCE_S
    make_old_and_remove(shm_dir, expected=1)


def test_a_peer_that_is_busy_and_holds_its_interpreter_is_not_lost(shm_dir: str) -> None:
    # One call into C that never gives the interpreter lock away.
    busy = """
import re, time
begin = time.monotonic()
n = 20
while time.monotonic() - begin < 4 * float(sys.argv[2]):
    re.match(r"(a+)+b", "a" * n)
    n += 1
dialer.send(b"done")
dialer.receive(60)
"""
    with Listener(shm_dir, heartbeat_timeout_s=SHORT_HEARTBEAT_S) as listener:
        heartbeat_s = SHORT_HEARTBEAT_S
        with dial(listener, heartbeat_timeout_s=heartbeat_s, code=DIALER + busy):
            assert receive(listener).data == b"0"
            assert receive(listener).data == b"done"


def test_two_pairs_at_once_do_not_meet(shm_dir: str) -> None:
    with Listener(shm_dir) as one, Listener(shm_dir) as two:
        assert one.endpoint != two.endpoint
        with Dialer(one.endpoint) as first, Dialer(two.endpoint) as second:
            first.send(b"to one")
            second.send(b"to two")

            to_one, to_two = receive(one), receive(two)
            one.send(to_one.peer, b"from one")
            two.send(to_two.peer, b"from two")

            assert (to_one.data, to_two.data) == (b"to one", b"to two")
            assert first.receive(PATIENCE_S) == b"from one"
            assert second.receive(PATIENCE_S) == b"from two"


def test_the_death_of_one_worker_does_not_touch_the_others(listener: Listener) -> None:
    with dial(listener) as first, dial(listener) as second, Dialer(listener.endpoint) as third:
        third.send(b"0")
        peers = {}
        for _ in range(3):
            peer = receive(listener).peer
            peers[listener.peer_pid(peer)] = peer
        first.kill()
        assert receive_loss(listener) == Lost(peers[first.pid], first.pid)

        second.kill()
        assert receive_loss(listener) == Lost(peers[second.pid], second.pid)
        listener.send(peers[os.getpid()], b"still here")
        assert third.receive(PATIENCE_S) == b"still here"


def test_a_descriptor_that_is_given_out_again_does_not_confuse_the_living_with_the_dead(
    listener: Listener,
) -> None:
    num_reused = 0
    for _ in range(20):
        # Nobody reads until all have come and most have gone.
        for name in (b"dead 1", b"dead 2"):
            with Dialer(listener.endpoint) as dead:
                dead.send(name)
        with Dialer(listener.endpoint) as alive:
            alive.send(b"alive")

            events = [listener.receive(PATIENCE_S) for _ in range(5)]

            messages = [event for event in events if isinstance(event, Received)]
            by_data = {event.data: event.peer for event in messages}
            for name in (b"dead 1", b"dead 2"):
                is_about = [getattr(event, "peer", None) == by_data[name] for event in events]
                assert [type(events[i]) for i in range(5) if is_about[i]] == [Received, Lost]
            assert listener.receive(0) is None
            assert listener.peer_pid(by_data[b"alive"]) == os.getpid()
            listener.send(by_data[b"alive"], b"you live")
            assert alive.receive(PATIENCE_S) == b"you live"
            num_reused += len({event.fd for event in messages}) < 3
        assert receive_loss(listener).peer == by_data[b"alive"]
    assert num_reused > 0


def test_an_oversized_message_is_refused_before_it_is_sent(listener: Listener) -> None:
    with Dialer(listener.endpoint) as dialer:
        dialer.send(b"0")
        peer = receive(listener).peer
        for send in (dialer.send, lambda data: listener.send(peer, data)):
            with pytest.raises(LocalProtocolError, match=str(MAX_MESSAGE_BYTES)):
                send(bytes(MAX_MESSAGE_BYTES + 1))

        dialer.send(b"1")
        assert receive(listener).data == b"1"


def test_an_oversized_message_of_a_stranger_ends_its_connection_alone(listener: Listener) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(listener.endpoint)
        stranger.send(b"0")
        peer = receive(listener).peer
        with Dialer(listener.endpoint) as good:
            stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
            assert receive_loss(listener).peer == peer

            stranger.setsockopt(zmq.RECONNECT_IVL, -1)
            good.send(b"fine")
            assert receive(listener).data == b"fine"


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        b"\xff" + b"\xff" * 8 + b"\x7f",
        b"\x80\x04\x95" * 100,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48 + b"\x04\xff\xff\xff",
    ],
    ids=["nothing", "http", "random", "huge", "pickle", "greeting"],
)
def test_a_junk_peer_is_not_heard_and_does_no_harm(listener: Listener, junk: bytes) -> None:
    path = listener.endpoint.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as stranger, Dialer(listener.endpoint) as good:
        stranger.connect(path)
        stranger.sendall(junk)
        good.send(b"fine")

        assert receive(listener).data == b"fine"
        stranger.close()
        good.send(b"still fine")
        assert receive(listener).data == b"still fine"
        assert listener.receive(0) is None


def test_messages_of_several_frames_are_ignored(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(listener.endpoint)
        stranger.send_multipart([b"a", b"b"])
        stranger.send(b"one frame")

        assert receive(listener).data == b"one frame"
    assert "none of a dialer" in caplog.text
    receive_loss(listener)


def test_a_peer_of_another_user_is_not_heard(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "peer_credentials", lambda _: (4711, 12345))
    with Dialer(listener.endpoint) as stranger:
        stranger.send(b"let me in")
        deadline = time.monotonic() + PATIENCE_S
        while "ignoring" not in caplog.text:
            assert listener.receive(0.01) is None
            assert time.monotonic() < deadline
        monkeypatch.undo()

        with Dialer(listener.endpoint) as good:
            good.send(b"fine")
            assert receive(listener).data == b"fine"
    assert "pid 4711 of uid 12345" in caplog.text
    receive_loss(listener)
    assert listener.receive(0) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_kernel_says_who_a_peer_is(shm_dir: str) -> None:
    path = f"{shm_dir}/open.sock"
    Path(shm_dir).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        Path(path).chmod(0o666)
        code = f"import socket as s; c = s.socket(s.AF_UNIX); c.connect({path!r}); c.recv(1)"
        with subprocess.Popen(["/usr/bin/python3", "-c", code], user=12345) as stranger:
            accepted, _ = server.accept()
            with accepted:
                assert sockets.peer_credentials(accepted.fileno()) == (stranger.pid, 12345)
    Path(path).unlink()
    assert not sockets.is_trusted(12345)


def test_credentials_of_a_closed_or_strange_descriptor_are_unknown() -> None:
    with open("/dev/null") as strange:  # noqa: PTH123 - a descriptor is wanted
        number = strange.fileno()
        assert sockets.peer_credentials(number) == (None, None)
    assert sockets.peer_credentials(number) == (None, None)


def test_a_directory_whose_name_is_too_long_is_named_with_its_setting(shm_dir: str) -> None:
    directory = Path(shm_dir) / ("x" * 150)
    directory.mkdir()

    with pytest.raises(ConfigError, match=r"kernel allows 107.*dir=.*VLLM_BUCKETSYNC_DIR"):
        Listener(str(directory))

    (directory / f"vllm_bucketsync-{os.geteuid()}").rmdir()
    directory.rmdir()


def test_the_longest_path_that_the_kernel_allows_works(shm_dir: str) -> None:
    rest = len(f"/vllm_bucketsync-{os.geteuid()}/{'x' * 24}.sock")
    directory = Path(shm_dir) / ("x" * (sockets.MAX_PATH_BYTES - rest - len(shm_dir) - 1))
    directory.mkdir()
    with Listener(str(directory)) as listener, Dialer(listener.endpoint) as dialer:
        assert len(listener.endpoint) == len("ipc://") + sockets.MAX_PATH_BYTES
        dialer.send(b"fine")
        assert receive(listener).data == b"fine"
    directory.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only file system takes root")
def test_a_directory_that_cannot_be_written_to_is_named_with_its_setting(shm_dir: str) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", shm_dir]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(ConfigError, match=rf"{shm_dir}.*Read-only.*VLLM_BUCKETSYNC_DIR"):
            Listener(shm_dir)
    finally:
        subprocess.run(["umount", shm_dir], check=True)


def test_a_dialer_says_at_once_that_nobody_listens(shm_dir: str) -> None:
    dead, plain, missing = (Path(shm_dir) / name for name in ("dead", "plain", "missing"))
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(dead))
        owner.listen()
    plain.touch()

    for path, reason in ((dead, "refused"), (plain, "not a socket"), (missing, "No such file")):
        with pytest.raises(PeerLostError, match=reason):
            Dialer(f"ipc://{path}")
    dead.unlink()
    plain.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_dialer_trusts_no_socket_of_another_user(listener: Listener) -> None:
    os.chown(listener.endpoint.removeprefix("ipc://"), 12345, 12345)

    with pytest.raises(PeerLostError, match="uid 12345"):
        Dialer(listener.endpoint)


@pytest.mark.parametrize("endpoint", ["", "tcp://127.0.0.1:5555", "ipc://relative", "/run/x.sock"])
def test_what_is_no_endpoint_of_ours_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="not an endpoint"):
        Dialer(endpoint)


def test_a_listener_that_dies_between_the_probe_and_the_connection_is_seen_at_once(
    shm_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "probe_listener", lambda _: None)
    begin = time.monotonic()
    with Dialer(f"ipc://{shm_dir}/gone.sock") as dialer, pytest.raises(PeerLostError):
        dialer.receive(PATIENCE_S)
    assert time.monotonic() - begin < AT_ONCE_S


def test_closing_waits_for_a_stopped_peer_no_longer_than_it_is_told(listener: Listener) -> None:
    with dial(listener) as child:
        peer = receive(listener).peer
        child.line()
        child.stop()
        for _ in range(8):
            listener.send(peer, bytes(MAX_MESSAGE_BYTES))
        begin = time.monotonic()

        listener.close(linger_s=0.2)

        assert time.monotonic() - begin < 0.2 + AT_ONCE_S


def test_a_closed_channel_can_be_closed_again_but_not_used(shm_dir: str) -> None:
    listener = Listener(shm_dir)
    dialer = Dialer(listener.endpoint)
    for end in (dialer, listener):
        end.close()
        end.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            end.receive(0)
    with pytest.raises(LocalProtocolError, match="closed"):
        dialer.send(b"x")
    with pytest.raises(LocalProtocolError, match="closed"):
        listener.send(b"peer", b"x")


def test_a_peer_that_nobody_knows_is_lost(listener: Listener) -> None:
    with pytest.raises(PeerLostError, match="pid unknown"):
        listener.send(b"nobody", b"x")


def test_a_signal_does_not_end_a_wait(listener: Listener) -> None:
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        begin = time.monotonic()
        assert listener.receive(0.3) is None
        assert time.monotonic() - begin >= 0.3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(heard) > 1


def test_no_message_but_the_first_of_a_peer_is_held_where_an_interrupt_would_be_lost(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyzmq runs signal handlers while it frees a frame, and drops what they raise.
    num_frames = 0
    receive_one: Any = zmq.Socket.recv

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_frames
        num_frames += options.get("copy") is False
        return receive_one(self, *args, **options)

    monkeypatch.setattr(zmq.Socket, "recv", watched)
    with Dialer(listener.endpoint) as one, Dialer(listener.endpoint) as other:
        for dialer in (one, other):
            dialer.send(b"hello")
        peers = [receive(listener).peer for _ in range(2)]
        for i in range(50):
            for dialer in (one, other):
                dialer.send(b"%d" % i)
            for peer in peers:
                listener.send(peer, b"%d" % i)
        assert sorted(receive(listener).data for _ in range(100)) == sorted(2 * texts(0, 50))
        assert [one.receive(PATIENCE_S) for _ in range(50)] == texts(0, 50)

    assert num_frames == 2


def test_without_threads_there_is_an_error_and_not_the_end_of_the_process(
    shm_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refused)
    with pytest.raises(TransportError, match=r"can't start new thread.*ulimit -u.*pids"):
        Listener(shm_dir)
    monkeypatch.undo()
    Listener(shm_dir).close()
