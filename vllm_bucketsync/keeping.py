"""What a ``WeightSync`` keeps between updates, and how all of it is given back.

Memory, a socket, and the calls that have not returned: one owner, one lock. Closing is
safe at any moment, from any thread, in a forked child and in the garbage collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from .asking import FAILED_RETURN_TIMEOUT_S, RpcCall, UpdateCall
from .channel import Listener
from .clients.base import STATUS_METHOD, Engine
from .clients.words import in_words_of
from .config import Settings
from .errors import BucketSyncError, ConfigError, EngineBusyError
from .guess import Known
from .rundir import remove_stale
from .slots import Slots
from .transport.registry import reclaim
from .turns import Turns

logger = logging.getLogger(__name__)

# For an engine's call to return, once its workers have: a moment, unless one is stopped.
RETURN_TIMEOUT_S = 3.0
# For idle workers to let go of device memory whose owner closes.
CLOSE_TIMEOUT_S = 5.0


class Keeper:
    """Keeps what is worth it between updates. ``WeightSync`` is the one that there is."""

    # Until there is something to close.
    _is_closed = True

    def __init__(self, engines: Sequence[Engine], *, settings: Settings) -> None:
        """Begin with nothing but the engines; memory and socket come when first needed."""
        self._engines = engines
        self._settings = settings
        self._slots = Slots(settings)
        self._listener: Listener | None = None
        # What the workers that are still connected to it will say.
        self._known: Known = {}
        self._calls: list[UpdateCall] = []
        self._turns = Turns()
        self._pid = os.getpid()
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

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close what was forgotten: an open descriptor keeps all of the shared memory."""
        # At the interpreter's end what closing needs is gone, and the kernel does it.
        if not self._is_closed and not is_exiting():
            self._close(may_ask=False)

    def close(self) -> None:
        """Give everything back. Idempotent.

        While a push runs, on another thread or further up on this one, nothing more
        begins, and the push gives everything back at its end. The workers notice that
        the memory has lost its owner with their next update; only for device memory,
        which cannot be freed while they have it mapped, are they asked to look at once.
        """
        self._close(may_ask=True)

    def _close(self, *, may_ask: bool) -> None:
        if os.getpid() != self._pid:
            # A forked child has copies: what they stand for is its parent's.
            return
        self._is_closed = True
        with (turn := threading.Lock()):
            if self._turns.take(turn):
                try:
                    self._give_back(may_ask=may_ask)
                finally:
                    self._turns.end(turn)

    def _give_back(self, *, may_ask: bool) -> None:
        # Whatever one of them raises, the others are done.
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.callback(engine.close)
            stack.callback(self._stop_listening)
            is_mapped = self._slots.release()
            if may_ask and (reclaim() or is_mapped):
                self._let_workers_look(is_mapped=is_mapped)

    def _let_workers_look(self, *, is_mapped: bool) -> None:
        """Ask for what makes workers drop the regions of dead owners; then free those.

        Args:
            is_mapped: They may have memory of the trainer's own mapped.
        """
        calls = [
            RpcCall(functools.partial(engine.call, STATUS_METHOD)).start()
            for engine in self._engines
            if _can_be_asked(engine)
        ]
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for call in calls:
            call.wait(max(0.0, deadline_s - time.monotonic()))
        num_bytes = reclaim()
        have_looked = len(calls) == len(self._engines) and all(
            call.is_done and call.error is None for call in calls
        )
        if is_mapped and not have_looked:
            logger.warning(
                "workers may still have the tensors of a zero-copy push mapped: not every engine "
                "could be asked, or answered in %g s; keep that memory until their next update",
                CLOSE_TIMEOUT_S,
            )
        if num_bytes:
            logger.warning(
                "%d bytes of device memory stay until the engine has looked for dead owners, with "
                "its next update or status(): it could not be asked, or did not answer in %g s",
                num_bytes,
                CLOSE_TIMEOUT_S,
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this WeightSync is closed; make a new one")

    @contextlib.contextmanager
    def _exclusively(self, turn: threading.Lock) -> Iterator[None]:
        """Let nothing else of this object run meanwhile.

        Args:
            turn: A lock of the caller's own, held by its ``with``: see ``Turns``.

        Raises:
            ConfigError: It is closed, or another process's.
            EngineBusyError: Another push runs, or an earlier one still occupies the engine.
        """
        self._check_open()
        if os.getpid() != self._pid:
            raise ConfigError(
                f"this WeightSync belongs to process {self._pid}, from which this one was "
                f"forked; push there, or make a new one here"
            )
        if not self._turns.take(turn):
            raise EngineBusyError("another push of this WeightSync runs; wait for its end")
        try:
            with in_words_of(self._engines):
                self._check_idle()
                yield
        finally:
            try:
                self._end_calls()
            finally:
                self._turns.end(turn)
                if self._is_closed:
                    self.close()

    def _end_calls(self) -> None:
        """Leave no engine that is asked: two threads may not use it at a time."""
        if all(call.is_done for call in self._calls):
            return
        # A worker that it asks later finds nobody, instead of waiting for a word.
        self._stop_listening()
        deadline_s = time.monotonic() + FAILED_RETURN_TIMEOUT_S
        for call in self._calls:
            call.wait(max(0.0, deadline_s - time.monotonic()))

    def _check_idle(self) -> None:
        deadline_s = time.monotonic() + RETURN_TIMEOUT_S
        if not all(call.wait(max(0.0, deadline_s - time.monotonic())) for call in self._calls):
            raise EngineBusyError(
                "an earlier update still occupies the engine and cannot be cancelled: a worker "
                "is stopped or hangs; continue or restart it"
            )
        self._calls = []

    def _listening(self) -> Listener:
        if self._listener is not None and not self._listener.can_be_found:
            self._stop_listening()
        if self._listener is None:
            for path in remove_stale(self._settings.dir):
                logger.info("removed %s, which a dead process had left", path)
            self._listener = Listener(self._settings.dir)
        return self._listener

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener, self._known = None, {}


def _can_be_asked(engine: Engine) -> bool:
    """Whether an engine may have memory mapped, and a thread beside this one can ask it."""
    if engine.is_in_process:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    try:
        engine.check_ready()
    # Its answer would have to come from the very loop that waits for it.
    except BucketSyncError as error:
        logger.debug("%s cannot be asked here: %s", engine.name, error)
        return False
    return True
