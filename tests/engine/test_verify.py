"""A bit that flips, and a parameter that does not take its value, are found in a real engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.pushes import load_all, metas_of, push
from support.worlds import World

# After the engines, whose environment vLLM reads when it is imported.
import torch  # isort: skip

from vllm_bucketsync import CorruptionError, VerifyError, WeightSync
from vllm_bucketsync.config import PlanMode, Verify
from vllm_bucketsync.copies import CopyBatch, DeferredCopies
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.packing import Packing
from vllm_bucketsync.worker.memory import WeightMemory
from vllm_bucketsync.worker.proofs import Proofs

two_kinds = pytest.mark.parametrize("world", ["qwen3_tied", "qwen3_moe"], indirect=True)
# Written in place once it was seen that it may be, on a CPU too.
DIRECT = "model.norm.weight"


@pytest.fixture
def sync(world: World) -> WeightSync:
    """Two updates old: what is written in place is known."""
    made = WeightSync(world.llm)
    for _ in range(2):
        made.push(world.tensors(0), version=0)
    return made


@two_kinds
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_a_verified_push_says_what_was_compared_and_how(
    world: World, sync: WeightSync, atomic: bool
) -> None:
    total_bytes = sum(tensor.nbytes for tensor in world.tensors(0).values())
    with sync:
        for seed in (1, 0):
            report = sync.push(world.tensors(seed), version=seed, verify="digest", atomic=atomic)

            world.holds(seed)
            (worker,) = report.workers
            assert report.verify == "digest"
            assert worker.verified_bytes == total_bytes
            assert worker.num_direct_verified == worker.num_direct > 0
            assert worker.num_processed_verified == worker.num_processed > 0
            compared = worker.direct_verified_bytes + worker.processed_verified_bytes
            assert compared == total_bytes
            assert (worker.num_unverified, worker.unverified) == (0, ())
        plain = sync.push(world.tensors(1), version=1)
        assert plain.workers[0].verified_bytes == plain.workers[0].num_direct_verified == 0


@two_kinds
def test_a_bit_that_flips_on_the_way_is_found_and_the_next_push_mends(
    world: World, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = world.tensors(1)
    name = list(tensors)[-1]
    end_bucket = Packing._end_bucket

    def flipping(self: Packing, **options: int | None) -> object:
        batch = end_bucket(self, **options)
        # Handed over by reference: what the worker reads is this very tensor.
        tensors[name].view(-1)[:1].view(torch.uint8)[1] ^= 0x40
        return batch

    with sync:
        with monkeypatch.context() as patch:
            patch.setattr(Packing, "_end_bucket", flipping)
            with pytest.raises(CorruptionError, match=r"bucket \d+ of \d+ over inproc") as caught:
                sync.push(tensors, version=1, verify="digest", atomic=True)
        assert (caught.value.name, caught.value.engine_state) == (name, "unchanged")
        world.holds(0)

        sync.push(world.tensors(1), version=1, verify="digest")
        world.holds(1)


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
def test_a_bit_that_flips_in_a_live_parameter_is_found_before_the_vote(
    world: World, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_live = Proofs.check_live

    def flipping(self: Proofs) -> None:
        world.model.get_parameter(DIRECT).data.view(torch.uint8)[7] ^= 1
        check_live(self)

    with sync:
        with monkeypatch.context() as patch:
            patch.setattr(Proofs, "check_live", flipping)
            with pytest.raises(VerifyError, match=f"{DIRECT} does not hold what was sent") as found:
                sync.push(world.tensors(1), version=1, verify="digest")
        assert (found.value.name, found.value.engine_state) == (DIRECT, "torn")

        sync.push(world.tensors(1), version=1, verify="digest")
        world.holds(1)


@pytest.mark.parametrize("world", ["qwen3_tied", "qwen3_moe"], indirect=True)
def test_a_load_that_copies_nothing_is_not_a_success(
    world: World, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object) -> None:
        return

    with sync:
        cases = ((CopyBatch, False), (DeferredCopies, False), (CopyBatch, True))
        # Weights that were never here: memory that is given out again holds what it held.
        for seed, (cls, atomic) in enumerate(cases, start=7):
            with monkeypatch.context() as patch:
                patch.setattr(cls, "run", nothing)
                with pytest.raises(VerifyError) as caught:
                    sync.push(world.tensors(seed), version=1, verify="digest", atomic=atomic)
            assert caught.value.engine_state == ("unchanged" if atomic else "torn")

            sync.push(world.tensors(0), version=0, verify="digest")
            sync.push(world.tensors(0), version=0, verify="digest")
            world.holds(0)


@pytest.mark.parametrize("world", ["qwen3_moe"], indirect=True)
def test_a_bit_that_flips_in_a_module_that_is_put_together_is_found_before_it_is_processed(
    world: World, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DeferredCopies.run
    processed: list[object] = []

    def flipping(self: DeferredCopies, targets: dict[str, torch.Tensor]) -> None:
        run(self, targets)
        next(iter(targets.values())).view(-1)[:1].view(torch.uint8)[2] ^= 4

    def process(*of: object) -> None:
        processed.append(of)

    with sync:
        with monkeypatch.context() as patch:
            patch.setattr(DeferredCopies, "run", flipping)
            patch.setattr("vllm_bucketsync.worker.layerwise.process", process)
            with pytest.raises(VerifyError, match="does not hold what was sent") as caught:
                sync.push(world.tensors(1), version=1, verify="digest")
        assert processed == []
        assert caught.value.name in {f"{path}.weight" for path in paths(world)} | {
            f"{path}.{leaf}" for path in paths(world) for leaf in ("w13_weight", "w2_weight")
        }

        sync.push(world.tensors(1), version=1, verify="digest")
        world.holds(1)


def paths(world: World) -> list[str]:
    return [path for path, _ in world.model.named_modules()]


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
def test_what_vllms_own_loaders_take_is_listed_as_not_compared(
    world: World, declared: bool
) -> None:
    tensors = world.tensors(1)

    report = push(world.sink(verify=Verify.DIGEST, mode=PlanMode.OFF), tensors, declared=declared)

    assert report.checked.num_unchecked == len(tensors)
    assert set(report.checked.unchecked) <= set(tensors)
    assert report.checked.num_direct == report.checked.num_processed == 0
    world.holds(1)


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
@pytest.mark.parametrize("left_at", [1, 7, 15])
def test_a_stream_that_leaves_its_plan_is_compared_up_to_there(world: World, left_at: int) -> None:
    memory = WeightMemory()
    for _ in range(2):
        push(world.sink(memory=memory), world.tensors(0))
    items = list(world.tensors(1).items())
    sink = world.sink(memory=memory, is_promise=False, verify=Verify.DIGEST)

    sink.open(Manifest(metas_of(items)))
    load_all(sink, items[:left_at], slot_size_bytes=20_224)
    sink.deviate(left_at)
    load_all(sink, items[left_at:], slot_size_bytes=20_224, first=left_at)
    sink.prepare()
    report = sink.commit()
    sink.release()

    world.holds(1)
    assert report.checked.num_unchecked >= len(items) - left_at
    assert report.checked.num_direct + report.checked.num_processed > 0 or left_at == 1


@pytest.mark.parametrize("world", ["qwen3_tied"], indirect=True)
def test_a_push_that_verifies_nothing_digests_nothing(
    world: World, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(data: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a digest was computed")

    digest: Callable[[torch.Tensor], torch.Tensor] = never
    monkeypatch.setattr("vllm_bucketsync.digests._row_sums", digest)
    with sync:
        for atomic in (False, True):
            sync.push(world.tensors(1), version=1, atomic=atomic)
            world.holds(1)
