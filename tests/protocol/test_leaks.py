"""Proves that nothing grows with the number of updates, in either process.

A trainer (this process) and two workers go through a hundred updates, also where updates
fail, differ, or come from one ``WeightSync`` after another. Held are then as many
descriptors, mappings and files as after the first few, and not more memory than the
allocators of three processes need to settle.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_engine import FakeEngine

from vllm_bucketsync.channel import Event, Listener, Received
from vllm_bucketsync.sync import WeightSync

NUM_WARM_UPS = 12
NUM_UPDATES = 100
NUM_REOPENED = 20
NUM_WORKERS = 2
# Two of them are made anew after a failure: kept a hundred times, they would be 9 MiB.
SLOT_SIZE = 48 * 1024
# What the memory of a process may grow by in all of the updates.
MAX_GROWTH_KIB = 1024
# One for each of these comes besides one for each bucket.
NUM_COMMANDS = len({"open", "finish", "commit"})
NUM_REPLIES = len({"hello", "ready", "prepared", "done"})
NUM_COMMANDS_OF_A_FIRST_UPDATE = NUM_COMMANDS + len({"metas"})


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one process holds."""

    rss_kib: int
    fds: int
    mapped: int


@pytest.fixture(scope="module")
def engine(_resource_tracker: None) -> Iterator[FakeEngine]:
    with FakeEngine("discarding", world_size=NUM_WORKERS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other take seconds where processors are few."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def tensors(number: int = 0) -> dict[str, torch.Tensor]:
    """Return a model of some buckets, of another shape for every number."""
    return {
        f"model.layers.{index}.weight": torch.full((16, 256 + number), float(index))
        for index in range(24)
    }


class GatherFailedError(Exception):
    pass


def failing() -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors().items())[:5]
    raise GatherFailedError


def push_the_same(sync: WeightSync, number: int) -> None:
    sync.push(tensors(), version=number)


def push_and_fail_every_third_time(sync: WeightSync, number: int) -> None:
    if number % 3 == 0:
        with pytest.raises(GatherFailedError):
            sync.push(failing(), version=number)
    else:
        sync.push(tensors(), version=number)


def push_another_model_each_time(sync: WeightSync, number: int) -> None:
    if number % 2:
        sync.push(tensors(number), version=number)
    else:
        # These come again, but only after more of them than a worker remembers.
        sync.push(iter(tensors(number % 60).items()), version=number)


Push = Callable[[WeightSync, int], None]


@pytest.mark.parametrize(
    "push", [push_the_same, push_and_fail_every_third_time, push_another_model_each_time]
)
def test_a_hundred_updates_hold_no_more_than_the_first_few(
    push: Push, engine: FakeEngine, shm_dir: str
) -> None:
    with WeightSync(engine, slot_size=SLOT_SIZE, dir=shm_dir) as sync:
        for number in range(1, NUM_WARM_UPS + 2):
            push(sync, number)
        before, files_before = held(engine), files(shm_dir)

        for number in range(1, NUM_UPDATES + 2):
            push(sync, number)

        check_flat(before, held(engine))
        assert len(files(shm_dir)) == len(files_before)
        assert all(status["num_updates"] > 0 for status in sync.status())


def test_a_weight_sync_that_is_opened_again_and_again_leaves_nothing(
    engine: FakeEngine, shm_dir: str
) -> None:
    def push_and_close() -> tuple[list[Held], int]:
        with WeightSync(engine, slot_size=SLOT_SIZE, dir=shm_dir) as sync:
            for number in range(NUM_UPDATES // NUM_REOPENED):
                sync.push(tensors(), version=number)
            found = held(engine), len(files(shm_dir))
        assert files(shm_dir) == []
        return found

    for _ in range(3):
        before, num_files_before = push_and_close()

    for _ in range(NUM_REOPENED):
        after, num_files = push_and_close()

    check_flat(before, after)
    assert num_files == num_files_before


def test_an_update_takes_one_message_a_bucket_and_a_few_more_for_each_worker(
    engine: FakeEngine, shm_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent, num_received = count_messages(monkeypatch)
    with WeightSync(engine, slot_size=SLOT_SIZE, dir=shm_dir) as sync:
        for number, model in enumerate([tensors(), tensors(), tensors(7), tensors(7)]):
            num_sent.clear()
            num_received.clear()
            report = sync.push(model, version=number)

            is_new = number in {0, 2}
            num_more = NUM_COMMANDS_OF_A_FIRST_UPDATE if is_new else NUM_COMMANDS
            assert report.num_buckets > 5
            assert len(num_sent) == len(num_received) == NUM_WORKERS
            assert max(num_sent.values()) <= report.num_buckets + num_more
            assert max(num_received.values()) <= report.num_buckets + NUM_REPLIES


def count_messages(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Count what the trainer sends to each worker, and what it receives from each."""
    num_sent: dict[bytes, int] = {}
    num_received: dict[bytes, int] = {}
    send, receive = Listener.send, Listener.receive

    def sending(self: Listener, peer: bytes, data: bytes) -> None:
        num_sent[peer] = num_sent.get(peer, 0) + 1
        send(self, peer, data)

    def receiving(self: Listener, timeout_s: float) -> Event | None:
        event = receive(self, timeout_s)
        if isinstance(event, Received):
            num_received[event.peer] = num_received.get(event.peer, 0) + 1
        return event

    monkeypatch.setattr(Listener, "send", sending)
    monkeypatch.setattr(Listener, "receive", receiving)
    return num_sent, num_received


def held(engine: FakeEngine) -> list[Held]:
    """Return what this process and each worker hold."""
    gc.collect()
    return [_own(), *(Held(**found) for found in engine.call("resources"))]


def check_flat(before: list[Held], after: list[Held]) -> None:
    for then, now in zip(before, after, strict=True):
        assert now.rss_kib - then.rss_kib <= MAX_GROWTH_KIB
        assert now == replace(then, rss_kib=now.rss_kib)


def files(directory: str) -> list[Path]:
    return [path for path in Path(directory).rglob("*") if not path.is_dir()]


def _own() -> Held:
    status = Path("/proc/self/status").read_text().splitlines()
    found: dict[str, Any] = dict(line.split(":", 1) for line in status)
    return Held(
        rss_kib=int(found["VmRSS"].split()[0]),
        fds=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        mapped=Path("/proc/self/maps").read_text().count(".seg"),
    )
