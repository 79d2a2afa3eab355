"""What every client offers, whatever it asks: the contract, its words, its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ..errors import EngineState, UnsupportedError
from ..messages import AdapterSpec

EXTENSION = "vllm_bucketsync.WorkerExtension"
UPDATE_METHOD = "update_weights_from_bucket"
LORA_METHOD = "update_lora_from_bucket"
REMOVE_METHOD = "bucketsync_remove_lora"
STATUS_METHOD = "bucketsync_status"
RELEASE_METHOD = "bucketsync_release"


class PauseMode(StrEnum):
    """What happens to the requests that run when an update begins. vLLM's words."""

    WAIT = "wait"
    """They end first, on the old weights; new ones are held back."""
    ABORT = "abort"
    """They end at once, unfinished."""
    KEEP = "keep"
    """They are frozen, and go on with the new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """One update, as an engine is asked for it.

    Attributes:
        offer: What the workers get, see ``serve.Offer``.
        version: What the new weights are called.
        pause: What happens to the requests that run; ``None`` for a dry run, which holds
            nothing back.
        resume_torn: Let requests run again whatever the workers hold.
        timeout_s: For the requests that run, to end.
        adapter: The adapter that is updated, its config left out; ``None`` for weights.
    """

    offer: dict[str, Any]
    version: str
    pause: PauseMode | None
    resume_torn: bool = False
    timeout_s: float
    adapter: AdapterSpec | None = None

    @property
    def method(self) -> str:
        """What every worker is asked to do."""
        return UPDATE_METHOD if self.adapter is None else LORA_METHOD

    @property
    def weight_version(self) -> str | None:
        """What the engine's own weights are called then; ``None`` where they stay."""
        return self.version if self.adapter is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAnswer:
    """What an engine says of an update.

    Attributes:
        results: What its workers returned, see ``serve.update``. Of several data-parallel
            replicas only the first answers.
        drops_caches: Whether everything that was computed with the old weights is gone.
    """

    results: list[Any]
    drops_caches: bool = True


@dataclass(slots=True)
class OwnPause:
    """What whoever asks for updates remembers of an engine between them.

    Attributes:
        is_ours: It is paused because an update left it so, and not by somebody else.
    """

    is_ours: bool = False


class Engine(Protocol):
    """One engine, as a trainer asks it. Every method blocks."""

    @property
    def is_in_process(self) -> bool:
        """Whether its only worker runs on the thread that calls it."""

    @property
    def is_idle(self) -> bool:
        """Whether it runs no request, and none can come before ``update`` returns."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def num_workers(self) -> int | None:
        """Return how many workers take part in an update; ``None`` if it cannot say."""

    def check_ready(self) -> None:
        """Refuse an engine that cannot be updated now.

        Raises:
            ConfigError: It cannot be asked from this thread.
            EngineUnreachableError: It does not answer.
            UnsupportedError: It was started without the extension.
        """

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """Pause, run the update on every worker, drop caches, set the version, resume.

        No timeout beside that of the pause: the update has deadlines of its own.
        """

    def call(self, method: str) -> list[Any]:
        """Run a method on every worker and return what they return. No timeout."""

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        """Make every worker forget an adapter, and return what they return.

        Args:
            name: The adapter.
            timeout_s: For the requests that run, to end: some may use it.
        """

    def close(self) -> None:
        """Give back what the client holds; never the engine itself."""


def verdict(results: Sequence[Any]) -> EngineState:
    """Return what an engine holds, as its workers' results say."""
    states = {result.get("state") if isinstance(result, dict) else None for result in results}
    known = {state for state in EngineState if state in states}
    # Where some have committed and some have not, the engine holds both.
    if EngineState.TORN in known or known >= {EngineState.COMMITTED, EngineState.UNCHANGED}:
        return EngineState.TORN
    return known.pop() if len(known) == len(states) == 1 else EngineState.UNKNOWN


def has_committed(results: Sequence[Any]) -> bool:
    """Return whether a worker has what is new, so that caches may know what is old."""
    said = [result for result in results if isinstance(result, dict)]
    return any(result.get("state") == EngineState.COMMITTED for result in said)


def may_resume(
    state: EngineState, results: Sequence[Any], *, was_paused: bool, resume_torn: bool
) -> bool:
    """Return whether requests may run again on an engine after an update.

    Not on one that holds parts of two sets of weights: it would answer with both. And
    not on one that somebody else had paused, or put to sleep, before: only an engine
    that an earlier update left torn, and so paused, is let go on by the one that repairs it.

    Args:
        state: What the engine holds.
        results: What its workers returned.
        was_paused: Whether it was paused before the update.
        resume_torn: Whoever asks wants it to go on whatever it holds.
    """
    said = [result for result in results if isinstance(result, dict)]
    is_whole = state in {EngineState.UNCHANGED, EngineState.COMMITTED}
    # A partial update of a torn engine is committed, and repairs nothing.
    is_whole = is_whole and not any(result.get("is_torn") for result in said)
    repairs = any(result.get("was_torn") for result in said)
    return resume_torn or (is_whole and (not was_paused or repairs))


def without_extension(found: str) -> UnsupportedError:
    """Return the refusal of an engine whose workers know nothing of updates."""
    return UnsupportedError(
        f"the engine's workers cannot take an update: {found}; start it with "
        f"--worker-extension-cls {EXTENSION}, or a class derived from it"
    )


def without_method(error: BaseException) -> UnsupportedError | None:
    """Return what to say where a call failed because no worker knows the method."""
    text = str(error)
    for method in (UPDATE_METHOD, LORA_METHOD, REMOVE_METHOD):
        if method in text and "attribute" in text:
            return without_extension(f"its worker_extension_cls has no {method}")
    return None
