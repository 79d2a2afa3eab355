"""Proves that an atomic update leaves the old weights, whoever dies, or brings the new ones.

Real processes over shared memory: a trainer and two workers, each with its part of a model.
One of them is killed at a random moment, again and again. Afterwards every byte that is
served is of one version, and the next update works.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from support.live_sink import LiveSink, Model
from support.nursery import Child, Nursery
from support.trainer_process import PipeEngine

from vllm_bucketsync import serve
from vllm_bucketsync.clients.base import UpdateAnswer, UpdateRequest, verdict
from vllm_bucketsync.errors import ApplyError, EngineState, SourceError
from vllm_bucketsync.messages import Open
from vllm_bucketsync.rundir import remove_stale
from vllm_bucketsync.sinks import Sink
from vllm_bucketsync.staging import staged_if_asked
from vllm_bucketsync.sync import WeightSync

NUM_WORKERS = 2
# Of each kind of death. CI has time for few; two hundred take minutes.
NUM_ROUNDS = 10
NUM_LONG_ROUNDS = 150


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return some megabytes of which no part is the same in two versions."""
    generator = torch.Generator().manual_seed(version)
    return {
        f"layer.{i}.{'columns' if i % 2 else 'rows'}": torch.randn(
            (64, 256 + 8 * i), generator=generator
        )
        for i in range(24)
    }


def work(pipe: Connection, rank: int) -> None:
    """Be a worker: answer calls until the pipe ends."""
    model = Model(rank, NUM_WORKERS)
    strikes: dict[str, Exception] = {}

    def strike(call: str) -> None:
        error = strikes.pop(call, None)
        if error is not None:
            raise error

    def make_sink(opened: Open) -> Sink:
        inner = LiveSink(model, on_call=strike)
        return staged_if_asked(inner, opened, device=torch.device("cpu"))

    worker = serve.Worker(make_sink=make_sink, rank=rank, world_size=NUM_WORKERS)
    while True:
        method, args = pipe.recv()
        match method:
            case "update_weights_from_bucket":
                pipe.send(serve.update(worker, *args))
            case "bucketsync_status":
                pipe.send(serve.status(worker))
            case "hashes":
                pipe.send(model.hashes())
            case "strike":
                strikes[args[0]] = RuntimeError("this kernel cannot be launched")
                pipe.send(None)


class _Engine(PipeEngine):
    """An engine of several workers, of which somebody else has the other end."""

    def num_workers(self) -> int:
        return NUM_WORKERS

    def _ask(self, method: str, *args: Any) -> list[Any]:
        found = super()._ask(method, *args)
        if None in found:
            raise RuntimeError("a worker died, and the engine with it")
        return found


