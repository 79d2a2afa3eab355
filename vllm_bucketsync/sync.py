"""``WeightSync``: what a trainer holds to give an engine new weights."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from .channel import Listener
from .clients import Engine, connect
from .config import Settings
from .errors import (
    BucketSyncError,
    ConfigError,
    EngineBusyError,
    EngineState,
    EngineUnreachableError,
)
from .layout import Manifest
from .report import PushReport, WorkerReport
from .rundir import remove_stale
from .sender import Sender, Update
from .slots import Slots
from .sources import Source, open_source
from .transfer import Progress, RpcCall, run_linked, run_remote
from .transport.registry import candidates

logger = logging.getLogger(__name__)

# Between a death and the next update: for the engine's own call to notice.
CLOSE_TIMEOUT_S = 5.0


class WeightSync:
    """The trainer's end: gives one engine new weights, as often as asked.

    Keeps the shared memory and the socket between updates; ``close`` gives them back.
    One update at a time; not for several threads at once.
    """

    def __init__(
        self, engine: object, *, expected_workers: int | None = None, **settings: Any
    ) -> None:
        """Take note of the engine; nothing is asked or allocated yet.

        Args:
            engine: A ``vllm.LLM``, or the base URL of a vLLM server.
            expected_workers: How many workers take part, where the engine cannot say.
            settings: Fields of ``Settings``; the environment fills in the rest.

        Raises:
            ConfigError: The engine or a setting is wrong.
        """
        self._settings = Settings.from_env(**settings)
        self._engine: Engine = connect(engine)
        self._expected_workers = expected_workers
        self._slots = Slots(self._settings)
        self._listener: Listener | None = None
        self._call: RpcCall | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def push(
        self,
        source: object,
        *,
        version: int | str,
        partial: Sequence[str] = (),
        rename: Callable[[str], str] | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> PushReport:
        """Give the engine new weights, and return when every worker uses them.

        Blocks. The source is consumed on the calling thread, one tensor at a time, and
        its tensors are never changed.

        Args:
            source: An ``nn.Module`` (parameters and persistent buffers), a state dict,
                an iterable of (name, tensor), or the folder of a checkpoint.
            version: Your name for these weights; vLLM gets it as a string.
            partial: Patterns (as in ``fnmatch``) of the engine's parameter names that may
                be left as they are.
            rename: Maps each name, after trainers' wrappers are stripped, to the
                checkpoint's.
            dry_run: Check everything that can be checked and stop; nothing is written.
            progress: Called with the bytes packed so far, and their total or ``None``.

        Returns:
            What it came to.

        Raises:
            SourceError: The source cannot be sent.
            LoadError: The engine's model refused it.
            EngineAsleepError: The engine's weights are asleep.
            EngineBusyError: Another update runs, or an earlier one cannot be cancelled.
            TransportError: A worker died, was stopped, or memory could not be shared.
            BucketSyncError: Anything else; ``engine_state`` says what the engine holds.
        """
        begin_s = time.monotonic()
        with self._exclusively():
            self._engine.check_ready()
            opened = open_source(source, rename=rename)
            if dry_run and opened.declared is None:
                opened = _read_metas(opened)
            sender = self._sender(opened, str(version), tuple(partial), is_dry_run=dry_run)
            with contextlib.closing(opened), self._pause(is_dry_run=dry_run):
                self._run(sender, progress)
                if not dry_run:
                    self._finish(sender)
        report = _report(sender, self._slots, seconds=time.monotonic() - begin_s)
        logger.info(
            "version %s: %d tensors, %d bytes in %d buckets over %s, %.3f s",
            report.version,
            report.num_tensors,
            report.num_bytes,
            report.num_buckets,
            report.transport,
            report.seconds,
        )
        return report

    def status(self) -> list[dict[str, Any]]:
        """Return what every worker says that it holds, in order of rank.

        Raises:
            EngineBusyError: The engine is at work and did not answer within
                ``connect_timeout_s``.
            EngineUnreachableError: It did not answer at all.
        """
        return self._ask("bucketsync_status")

    def release(self) -> None:
        """Give the shared memory back on both ends; the next push takes it anew.

        Raises:
            EngineBusyError: The engine is at work and did not answer in time.
        """
        with self._exclusively():
            self._ask("bucketsync_release")
            self._slots.release()

    def close(self) -> None:
        """Give everything back on this end. Idempotent.

        The workers notice that the memory has lost its owner with their next update.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._slots.release()
        if self._listener is not None:
            self._listener.close()
        self._engine.close()

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        if self._is_closed:
            raise ConfigError("this WeightSync is closed; make a new one")
        if not self._lock.acquire(blocking=False):
            raise EngineBusyError("another push of this WeightSync runs; wait for its end")
        try:
            self._check_idle()
            yield
        finally:
            self._lock.release()

    def _check_idle(self) -> None:
        if self._call is not None and not self._call.wait(0.0):
            raise EngineBusyError(
                "an earlier update still occupies the engine and cannot be cancelled: a worker "
                "is stopped or hangs; continue or restart it"
            )
        self._call = None

    def _pause(self, *, is_dry_run: bool) -> contextlib.AbstractContextManager[None]:
        if is_dry_run:
            return contextlib.nullcontext()
        return self._engine.paused(timeout_s=self._settings.connect_timeout_s)

    def _sender(
        self, source: Source, version: str, partial: tuple[str, ...], *, is_dry_run: bool
    ) -> Sender:
        num_workers = self._expected_workers or self._engine.num_workers()
        if not num_workers:
            raise ConfigError(
                "the engine cannot say how many workers it has; pass expected_workers="
            )
        update = Update(
            update_id=secrets.token_hex(8),
            version=version,
            token=secrets.token_hex(16),
            num_workers=num_workers,
            partial=partial,
            is_dry_run=is_dry_run,
        )
        choices = candidates(self._settings.transport, is_in_process=self._engine.is_in_process)
        return Sender(update=update, source=source, slots=self._slots, choices=choices)

    def _run(self, sender: Sender, progress: Progress | None) -> None:
        """Run the update, and raise what it failed with."""
        if self._engine.is_in_process:
            run_linked(sender, engine=self._engine, settings=self._settings, progress=progress)
            # References to the trainer's tensors end with the push.
            self._slots.release()
        else:
            if self._listener is None:
                for path in remove_stale(self._settings.dir):
                    logger.info("removed %s, which a dead process had left", path)
                self._listener = Listener(self._settings.dir)
            self._call = run_remote(
                sender,
                engine=self._engine,
                listener=self._listener,
                settings=self._settings,
                progress=progress,
            )
        error = sender.error
        if error is None:
            return
        # Half-read slots cannot be told from free ones: begin the next update with new memory.
        self._slots.release()
        text = f"the engine's weights are {sender.engine_state}"
        if sender.engine_state is EngineState.TORN:
            text += ": part new, part old; a complete push mends them"
        if isinstance(error, BucketSyncError):
            error.engine_state = sender.engine_state
        error.add_note(f"vllm_bucketsync: update {sender.update.update_id}: {text}")
        raise error

    def _finish(self, sender: Sender) -> None:
        try:
            self._engine.finish(sender.update.version)
        except BucketSyncError as error:
            error.engine_state = EngineState.COMMITTED
            raise

    def _ask(self, method: str) -> list[dict[str, Any]]:
        """Call a method that every worker answers at once."""
        timeout_s = self._settings.connect_timeout_s
        if self._engine.is_in_process:
            results = self._engine.call(method)
        else:
            call = RpcCall(self._engine, method)
            if not call.wait(timeout_s):
                raise EngineBusyError(
                    f"the engine did not answer {method} within {timeout_s:g} s; it is busy"
                )
            if isinstance(call.error, BucketSyncError):
                raise call.error
            if call.error is not None:
                raise EngineUnreachableError(
                    f"{method} failed: {call.error}", url=""
                ) from call.error
            results = call.results
        return sorted(results, key=lambda result: (result["dp_index"], result["rank"]))


