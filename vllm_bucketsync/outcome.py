"""What push raises: how an update ended, and what the engines hold then."""

from __future__ import annotations

from collections.abc import Sequence

from .asking import UpdateCall, early_end, has_failed
from .clients.base import Engine
from .errors import (
    BucketSyncError,
    ChannelTimeoutError,
    EngineBusyError,
    EngineState,
    EngineUnreachableError,
)
from .sender import Sender


def check_calls(engines: Sequence[Engine], calls: Sequence[UpdateCall], sender: Sender) -> None:
    """Raise if an engine's own end of an update that went well did not."""
    if sender.update.is_dry_run:
        left, what = sender.engine_state, "was only asked, and holds what it held"
    else:
        left, what = EngineState.COMMITTED, "has the new weights"
    for engine, call in zip(engines, calls, strict=True):
        if not call.is_done:
            late = EngineBusyError(f"{engine.name} {what}, but has not returned from the call")
            raise leaving(left, late)
        if isinstance(call.error, BucketSyncError):
            raise leaving(left, call.error)
        if call.error is not None:
            failure = EngineUnreachableError(
                f"{engine.name} {what}, but the call failed: {call.error}", url=engine.name
            )
            raise leaving(left, failure) from call.error
        # The workers that were counted have committed; one too many has not.
        failed = early_end(call.result, None) if has_failed(call.result) else None
        if failed is not None:
            if isinstance(failed, BucketSyncError):
                failed.engine_state = EngineState.TORN
            raise failed


def explained(error: BaseException, sender: Sender) -> BaseException:
    """Say in an update's error what the engines hold."""
    adapter = sender.update.adapter
    what = "weights are" if adapter is None else f"adapter {adapter.name!r} is"
    text = f"the engine's {what} {sender.engine_state}"
    if sender.engine_state is EngineState.TORN and adapter is None:
        text += ": part new, part old; a complete push repairs them"
    elif sender.engine_state is EngineState.TORN:
        text += ": some workers have it and some have not; push it again"
    if isinstance(error, BucketSyncError):
        error.engine_state = sender.engine_state
    if isinstance(error, ChannelTimeoutError) and error.rank is not None and sender.packing:
        text += (
            f"; the worker gave up by itself, while the source took {sender.packing.source_s:.1f} "
            f"s for one tensor, in {sender.packing.describe()}"
        )
    error.add_note(f"vllm_bucketsync: update {sender.update.update_id}: {text}")
    return error


def leaving(state: EngineState, error: BucketSyncError) -> BucketSyncError:
    """Say in an error what an update left that went well all the same."""
    error.engine_state = state
    return error