def train(pipe: Connection, version: int, options: dict[str, Any]) -> None:
    """Be a trainer: push once, and say how it went."""
    tensors = weights(version)
    with WeightSync(_Engine(pipe), slot_size="64KiB", **options.pop("settings", {})) as sync:
        try:
            report = sync.push(tensors, version=version, atomic=True, **options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test gets to see it
            pipe.send(("error", (type(error).__name__, str(error), getattr(error, "rank", None))))
        else:
            pipe.send(("pushed", [(one.staged_bytes, one.staged_on) for one in report.workers]))
        # Until the pipe ends: what a killed trainer leaves is another test's.
        pipe.poll(10)


class Stage:
    """One engine of two workers, and trainers that push into it.

    Attributes:
        seconds: How long an undisturbed update took, from the trainer's birth on.
    """

    def __init__(self, nursery: Nursery, settings: dict[str, Any]) -> None:
        self._nursery = nursery
        self._settings = settings
        self.workers = [nursery.fork(work, rank) for rank in range(NUM_WORKERS)]
        self.seconds = 0.0

    def train(self, version: int, **options: Any) -> Child:
        return self._nursery.fork(train, version, {"settings": self._settings, **options})

    def respawn(self, rank: int) -> None:
        self.workers[rank].end()
        self.workers[rank] = self._nursery.fork(work, rank)

    def ask(self, method: str, *args: Any) -> list[Any]:
        for worker in self.workers:
            worker.pipe.send((method, args))
        return [worker.receive() for worker in self.workers]

    def update(
        self, trainer: Child, *, kill: Child | None = None, after_s: float = 0.0
    ) -> list[Any]:
        """Let the workers take part in a trainer's update; kill somebody meanwhile.

        Returns:
            What each worker returned; ``None`` of a dead one, and of all where the trainer
            died before it asked.
        """
        due_s = time.monotonic() + after_s
        results: list[Any] = [None] * NUM_WORKERS
        waiting: dict[Any, int] = {trainer.pipe: -1}
        while waiting:
            if kill is not None and time.monotonic() >= due_s:
                kill.kill()
                kill = None
            wait_s = 60.0 if kill is None else max(due_s - time.monotonic(), 0)
            for pipe in wait(list(waiting), wait_s):
                index, said = waiting.pop(pipe), _said(pipe)
                if index >= 0:
                    results[index] = said
                    self._report_death(trainer, said)
                elif said is not None:
                    for number, worker in enumerate(self.workers):
                        waiting[worker.pipe] = number
                        # To one that is dead already: then its pipe has ended, too.
                        _told(worker.pipe, said)
        if kill is not None:
            time.sleep(max(due_s - time.monotonic(), 0))
            kill.kill()
        return results

    def _report_death(self, trainer: Child, said: Any) -> None:
        """Do as vLLM's executor: the call fails as soon as a worker is dead."""
        if said is None:
            _told(trainer.pipe, [None])

    def push(self, version: int, **options: Any) -> tuple[str, Any]:
        """Push without any fault, and return what the trainer says of it."""
        trainer = self.train(version, **options)
        begin_s = time.monotonic()
        results = self.update(trainer)
        trainer.pipe.send(results)
        said: tuple[str, Any] = trainer.receive()
        self.seconds = time.monotonic() - begin_s
        trainer.end()
        return said

    def serves(self, *versions: int) -> set[int]:
        """Return which of some versions are served: each worker has to have one, whole."""
        found = set()
        for rank, hashes in enumerate(self.ask("hashes")):
            model = Model(rank, NUM_WORKERS)
            held = [v for v in versions if model.expected(weights(v)) == hashes]
            assert held, f"rank {rank} serves none of the versions {versions} whole"
            found.update(held)
        return found


def _said(pipe: Any) -> Any:
    """Return what a process says; ``None`` if it is dead."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def _told(pipe: Connection, said: Any) -> None:
    """Tell a process something, if it still lives."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(said)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


@pytest.fixture
def stage(nursery: Nursery, shm_dir: str) -> Iterator[Stage]:
    found = Stage(nursery, {"dir": shm_dir, "idle_timeout_s": 20.0})
    yield found
    for worker in found.workers:
        worker.end()
    for file in Path(shm_dir).rglob("*.*"):
        os.utime(file, (0, 0))
    # What killed trainers left, the next one would remove.
    remove_stale(shm_dir)


def kill_one(stage: Stage, rng: random.Random, *, old: int, new: int, whom: str) -> str:
    """Push ``new`` over ``old``, kill the trainer or a worker meanwhile; return the outcome."""
    trainer = stage.train(new, verify=rng.choice(["none", "digest"]))
    rank = rng.randrange(NUM_WORKERS) if whom == "worker" else None
    victim = trainer if rank is None else stage.workers[rank]
    results = stage.update(trainer, kill=victim, after_s=rng.uniform(0, 1.1 * stage.seconds))
    if rank is not None:
        stage.respawn(rank)
    trainer.end()
    held = {}
    for number, hashes in enumerate(stage.ask("hashes")):
        model = Model(number, NUM_WORKERS)
        versions = [v for v in (old, new) if model.expected(weights(v)) == hashes]
        if number != rank:
            assert versions, f"rank {number} holds neither version {old} nor {new} whole"
            held[number] = versions[0]
    for number, result in enumerate(results):
        if result is not None and number != rank:
            assert result["state"] == ("committed" if held[number] == new else "unchanged")
            assert not result["is_torn"]
    if len(set(held.values())) > 1:
        # The trainer died between its two messages to commit: nobody else can know.
        assert verdict(results) is EngineState.TORN
        return "mixed"
    return "new" if new in held.values() else "old"


def kill_at_random(stage: Stage, *, whom: str, num_rounds: int) -> Counter[str]:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it with a failure
    rng = random.Random(seed)  # noqa: S311 - moments, not secrets
    for version in (1, 2):
        assert stage.push(version)[0] == "pushed"
    version, outcomes = 2, Counter[str]()
    for _ in range(num_rounds):
        outcomes[kill_one(stage, rng, old=version, new=version + 1, whom=whom)] += 1
        version += 2

        assert stage.push(version)[0] == "pushed"
        assert stage.serves(version) == {version}
        assert [one["is_torn"] for one in stage.ask("bucketsync_status")] == [False] * NUM_WORKERS
    print(f"{whom} killed {num_rounds} times: {dict(outcomes)}")  # noqa: T201 - likewise
    return outcomes


@pytest.mark.parametrize("whom", ["trainer", "worker"])
def test_whoever_is_killed_at_a_random_moment_every_survivor_serves_one_version_whole(
    stage: Stage, whom: str
) -> None:
    outcomes = kill_at_random(stage, whom=whom, num_rounds=NUM_ROUNDS)

    assert outcomes.total() == NUM_ROUNDS


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("whom", ["trainer", "worker"])
def test_hundreds_of_deaths_leave_one_version_whole(stage: Stage, whom: str) -> None:
    outcomes = kill_at_random(stage, whom=whom, num_rounds=NUM_LONG_ROUNDS)

    # Moments on both sides of the commit were met.
    assert min(outcomes["old"], outcomes["new"]) > 0


def test_an_atomic_update_stages_each_ranks_part_and_says_where(stage: Stage) -> None:
    (kind, staged) = stage.push(1)

    half = sum(tensor.nbytes for tensor in weights(1).values()) // NUM_WORKERS
    assert kind == "pushed"
    assert all(place == "host memory" for _, place in staged)
    # Of rows and of columns alike, but for alignment.
    assert all(half <= num_bytes < half + 256 * 24 for num_bytes, _ in staged)
    assert stage.serves(1) == {1}


def test_a_rank_that_fails_to_apply_is_torn_and_named_and_the_next_update_mends_it(
    stage: Stage,
) -> None:
    stage.push(1)
    for call in ("load", "prepare", "commit"):
        stage.workers[1].pipe.send(("strike", (call,)))
        stage.workers[1].receive()

        (kind, (name, text, rank)) = stage.push(2)

        assert (kind, name, rank) == ("error", ApplyError.__name__, 1)
        assert "applying it failed here: RuntimeError: this kernel cannot be launched" in text
        statuses = stage.ask("bucketsync_status")
        assert [one["is_torn"] for one in statuses] == [False, True]
        assert stage.push(3)[0] == "pushed"
        assert stage.serves(3) == {3}
        assert [one["is_torn"] for one in stage.ask("bucketsync_status")] == [False, False]


def test_an_iterator_is_refused_before_anybody_is_asked() -> None:
    class Untouched(_Engine):
        def update(self, request: UpdateRequest) -> UpdateAnswer:
            raise AssertionError("the engine was asked")

    asked: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append("a tensor")
        yield "a", torch.zeros(1)

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, WeightSync(Untouched(ours)) as sync:
        for dry_run in (False, True):
            with pytest.raises(SourceError, match="pass the module, its state_dict"):
                sync.push(stream(), version=1, atomic=True, dry_run=dry_run)
    assert asked == []
