"""An atomic update leaves a real engine as it was until the commit, and then is the new one."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.bytes_of import bytes_of
from support.nursery import Nursery
from support.pushes import Failing, Warm, load_all, metas_of
from support.trainer_process import push_checkpoint
from support.worlds import World

# After the engines, whose environment vLLM reads when it is imported.
import torch  # isort: skip

from vllm_bucketsync import ApplyError, StagingError, UnknownTensorError, WeightSync
from vllm_bucketsync.config import PLAN_ENV, PlanMode, Verify
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.staging import StagedSink
from vllm_bucketsync.transport import arena
from vllm_bucketsync.worker import layerwise
from vllm_bucketsync.worker.memory import WeightMemory

two_kinds = pytest.mark.parametrize("world", ["qwen3_tied", "qwen3_moe"], indirect=True)
CPU = torch.device("cpu")
NUM_DEATHS = 25


@two_kinds
def test_an_atomic_push_comes_to_the_same_as_any_other(world: World) -> None:
    addresses = world.addresses()
    with WeightSync(world.llm) as sync:
        for seed in (1, 0, 1):
            tensors = world.tensors(seed)
            before = {name: bytes_of(tensor) for name, tensor in tensors.items()}

            report = sync.push(tensors, version=seed, atomic=True)

            world.holds(seed)
            assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == before
            (worker,) = report.workers
            assert (report.is_atomic, worker.staged_on) == (True, "host memory")
            assert report.num_bytes <= worker.staged_bytes < report.num_bytes + 256 * len(tensors)
            assert worker.num_loaded == worker.cloned_bytes == 0
        assert sync.status()[0]["region_bytes"] == 0
    assert world.addresses() == addresses


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
def test_what_goes_nowhere_is_sent_and_not_staged(world: World) -> None:
    with WeightSync(world.llm) as sync:
        for seed in (1, 0):
            tensors = world.tensors(seed)
            head = tensors["model.embed_tokens.weight"]

            report = sync.push(
                tensors | {"lm_head.weight": head}, version=seed, atomic=True, verify="digest"
            )

            world.holds(seed)
            assert report.skipped == ("lm_head.weight",)
            sizes = [tensor.nbytes for tensor in tensors.values()]
            assert sum(sizes) <= report.workers[0].staged_bytes <= sum(sizes) + 256 * len(sizes)
            assert report.workers[0].verified_bytes == sum(sizes) + head.nbytes


@two_kinds
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_an_atomic_push_that_fails_on_the_way_changes_nothing(world: World, part: float) -> None:
    with WeightSync(world.llm) as sync:
        sync.push(world.tensors(0), version=0)
        before = world.live(), world.addresses(), world.outputs()
        tensors = world.tensors(1)
        failing = Failing(tensors, after=int(part * len(tensors)))

        with pytest.raises(ConnectionError, match="a rank is gone") as caught:
            sync.push(failing, version=1, atomic=True)

        assert any("unchanged" in note for note in caught.value.__notes__)
        assert (world.live(), world.addresses(), world.outputs()) == before
        (status,) = sync.status()
        assert (status["is_torn"], status["version"]) == (False, "0")

        sync.push(tensors, version=1, atomic=True)
        world.holds(1)


@two_kinds
def test_an_engine_that_has_voted_is_as_it_was_until_it_is_told_to_commit(world: World) -> None:
    for seed, other in ((1, 0), (0, 1)):
        before = world.live(), world.addresses()
        sink = StagedSink(world.sink(), device=CPU, verify=Verify.DIGEST)
        tensors = world.tensors(seed)
        sink.open(Manifest(metas_of(tensors)))
        load_all(sink, tensors, slot_size_bytes=20_224)
        sink.prepare()
        assert (world.live(), world.addresses()) == before

        assert sink.abort() is EngineState.UNCHANGED
        sink.release()
        assert (world.live(), world.addresses()) == before

        Warm().push(StagedSink(world.sink(), device=CPU), world.tensors(other))
        world.holds(other)


@two_kinds
@pytest.mark.parametrize("mode", [PlanMode.OFF, PlanMode.CHECK])
@pytest.mark.parametrize("verify", Verify)
def test_what_no_plan_loads_is_staged_whole(
    world: World, mode: PlanMode, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAN_ENV, mode)
    with WeightSync(world.llm) as sync:
        for seed in (1, 0):
            report = sync.push(world.tensors(seed), version=seed, atomic=True, verify=verify)

            world.holds(seed)
            assert (report.workers[0].num_loaded > 0) == (mode is PlanMode.OFF)


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
def test_warm_slots_serve_atomic_updates_and_others_by_turns(world: World) -> None:
    memory, warm = WeightMemory(), Warm()
    for turn, seed in enumerate((1, 0, 1, 0, 1, 0)):
        sink = world.sink(memory=memory)

        warm.push(StagedSink(sink, device=CPU) if turn % 2 else sink, world.tensors(seed))

        world.holds(seed)


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
def test_what_does_not_fit_the_model_or_the_memory_is_refused_before_a_byte(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightSync(world.llm) as sync:
        sync.push(world.tensors(0), version=0)
        before = world.live()
        wrong = world.tensors(1) | {"model.layers.0.wrong.weight": torch.ones(3)}
        with pytest.raises(UnknownTensorError, match="nothing was written"):
            sync.push(wrong, version=1, atomic=True)

        monkeypatch.setattr(arena, "available_bytes", lambda: arena.HOST_MARGIN_BYTES + 99)
        for dry_run in (True, False):
            with pytest.raises(StagingError, match="99 on the host") as caught:
                sync.push(world.tensors(1), version=1, atomic=True, dry_run=dry_run)
            assert caught.value.engine_state == "unchanged"
        assert world.live() == before


@two_kinds
def test_a_trainer_that_is_killed_at_any_moment_leaves_a_real_engine_whole(
    world: World, checkpoint: Callable[[str, int], Path]
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it with a failure
    rng = random.Random(seed)  # noqa: S311 - moments, not secrets
    holds, seconds, outcomes = 0, 0.0, set()
    with WeightSync(world.llm) as sync:
        sync.push(world.tensors(holds), version=holds)
    # Short, as the path of a socket has to be.
    with Nursery() as nursery, TemporaryDirectory(dir="/dev/shm") as directory:
        for turn in range(NUM_DEATHS):
            new = 1 - holds
            trainer = nursery.fork(push_checkpoint, str(checkpoint(world.kind, new)), directory)
            begin_s = time.monotonic()
            _, (offer,) = trainer.receive()
            # The first is not disturbed, and tells how long one takes.
            due_s = 1.1 * rng.random() * seconds if turn else 30.0
            killer = threading.Timer(due_s, trainer.kill)
            killer.start()
            result = world.worker.update_weights_from_bucket(offer)
            seconds = seconds or time.monotonic() - begin_s
            killer.cancel()
            killer.join()
            trainer.end()

            assert result["state"] in {"committed", "unchanged"}
            assert not result["is_torn"]
            holds = new if result["state"] == "committed" else holds
            outcomes.add(result["state"])
            world.holds(holds)
    world.worker.bucketsync_release()
    assert outcomes == {"committed", "unchanged"}


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
def test_an_engine_that_fails_to_apply_says_that_it_is_torn_and_the_next_push_mends_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("an illegal address")

    with WeightSync(world.llm) as sync:
        for _ in range(2):
            sync.push(world.tensors(0), version=0)
        with monkeypatch.context() as patch:
            patch.setattr(layerwise, "process", failing)
            with pytest.raises(ApplyError, match="an illegal address") as caught:
                sync.push(world.tensors(1), version=1, atomic=True)
        assert (caught.value.engine_state, caught.value.rank) == ("torn", 0)
        assert sync.status()[0]["is_torn"]

        sync.push(world.tensors(1), version=1, atomic=True)
        world.holds(1)
        assert not sync.status()[0]["is_torn"]
