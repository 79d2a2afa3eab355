"""Worker side of one update, up to but not into the model: it drives a sink.

A stepper: commands in, replies out. It opens regions, keeps the account of what
arrived, and never raises: whatever fails becomes an ``Error`` reply, after the sink has
undone what it can. Sockets and clocks are in ``serve.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from msgspec import structs

from .arrivals import Arrivals, check_manifest
from .config import Verify
from .corruption import check_arrived
from .errors import (
    BucketSyncError,
    EngineState,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
    UnsupportedError,
)
from .handles import MAX_TEXT_CHARS
from .layout import Manifest, TensorMeta
from .messages import (
    MAX_METAS,
    MAX_NOTES,
    Abort,
    Aborted,
    Ack,
    Batch,
    Busy,
    Command,
    Commit,
    Conclude,
    Deviate,
    Done,
    Error,
    Fallback,
    Finish,
    Hello,
    Metas,
    Open,
    Prepared,
    Ready,
    Reply,
)
from .promises import check_offer
from .retained import KeptBuckets, ReceiverMemory, view_pieces
from .session import Role, Session
from .sinks import Bucket, Sink
from .timeline import (
    ABORTING,
    COMMITTING,
    LOADING,
    OPENING,
    PREPARING,
    STAGING,
    WAITING,
    Timeline,
)
from .transport.registry import open_region
from .wire_errors import to_wire

# What a worker is about while it does what a command asks for.
_STAGES: dict[type[Command], str] = {
    Open: OPENING,
    Metas: OPENING,
    Batch: LOADING,
    Deviate: LOADING,
    Busy: LOADING,
    Finish: PREPARING,
    Conclude: PREPARING,
    Commit: COMMITTING,
    Abort: ABORTING,
}

logger = logging.getLogger(__name__)


class Receiver:
    """One update, seen from a worker.

    Attributes:
        session: Where the protocol stands.
        opened: The offer that was accepted, or ``None`` before it.
        state: What the worker holds once the session has ended.
        was_torn: Whether an earlier update had left the worker torn.
        num_tensors: Tensors that arrived, once all have.
        num_bytes: Their bytes.
        sender: What messages call the other end.
        left_as_is: Patterns of ``partial`` that were used, once it is committed.
        error: Why it failed, as the error that was replied.
    """

    def __init__(
        self,
        *,
        memory: ReceiverMemory,
        make_sink: Callable[[Open], Sink],
        rank: int = 0,
        device: str = "cpu",
    ) -> None:
        self._memory = memory
        self._make_sink = make_sink
        self._rank = rank
        self._device = torch.device(device)
        self._sink: Sink | None = None
        self._metas: list[TensorMeta] = []
        self._manifest: Manifest | None = None
        self._arrivals: Arrivals | None = None
        self._kept: KeptBuckets | None = None
        self._timeline = Timeline(WAITING)
        self._verified_bytes = 0
        self.was_torn = memory.is_torn
        self.num_tensors = 0
        self.num_bytes = 0
        self.sender = "the trainer"
        self.left_as_is: tuple[str, ...] = ()
        self.session = Session(Role.RECEIVER)
        self.opened: Open | None = None
        self.state: EngineState | None = None
        self.error: Error | None = None

    def greet(self, hello: Hello) -> Hello:
        """Return ``hello``, having taken note of it."""
        self.session.send(hello)
        return hello

    def step(self, command: Command) -> list[Reply]:
        """Do what a command asks for, and return what is to be replied.

        Every failure is a reply: ``Error`` ends the session, with the worker's state.
        """
        self._enter_stage_of(command)
        try:
            self.session.receive(command)
            replies = self._handle(command)
            for reply in replies:
                self.session.send(reply)
        # The one place where a worker turns any failure into a message.
        except Exception as error:  # noqa: BLE001
            return [self.fail(error)]
        finally:
            self._timeline.enter(WAITING)
        return replies

    def fail(self, error: BaseException) -> Error:
        """Undo what can be undone, end the session, and return the reply for it.

        A session that has ended keeps its outcome.
        """
        if not isinstance(error, BucketSyncError):
            logger.error("update failed in worker %d", self._rank, exc_info=error)
        if not self.session.has_ended:
            error = self._placed(error)
        state = self._abort()
        code, message, details = to_wire(error)
        reply = Error(code=code, message=message[:MAX_TEXT_CHARS], details=details, state=state)
        if not self.session.has_ended:
            self.session.send(reply)
            self.error = reply
        return reply

    def _placed(self, error: BaseException) -> BaseException:
        """Return an error of the other end with who that is, and where the update was."""
        where = self.describe()
        if isinstance(error, RemoteProtocolError):
            return RemoteProtocolError(f"{self.sender} broke the protocol at {where}: {error}")
        if isinstance(error, PeerLostError):
            return PeerLostError(f"{error}; this worker was at {where}", pid=error.pid)
        return error

    def describe(self) -> str:
        """Return how far the update has come here, for messages."""
        if self._arrivals is None:
            return f"state {self.session.state.name}"
        where = f"bucket {self.session.num_batches}{self._arrivals.describe()}"
        return f"{where}, state {self.session.state.name}"

    def release(self) -> None:
        """Drop what was kept for this update. Idempotent, and never raises."""
        sink, self._sink = self._sink, None
        self._arrivals = self._kept = None
        self._metas = []
        if sink is None:
            return
        try:
            sink.release()
        # The verdict stands: what a sink still holds does not change the weights.
        except Exception:
            logger.exception("worker %d could not release its sink", self._rank)

    def _enter_stage_of(self, command: Command) -> None:
        stage = _STAGES[type(command)]
        if stage == LOADING and self.opened is not None and self.opened.is_atomic:
            stage = STAGING
        if isinstance(command, Batch):
            self._timeline.enter(stage, bucket=command.seq, region=command.region)
        else:
            self._timeline.enter(stage)

    def _handle(self, command: Command) -> list[Reply]:
        replies: list[Reply] = []
        match command:
            case Open():
                replies = self._open(command)
            case Metas():
                replies = self._extend(command)
            case Batch():
                replies = [self._load(command)]
            case Deviate():
                self._deviate(command)
            case Conclude():
                self._finish(command)
                self._timeline.enter(_STAGES[Commit])
                replies = [self._commit()]
            case Busy(num_tensors=num_tensors):
                logger.debug("the sender's source has given %d tensors so far", num_tensors)
            case Finish():
                replies = [self._finish(command)]
            case Commit():
                replies = [self._commit()]
            case Abort(reason=reason):
                logger.info("update aborted by the sender: %s", reason)
                replies = [Aborted(state=self._abort())]
        return replies

    def _open(self, command: Open) -> list[Reply]:
        check_offer(command, before=self.opened)
        self.opened = command
        self._metas = []
        return self._begin() if not command.num_metas else []

    def _extend(self, command: Metas) -> list[Reply]:
        self._metas.extend(command.metas)
        return self._begin() if not self.session.num_metas_due else []

    def _begin(self) -> list[Reply]:
        """Open the shared memory, then the sink: nothing is written before both did."""
        opened = self._offer()
        # The sender has closed what it replaces, which is to go before more is mapped.
        self._memory.drop_dead_regions()
        try:
            for handle in opened.handles:
                if handle.id not in self._memory.regions:
                    region = open_region(opened.transport, handle, device=self._device)
                    self._memory.regions[handle.id] = region
        except (TransportError, UnsupportedError) as error:
            logger.warning("transport %s does not work here: %s", opened.transport, error)
            return [Fallback(transport=opened.transport, reason=str(error)[:MAX_TEXT_CHARS])]
        self._manifest = self._named_manifest(opened)
        self._arrivals = Arrivals(self._manifest, layout=opened.layout, placed=opened.placed)
        self._kept = self._memory.buckets_of(opened)
        if self._sink is None:
            self._sink = self._make_sink(opened)
            self._sink.open(self._manifest)
        return [Ready()]

    def _named_manifest(self, opened: Open) -> Manifest | None:
        if opened.manifest is None:
            return None
        if opened.num_metas:
            self._memory.remember(check_manifest(self._metas, digest=opened.manifest))
            self._metas = []
        manifest = self._memory.manifests.get(opened.manifest)
        if manifest is None:
            raise RemoteProtocolError(
                f"manifest {opened.manifest[:12]} is not known here, and no metas came with it"
            )
        return manifest

    def _load(self, batch: Batch) -> Ack:
        opened = self._offer()
        arrivals, sink = self._running()
        if batch.region >= len(opened.regions):
            raise RemoteProtocolError(f"region {batch.region} of {len(opened.regions)}")
        region = opened.regions[batch.region]
        memory = self._memory.regions[opened.handles[region.handle].id]
        memory.await_writes(batch.region)
        planned = arrivals.accept_planned(batch, capacity_bytes=region.num_bytes)
        kept = None if planned is None else self._kept
        bucket = None if kept is None else kept.get((batch.seq, batch.region))
        if bucket is None:
            entries = planned or arrivals.accept(batch, capacity_bytes=region.num_bytes)
            pieces = view_pieces(memory, region, entries)
            bucket = Bucket(seq=batch.seq, pieces=pieces, is_kept=kept is not None)
            if kept is not None:
                kept[batch.seq, batch.region] = bucket
        if opened.verify is Verify.DIGEST:
            bucket.digests = check_arrived(
                bucket,
                batch.digests,
                transport=opened.transport,
                num_buckets=arrivals.num_buckets,
            )
            self._verified_bytes += sum(piece.data.numel() for piece in bucket.pieces)
        sink.load(bucket)
        return Ack(seq=batch.seq)

    def _deviate(self, command: Deviate) -> None:
        arrivals, sink = self._running()
        if self._offer().is_declared:
            raise RemoteProtocolError(
                f"the manifest was declared, and is left at tensor {command.index}"
            )
        arrivals.deviate(command.index)
        sink.deviate(command.index)

    def _finish(self, command: Finish) -> Prepared:
        arrivals, sink = self._running()
        self._memory.remember(arrivals.finish(command))
        self.num_tensors, self.num_bytes = arrivals.num_tensors, arrivals.num_bytes
        sink.prepare()
        return Prepared()

    def _commit(self) -> Done:
        opened = self._offer()
        _, sink = self._running()
        report = sink.commit()
        self._timeline.end()
        self.state = EngineState.COMMITTED
        self.left_as_is = report.left_as_is
        # What was torn may be among what was left as it was.
        if opened.kind == "weights" and not report.left_as_is:
            self._memory.is_torn = False
        return Done(
            split=report.split,
            staged=report.staged,
            checked=structs.replace(report.checked, arrived_bytes=self._verified_bytes),
            cloned_bytes=report.cloned_bytes,
            # What the message has room for; the worker's log has it all.
            skipped=report.skipped[:MAX_METAS],
            notes=tuple(note[:MAX_TEXT_CHARS] for note in report.notes[:MAX_NOTES]),
            left_as_is=report.left_as_is,
            casts=report.casts[:MAX_NOTES],
            stages_ms=self._timeline.stages_ms(),
            spans=(*self._timeline.stages, *report.spans) if opened.is_traced else (),
        )

    def _abort(self) -> EngineState:
        """Abort the sink once; a worker that was torn before stays torn."""
        if self.state is not None:
            return self.state
        was_torn = self._memory.is_torn
        state = EngineState.UNCHANGED
        if self._sink is not None:
            # Until it says otherwise: a second Ctrl-C must not leave it unsaid.
            self.state, self._memory.is_torn = EngineState.TORN, True
            try:
                state = self._sink.abort()
            # Whatever an abort fails with, the answer is the same: part of it is there.
            except Exception:
                logger.exception("worker %d could not undo the update", self._rank)
                state = EngineState.TORN
        self._memory.is_torn = was_torn or state is EngineState.TORN
        self.state = EngineState.TORN if self._memory.is_torn else state
        return self.state

    def _offer(self) -> Open:
        if self.opened is None:
            raise RemoteProtocolError("nothing was offered yet")
        return self.opened

    def _running(self) -> tuple[Arrivals, Sink]:
        if self._arrivals is None or self._sink is None:
            raise RemoteProtocolError("nothing was opened yet")
        return self._arrivals, self._sink
