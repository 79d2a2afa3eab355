"""Moves a model between two processes, beside plain copies of the same bytes.

What is compared is written down in ``result.COMPARED``. Every warm update is measured
right after the plain copies, so that a machine's noise hits both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import ConfigError, UnsupportedError
from vllm_bucketsync.host_memory import available_bytes
from vllm_bucketsync.report import PushReport
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.trace import Trace

from .floors import DeviceCopy, HostCopies, Memcpys
from .memory import begin_peak, peak_since
from .model import decoder_shapes, make_tensors, num_elements
from .result import DEVICE_COPY, HOST_COPIES, MEMCPYS, Measured, Peaks, Plan
from .traces import nearest, traced
from .worker import BEGIN_PEAK, DISCARD, INTO, MODEL, PEAK, WorkerProcess

# The tensors, the two buffers of plain copies, and the worker's model.
NUM_COPIES = 4

Tell = Callable[[str], None]


def measure(plan: Plan, *, tell: Tell) -> Measured:
    """Run the benchmark: one first update, then warm ones.

    Whatever ends it, the worker is stopped and the shared memory given back.

    Args:
        plan: What to measure.
        tell: Told what is about to be done.

    Raises:
        ConfigError: The plan makes no sense; nothing was started.
        UnsupportedError: There is too little memory; nothing was started.
        BucketSyncError: An update failed.
    """
    settings: dict[str, Any] = {
        "slot_size": plan.slot_size,
        "num_slots": plan.num_slots,
        # Else as the environment says.
        "transport": None if plan.transport == "auto" else plan.transport,
    }
    Settings.from_env(**settings)
    if plan.repeat < 1 or plan.num_threads < 1:
        raise ConfigError(
            f"repeat is {plan.repeat} and threads is {plan.num_threads}; expected 1 or more"
        )
    shapes = decoder_shapes(plan.num_bytes, dtype=plan.dtype)
    num_bytes = num_elements(shapes) * getattr(torch, plan.dtype).itemsize
    _check_memory(num_bytes, device=plan.device)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(plan.num_threads)
    try:
        tell("make the tensors, and start a worker")
        tensors = make_tensors(shapes, dtype=plan.dtype, device=plan.device)
        size = {"model_bytes": num_bytes, "num_threads": plan.num_threads}
        with (
            WorkerProcess(**size, device=plan.device) as worker,
            WeightSync(worker, **settings) as sync,
        ):
            return _measure(plan, worker, sync, tensors, tell)
    finally:
        torch.set_num_threads(num_threads)


def _measure(
    plan: Plan,
    worker: WorkerProcess,
    sync: WeightSync,
    tensors: Mapping[str, torch.Tensor],
    tell: Tell,
) -> Measured:
    floors = _floors(tensors)
    # Untimed: nothing is to be the first of its kind in what is measured.
    for copies in floors.values():
        copies.run()
    begin_bytes, (worker_begin_bytes,) = begin_peak(), worker.call(BEGIN_PEAK)
    tell("push for the first time")
    first = sync.push(tensors, version="first")
    seconds: dict[str, list[float]] = {name: [] for name in floors}
    warm: dict[str, list[PushReport]] = {DISCARD: [], MODEL: []}
    for number in range(plan.repeat):
        tell(f"copy, and push again: {number + 1} of {plan.repeat}")
        for target, reports in warm.items():
            worker.call(INTO, target)
            for name, copies in floors.items():
                seconds[name].append(copies.run())
            reports.append(sync.push(tensors, version=f"{target}-{number}"))
    (status,) = sync.status()
    (worker_peak_bytes,) = worker.call(PEAK, worker_begin_bytes)
    traces: dict[str, Trace] = {}
    for target in warm if plan.is_traced else ():
        tell(f"trace updates ({target})")
        worker.call(INTO, target)
        traces[target] = _trace_like(warm[target], sync, tensors)
    # Peaks are of the host's memory.
    are_on_host = first.transport != "cuda_ipc"
    # The region is the slots, and at most a header that is smaller than one.
    num_slots = status["region_bytes"] // first.slot_size_bytes
    return Measured(
        plan=plan,
        first=first,
        warm={target: tuple(reports) for target, reports in warm.items()},
        floors={name: tuple(found) for name, found in seconds.items()},
        num_slots=num_slots,
        peaks=Peaks(
            slots_bytes=num_slots * first.slot_size_bytes if are_on_host else 0,
            largest_tensor_bytes=max(tensor.nbytes for tensor in tensors.values()),
            trainer_bytes=peak_since(begin_bytes),
            worker_bytes=worker_peak_bytes,
        ),
        traces=traces,
    )


def _trace_like(
    reports: Sequence[PushReport], sync: WeightSync, tensors: Mapping[str, torch.Tensor]
) -> Trace:
    def run() -> tuple[float, Trace]:
        return traced(lambda path: sync.push(tensors, version="traced", trace=path))

    return nearest(run, seconds=median(report.seconds for report in reports))


def _floors(
    tensors: Mapping[str, torch.Tensor],
) -> Mapping[str, Memcpys | DeviceCopy | HostCopies]:
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return {MEMCPYS: Memcpys(tensors.values())}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return {
        DEVICE_COPY: DeviceCopy(num_bytes, device),
        HOST_COPIES: HostCopies(num_bytes, device),
    }


def _check_memory(num_bytes: int, *, device: str) -> None:
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError(f"torch {torch.__version__} finds no GPU here; use --device cpu")
        free_bytes, _ = torch.cuda.mem_get_info()
    else:
        free_bytes = available_bytes()
    needed_bytes = NUM_COPIES * num_bytes
    if needed_bytes > free_bytes:
        raise UnsupportedError(
            f"the benchmark takes {NUM_COPIES} times {num_bytes} bytes and its slots, but "
            f"{free_bytes} bytes of memory are free; choose a smaller --size"
        )
