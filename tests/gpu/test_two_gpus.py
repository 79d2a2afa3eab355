"""A trainer and workers on different GPUs of one host, which see them under other numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_engine import FakeEngine
from support.gpu_trainer import hashes_of, many_tensors

from vllm_bucketsync import WeightSync
from vllm_bucketsync.transport.devices import uuid_of

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(120)]

# The devices of an engine's workers, and what they are allowed to see.
WORKERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "on the first": (["cuda:0"], {}),
    "on the second": (["cuda:1"], {}),
    "on both": (["cuda:0", "cuda:1"], {}),
    "that see the second alone": (["cuda:0"], {"CUDA_VISIBLE_DEVICES": "1"}),
    "that see them in another order": (["cuda:0", "cuda:1"], {"CUDA_VISIBLE_DEVICES": "1,0"}),
}


@pytest.fixture(scope="module", params=WORKERS, ids=lambda name: f"workers {name}")
def engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; two are needed")
    devices, environment = WORKERS[request.param]
    with FakeEngine(world_size=len(devices), device=devices, environment=environment) as engine:
        yield engine


def on(device: str, seed: int) -> dict[str, torch.Tensor]:
    return many_tensors(device, seed=seed)


def spread(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of which some are on each GPU, and some on the host."""
    places = ("cuda:0", "cuda:1", "cpu")
    tensors = many_tensors("cpu", seed=seed)
    return {
        name: tensor.to(places[index % 3]) for index, (name, tensor) in enumerate(tensors.items())
    }


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_every_byte_arrives_wherever_the_tensors_are(engine: FakeEngine, transport: str) -> None:
    sources: dict[str, Any] = {
        "first": on("cuda:0", 1),
        "second": on("cuda:1", 2),
        "spread": spread(3),
    }
    told = {}
    for name, tensors in sources.items():
        with WeightSync(engine, transport=transport, slot_size=4096) as sync:
            for version in range(3):
                report = sync.push(tensors, version=version)
                for found in engine.call("loaded"):
                    assert found == hashes_of(tensors), (name, version)
            told[name] = (report.transport, report.transport_reason)
    kinds = {kind for kind, _ in told.values()}
    assert kinds == {"shm"} if transport == "shm" else "cuda_ipc" in kinds, told


def test_what_another_gpu_computes_just_before_the_push_is_what_arrives(
    engine: FakeEngine,
) -> None:
    with WeightSync(engine, slot_size="1MiB") as sync:
        for version in range(1, 21):
            tensors = {}
            for device in ("cuda:0", "cuda:1"):
                with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                    torch.cuda._sleep(20_000_000)
                    tensors[device] = torch.full((1 << 18,), float(version), device=device)
            sync.push(tensors, version=version)
            for found in engine.call("loaded"):
                assert found == hashes_of(tensors), version


def test_devices_have_names_of_their_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; two are needed")
    assert uuid_of("cuda:0") != uuid_of("cuda:1")
