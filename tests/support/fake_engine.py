"""An engine without vLLM: real worker processes that run the real receiver.

The parent's end is an ``Engine`` for ``WeightSync``; each worker is a spawned process
that answers calls over a pipe, as vLLM's executor does, with a sink of the test's choice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from support import forking, striking

from vllm_bucketsync import serve
from vllm_bucketsync.clients.base import UPDATE_METHOD, UpdateAnswer, UpdateRequest, verdict
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.messages import Open
from vllm_bucketsync.session import Role
from vllm_bucketsync.sinks import Bucket, DiscardSink, Sink, SinkReport
from vllm_bucketsync.staging import staged_if_asked
from vllm_bucketsync.transport.devices import uuid_of


class RecordingSink:
    """Keeps a hash of every tensor's bytes, in order of arrival."""

    last: ClassVar[dict[str, tuple[str, tuple[int, ...], str]]] = {}

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.hashes: dict[str, Any] = {}

    def open(self, manifest: Manifest | None) -> None:
        self.manifest = manifest

    def wanted(self, index: int) -> None:
        """Want all of every tensor, where it is staged."""

    def deviate(self, index: int) -> None:
        pass

    def load(self, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            digest = self.hashes.setdefault(piece.meta.name, hashlib.blake2b(digest_size=16))
            digest.update(piece.data.cpu().numpy().tobytes())
            self.seen[piece.meta.name] = piece.meta

    def prepare(self) -> None:
        pass

    def commit(self) -> SinkReport:
        type(self).last = {
            name: (meta.dtype, meta.shape, self.hashes[name].hexdigest())
            for name, meta in self.seen.items()
        }
        return SinkReport()

    def abort(self) -> EngineState:
        return EngineState.TORN if self.hashes else EngineState.UNCHANGED

    def release(self) -> None:
        self.hashes = {}


class FaultySink(RecordingSink):
    """Raises, dies or stops at one call, once in the life of its process."""

    has_struck = False

    def __init__(self, action: str, call: str) -> None:
        super().__init__()
        self._action = action
        self._call = call

    def _strike(self, call: str) -> None:
        if call != self._call or FaultySink.has_struck:
            return
        FaultySink.has_struck = True
        match self._action:
            case "raise":
                raise RuntimeError(f"this loader cannot {call}")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)

    def open(self, manifest: Manifest | None) -> None:
        self._strike("open")
        super().open(manifest)

    def load(self, bucket: Bucket) -> None:
        if self.hashes:
            self._strike("load")
        super().load(bucket)

    def prepare(self) -> None:
        self._strike("prepare")

    def commit(self) -> SinkReport:
        self._strike("commit")
        return super().commit()


