"""Proves that careless use of a ``WeightSync``, and strangers at its socket, break no update.

Workers are threads here; sockets, shared memory, forks and both ends are the real ones.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from support.thread_engine import ThreadEngine

from vllm_bucketsync.channel import Listener, Received
from vllm_bucketsync.codec import decode_reply, encode
from vllm_bucketsync.errors import ChannelTimeoutError, ConfigError
from vllm_bucketsync.identity import HOST
from vllm_bucketsync.messages import PROTOCOL_VERSION, Done, Hello
from vllm_bucketsync.sync import WeightSync

TENSORS = {"a": torch.arange(1000.0), "b": torch.ones(3)}


def fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("is_in_process", [False, True])
def test_a_push_that_closes_its_own_sync_goes_on_to_its_end(
    is_in_process: bool, shm_dir: str
) -> None:
    engine = ThreadEngine(is_in_process=is_in_process)
    sync = WeightSync(engine, dir=shm_dir, slot_size=512)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(5):
            yield f"w{index}", torch.ones(1000)
            sync.close()

    sync.push(source(), version=1)

    assert engine.workers[0].version == "1"
    assert list(Path(shm_dir).iterdir()) == []
    with pytest.raises(ConfigError, match="is closed"):
        sync.push(TENSORS, version=2)
    engine.close()


def test_a_push_on_another_thread_outlives_close_and_gives_everything_back(shm_dir: str) -> None:
    engine = ThreadEngine()
    sync = WeightSync(engine, dir=shm_dir, slot_size=512)
    has_begun, may_end = threading.Event(), threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1000)
        has_begun.set()
        may_end.wait(30)
        yield "b", torch.ones(1000)

    thread = threading.Thread(target=sync.push, args=(source(),), kwargs={"version": 1})
    thread.start()
    has_begun.wait(30)
    sync.close()
    with pytest.raises(ConfigError, match="is closed"):
        sync.push(TENSORS, version=2)
    may_end.set()
    thread.join(30)

    assert engine.workers[0].version == "1"
    assert not engine.workers[0].memory.is_torn
    assert list(Path(shm_dir).iterdir()) == []
    engine.close()


def test_a_sync_that_was_forgotten_keeps_no_memory_and_no_socket(shm_dir: str) -> None:
    engine = ThreadEngine()
    WeightSync(engine, dir=shm_dir).push(TENSORS, version=0)
    gc.collect()
    engine.close()
    before = fds()

    for version in range(5):
        WeightSync(engine, dir=shm_dir).push(TENSORS, version=version)
        gc.collect()
        engine.close()

    assert fds() == before
    assert list(Path(shm_dir).iterdir()) == []


def _in_a_fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_can_neither_push_nor_close_what_is_its_parents(shm_dir: str) -> None:
    engine = ThreadEngine()
    with WeightSync(engine, dir=shm_dir) as sync:
        sync.push(TENSORS, version=1)

        parent = os.getpid()

        def push() -> None:
            with pytest.raises(ConfigError, match=f"process {parent}"):
                sync.push(TENSORS, version=2)

        assert _in_a_fork(push) == 0
        assert _in_a_fork(sync.close) == 0
        assert _in_a_fork(lambda: sync.__exit__(None, None, None)) == 0

        assert all(region.owner_is_alive() for region in engine.workers[0].memory.regions.values())
        sync.push(TENSORS, version=3)
    assert engine.workers[0].version == "3"
    engine.close()


def test_a_socket_that_somebody_removed_is_made_anew(shm_dir: str) -> None:
    engine = ThreadEngine()
    with WeightSync(engine, dir=shm_dir) as sync:
        sync.push(TENSORS, version=1)
        for found in Path(shm_dir).iterdir():
            shutil.rmtree(found)

        sync.push(TENSORS, version=2)
    assert engine.workers[0].version == "2"
    engine.close()


class Stranger:
    """A process of the same user that talks to a trainer's socket; here a thread's socket."""

    def __init__(self, sync: WeightSync) -> None:
        listener: Any = sync._listener
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(listener.endpoint)

    def say(self, data: bytes) -> None:
        self._socket.send(data)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.mark.parametrize("data", [b"junk", b"", b"\x80", os.urandom(1000)], ids=len)
def test_what_a_stranger_says_in_the_middle_of_an_update_does_not_end_it(
    data: bytes, shm_dir: str
) -> None:
    engine = ThreadEngine()
    with WeightSync(engine, dir=shm_dir, slot_size=256) as sync:
        sync.push(TENSORS, version=1)
        strangers: list[Stranger] = []

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for index in range(20):
                yield f"w{index}", torch.ones(300)
                if not strangers:
                    strangers.append(Stranger(sync))
                strangers[0].say(data)
                time.sleep(0.005)

        sync.push(source(), version=2)
        strangers[0].close()
    assert engine.workers[0].version == "2"
    engine.close()


class AbsentEngine(ThreadEngine):
    """Its workers come too late."""

    def _act(self, index: int, act: Callable[..., Any], *args: Any) -> Any:
        time.sleep(6)
        return super()._act(index, act, *args)


def test_strangers_keep_no_deadline_away(shm_dir: str) -> None:
    engine = AbsentEngine()
    hello = Hello(
        token="of an offer that expired",  # noqa: S106
        protocol=PROTOCOL_VERSION,
        plugin_version="",
        engine=0,
        rank=0,
        dp_index=0,
        world_size=1,
        instance_id="",
        pid=1,
        host_id="",
        boot_id=HOST.boot_id,
        device="cpu",
        device_uuid="",
        transports=("shm",),
    )
    is_over = threading.Event()

    with WeightSync(engine, dir=shm_dir, connect_timeout_s=0.5) as sync:

        def spam() -> None:
            while sync._listener is None:
                time.sleep(0.01)
            stranger = Stranger(sync)
            while not is_over.wait(0.02):
                stranger.say(encode(hello))
            stranger.close()

        thread = threading.Thread(target=spam)
        thread.start()
        begin_s = time.monotonic()
        with pytest.raises(ChannelTimeoutError, match="1 of 1 workers that have not said hello"):
            sync.push(TENSORS, version=1)
        # The deadline, and what workers get to answer an abort.
        assert time.monotonic() - begin_s < 5
        is_over.set()
        thread.join(30)
        assert all(call.wait(30) for call in sync._calls)


@pytest.mark.parametrize("is_in_process", [False, True])
def test_an_error_of_the_users_progress_is_raised_as_it_is(is_in_process: bool) -> None:
    engine = ThreadEngine(is_in_process=is_in_process)

    def show(done: int, total: int | None) -> None:
        raise ZeroDivisionError("no bar")

    with WeightSync(engine) as sync:
        with pytest.raises(ZeroDivisionError, match="no bar") as caught:
            sync.push(TENSORS, version=1, progress=show)
        assert "weights are unknown" not in caught.value.__notes__[-1]
        sync.push(TENSORS, version=2)
    assert engine.workers[0].version == "2"
    engine.close()


@pytest.mark.parametrize("expected", [0, -1, True, "2", 2.0])
def test_a_number_of_workers_that_is_none_is_refused(expected: Any) -> None:
    with pytest.raises(ConfigError, match="expected_workers"):
        WeightSync(ThreadEngine(), expected_workers=expected)


@pytest.mark.parametrize("is_in_process", [False, True])
def test_a_version_that_is_no_text_is_refused_before_anything_begins(is_in_process: bool) -> None:
    engine = ThreadEngine(is_in_process=is_in_process)
    with WeightSync(engine) as sync, pytest.raises(ConfigError, match="UTF-8"):
        sync.push(TENSORS, version="\ud800")
    assert engine.sinks == []


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_what_a_worker_says_last_may_come_after_its_call_has_returned(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Listener.receive
    held: list[tuple[float, Any]] = []

    def late(self: Listener, timeout_s: float) -> Any:
        if held and time.monotonic() >= held[0][0]:
            return held.pop()[1]
        event = receive(self, timeout_s)
        if isinstance(event, Received) and isinstance(decode_reply(event.data), Done):
            held.append((time.monotonic() + late_s, event))
            return None
        # That it is gone is known later still.
        return None if held else event

    monkeypatch.setattr(Listener, "receive", late)
    engine = ThreadEngine()
    with WeightSync(engine) as sync:
        report = sync.push({"a": torch.ones(3)}, version=1)
    assert report.num_workers == 1
    engine.close()


def slowly(*took_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield small tensors, all of which fit into one bucket, after so many seconds each."""
    for index, seconds in enumerate(took_s):
        time.sleep(seconds)
        yield f"w{index}", torch.ones(2)


def test_a_bucket_may_take_longer_than_any_deadline_while_its_tensors_come() -> None:
    engine = ThreadEngine()
    with WeightSync(engine, idle_timeout_s=0.8) as sync:
        report = sync.push(slowly(*[0.35] * 6), version=1)

    assert (report.num_buckets, engine.workers[0].version) == (1, "1")
    engine.close()


def test_one_tensor_that_takes_longer_than_the_deadline_is_said_at_both_ends() -> None:
    engine = ThreadEngine()
    with WeightSync(engine, idle_timeout_s=0.8) as sync:
        with pytest.raises(ChannelTimeoutError, match=f"pid {os.getpid()}.* is alive") as caught:
            sync.push(slowly(0.0, 2.5, 0.0), version=1)

        assert caught.value.rank == 0
        (note,) = caught.value.__notes__
        assert "gave up by itself, while the source took 2." in note
        assert "w1" in note
        sync.push(TENSORS, version=2)
    assert engine.workers[0].version == "2"
    engine.close()
