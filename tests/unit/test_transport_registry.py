"""One place picks a transport: the best that nothing rules out, and it says why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.stepping import hello
from support.thread_engine import ThreadEngine

from vllm_bucketsync.config import TRANSPORTS, Settings
from vllm_bucketsync.errors import ConfigError, RegionError, UnsupportedError
from vllm_bucketsync.handles import CudaIpcHandle, InprocHandle, ShmHandle
from vllm_bucketsync.identity import HOST
from vllm_bucketsync.messages import Hello
from vllm_bucketsync.probe import TransportProbe
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.transport import registry
from vllm_bucketsync.transport.registry import KINDS, Choice, Wish, candidates, openable

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)
HAS_GPU = TransportProbe("cuda_ipc", "a GPU is here", {})
HAS_NONE = TransportProbe("shm", "no GPU's device files are in /dev", {})

SHM = ShmHandle(id="r", path="/missing", num_bytes=256, canary=bytes(32))
CUDA = CudaIpcHandle(
    id="r",
    lease=SHM,
    boot_id=HOST.boot_id,
    device_uuid="GPU-1",
    num_bytes=256,
    memory=bytes(64),
    events=(bytes(64),),
)
INPROC = InprocHandle(id="nobody's", num_bytes=256)


def cpu_worker(rank: int = 0) -> Hello:
    reason = "no GPU's device files are in /dev"
    return hello(rank=rank, transports=("inproc", "shm"), transport_reason=reason)


def gpu_worker(rank: int = 0) -> Hello:
    return hello(rank=rank, device=f"cuda:{rank}", transports=KINDS, transport_reason="a GPU")


WORKERS = {
    "cpu": [cpu_worker()],
    "gpu": [gpu_worker(0), gpu_worker(1)],
    "mixed": [gpu_worker(0), cpu_worker(1)],
}
# Of a stream nothing is known before its first tensor.
SOURCES = {"cpu": CPU, "gpu": GPU, "stream": None}


@pytest.fixture(autouse=True)
def trainer(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A trainer that uses a GPU, unless a test takes that away."""
    be(monkeypatch, probe=HAS_GPU, is_available=True, is_initialized=True)
    return monkeypatch


def be(
    monkeypatch: pytest.MonkeyPatch,
    *,
    probe: TransportProbe,
    is_available: bool,
    is_initialized: bool,
) -> None:
    monkeypatch.setattr(registry, "own_probe", lambda: probe)
    monkeypatch.setattr(registry, "machine_probe", lambda: probe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)


def kinds(choices: Iterable[Choice]) -> list[str]:
    return [choice.kind for choice in choices]


# transport, workers, source: what is tried, and words of the first one's reason.
TABLE: list[tuple[str, str, str, list[str], str]] = [
    ("auto", "gpu", "gpu", ["cuda_ipc", "shm"], "the tensors are on a GPU"),
    ("auto", "gpu", "stream", ["cuda_ipc", "shm"], "a GPU that every worker may reach"),
    ("auto", "gpu", "cpu", ["shm"], "no CUDA IPC: the tensors are on cpu"),
    ("auto", "cpu", "gpu", ["shm"], "rank 0 is on cpu: no GPU's device files"),
    ("auto", "cpu", "cpu", ["shm"], "no CUDA IPC: rank 0 is on cpu"),
    ("auto", "cpu", "stream", ["shm"], "no CUDA IPC: rank 0 is on cpu"),
    ("auto", "mixed", "gpu", ["shm"], "no CUDA IPC: rank 1 is on cpu"),
    ("auto", "mixed", "cpu", ["shm"], "no CUDA IPC: rank 1 is on cpu"),
    ("auto", "mixed", "stream", ["shm"], "no CUDA IPC: rank 1 is on cpu"),
    # What is asked for is only refused where it cannot be: bytes from the host can go there.
    *(("cuda_ipc", "gpu", source, ["cuda_ipc"], "asked for") for source in SOURCES),
    *(("shm", workers, source, ["shm"], "asked for") for workers in WORKERS for source in SOURCES),
]
REFUSED = [
    (workers, source, words)
    for workers, words in (("cpu", "rank 0 is on cpu: no GPU's"), ("mixed", "rank 1 is on cpu"))
    for source in SOURCES
]


def test_every_combination_of_setting_workers_and_source_is_in_a_table() -> None:
    said = {row[:3] for row in TABLE} | {("cuda_ipc", *row[:2]) for row in REFUSED}

    assert said == {(t, w, s) for t in TRANSPORTS for w in WORKERS for s in SOURCES}


