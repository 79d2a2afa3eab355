"""Which transports work here: one process writes random bytes, and another reads them.

So for each transport and each device. Both are fresh processes, and everything together
has one deadline: a driver that hangs, a container that kills, a device that is lost cost a
finding and no more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_bucketsync.config import Settings
from vllm_bucketsync.probe import TransportProbe

from .findings import Finding, State
from .helpers import Helper, HelperError, HelperTimeoutError

# More than a page and less than anybody misses, also on a full device.
PROBE_BYTES = 4 * 1024**2
DEFAULT_TIMEOUT_S = 180.0
_CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to move bytes that is tried.

    Attributes:
        kind: The transport.
        writer: The device that the trainer's tensors would be on.
        reader: The worker's device.
    """

    kind: str
    writer: str
    reader: str

    @property
    def name(self) -> str:
        """What its finding is called."""
        way = self.writer if self.writer == self.reader else f"{self.writer} to {self.reader}"
        return f"{self.kind}, {way}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Until when everything has to be tried.

    Attributes:
        ends_at_s: As ``time.monotonic`` counts.
    """

    ends_at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return one that is so many seconds away."""
        return cls(ends_at_s=time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(self.ends_at_s - time.monotonic(), 0.0)


def check_transports(
    settings: Settings, *, probe: TransportProbe, deadline: Deadline
) -> Iterator[Finding]:
    """Try every transport on every device, and yield what came of each.

    Args:
        settings: Where shared memory is, and which transport is asked for.
        probe: What can be told of this machine without a device.
        deadline: Until when.
    """
    devices: list[str] = []
    if probe.kind == "cuda_ipc":
        finding, devices = check_devices(probe, deadline=deadline)
        yield finding
    else:
        yield Finding(name="devices", state=State.OK, found=f"the CPU alone: {probe.reason}")
        is_asked_for = settings.transport == "cuda_ipc"
        yield Finding(
            name="cuda_ipc",
            state=State.FAILED if is_asked_for else State.SKIPPED,
            found=probe.reason,
            advice="set VLLM_BUCKETSYNC_TRANSPORT to auto" if is_asked_for else "",
        )
    yield from _try_all(trials(devices), settings=settings, deadline=deadline)


def trials(devices: list[str]) -> list[Trial]:
    """Return what is to be tried: each device by itself, and the first one to each other.

    Args:
        devices: GPUs, as torch writes them.
    """
    found = [Trial(kind="shm", writer=device, reader=device) for device in (_CPU, *devices)]
    found += [Trial(kind="cuda_ipc", writer=device, reader=device) for device in devices]
    # A trainer on one GPU feeds the workers of all others (tensor parallel).
    found += [Trial(kind="cuda_ipc", writer=devices[0], reader=other) for other in devices[1:]]
    return found


def check_devices(probe: TransportProbe, *, deadline: Deadline) -> tuple[Finding, list[str]]:
    """Tell which GPUs torch finds, by their UUIDs, and return their names in torch.

    Args:
        probe: What can be told without asking one.
        deadline: Until when.
    """
    name = "devices"
    visible = probe.facts["visible_devices"]
    seen = "all are visible" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        with Helper() as helper:
            answer = helper.ask("devices", timeout_s=deadline.left_s)
    except HelperError as error:
        advice = "see whether python -c 'import torch; torch.cuda.init()' works"
        found = f"torch cannot be asked for GPUs: {error}"
        return Finding(name=name, state=State.FAILED, found=found, advice=advice), []
    devices: list[dict[str, Any]] = answer["devices"]
    if not devices:
        found = f"there are a GPU's files in /dev, but torch {answer['torch']} finds none; {seen}"
        advice = "install a build of torch for it, or look whether nvidia-smi works"
        return Finding(name=name, state=State.WARN, found=found, advice=advice), []
    listed = "; ".join(f"{one['device']} {one['name']} {one['uuid']}" for one in devices)
    found = f"{listed}; {seen}"
    return Finding(name=name, state=State.OK, found=found), [one["device"] for one in devices]


def _try_all(waiting: list[Trial], *, settings: Settings, deadline: Deadline) -> Iterator[Finding]:
    """Try one after the other, with a new pair of processes after each that broke one."""
    while waiting:
        with Helper() as writer, Helper() as reader:
            while waiting:
                trial = waiting.pop(0)
                try:
                    finding = _tried(trial, writer, reader, settings=settings, deadline=deadline)
                except HelperTimeoutError as error:
                    yield _late(trial, error)
                    break
                except HelperError as error:
                    yield _not_working(trial, str(error), settings)
                    break
                yield finding


def _tried(
    trial: Trial, writer: Helper, reader: Helper, *, settings: Settings, deadline: Deadline
) -> Finding:
    shared = {"kind": trial.kind, "num_bytes": PROBE_BYTES}
    written = writer.ask(
        "write",
        timeout_s=deadline.left_s,
        device=trial.writer,
        directory=settings.dir,
        **shared,
    )
    handle = written["handle"]
    read = reader.ask(
        "read", timeout_s=deadline.left_s, device=trial.reader, handle=handle, **shared
    )
    # The reader first: what it has mapped cannot be freed.
    ended = [side.ask("close", timeout_s=deadline.left_s) for side in (reader, writer)]
    if read["digest"] != written["digest"]:
        return _not_working(trial, "the bytes that were read are not those written", settings)
    found = f"{PROBE_BYTES:,} bytes, written by one process and read by another, are the same"
    warnings = [text for one in (written, read, *ended) for text in one["warnings"]]
    if warnings:
        advice = "; ".join(dict.fromkeys(warnings))
        return Finding(name=trial.name, state=State.WARN, found=found, advice=advice)
    return Finding(name=trial.name, state=State.OK, found=found)


def _late(trial: Trial, error: HelperTimeoutError) -> Finding:
    advice = "raise --timeout-s; if that does not help, a driver or a file system hangs"
    return Finding(name=trial.name, state=State.FAILED, found=str(error), advice=advice)


def _not_working(trial: Trial, why: str, settings: Settings) -> Finding:
    if trial.kind == "cuda_ipc" and settings.transport == "auto":
        advice = "updates go over shm, which is slower; both processes need the same /dev and the "
        advice += "same GPU: no MIG, no confidential computing, and --ipc=host for containers"
    elif trial.kind == "cuda_ipc":
        advice = "set VLLM_BUCKETSYNC_TRANSPORT to auto, so that updates go over shm"
    else:
        advice = "make room in that directory, or set VLLM_BUCKETSYNC_DIR to another"
    return Finding(name=trial.name, state=State.FAILED, found=why, advice=advice)
