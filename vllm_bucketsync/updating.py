"""Runs the updates of a ``WeightSync``, one after the other, with what is kept between them.

An update is begun before its source is looked at, so that workers make themselves ready
meanwhile (``_begin``), then run (``_give``), and reported (``_logged``).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from .arguments import check_declared
from .asking import Asking, Progress, ask_each
from .clients.base import Engine, PauseMode
from .config import Settings
from .errors import ConfigError, EngineState, EngineUnreachableError
from .keeping import Keeper
from .outcome import check_calls, explained, leaving
from .report import PushReport
from .route import Route
from .sender import Sender
from .sources import Source, read_metas
from .streams import wait_for_trainer
from .timeline import Timeline
from .trace import traced
from .transfer import ask_for_update, run_linked, run_remote
from .transport.registry import Wish
from .update import Update

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=PushReport)


class Updater(Keeper):
    """Runs one update at a time, and any question that workers answer at once."""

    def __init__(
        self, engines: Sequence[Engine], *, settings: Settings, expected_workers: int | None
    ) -> None:
        """See ``WeightSync``."""
        super().__init__(engines, settings=settings)
        self._expected_workers = expected_workers

    @property
    def _is_in_process(self) -> bool:
        return self._engines[0].is_in_process

    def _asking(
        self,
        pause: PauseMode,
        is_dry_run: bool,
        resume_torn: bool,
        progress: Progress | None,
    ) -> Asking:
        return Asking(
            settings=self._settings,
            pause=None if is_dry_run else pause,
            resume_torn=resume_torn,
            progress=progress,
        )

    def _check_ready(self) -> None:
        for engine in self._engines:
            engine.check_ready()

    def _begin(self, asking: Asking, **what: Any) -> Update:
        """Name an update, and have the engine call its workers if they are as they were left.

        They make themselves ready while the source is looked at. If that fails, they find
        nobody, and the weights are as they were.

        Args:
            asking: How the engine is asked.
            what: The rest of an ``Update``.
        """
        update = Update(
            update_id=secrets.token_hex(8),
            token=secrets.token_hex(16),
            num_workers=tuple(self._num_workers(engine) for engine in self._engines),
            **what,
        )
        is_warm = bool(self._known) and update.may_be_guessed
        if is_warm and all(getattr(engine, "is_idle", False) for engine in self._engines):
            self._call(update, asking, is_ahead=True)
        return update

    def _give(
        self,
        source: Source,
        update: Update,
        asking: Asking,
        *,
        timeline: Timeline,
        trace: Path | None,
        is_zero_copy: bool = False,
    ) -> Sender:
        """Run one update of ``source``."""
        if update.is_atomic:
            check_declared(source)
        if update.is_dry_run and source.declared is None:
            source = read_metas(source)
        wish = Wish(
            transport=self._settings.transport,
            is_in_process=self._is_in_process,
            device=source.device,
            is_zero_copy=is_zero_copy and source.ready is not None and not update.is_dry_run,
        )
        wish.check()
        route = Route(wish=wish, slots=self._slots)
        sender = Sender(
            update=update,
            source=source,
            slots=self._slots,
            route=route,
            timeline=timeline,
        )
        with contextlib.closing(source), traced(sender, trace):
            if not update.is_dry_run:
                declared = source.declared
                if not wish.is_zero_copy:
                    # What is read where it lies needs no room; the rest is not known yet.
                    self._slots.make_room(None if declared is None else declared.aligned_bytes)
                wait_for_trainer(source.devices)
            self._run(sender, asking)
        return sender

    def _outcome(self, begin_s: float) -> dict[str, Any]:
        return {
            "engines": tuple(engine.name for engine in self._engines),
            "seconds": time.monotonic() - begin_s,
        }

    def _logged(self, report: R) -> R:
        logger.info(
            "version %s: %d tensors, %d bytes in %d buckets over %s, %.3f s",
            report.version,
            report.num_tensors,
            report.num_bytes,
            report.num_buckets,
            report.transport,
            report.seconds,
        )
        if report.goes_back:
            logger.warning(
                "version %s is older than %s, which the engine held: it went back",
                report.version,
                ", ".join(sorted({str(one.previous_version) for one in report.workers})),
            )
        return report

    def _num_workers(self, engine: Engine) -> int:
        found = self._expected_workers or engine.num_workers()
        if not found:
            raise ConfigError(
                f"{engine.name} cannot say how many workers it has; pass expected_workers="
            )
        return found

    def _run(self, sender: Sender, asking: Asking) -> None:
        """Run the update, and raise what it failed with."""
        if self._is_in_process:
            answers = [run_linked(sender, engine=self._engines[0], asking=asking)]
            # References to the trainer's tensors end with the push.
            self._slots.release()
        else:
            self._run_remote(sender, asking)
            if sender.error is None:
                check_calls(self._engines, self._calls, sender)
            answers = [call.result for call in self._calls]
        if sender.error is not None:
            # The slots stay: the next push begins only when no worker can read them.
            raise explained(sender.error, sender)
        if not all(answer is not None and answer.drops_caches for answer in answers):
            raise leaving(
                EngineState.COMMITTED,
                EngineUnreachableError(
                    "the prefix cache could not be reset; the new weights are committed, but "
                    "old cache entries may still be used; reset it again",
                    url=", ".join(engine.name for engine in self._engines),
                ),
            )

    def _call(self, update: Update, asking: Asking, *, is_ahead: bool = False) -> None:
        # A new listener knows nobody, so it comes first.
        endpoint = self._listening().endpoint
        ask_for_update(
            update,
            engines=self._engines,
            endpoint=endpoint,
            asking=asking,
            calls=self._calls,
            is_ahead=is_ahead,
        )

    def _run_remote(self, sender: Sender, asking: Asking) -> None:
        """Run the update; what is kept for the next one holds, whatever interrupts this."""
        if not self._calls:
            self._call(sender.update, asking)
        # Where those who were called come to.
        listener = self._listener or self._listening()
        known, self._known = self._known, {}
        if sender.update.may_be_guessed:
            sender.known = known
        try:
            run_remote(sender, calls=self._calls, listener=listener, asking=asking)
            self._known = sender.kept()
        finally:
            if sender.has_silent_guess:
                # It would take what was sent before it said a word.
                self._stop_listening()

    def _ask(self, method: str) -> list[dict[str, Any]]:
        """Call a method that every worker answers at once."""
        found = ask_each(
            self._engines,
            lambda engine: engine.call(method),
            what=method,
            timeout_s=self._settings.connect_timeout_s,
        )
        return sorted(found, key=lambda one: (one["engine"], one["dp_index"], one["rank"]))