class MeetingSink(RecordingSink):
    """Loads each bucket until its trainer has made a tensor of the next one.

    Files of a folder are what they tell each other by: ``meet`` is the trainer's half.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def load(self, bucket: Bucket) -> None:
        super().load(bucket)
        (self._folder / f"loading-{bucket.seq}-{os.getpid()}").touch()
        await_files(self._folder, f"made-{bucket.seq + 1}", num_files=1)


def meet(folder: Path, bucket: int, *, num_workers: int) -> None:
    """Wait until every worker loads the bucket before, and let them go on."""
    if bucket:
        await_files(folder, f"loading-{bucket - 1}-*", num_files=num_workers)
    (folder / f"made-{bucket}").touch()


def await_files(folder: Path, pattern: str, *, num_files: int) -> None:
    """Wait until there are so many files, for half a minute at most."""
    deadline_s = time.monotonic() + 30
    while len(list(folder.glob(pattern))) < num_files:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{num_files} of {pattern} in {folder} did not come")
        time.sleep(0.001)


def _maker(sink: str) -> Any:
    """Return what makes a sink: a kind of sink, or ``<action> <call>`` for a faulty one."""
    match sink.split():
        case ["recording"]:
            return RecordingSink
        case ["discarding"]:
            return DiscardSink
        case ["meeting", folder]:
            return lambda: MeetingSink(folder)
        case ["live"]:
            striking.watch(Role.RECEIVER)
            return striking.LiveSink
        case [action, call]:
            return lambda: FaultySink(action, call)
    raise ValueError(sink)


def _work(pipe: Connection, rank: int, world_size: int, sink: str, device: str) -> None:
    make = _maker(sink)
    torch.set_num_threads(1)

    def make_sink(opened: Open) -> Sink:
        return staged_if_asked(make(), opened, device=torch.device(device))

    worker = serve.Worker(
        make_sink=make_sink,
        rank=rank,
        world_size=world_size,
        device=device,
        device_uuid=uuid_of(device),
    )
    while True:
        try:
            number, method, args = pipe.recv()
        except EOFError:
            return
        pipe.send((number, _answer(worker, method, args)))


def _answer(worker: serve.Worker, method: str, args: Sequence[Any]) -> Any:
    methods: dict[str, Callable[..., Any]] = {
        "update_weights_from_bucket": lambda offer: serve.update(worker, offer),
        "bucketsync_status": lambda: serve.status(worker),
        "bucketsync_release": lambda: serve.release(worker),
        "loaded": lambda: RecordingSink.last,
        "arm": striking.arm,
        "live": striking.LiveSink.hashes,
        "held": lambda: striking.held() | _device_memory(worker.device),
        "break_ipc_collect": lambda: setattr(torch.cuda, "ipc_collect", _never),
        "resources": lambda: (
            {
                "fds": len(list(Path("/proc/self/fd").iterdir())),
                "rss_kib": _rss_kib(),
                "mapped": Path("/proc/self/maps").read_text().count(".seg"),
            }
            | _device_memory(worker.device)
        ),
    }
    return methods[method](*args)


def _never() -> None:
    raise RuntimeError("this device has no ipc_collect")


def _device_memory(device: str) -> dict[str, int]:
    is_gpu = device.startswith("cuda")
    return {"free_bytes": torch.cuda.mem_get_info(device)[0]} if is_gpu else {}


def _rss_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


class FakeEngine:
    """The parent's end. Close it, or use it as a context manager."""

    is_in_process = False
    is_idle = True
    name = "the fake engine"

    def __init__(
        self,
        sink: str = "recording",
        *,
        world_size: int = 1,
        device: str | Sequence[str] = "cpu",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.finished: list[str] = []
        self.requests: list[UpdateRequest] = []
        self.world_size = world_size
        self._sink = sink
        self._devices = [device] * world_size if isinstance(device, str) else list(device)
        self._environment = dict(environment or {})
        # As vLLM's executor: one call after the other, whoever asks.
        self._one_call = threading.Lock()
        self._num_calls = 0
        self.processes: list[Any] = [None] * world_size
        self._pipes: list[Any] = [None] * world_size
        for rank in range(world_size):
            self._spawn(rank)
        self.call("resources")

    def _spawn(self, rank: int) -> None:
        context = forking.context(is_fresh=bool(self._environment))
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work,
            args=(theirs, rank, self.world_size, self._sink, self._devices[rank]),
            daemon=True,
        )
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self._pipes[rank], self.processes[rank] = ours, process

    def respawn(self, rank: int = 0) -> None:
        """Put a new worker, which will not strike, where one has died."""
        self._end(rank)
        if self._sink != "live":
            self._sink = "recording"
        self._spawn(rank)

    def _end(self, rank: int) -> None:
        self._pipes[rank].close()
        process = self.processes[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join(5)
        process.close()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def num_workers(self) -> int:
        return self.world_size

    def check_ready(self) -> None:
        pass

    def call(self, method: str, *args: Any) -> list[Any]:
        with self._one_call:
            return self._ask(range(self.world_size), method, args)

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        """Run a method on one worker alone."""
        with self._one_call:
            return self._ask([rank], method, args)[0]

    def _ask(self, ranks: Sequence[int], method: str, args: Sequence[Any]) -> list[Any]:
        """Return what workers answer; raise as soon as one of them is dead, as vLLM does."""
        self._num_calls += 1
        for rank in ranks:
            # Of one that is dead is said below.
            with contextlib.suppress(OSError):
                self._pipes[rank].send((self._num_calls, method, args))
        deadline_s = time.monotonic() + 120
        answers: dict[int, Any] = {}
        while len(answers) < len(ranks) and time.monotonic() < deadline_s:
            for rank in set(ranks) - answers.keys():
                answers |= self._answer_of(rank)
        return [answers[rank] for rank in ranks]

    def _answer_of(self, rank: int) -> dict[int, Any]:
        pipe, process = self._pipes[rank], self.processes[rank]
        try:
            if pipe.poll(0.01):
                number, answer = pipe.recv()
                # One to an earlier call comes late, where that one failed.
                return {rank: answer} if number == self._num_calls else {}
        except (EOFError, OSError):
            pass
        else:
            if process.is_alive():
                return {}
        raise RuntimeError(f"worker {process.pid} is gone")

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        self.requests.append(request)
        results = self.call(UPDATE_METHOD, request.offer)
        if verdict(results) is EngineState.COMMITTED:
            self.finished.append(request.version)
        return UpdateAnswer(results=results)

    def close(self) -> None:
        pass

    def kill(self, rank: int = 0, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def stop(self) -> None:
        for rank in range(self.world_size):
            self._end(rank)