@pytest.mark.parametrize(("transport", "workers", "source", "tried", "words"), TABLE)
def test_the_best_that_nothing_rules_out_comes_first_with_its_reason(
    transport: str, workers: str, source: str, tried: list[str], words: str
) -> None:
    found = candidates(Wish(transport=transport, device=SOURCES[source]), WORKERS[workers])

    assert kinds(found) == tried
    assert words in found[0].reason


@pytest.mark.parametrize(("workers", "source", "words"), REFUSED)
def test_what_is_asked_for_and_cannot_be_is_refused_by_name(
    workers: str, source: str, words: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        candidates(Wish(transport="cuda_ipc", device=SOURCES[source]), WORKERS[workers])

    text = str(caught.value)
    assert words in text
    for part in ("'cuda_ipc' cannot be used", "nothing was written", "set transport to 'auto'"):
        assert part in text


@pytest.mark.parametrize("device", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("transport", ["auto", "cuda_ipc"])
def test_a_trainer_without_a_gpu_says_what_it_lacks(
    trainer: pytest.MonkeyPatch, transport: str, device: torch.device | None
) -> None:
    be(trainer, probe=HAS_NONE, is_available=False, is_initialized=False)

    assert_ruled_out(Wish(transport=transport, device=device), "here in the trainer, no GPU's")


@pytest.mark.parametrize("transport", ["auto", "cuda_ipc"])
def test_a_torch_without_cuda_is_named_where_the_machine_has_a_gpu(
    trainer: pytest.MonkeyPatch, transport: str
) -> None:
    be(trainer, probe=HAS_GPU, is_available=False, is_initialized=False)

    words = f"torch {torch.__version__} finds no GPU in the trainer"
    assert_ruled_out(Wish(transport=transport, device=GPU), words)


def test_a_stream_does_not_make_a_trainer_use_cuda_that_does_not_yet(
    trainer: pytest.MonkeyPatch,
) -> None:
    def touched() -> bool:
        raise AssertionError("CUDA was looked at")

    be(trainer, probe=HAS_GPU, is_available=True, is_initialized=False)
    trainer.setattr(torch.cuda, "is_available", touched)

    assert_ruled_out(Wish(transport="auto"), "a stream is sent by a trainer that does not use CUDA")


def test_tensors_on_the_host_never_look_at_cuda(trainer: pytest.MonkeyPatch) -> None:
    def touched() -> bool:
        raise AssertionError("CUDA was looked at")

    trainer.setattr(torch.cuda, "is_available", touched)
    trainer.setattr(torch.cuda, "is_initialized", touched)

    assert_ruled_out(Wish(transport="auto", device=CPU), "the tensors are on cpu")


def assert_ruled_out(wish: Wish, words: str) -> None:
    """Check what becomes of CUDA IPC that cannot be: refused if asked for, else not tried."""
    if wish.transport == "cuda_ipc":
        with pytest.raises(UnsupportedError, match=re.escape(words)):
            candidates(wish, WORKERS["gpu"])
        return
    (found,) = candidates(wish, WORKERS["gpu"])
    assert found.kind == "shm"
    assert words in found.reason


def test_a_worker_that_does_not_say_why_not_has_no_gpu() -> None:
    (found,) = candidates(
        Wish(transport="auto", device=GPU), [hello(device="xpu:0", transports=("shm",))]
    )

    assert found.reason == "no CUDA IPC: rank 0 is on xpu:0: no GPU"


def test_a_worker_in_this_process_takes_references_whatever_it_is_on() -> None:
    for workers in WORKERS.values():
        found = candidates(Wish(transport="auto", is_in_process=True, device=GPU), workers)

        assert kinds(found) == ["inproc"]
        assert "lives in this process" in found[0].reason


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_a_worker_in_this_process_leaves_no_choice(transport: str) -> None:
    Wish(transport=transport).check()
    wish = Wish(transport=transport, is_in_process=True)
    if transport == "auto":
        wish.check()
        return
    with pytest.raises(ConfigError, match=rf"transport is '{transport}'.*MULTIPROCESSING=1"):
        wish.check()


def test_what_is_left_after_a_failure_says_what_failed() -> None:
    best, good, last = (
        Choice("cuda_ipc", "asked for", is_zero_copy=True),
        Choice("cuda_ipc", "a GPU"),
        Choice("shm", "works everywhere"),
    )

    left = last.after(good.after(best, "error 1"), "error 801")

    assert (left.kind, left.is_zero_copy) == ("shm", False)
    assert left.reason == (
        "zero-copy cuda_ipc failed (error 1); cuda_ipc failed (error 801); works everywhere"
    )


@pytest.mark.parametrize(
    ("device", "expected"),
    [(GPU, "cuda:1"), (torch.device("cuda"), "cuda"), (CPU, "cuda"), (None, "cuda")],
)
def test_buckets_lie_on_the_gpu_of_the_tensors_or_on_the_current_one(
    device: torch.device | None, expected: str
) -> None:
    assert str(Wish(transport="auto", device=device).gpu) == expected


@pytest.mark.parametrize("probe", [HAS_GPU, HAS_NONE], ids=["gpu", "none"])
@pytest.mark.parametrize("device", ["cuda:0", "cuda", "cpu", "xpu:0"])
def test_a_worker_may_open_device_memory_only_on_a_gpu_that_was_found(
    device: str, probe: TransportProbe
) -> None:
    may = device.startswith("cuda") and probe is HAS_GPU

    assert openable(device, probe) == (KINDS if may else ("inproc", "shm"))
    assert openable(torch.device(device), probe) == openable(device, probe)


def test_a_worker_s_own_probe_counts_where_none_is_given(trainer: pytest.MonkeyPatch) -> None:
    assert "cuda_ipc" in openable("cuda:0")
    be(trainer, probe=HAS_NONE, is_available=False, is_initialized=False)
    assert "cuda_ipc" not in openable("cuda:0")


@pytest.mark.parametrize(
    ("kind", "handle", "device"),
    [
        ("cuda_ipc", SHM, GPU),
        ("cuda_ipc", INPROC, GPU),
        ("cuda_ipc", CUDA, CPU),
        ("shm", CUDA, GPU),
        ("shm", INPROC, CPU),
        ("inproc", SHM, CPU),
        ("teleport", SHM, CPU),
    ],
)
def test_a_handle_is_opened_only_by_its_own_transport(
    kind: str, handle: Any, device: torch.device
) -> None:
    with pytest.raises(UnsupportedError, match=rf"transport '{kind}' is not known.*cuda_ipc"):
        registry.open_region(kind, handle, device=device)


def test_device_memory_of_another_boot_is_refused_before_anything_is_touched(
    trainer: pytest.MonkeyPatch,
) -> None:
    for name in ("init", "_lazy_init", "current_device", "get_device_properties"):
        trainer.setattr(torch.cuda, name, touch)
    trainer.setattr("vllm_bucketsync.transport.cuda_runtime._runtime", touch)
    trainer.setattr("vllm_bucketsync.transport.cuda_ipc.OpenedShm.open", touch)

    elsewhere = msgspec.structs.replace(CUDA, boot_id="0123456789")
    with pytest.raises(RegionError) as caught:
        registry.open_region("cuda_ipc", elsewhere, device=GPU)

    for part in ("'01234567'", repr(HOST.boot_id[:8]), "another host", "within one host only"):
        assert part in str(caught.value)


def touch(*_: Any, **__: Any) -> Any:
    raise AssertionError("the device was touched")


def test_device_memory_without_a_lease_here_is_refused_before_the_device_is_touched(
    trainer: pytest.MonkeyPatch,
) -> None:
    trainer.setattr("vllm_bucketsync.transport.cuda_runtime._runtime", touch)

    with pytest.raises(RegionError, match=r"/missing.*cannot be opened.*same user"):
        registry.open_region("cuda_ipc", CUDA, device=GPU)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_a_torch_without_cuda_has_no_device_memory_and_leaves_nothing(
    trainer: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer.undo()
    for device in (GPU, None):
        with pytest.raises(RegionError, match=r"(?i)compiled with(out)? CUDA"):
            registry.create_slots(
                "cuda_ipc",
                settings=Settings(dir=str(tmp_path)),
                needed_bytes=1000,
                wish=Wish(transport="cuda_ipc", device=device),
            )

    assert list(tmp_path.iterdir()) == []


def test_a_transport_that_cannot_be_is_refused_before_a_tensor_is_asked_for(
    trainer: pytest.MonkeyPatch,
) -> None:
    be(trainer, probe=HAS_NONE, is_available=False, is_initialized=False)
    asked: list[str] = []

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append("a")
        yield "a", torch.zeros(3)

    engine = ThreadEngine()
    with (
        WeightSync(engine, transport="cuda_ipc") as sync,
        pytest.raises(UnsupportedError, match="nothing was written; set transport to 'auto'"),
    ):
        sync.push(produce(), version=1)

    assert asked == []
    assert [sink.calls for sink in engine.sinks] == []
    assert [worker.status()["version"] for worker in engine.workers] == [None]
    engine.close()
