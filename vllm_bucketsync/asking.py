"""How engines are asked: on which thread, with what, and what an early answer means."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import msgspec

from .clients.base import Engine, PauseMode, UpdateAnswer, UpdateRequest, without_method
from .config import Settings
from .errors import BucketSyncError, EngineBusyError, EngineUnreachableError, RemoteError
from .messages import PROTOCOL_VERSION, AdapterSpec
from .update import Update
from .wire_errors import from_dict

T = TypeVar("T")
Progress = Callable[[int, int | None], None]

# For a thread to begin, where a Ctrl-C came while it was started.
START_TIMEOUT_S = 1.0
# For a call to return after a push that failed: a worker may be stopped, or on its way here.
FAILED_RETURN_TIMEOUT_S = 1.0
# By how much workers wait longer than the sender at most.
WORKER_GRACE_S = 10.0


class RpcCall(Generic[T]):
    """A call of an engine on a thread of its own, since it cannot be cancelled.

    Attributes:
        error: What it raised, once it is done.
        result: What it returned, once it is done and has not raised.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        """Prepare: whoever is to wait for its end has it before ``start``."""
        self.error: BaseException | None = None
        self.result: T | None = None
        self._call = call
        self._has_begun, self._has_ended = threading.Event(), threading.Event()
        # Until it begins, there is nothing to wait for.
        self._has_ended.set()
        self._thread = threading.Thread(target=self._run, name="bucketsync-rpc", daemon=True)

    def start(self) -> Self:
        """Begin the call. Once."""
        self._has_ended.clear()
        try:
            self._thread.start()
        # There can be no more threads; or a Ctrl-C, which may come when the thread runs already.
        except BaseException:
            if not self._has_begun.wait(START_TIMEOUT_S):
                self._has_ended.set()
            raise
        return self

    @property
    def is_done(self) -> bool:
        """Whether it has returned or raised, or was never begun."""
        return self._has_ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most ``timeout_s`` seconds; return ``is_done``."""
        return self._has_ended.wait(timeout_s)

    def _run(self) -> None:
        self._has_begun.set()
        try:
            self.result = self._call()
        # Kept for the thread that waits.
        except BaseException as error:  # noqa: BLE001
            self.error = error
        finally:
            self._has_ended.set()


UpdateCall = RpcCall[UpdateAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How engines are asked for an update.

    Attributes:
        settings: The deadlines.
        pause: What happens to the requests that run; ``None`` for a dry run.
        resume_torn: Let requests run again whatever the workers hold.
        progress: Told the bytes packed so far, and their total where it is known.
    """

    settings: Settings
    pause: PauseMode | None
    resume_torn: bool
    progress: Progress | None

    def request(
        self, update: Update, *, endpoint: str, engine: int, is_ahead: bool = False
    ) -> UpdateRequest:
        """Return the question for one engine.

        Args:
            update: What is asked for.
            endpoint: Where the workers connect to.
            engine: Its number.
            is_ahead: The source is still to be looked at, which takes as long as it takes.
        """
        settings = self.settings
        connect_s = settings.connect_timeout_s
        if is_ahead:
            connect_s = max(connect_s, settings.idle_timeout_s)
        return UpdateRequest(
            offer={
                "protocol": PROTOCOL_VERSION,
                "token": update.token,
                "update_id": update.update_id,
                "endpoints": {"*": endpoint},
                "engine": engine,
                "connect_timeout_s": _later(connect_s),
                "idle_timeout_s": _later(settings.idle_timeout_s),
            },
            version=update.version,
            pause=self.pause,
            resume_torn=self.resume_torn,
            timeout_s=settings.connect_timeout_s,
            adapter=_named(update.adapter),
        )


def ask_each(
    engines: Sequence[Engine],
    call: Callable[[Engine], list[Any]],
    *,
    what: str,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Ask engines one after the other for what their workers answer at once.

    Args:
        engines: Whom to ask.
        call: Asks one of them.
        what: What for, for messages.
        timeout_s: For each of them, in seconds; one in this process has no deadline.

    Returns:
        What their workers answered, each with its ``engine``.

    Raises:
        EngineBusyError: One is at work and did not answer in time.
        EngineUnreachableError: One did not answer at all.
    """
    found = []
    for index, engine in enumerate(engines):
        if engine.is_in_process:
            answers = call(engine)
        else:
            answers = _wait(engine, call, what=what, timeout_s=timeout_s)
        found += [answer | {"engine": index} for answer in answers]
    return found


def _wait(
    engine: Engine, call: Callable[[Engine], list[Any]], *, what: str, timeout_s: float
) -> list[Any]:
    asked = RpcCall(functools.partial(call, engine)).start()
    if not asked.wait(timeout_s):
        raise EngineBusyError(
            f"{engine.name} did not answer {what} within {timeout_s:g} s; it is busy"
        )
    if isinstance(asked.error, BucketSyncError):
        raise asked.error
    if asked.error is not None:
        raise EngineUnreachableError(
            f"{what} failed on {engine.name}: {asked.error}", url=engine.name
        ) from asked.error
    return asked.result or []


def has_failed(answer: UpdateAnswer | None) -> bool:
    """Return whether a worker says that it did not take part."""
    results = [] if answer is None else answer.results
    return any(isinstance(result, dict) and result.get("ok") is False for result in results)


def early_end(answer: UpdateAnswer | None, error: BaseException | None) -> BaseException:
    """Return why a call ended before the update did."""
    if isinstance(error, BucketSyncError):
        return without_method(error) or error
    if error is not None:
        failure: BucketSyncError = without_method(error) or EngineUnreachableError(
            f"the engine's call failed: {error}; see the engine's log", url=""
        )
        failure.__cause__ = error
        return failure
    results = [] if answer is None else answer.results
    for result in results:
        wire = result.get("error") if isinstance(result, dict) else None
        if isinstance(wire, dict) and {"code", "message", "details"} <= wire.keys():
            return from_dict(wire, rank=result.get("rank"))
    return RemoteError(
        f"the engine's call returned before the update ended: {results!r}; it has fewer workers "
        f"than were expected, or another update runs there"
    )


def _named(adapter: AdapterSpec | None) -> AdapterSpec | None:
    """Return what a server has to know of an adapter: all but its config."""
    return None if adapter is None else msgspec.structs.replace(adapter, config="")


def _later(timeout_s: float) -> float:
    """Let workers wait longer: the sender knows more of what is late, and says it better."""
    return timeout_s + min(timeout_s, WORKER_GRACE_S)
