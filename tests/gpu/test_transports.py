"""Buckets on a GPU: between real processes, through every transport, without vLLM.

What arrives is compared byte for byte; what is held before and after is compared too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.fake_engine import FakeEngine
from support.gpu_trainer import hashes_of, many_tensors, train_with
from support.thread_engine import ThreadEngine

from vllm_bucketsync import TransportError, WeightSync
from vllm_bucketsync.transport import cuda_runtime, parked, pinned, registry
from vllm_bucketsync.transport.cuda_library import LoadedRuntime
from vllm_bucketsync.transport.devices import uuid_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1024**2
KINDS = ("cuda_ipc", "shm")


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(device="cuda:0") as engine:
        # What this process's driver and allocator take the first time, and keep.
        for kind in KINDS:
            with WeightSync(engine, transport=kind, slot_size=4096) as sync:
                sync.push(many_tensors(), version="first")
        yield engine


def loaded(engine: FakeEngine) -> Any:
    (found,) = engine.call("loaded")
    return found


@pytest.mark.parametrize("slot_size", [None, 1024, "64KiB"], ids=str)
@pytest.mark.parametrize("transport", ["auto", *KINDS])
def test_every_byte_arrives_from_a_gpu(
    engine: FakeEngine, transport: str, slot_size: int | str | None
) -> None:
    with WeightSync(engine, transport=transport, slot_size=slot_size) as sync:
        for seed in range(3):
            tensors = many_tensors(seed=seed)
            report = sync.push(tensors, version=seed)
            assert loaded(engine) == hashes_of(tensors)
    assert report.transport == ("cuda_ipc" if transport == "auto" else transport)


@pytest.mark.parametrize("transport", ["auto", *KINDS])
def test_every_byte_arrives_from_the_host_and_from_both(engine: FakeEngine, transport: str) -> None:
    host = many_tensors("cpu", seed=5)
    both = {name: t if len(name) % 2 else t.cuda() for name, t in host.items()}
    with WeightSync(engine, transport=transport, slot_size=4096) as sync:
        report = sync.push(host, version="host")
        assert report.transport == ("shm" if transport == "auto" else transport)
        assert loaded(engine) == hashes_of(host)
        report = sync.push(both, version="both")
        assert report.transport == ("cuda_ipc" if transport == "auto" else transport)
        assert loaded(engine) == hashes_of(host)


@pytest.mark.parametrize("transport", KINDS)
def test_a_stream_arrives(engine: FakeEngine, transport: str) -> None:
    tensors = many_tensors(seed=7)
    with WeightSync(engine, transport=transport, slot_size=4096) as sync:
        for version in range(3):
            sync.push(((name, t.clone()) for name, t in tensors.items()), version=version)
            assert loaded(engine) == hashes_of(tensors)


@pytest.mark.parametrize("transport", KINDS)
def test_what_a_side_stream_computes_just_before_the_push_is_what_arrives(
    engine: FakeEngine, transport: str
) -> None:
    side = torch.cuda.Stream()
    tensors = {f"t{index}": torch.zeros(MIB // 4, device="cuda") for index in range(4)}
    with WeightSync(engine, transport=transport, slot_size="1MiB") as sync:
        for version in range(1, 101):
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                for tensor in tensors.values():
                    tensor.fill_(float(version))
            sync.push(tensors, version=version)
            assert loaded(engine) == hashes_of(tensors), version


def test_a_generator_may_compute_each_tensor_in_another_stream(engine: FakeEngine) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(30):
            with torch.cuda.stream(streams[index % 3]):
                torch.cuda._sleep(3_000_000)
                tensor = torch.full((MIB // 8,), float(index), device="cuda")
                yield f"t{index}", tensor
                del tensor

    expected = {f"t{i}": torch.full((MIB // 8,), float(i), device="cuda") for i in range(30)}
    for transport in KINDS:
        with WeightSync(engine, transport=transport, slot_size="1MiB") as sync:
            for version in range(3):
                sync.push(source(), version=version)
                assert loaded(engine) == hashes_of(expected)


def test_the_sender_may_overwrite_its_tensors_as_soon_as_push_returns(engine: FakeEngine) -> None:
    tensors = many_tensors(seed=3)
    expected = hashes_of(tensors)
    with WeightSync(engine, slot_size=4096) as sync:
        sync.push(tensors, version=1)
        for tensor in tensors.values():
            if tensor.is_contiguous() and tensor.numel():
                tensor.view(-1).view(torch.uint8).fill_(255)
    assert loaded(engine) == expected


@pytest.mark.parametrize("transport", KINDS)
def test_nothing_grows_over_two_hundred_updates_and_nothing_is_left(
    engine: FakeEngine, transport: str, tmp_path: Path
) -> None:
    tensors = many_tensors()
    torch.cuda.synchronize()
    with WeightSync(engine, transport=transport, slot_size="16KiB") as sync:
        for version in range(5):
            sync.push(tensors, version=version)
        (handle,) = sync._slots.handles
        before = engine.call("resources")[0], held()
        for version in range(200):
            sync.push(tensors, version=version)
        after = engine.call("resources")[0], held()
        assert sync._slots.handles == (handle,)
    for key in ("fds", "mapped", "free_bytes"):
        assert after[0][key] == before[0][key], key
    assert after[1] == before[1]
    assert parked.free_unused() == 0


def held() -> dict[str, int]:
    torch.cuda.synchronize()
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "shm": len(list(Path("/dev/shm").iterdir())),  # noqa: S108
        "free_bytes": torch.cuda.mem_get_info()[0],
        "reserved": torch.cuda.memory_reserved(),
    }


@pytest.mark.parametrize("end", ["close", "release"])
def test_device_memory_comes_back_to_the_byte(engine: FakeEngine, end: str) -> None:
    tensors = {"t": torch.zeros(MIB, device="cuda")}
    with WeightSync(engine, transport="cuda_ipc", slot_size="1MiB") as warm:
        warm.push(tensors, version=0)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with WeightSync(engine, slot_size="64MiB") as sync:
        sync.push(tensors, version=1)
        assert before - torch.cuda.mem_get_info()[0] >= 128 * MIB
        if end == "release":
            sync.release()
            assert torch.cuda.mem_get_info()[0] == before
            sync.push(tensors, version=2)
    assert torch.cuda.mem_get_info()[0] == before


def test_a_forgotten_sync_parks_its_memory_until_workers_let_go(engine: FakeEngine) -> None:
    tensors = {"t": torch.zeros(MIB, device="cuda")}
    sync = WeightSync(engine, slot_size="64MiB")
    sync.push(tensors, version=1)
    before = torch.cuda.mem_get_info()[0]
    del sync
    assert parked.free_unused() >= 128 * MIB
    engine.call("bucketsync_status")
    assert parked.free_unused() == 0
    assert torch.cuda.mem_get_info()[0] >= before + 128 * MIB


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"NCCL_CUMEM_ENABLE": "1"},
    ],
    ids=str,
)
def test_trainers_of_every_allocator_push_over_ipc(environment: dict[str, str]) -> None:
    told, is_right = train_with(environment, slot_size="64KiB")
    assert is_right
    assert {kind for kind, _ in told} == {"cuda_ipc"}, told


def test_devices_are_matched_by_uuid(engine: FakeEngine) -> None:
    told, is_right = train_with({"CUDA_VISIBLE_DEVICES": uuid_of("cuda:0")}, slot_size="64KiB")
    assert is_right
    assert {kind for kind, _ in told} == {"cuda_ipc"}, told


def test_without_cuda_bindings_the_library_that_torch_loaded_does(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = LoadedRuntime.find()
    monkeypatch.setattr(cuda_runtime, "_runtime", lambda: runtime)
    tensors = many_tensors(seed=9)
    for transport in KINDS:
        with WeightSync(engine, transport=transport, slot_size=4096) as sync:
            sync.push(tensors, version=transport)
            assert loaded(engine) == hashes_of(tensors)
    with pytest.raises(TransportError, match="cudaMalloc failed with 2"):
        cuda_runtime.allocate(1 << 50, device=0)
    torch.ones(8, device="cuda").sum().item()


def test_a_failed_call_leaves_no_error_for_the_next_one() -> None:
    for size in (1 << 50, 1 << 49):
        with pytest.raises(TransportError, match="cudaMalloc failed with 2"):
            cuda_runtime.allocate(size, device=0)
        assert torch.ones(8, device="cuda").sum().item() == 8
    pin = pinned.Pin.of(torch.zeros(100, dtype=torch.uint8), device=torch.device("cuda:0"))
    pin.undo()
    assert torch.ones(8, device="cuda").sum().item() == 8


@pytest.mark.parametrize("change", ["memory", "canary", "event"])
def test_a_handle_that_is_wrong_falls_back_to_shared_memory_in_the_same_update(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    create = registry.create_slots

    def spoiled(kind: str, **arguments: Any) -> Any:
        region, layout, num_slots = create(kind, **arguments)
        if kind == "cuda_ipc":
            setattr(region, "handle", spoil(region.handle, change))  # noqa: B010 - read-only
        return region, layout, num_slots

    monkeypatch.setattr("vllm_bucketsync.slots.create_slots", spoiled)
    tensors = many_tensors(seed=11)

    def run() -> int:
        with WeightSync(engine, slot_size=4096) as sync:
            for version in range(2):
                report = sync.push(tensors, version=version)
                assert report.transport == "shm"
                assert "cuda_ipc failed" in report.transport_reason
                assert loaded(engine) == hashes_of(tensors)
            (status,) = sync.status()
            assert "cuda_ipc failed" in status["transport_reason"]
        with (
            WeightSync(engine, slot_size=4096, transport="cuda_ipc") as forced,
            pytest.raises(TransportError, match="rank 0"),
        ):
            forced.push(tensors, version=3)
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    run()  # the driver takes some memory the first time that it is asked for something new
    assert {run() for _ in range(4)} == {run()}
    assert parked.free_unused() == 0


def spoil(handle: Any, change: str) -> Any:
    match change:
        case "memory":
            return msgspec.structs.replace(handle, memory=bytes(64))
        case "event":
            return msgspec.structs.replace(handle, events=(bytes(64),) * 2)
        case _:
            lease = msgspec.structs.replace(handle.lease, canary=bytes(32))
            return msgspec.structs.replace(handle, lease=lease)


def test_a_full_gpu_gets_smaller_slots_or_shared_memory_and_says_so(engine: FakeEngine) -> None:
    tensors = {"t": torch.randn(8 * MIB, device="cuda")}
    free = torch.cuda.mem_get_info()[0]
    address = cuda_runtime.allocate(free - 40 * MIB, device=0)
    try:
        with WeightSync(engine) as sync:
            report = sync.push(tensors, version="shrunk")
            assert loaded(engine) == hashes_of(tensors)
        with WeightSync(engine, slot_size="64MiB") as sync:
            asked = sync.push(tensors, version="asked for")
            assert loaded(engine) == hashes_of(tensors)
        with (
            WeightSync(engine, slot_size="64MiB", transport="cuda_ipc") as sync,
            pytest.raises(TransportError, match="cudaMalloc failed with 2"),
        ):
            sync.push(tensors, version="forced")
    finally:
        cuda_runtime.free(address, device=0)
    assert (report.transport, asked.transport) == ("cuda_ipc", "shm")
    assert "cudaMalloc failed with 2" in asked.transport_reason


def test_in_process_the_worker_takes_references() -> None:
    engine = ThreadEngine(is_in_process=True)
    tensors = many_tensors(seed=13)
    addresses = {t.data_ptr() for t in tensors.values() if t.is_contiguous() and t.numel()}
    with WeightSync(engine) as sync:
        report = sync.push(tensors, version=1)
    assert report.transport == "inproc"
    assert addresses <= set(engine.sinks[-1].addresses)
    arrived = engine.sinks[-1].tensors
    for name, tensor in tensors.items():
        assert torch.equal(arrived[name], tensor.contiguous().view(-1).view(torch.uint8).cpu())


@pytest.mark.parametrize("transport", KINDS)
def test_ipc_collect_is_never_called(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise RuntimeError("this device has no ipc_collect")

    monkeypatch.setattr(torch.cuda, "ipc_collect", never)
    with FakeEngine("recording", device="cuda:0") as engine:
        engine.call("break_ipc_collect")
        with WeightSync(engine, transport=transport, slot_size=4096) as sync:
            sync.push(many_tensors(), version=1)
            sync.release()
            sync.push(many_tensors(), version=2)


@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("call", ["open", "load", "prepare", "commit"])
def test_a_worker_killed_at_any_step_leaves_the_trainer_usable(call: str, transport: str) -> None:
    tensors = many_tensors()
    before = torch.cuda.mem_get_info()[0]
    with (
        FakeEngine(f"die {call}", device="cuda:0") as engine,
        WeightSync(engine, transport=transport, slot_size=4096) as sync,
    ):
        with pytest.raises(TransportError, match="gone"):
            sync.push(tensors, version="lost")
        engine.respawn()
        sync.push(tensors, version="new")
        assert loaded(engine) == hashes_of(tensors)
    assert torch.cuda.mem_get_info()[0] >= before


def test_the_push_of_another_thread_is_in_the_callers_order(engine: FakeEngine) -> None:
    tensors = {"t": torch.zeros(MIB, device="cuda")}
    errors: list[BaseException] = []

    def push() -> None:
        try:
            with WeightSync(engine, slot_size="1MiB") as sync:
                sync.push(tensors, version="thread")
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    torch.cuda._sleep(50_000_000)
    tensors["t"].fill_(3)
    thread = threading.Thread(target=push)
    thread.start()
    thread.join(60)
    assert errors == []
    assert loaded(engine) == hashes_of({"t": torch.full((MIB,), 3.0, device="cuda")})


def test_shared_memory_is_pinned_on_this_machine(engine: FakeEngine, caplog: Any) -> None:
    with caplog.at_level("WARNING"), WeightSync(engine, transport="shm") as sync:
        sync.push({"t": torch.zeros(MIB, device="cuda")}, version=1)
        assert sync._slots._region is not None
        assert sync._slots._region._copies._pin.is_pinned  # type: ignore[attr-defined]
    assert [r for r in caplog.records if "not pinned" in r.getMessage()] == []
    assert os.environ.get("VLLM_BUCKETSYNC_TRANSPORT") is None
