"""Moves a model between two processes, beside two plain memcpys of the same bytes.

What is compared, exactly. An *update* is the whole of ``WeightSync.push``: the trainer
copies every tensor into a slot, and a worker in a second process copies it from there
into a buffer of its own (``DiscardSink``), as loading would. The *memcpys* run in the
trainer's process, one after the other: every tensor to its place in a buffer as large as
the model, then from there to its place in a second one; both were touched before. Each
update is measured right after its memcpys, so that a machine's noise hits both alike.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from vllm_bucketsync import __version__
from vllm_bucketsync.config import Settings
from vllm_bucketsync.report import PushReport
from vllm_bucketsync.sync import WeightSync

from .memory import begin_peak, peak_since
from .model import decoder_shapes, make_tensors
from .worker import BEGIN_PEAK, PEAK, WorkerProcess

COMPARED = (
    "update: WeightSync.push, tensors to slot in one process, slot to buffer in another. "
    "memcpys: the same tensors to a buffer, and on to a second one, with torch's copy_, one "
    "after the other in the trainer's process, with as many threads as each end of the update"
)

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        num_bytes: Bytes of the model, at least.
        dtype: Of every tensor.
        repeat: Warm updates.
        num_threads: Threads of torch at each end.
        slot_size: As in ``Settings``.
        num_slots: As in ``Settings``.
    """

    num_bytes: int
    dtype: str = "bfloat16"
    repeat: int = 5
    num_threads: int = 1
    slot_size: int | None = None
    num_slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """How far the resident memory of each end rose above what it was before the updates.

    The slots count at both ends, since both map them; they exist once. ``None`` where
    the kernel does not let a process count its peak anew.

    Attributes:
        slots_bytes: All slots.
        largest_tensor_bytes: What ``DiscardSink`` takes beside them.
        trainer_bytes: The trainer's rise, slots included.
        worker_bytes: The worker's, slots included.
    """

    slots_bytes: int
    largest_tensor_bytes: int
    trainer_bytes: int | None
    worker_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured; seconds are those of whole pushes.

    Attributes:
        plan: What was asked for.
        first: The first update of the worker: memory is made, and descriptions are sent.
        warm: The updates after it.
        memcpys: Seconds of the two memcpys before each warm update.
        num_slots: How many slots there were.
        peaks: Memory beyond the tensors.
    """

    plan: Plan
    first: PushReport
    warm: tuple[PushReport, ...]
    memcpys: tuple[float, ...]
    num_slots: int
    peaks: Peaks

    @property
    def warm_s(self) -> tuple[float, ...]:
        """Seconds of each warm update."""
        return tuple(report.seconds for report in self.warm)

    @property
    def ratio_of_medians(self) -> float:
        """The median warm update's seconds, by those of the median memcpys."""
        return median(self.warm_s) / median(self.memcpys)

    @property
    def ratio_of_bests(self) -> float:
        """The fastest warm update's seconds, by those of the fastest memcpys."""
        return min(self.warm_s) / min(self.memcpys)

    def gb_per_s(self, seconds: float) -> float:
        """Return bytes of the model per second, in 10^9 bytes."""
        return self.first.num_bytes / seconds / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Return everything as data that JSON can hold."""
        workers = [report.workers[0] for report in self.warm]
        return {
            "benchmark": "transfer",
            "compared": COMPARED,
            "dtype": self.plan.dtype,
            "num_bytes": self.first.num_bytes,
            "num_tensors": self.first.num_tensors,
            "num_buckets": self.first.num_buckets,
            "num_slots": self.num_slots,
            "slot_size_bytes": self.first.slot_size_bytes,
            "transport": self.first.transport,
            "num_threads": self.plan.num_threads,
            "repeat": self.plan.repeat,
            "first_s": self.first.seconds,
            "warm_s": list(self.warm_s),
            "warm_median_s": median(self.warm_s),
            "warm_best_s": min(self.warm_s),
            "warm_median_gb_per_s": self.gb_per_s(median(self.warm_s)),
            "warm_best_gb_per_s": self.gb_per_s(min(self.warm_s)),
            "worker_load_s": [worker.load_s for worker in workers],
            "worker_wait_s": [worker.wait_s for worker in workers],
            "memcpys_s": list(self.memcpys),
            "memcpys_median_s": median(self.memcpys),
            "memcpys_best_s": min(self.memcpys),
            "ratio_of_medians": self.ratio_of_medians,
            "ratio_of_bests": self.ratio_of_bests,
            "peaks": asdict(self.peaks),
            "machine": _machine(),
            "versions": _versions(),
        }


def measure(plan: Plan, *, tell: Tell = lambda doing: None) -> Measured:
    """Run the benchmark: one first update, then warm ones.

    Takes three times the model's bytes, the slots, and the worker. Whatever ends it, the
    worker is stopped and the shared memory given back.

    Args:
        plan: What to measure.
        tell: Told what is about to be done.

    Raises:
        ConfigError: The plan cannot be carried out; nothing was started.
        BucketSyncError: An update failed.
    """
    shapes = decoder_shapes(plan.num_bytes, dtype=plan.dtype)
    settings = {"slot_size": plan.slot_size, "num_slots": plan.num_slots}
    Settings.from_env(**settings)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(plan.num_threads)
    try:
        tell("make the model, and start a worker")
        memcpys = _Memcpys(make_tensors(shapes, dtype=plan.dtype))
        with (
            WorkerProcess(num_threads=plan.num_threads) as worker,
            WeightSync(worker, **settings) as sync,
        ):
            return _measure(plan, worker, sync, memcpys, tell)
    finally:
        torch.set_num_threads(num_threads)


def _measure(
    plan: Plan, worker: WorkerProcess, sync: WeightSync, memcpys: _Memcpys, tell: Tell
) -> Measured:
    tensors = memcpys.tensors
    # Untimed: the first copy through a code path costs more than a later one.
    memcpys.run()
    begin_bytes, (worker_begin_bytes,) = begin_peak(), worker.call(BEGIN_PEAK)
    tell("push for the first time")
    first = sync.push(tensors, version="first")
    seconds, warm = [], []
    for number in range(plan.repeat):
        tell(f"push once more ({number + 1} of {plan.repeat})")
        seconds.append(memcpys.run())
        warm.append(sync.push(tensors, version=f"warm-{number}"))
    (status,) = sync.status()
    (worker_peak_bytes,) = worker.call(PEAK, worker_begin_bytes)
    return Measured(
        plan=plan,
        first=first,
        warm=tuple(warm),
        memcpys=tuple(seconds),
        num_slots=status["region_bytes"] // first.slot_size_bytes,
        peaks=Peaks(
            slots_bytes=status["region_bytes"],
            largest_tensor_bytes=max(tensor.nbytes for tensor in tensors.values()),
            trainer_bytes=peak_since(begin_bytes),
            worker_bytes=worker_peak_bytes,
        ),
    )


class _Memcpys:
    """The two plain copies; their buffers are touched before the first."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        buffers = [torch.full((num_bytes,), fill, dtype=torch.uint8) for fill in (1, 2)]
        # Cut beforehand, so that nothing but the copies is measured.
        self._sources = [tensor.view(-1).view(torch.uint8) for tensor in tensors.values()]
        sizes = [source.numel() for source in self._sources]
        self._first, self._second = (buffer.split(sizes) for buffer in buffers)

    def run(self) -> float:
        """Copy everything twice, and return the seconds that it took."""
        begin_s = time.perf_counter()
        for source, target in zip(self._sources, self._first, strict=True):
            target.copy_(source)
        for source, target in zip(self._first, self._second, strict=True):
            target.copy_(source)
        return time.perf_counter() - begin_s


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
    }


def _versions() -> dict[str, str]:
    return {
        "vllm_bucketsync": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
