"""Workers read a trainer's tensors on the GPU where they lie, between real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.fake_engine import FakeEngine
from support.gpu_trainer import hashes_of, many_tensors, train_with

from vllm_bucketsync import WeightSync

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1024**2


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    torch.zeros(1, device="cuda")
    with FakeEngine(device="cuda:0", world_size=2) as engine:
        yield engine


def assert_loaded(engine: FakeEngine, tensors: dict[str, torch.Tensor]) -> None:
    expected = hashes_of(tensors)
    for found in engine.call("loaded"):
        assert found == expected


def test_what_lies_on_the_gpu_is_read_there_and_the_rest_goes_through_slots(
    engine: FakeEngine,
) -> None:
    tensors = many_tensors(seed=2) | {"host": torch.randn(1000)}
    with WeightSync(engine, slot_size=4096) as sync:
        for version in range(5):
            for tensor in tensors.values():
                if tensor.dtype.is_floating_point and tensor.numel() and tensor.is_contiguous():
                    tensor.add_(version)
            report = sync.push(tensors, version=version, zero_copy=True)
            assert_loaded(engine, tensors)
            assert report.transport == "cuda_ipc"
            assert 0 < report.zero_copy_bytes < report.num_bytes
        sync.push(tensors, version="copied")
        assert_loaded(engine, tensors)


def test_what_a_side_stream_computes_just_before_the_push_is_what_arrives(
    engine: FakeEngine,
) -> None:
    side = torch.cuda.Stream()
    tensors = {f"t{index}": torch.zeros(MIB, device="cuda") for index in range(3)}
    with WeightSync(engine) as sync:
        for version in range(1, 51):
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                for tensor in tensors.values():
                    tensor.fill_(float(version))
            sync.push(tensors, version=version, zero_copy=True)
            assert_loaded(engine, tensors)


def test_nothing_grows_and_everything_comes_back(engine: FakeEngine) -> None:
    tensors = {f"t{index}": torch.randn(1 << 14, device="cuda") for index in range(20)}
    with WeightSync(engine) as warm:
        warm.push(tensors, version=0, zero_copy=True)
    begin = held()
    with WeightSync(engine) as sync:
        for version in range(3):
            sync.push(tensors, version=version, zero_copy=True)
        before = engine.call("resources"), held()
        for version in range(200):
            sync.push(tensors, version=version, zero_copy=True)
        after = engine.call("resources"), held()
    for one, other in zip(before[0], after[0], strict=True):
        for key in ("fds", "mapped", "free_bytes"):
            assert one[key] == other[key], key
    assert before[1] == after[1]
    assert held() == begin


def held() -> dict[str, int]:
    torch.cuda.synchronize()
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "shm": len(list(Path("/dev/shm").iterdir())),  # noqa: S108
        "free_bytes": torch.cuda.mem_get_info()[0],
    }


def test_memory_that_is_freed_after_a_release_and_comes_back_is_read_anew(
    engine: FakeEngine,
) -> None:
    with WeightSync(engine) as sync:
        for seed in range(6):
            tensors = {"t": torch.full((32 * MIB,), float(seed), device="cuda")}
            sync.push(tensors, version=seed, zero_copy=True)
            assert_loaded(engine, tensors)
            sync.release()
            del tensors
            torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "configuration", ["expandable_segments:True", "backend:cudaMallocAsync", "backend:native"]
)
def test_memory_of_every_allocator_arrives_in_place_or_through_slots(configuration: str) -> None:
    told, is_right = train_with(
        {"PYTORCH_CUDA_ALLOC_CONF": configuration}, is_zero_copy=True, slot_size="64KiB"
    )
    assert is_right
    assert {kind for kind, _ in told} == {"cuda_ipc"}, told
