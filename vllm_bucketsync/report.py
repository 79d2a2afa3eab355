"""What an update came to, as plain frozen data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from msgspec.structs import asdict as asdict_of

from .errors import LocalProtocolError
from .messages import Cast, Checked, Done
from .peers import Peer
from .sender import Sender
from .slots import Slots
from .timeline import WAITING
from .versions import goes_back

# Nothing is packed, opened or written in one.
_NOT_OF_A_DRY_RUN = (
    *("num_buckets", "gb_per_s", "slot_size_bytes", "zero_copy_bytes", "skipped"),
    *("workers", "num_workers", "left_as_is", "goes_back"),
)
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What one worker did with an update.

    Attributes:
        engine: Which of the engines, counted from 0.
        rank: Its rank within its engine.
        dp_index: Which data-parallel replica of the engine.
        pid: Its process id, as it sees it.
        device: Its device, as torch writes it.
        num_direct: Modules that were written in place.
        direct_bytes: Bytes that went this way.
        num_processed: Modules that were put together aside, then post-processed.
        processed_bytes: Bytes that went this way.
        num_loaded: Modules that vLLM's own loaders filled.
        loaded_bytes: Bytes that went this way.
        process_s: Seconds of post-processing, within ``load_s``.
        load_s: Seconds of work, from the offer to the commit.
        wait_s: Seconds spent waiting for the sender.
        stages_ms: What each stage took in all, in milliseconds: ``opening``, ``loading``,
            ``preparing``, ``committing``, and ``waiting`` for the sender.
        cloned_bytes: Bytes copied aside because they had to outlive their bucket.
        notes: Anything else that a user should read.
        staged_bytes: What this worker's part of an atomic update took until the commit.
        staged_on: Where: the device, or the kind of host memory; empty where nothing was.
        verified_bytes: Bytes that ``verify`` saw arrive as they were sent.
        num_direct_verified: Modules written in place whose live tensors were compared, after
            everything was loaded and before the commit was voted for.
        direct_verified_bytes: Bytes of those tensors.
        num_processed_verified: Modules that were compared before their post-processing.
        processed_verified_bytes: Bytes of their tensors.
        num_unverified: Tensors that vLLM's own loaders took, and nothing compared.
        unverified: Names of the first of these.
        left_as_is: Patterns of ``partial`` that let a parameter keep its old value.
        previous_version: What it had before; ``None`` for nothing that was pushed.
        casts: What the engine holds in another dtype than it was sent in, by pairs of dtypes;
            empty for a stream that was not known in advance.
    """

    engine: int
    rank: int
    dp_index: int
    pid: int
    device: str
    num_direct: int
    direct_bytes: int
    num_processed: int
    processed_bytes: int
    num_loaded: int
    loaded_bytes: int
    process_s: float
    load_s: float
    wait_s: float
    stages_ms: dict[str, float]
    cloned_bytes: int
    notes: tuple[str, ...]
    staged_bytes: int = 0
    staged_on: str = ""
    verified_bytes: int = 0
    num_direct_verified: int = 0
    direct_verified_bytes: int = 0
    num_processed_verified: int = 0
    processed_verified_bytes: int = 0
    num_unverified: int = 0
    unverified: tuple[str, ...] = ()
    left_as_is: tuple[str, ...] = ()
    previous_version: str | None = None
    casts: tuple[Cast, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one push came to.

    Attributes:
        engines: What was updated, and how it was asked.
        update_id: Random name of the update.
        version: The weights' name, as the engine has it.
        previous_version: What the engine had before; ``None`` for nothing that was pushed,
            or where workers differed: each of their reports says its own.
        is_dry_run: Everything was checked and nothing was written.
        num_tensors: Tensors sent; those that would be, in a dry run.
        num_bytes: Their bytes.
        num_buckets: Buckets that carried them; 0 for a dry run.
        seconds: From the call to its return.
        transport: What carried them.
        transport_reason: Why that one.
        slot_size_bytes: Capacity of one slot; 0 where references are handed over.
        zero_copy_bytes: Bytes that workers read where they lay.
        is_atomic: It was staged on every worker before any of them applied it.
        verify: What was compared: ``none`` or ``digest``.
        skipped: Names that the engine has no place for and was allowed to skip.
        stages_ms: What each stage of the trainer took in all, in milliseconds:
            ``examining`` the source, ``greeting`` the workers, ``opening`` the memory,
            ``streaming``, ``finishing``, ``committing``, and ``returning`` from the call.
            Within streaming: ``packing``, ``waiting for a slot``, ``making tensors``.
        workers: One report for each worker; empty for a dry run.
    """

    engines: tuple[str, ...]
    update_id: str
    version: str
    previous_version: str | None = None
    is_dry_run: bool
    num_tensors: int
    num_bytes: int
    num_buckets: int
    seconds: float
    transport: str
    transport_reason: str
    slot_size_bytes: int
    zero_copy_bytes: int
    skipped: tuple[str, ...]
    stages_ms: dict[str, float]
    workers: tuple[WorkerReport, ...]
    is_atomic: bool = False
    verify: str = "none"

    @property
    def num_workers(self) -> int:
        """Workers that took part."""
        return len(self.workers)

    @property
    def goes_back(self) -> bool:
        """Whether a worker held a newer version, where versions are whole numbers."""
        held = (self.previous_version, *(worker.previous_version for worker in self.workers))
        return goes_back(self.version, held)

    @property
    def left_as_is(self) -> tuple[str, ...]:
        """Patterns of ``partial`` that let a parameter keep its old value, on any worker."""
        return tuple(sorted({one for worker in self.workers for one in worker.left_as_is}))

    @property
    def gb_per_s(self) -> float:
        """Bytes of the tensors per second of the whole push, in 10^9 bytes; 0 for a dry run."""
        if self.is_dry_run or not self.seconds:
            return 0.0
        return self.num_bytes / self.seconds / 1e9

    def __str__(self) -> str:
        """Return what matters most, as one line."""
        amount = f"{_bytes_text(self.num_bytes)} in {self.num_tensors} tensors"
        if self.is_dry_run:
            return (
                f"{self._thing()} fits: {amount}, checked in {self.seconds:.3f} s, nothing written"
            )
        speed = f"{self.seconds:.3f} s, {self.gb_per_s:.2f} GB/s over {self.transport}"
        return f"{self._thing()}: {amount}, {speed}, into {_counted(self.num_workers, 'worker')}"

    def _thing(self) -> str:
        return f"version {self.version!r}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as data that JSON can hold; of a dry run, what it has found out."""
        found = self._as_dict()
        if self.is_dry_run:
            for name in _NOT_OF_A_DRY_RUN:
                del found[name]
        return found

    def _as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "num_workers": self.num_workers,
            "gb_per_s": self.gb_per_s,
            "goes_back": self.goes_back,
            "left_as_is": self.left_as_is,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport(PushReport):
    """What one push of an adapter came to, and how to generate with it.

    Attributes:
        name: The adapter's name. An OpenAI request to a server has it as its ``model``.
        lora_int_id: What vLLM calls it: the same for this name whatever its version.
        lora_path: What stands where vLLM has a folder. There is no such file.
    """

    name: str
    lora_int_id: int
    lora_path: str

    def _thing(self) -> str:
        return f"adapter {self.name!r} version {self.version!r}"

    @property
    def request_kwargs(self) -> dict[str, Any]:
        """What vLLM's ``LoRARequest`` is made from: ``LoRARequest(**report.request_kwargs)``."""
        return {
            "lora_name": self.name,
            "lora_int_id": self.lora_int_id,
            "lora_path": self.lora_path,
        }


def _bytes_text(num_bytes: int) -> str:
    unit, name = next(one for one in _UNITS if num_bytes >= one[0] or one is _UNITS[-1])
    return f"{num_bytes / unit:.3g} {name}" if unit > 1 else f"{num_bytes} bytes"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def adapter_report_of(
    sender: Sender, slots: Slots, *, engines: tuple[str, ...], seconds: float
) -> AdapterReport:
    """Return what an adapter's update that ended well came to; see ``report_of``."""
    report = report_of(sender, slots, engines=engines, seconds=seconds)
    adapter = sender.update.adapter
    if adapter is None:
        raise LocalProtocolError("the update was none of an adapter")
    return AdapterReport(
        **{field.name: getattr(report, field.name) for field in fields(report)},
        name=adapter.name,
        lora_int_id=adapter.lora_int_id,
        lora_path=adapter.lora_path,
    )


def report_of(
    sender: Sender, slots: Slots, *, engines: tuple[str, ...], seconds: float
) -> PushReport:
    """Return what an update that ended well came to.

    Args:
        sender: The update.
        slots: What it went through.
        engines: What they are called.
        seconds: From the call to its return.
    """
    packing, declared = sender.packing, sender.source.declared
    counted = declared if sender.update.is_dry_run else None
    workers = sorted(
        (peer for peer in sender.peers.values() if peer.done is not None),
        key=lambda peer: peer.place,
    )
    held = {peer.holds(sender.update.adapter) for peer in sender.peers.values()}
    return PushReport(
        engines=engines,
        update_id=sender.update.update_id,
        version=sender.update.version,
        previous_version=held.pop() if len(held) == 1 else None,
        is_dry_run=sender.update.is_dry_run,
        num_tensors=len(counted) if counted else packing.num_tensors if packing else 0,
        num_bytes=counted.num_bytes if counted else packing.num_bytes if packing else 0,
        num_buckets=packing.num_batches if packing else 0,
        seconds=seconds,
        transport=sender.route.choice.kind,
        transport_reason=sender.route.choice.reason,
        slot_size_bytes=slots.slot_size_bytes,
        zero_copy_bytes=0 if sender.update.is_dry_run else slots.placed_bytes,
        is_atomic=sender.update.is_atomic,
        verify=str(sender.update.verify),
        skipped=tuple(sorted({name for p in workers if p.done for name in p.done.skipped})),
        stages_ms=sender.timeline.stages_ms(),
        workers=tuple(
            _worker_report(peer, peer.done, previous_version=peer.holds(sender.update.adapter))
            for peer in workers
            if peer.done is not None
        ),
    )


def _worker_report(peer: Peer, done: Done, *, previous_version: str | None) -> WorkerReport:
    return WorkerReport(
        engine=peer.hello.engine,
        rank=peer.hello.rank,
        dp_index=peer.hello.dp_index,
        pid=peer.hello.pid,
        device=peer.hello.device,
        **asdict_of(done.split),
        load_s=_work_s(done),
        wait_s=done.stages_ms.get(WAITING, 0.0) / 1e3,
        stages_ms=done.stages_ms,
        cloned_bytes=done.cloned_bytes,
        notes=done.notes,
        staged_bytes=done.staged.num_bytes,
        staged_on=done.staged.place,
        **_verified(done.checked),
        left_as_is=done.left_as_is,
        casts=done.casts,
        previous_version=previous_version,
    )


def _work_s(done: Done) -> float:
    return sum(ms for stage, ms in done.stages_ms.items() if stage != WAITING) / 1e3


def _verified(checked: Checked) -> dict[str, Any]:
    """Return what a worker verified, under a report's names."""
    return {
        "verified_bytes": checked.arrived_bytes,
        "num_direct_verified": checked.num_direct,
        "direct_verified_bytes": checked.direct_bytes,
        "num_processed_verified": checked.num_processed,
        "processed_verified_bytes": checked.processed_bytes,
        "num_unverified": checked.num_unchecked,
        "unverified": checked.unchecked,
    }
