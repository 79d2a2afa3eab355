"""What a benchmark of transfers was asked for, and what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from vllm_bucketsync.report import PushReport
from vllm_bucketsync.trace import Trace

from .machine import machine, versions
from .stages import stages_of

# What warm updates are compared with, by what carries them and where the tensors are.
MEMCPYS, DEVICE_COPY, HOST_COPIES = "memcpys", "device_copy", "host_copies"

COMPARED = (
    "update: WeightSync.push; one process copies every tensor to a slot, and another one from "
    "there to a scratch buffer that is used again for every tensor and so stays in the caches "
    "(discard: DiscardSink), or to its place in memory as large as the model (model). "
    "memcpys: the same tensors to their places in a buffer as large as the model, and from "
    "there to a second one, with torch's copy_, one after the other, in the trainer's process. "
    "Every process uses the same number of torch threads, so an update has the CPU time of two "
    "processes and the memcpys that of one"
)
COMPARED_ON_GPU = (
    "update: WeightSync.push; one process copies every tensor on the GPU to a slot, and another "
    "one from there to a scratch buffer on the GPU (discard: DiscardSink), or to its place in "
    "memory as large as the model (model). device_copy: as many bytes, once, between two buffers "
    "on the GPU. host_copies: as many bytes to pinned host memory, then as many from there. All "
    "end when the GPU is done"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        num_bytes: Bytes of the model, at least.
        dtype: Of every tensor.
        device: ``cpu`` or ``cuda``: where the tensors and the worker's model are.
        transport: As in ``Settings``.
        repeat: Warm updates into each target.
        num_threads: Threads of torch at each end.
        slot_size: As in ``Settings``.
        num_slots: As in ``Settings``.
        is_traced: Whether more updates follow, of which traces are kept.
    """

    num_bytes: int
    num_threads: int
    dtype: str = "bfloat16"
    device: str = "cpu"
    transport: str = "auto"
    repeat: int = 5
    slot_size: int | None = None
    num_slots: int | None = None
    is_traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """How far the resident memory of each end rose above what it was before the updates.

    The tensors at both ends are there before, and the buffers of the memcpys. The slots
    count at both ends, since both map them; they exist once.

    Attributes:
        slots_bytes: All slots that are in the host's memory.
        largest_tensor_bytes: The largest tensor: what ``DiscardSink`` may take.
        trainer_bytes: The trainer's rise, slots included; ``None`` where the kernel does
            not let a process count its peak anew.
        worker_bytes: The worker's, likewise.
    """

    slots_bytes: int
    largest_tensor_bytes: int
    trainer_bytes: int | None
    worker_bytes: int | None

    def as_dict(self) -> dict[str, int | None]:
        """Return everything, with what each end took beyond the slots."""
        rises = {"trainer": self.trainer_bytes, "worker": self.worker_bytes}
        beyond = {
            f"{end}_beyond_slots_bytes": None if rise is None else rise - self.slots_bytes
            for end, rise in rises.items()
        }
        return asdict(self) | beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured; seconds are those of whole pushes.

    Attributes:
        plan: What was asked for.
        first: The first update of the worker: memory is made, and descriptions are sent.
        warm: Later updates, by what they went into.
        floors: Seconds of each plain copy, once before each warm update, by its name.
        num_slots: How many slots there were.
        peaks: Memory beyond the tensors.
        traces: Of an update like the median one, by what it went into.
    """

    plan: Plan
    first: PushReport
    warm: Mapping[str, tuple[PushReport, ...]]
    floors: Mapping[str, tuple[float, ...]]
    num_slots: int
    peaks: Peaks
    traces: Mapping[str, Trace]

    @property
    def floor(self) -> str:
        """The plain copy that the updates are compared with."""
        if MEMCPYS in self.floors:
            return MEMCPYS
        return HOST_COPIES if self.first.transport == "shm" else DEVICE_COPY

    def seconds(self, target: str) -> tuple[float, ...]:
        """Return the seconds of each warm update into ``target``."""
        return tuple(report.seconds for report in self.warm[target])

    def gb_per_s(self, seconds: float) -> float:
        """Return bytes of the model per second, in 10^9 bytes."""
        return self.first.num_bytes / seconds / 1e9

    def ratio_of_medians(self, target: str) -> float:
        """Return the median update's seconds divided by those of the median floor."""
        return median(self.seconds(target)) / median(self.floors[self.floor])

    def ratio_of_bests(self, target: str) -> float:
        """Return the fastest update's seconds divided by those of the fastest floor."""
        return min(self.seconds(target)) / min(self.floors[self.floor])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as data that JSON can hold."""
        return {
            "benchmark": "transfer",
            "compared": COMPARED if self.floor == MEMCPYS else COMPARED_ON_GPU,
            "compared_with": self.floor,
            "device": self.plan.device,
            "dtype": self.plan.dtype,
            "repeat": self.plan.repeat,
            "num_threads": self.plan.num_threads,
            "num_bytes": self.first.num_bytes,
            "num_tensors": self.first.num_tensors,
            "num_buckets": self.first.num_buckets,
            "num_slots": self.num_slots,
            "slot_size_bytes": self.first.slot_size_bytes,
            "transport": self.first.transport,
            "first": {
                "seconds": self.first.seconds,
                "gb_per_s": self.gb_per_s(self.first.seconds),
            },
            "warm": {target: self._warm_as_dict(target) for target in self.warm},
            **{name: self._floor_as_dict(seconds) for name, seconds in self.floors.items()},
            "peaks": self.peaks.as_dict(),
            "machine": machine(self.plan.device),
            "versions": versions(),
        }

    def _floor_as_dict(self, seconds: Sequence[float]) -> dict[str, Any]:
        return {
            "seconds": list(seconds),
            "median_s": median(seconds),
            "best_s": min(seconds),
            "median_gb_per_s": self.gb_per_s(median(seconds)),
        }

    def _warm_as_dict(self, target: str) -> dict[str, Any]:
        seconds = self.seconds(target)
        workers = [report.workers[0] for report in self.warm[target]]
        return {
            "seconds": list(seconds),
            "median_s": median(seconds),
            "best_s": min(seconds),
            "median_gb_per_s": self.gb_per_s(median(seconds)),
            "best_gb_per_s": self.gb_per_s(min(seconds)),
            "ratio_of_medians": self.ratio_of_medians(target),
            "ratio_of_bests": self.ratio_of_bests(target),
            "worker_load_s": [worker.load_s for worker in workers],
            "worker_wait_s": [worker.wait_s for worker in workers],
            "stages_ms": stages_of([report.as_dict() for report in self.warm[target]]),
        }