def _read_metas(source: Source) -> Source:
    """Read a stream to its end for what it would send; its tensors are dropped."""
    with contextlib.closing(source):
        manifest = Manifest([meta for meta, _ in source.tensors])
    return Source(declared=manifest, tensors=iter(()))


def _report(sender: Sender, slots: Slots, *, seconds: float) -> PushReport:
    packing, declared = sender.packing, sender.source.declared
    counted = declared if sender.update.is_dry_run else None
    workers = sorted(
        (peer for peer in sender.peers.values() if peer.done is not None),
        key=lambda peer: (peer.hello.dp_index, peer.hello.rank),
    )
    return PushReport(
        update_id=sender.update.update_id,
        version=sender.update.version,
        is_dry_run=sender.update.is_dry_run,
        num_tensors=len(counted) if counted else packing.num_tensors if packing else 0,
        num_bytes=counted.num_bytes if counted else packing.num_bytes if packing else 0,
        num_buckets=packing.num_batches if packing else 0,
        seconds=seconds,
        transport=sender.choice.kind,
        transport_reason=sender.choice.reason,
        slot_size_bytes=slots.slot_size_bytes,
        skipped=tuple(sorted({name for p in workers if p.done for name in p.done.skipped})),
        workers=tuple(
            WorkerReport(
                rank=peer.hello.rank,
                dp_index=peer.hello.dp_index,
                pid=peer.hello.pid,
                device=peer.hello.device,
                load_s=peer.done.load_s,
                wait_s=peer.done.wait_s,
                cloned_bytes=peer.done.cloned_bytes,
                notes=peer.done.notes,
            )
            for peer in workers
            if peer.done is not None
        ),
    )
