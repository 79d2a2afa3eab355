"""``WeightSync``: what a trainer holds to give an engine new weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .adapters import check_name, spec_of
from .arguments import (
    check_declared,
    check_order,
    check_patterns,
    check_pause,
    check_rename,
    check_trace,
    check_verify,
    is_count,
)
from .asking import Asking, Progress, ask_each
from .clients.base import RELEASE_METHOD, STATUS_METHOD, Engine, PauseMode
from .clients.connect import connect
from .clients.words import in_words_of
from .config import Settings, Verify
from .errors import (
    ConfigError,
    EngineState,
    EngineUnreachableError,
    from_wire,
)
from .keeping import RETURN_TIMEOUT_S, Keeper
from .merging import open_weights
from .outcome import check_calls, explained, leaving
from .peft_models import open_adapter
from .recall import Recall
from .report import AdapterReport, PushReport, adapter_report_of, report_of
from .route import Route
from .sender import Sender
from .sources import Source, read_metas
from .streams import leave_thread, wait_for_trainer
from .timeline import EXAMINING, Timeline
from .trace import traced
from .transfer import ask_for_update, run_linked, run_remote
from .transport.registry import Wish
from .update import Update

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=PushReport)


class WeightSync(Keeper):
    """The trainer's end: gives one engine, or several, new weights, as often as asked.

    Keeps the shared memory and the socket between updates; ``close`` gives them back.
    One update at a time; not for several threads at once, nor for forked children.

    Everything that is raised on purpose is a ``BucketSyncError``. Its ``engine_state`` says
    what the engine holds: ``unchanged``, ``committed``, ``torn`` or ``unknown``, and ``None``
    where no update had begun; ``rank`` says which worker failed. After any of them the next
    push starts afresh.
    """

    def __init__(
        self,
        engine: object,
        *,
        api_key: str | None = None,
        expected_workers: int | None = None,
        **settings: Any,
    ) -> None:
        """Take note of the engine; nothing is asked or allocated yet.

        Args:
            engine: A ``vllm.LLM``, a ``vllm.AsyncLLM``, the base URL of a vLLM server
                (or ``unix:///path/of/its/socket``), or a list of them, which then are
                updated together: all commit, or none does.
            api_key: What the servers were started with; ``VLLM_API_KEY`` of the
                environment where it is left out.
            expected_workers: How many workers take part, where an engine cannot say.
            settings: By name, each of which can also be set in the environment, as
                ``VLLM_BUCKETSYNC_`` and the name in capitals:

                - ``transport``: ``"auto"``, or the only one that may be used.
                - ``slot_size``: Bytes of one slot, as a number or as ``"512MiB"``.
                - ``num_slots``: One is filled while others are loaded. 2.
                - ``dir``: Where shared memory and sockets live. ``"/dev/shm"``.
                - ``connect_timeout_s``: Until every worker has said hello. 60.
                - ``idle_timeout_s``: Without any progress. 300.
                - ``commit_timeout_s``: From the commit to the last report. 600.

                ``help(vllm_bucketsync.Settings)`` says more of each.

        Raises:
            ConfigError: The engine or a setting is wrong; the text names the setting.
        """
        if expected_workers is not None and not is_count(expected_workers):
            raise ConfigError(
                f"expected_workers is {expected_workers!r}; expected a whole number above 0"
            )
        super().__init__(connect(engine, api_key=api_key), settings=Settings.from_env(**settings))
        self._expected_workers = expected_workers
        self._recall, self._adapter_recall = Recall(), Recall()

    def push(
        self,
        source: object,
        *,
        version: int | str,
        require_newer: bool = False,
        partial: Sequence[str] = (),
        rename: Callable[[str], str] | None = None,
        merge: bool = False,
        dry_run: bool = False,
        pause: str = PauseMode.WAIT,
        resume_torn: bool = False,
        zero_copy: bool = False,
        atomic: bool = False,
        verify: str = Verify.NONE,
        progress: Progress | None = None,
        trace: str | Path | None = None,
    ) -> PushReport:
        """Give the engine new weights, and return when every worker uses them.

        Blocks. The source is consumed on the calling thread, one tensor at a time, and
        its tensors are never changed.

        Args:
            source: An ``nn.Module`` (parameters and persistent buffers), a state dict,
                an iterable of (name, tensor), or the folder of a checkpoint.
            version: Your name for these weights; vLLM gets it as a string.
            require_newer: Refuse to replace weights whose version is the same or a higher
                one. Versions have to be whole numbers then, or text of them.
            partial: Patterns (as in ``fnmatch``) of the engine's parameter names that may
                be left as they are. Which were, the report and ``status`` say.
            rename: Maps each name, after trainers' wrappers are stripped, to the
                checkpoint's.
            merge: The source is a PEFT model, and the weights to push are those that its
                active adapters give when they are merged. Its own weights stay as they are.
            dry_run: Check everything that can be checked and stop; nothing is written
                and no request is held back.
            pause: What happens to the requests that an online engine runs: ``wait``
                lets them end on the old weights, for ``connect_timeout_s`` at most;
                ``abort`` ends them; ``keep`` freezes them, to go on with the new ones.
            resume_torn: Let requests run again even on an engine that was left torn.
            zero_copy: Let workers read tensors on a GPU where they lie, which halves the
                time. Your promise that this memory stays allocated until ``release()``
                or ``close()``: call one of them before you move, free or offload it.
                What cannot be read so goes through slots in the same update.
            atomic: Keep the old weights until every worker of every engine has all of the
                new ones, aside, in memory for as much again as its part of them. Any
                failure before that leaves the old ones; one while they are applied is
                torn. Needs a source that says in advance what it holds: no generator.
            verify: ``digest`` compares digests of every bucket that arrives, and of every
                tensor that is filled by plan, with those of what was sent; ``none`` does not.
            progress: Called with the bytes packed so far, and their total or ``None``.
            trace: A file for what each end did when, as Chrome trace JSON, for Perfetto
                (https://ui.perfetto.dev). It is written when the update fails, too.

        Returns:
            What it came to.

        Raises:
            ConfigError: An argument is wrong, or this thread may not push.
            SourceError: The source cannot be sent.
            LoadError: The engine's model refused it: a name, a shape, something missing.
            UnsupportedError: The engine was started without the extension, or cannot do it.
            StagingError: A worker has no room for an atomic update.
            CorruptionError: A bucket did not arrive as it was sent; ``verify`` found it.
            OlderVersionError: ``require_newer``, and it is not. Nothing was written.
            EngineAsleepError: The engine's weights are asleep.
            EngineBusyError: Another update runs, or an earlier one cannot be cancelled.
            EngineUnreachableError: A server did not answer, or refused the key.
            TransportError: A worker died, was stopped, or memory could not be shared.
            ProtocolError: The two ends are of different versions.
            BucketSyncError: Anything else; ``engine_state`` says what the engine holds.
        """
        begin_s, timeline = time.monotonic(), Timeline(EXAMINING)
        with (turn := threading.Lock()), self._exclusively(turn):
            asking = self._asking(check_pause(pause), dry_run, resume_torn, progress)
            check_rename(rename)
            patterns, to = check_patterns(partial), check_trace(trace)
            how = check_verify(verify)
            text = check_order(version, require_newer=require_newer)
            self._check_ready()
            update = self._begin(
                asking,
                version=text,
                require_newer=require_newer,
                partial=patterns,
                is_dry_run=dry_run,
                is_traced=to is not None,
                is_atomic=atomic,
                verify=how,
            )
            opened = open_weights(source, rename=rename, merge=merge, recall=self._recall)
            sender = self._give(
                opened, update, asking, is_zero_copy=zero_copy, timeline=timeline, trace=to
            )
        return self._logged(report_of(sender, self._slots, **self._outcome(begin_s)))

    def push_lora(
        self,
        adapter: object,
        *,
        name: str,
        version: int | str,
        adapter_name: str | None = None,
        require_newer: bool = False,
        partial: Sequence[str] = (),
        rename: Callable[[str], str] | None = None,
        dry_run: bool = False,
        pause: str = PauseMode.WAIT,
        resume_torn: bool = False,
        verify: str = Verify.NONE,
        progress: Progress | None = None,
        trace: str | Path | None = None,
    ) -> AdapterReport:
        """Give the engine an adapter, or a new version of one that it has under this name.

        Blocks until every worker has it. Until then, and after any failure, the old
        version serves. The trainer's tensors are copied, and never changed.

        Args:
            adapter: A PEFT model; a pair of tensors, under the names that PEFT's files
                have, and PEFT's config; or the folder of a saved adapter.
            name: What requests call it.
            version: Your name for this version of it.
            adapter_name: Which adapter of a PEFT model; left out, the active one. Of nothing
                else: a pair or a folder is one adapter.
            require_newer: As for ``push``, for the adapter of this name.
            partial: Patterns (as in ``fnmatch``) of the adapter's module names for which
                the engine may have no place.
            rename: See ``push``.
            dry_run: See ``push``.
            pause: See ``push``.
            resume_torn: See ``push``.
            verify: ``digest`` compares digests of every bucket that arrives; see ``push``.
            progress: See ``push``.
            trace: See ``push``.

        Returns:
            What it came to. ``generate`` takes a ``LoRARequest(**report.request_kwargs)``, and
            an OpenAI request has ``report.name`` as its ``model``.

        Raises:
            SourceError: The adapter cannot be sent.
            AdapterError: The engine cannot use it: a setting, a module, a tensor, no room.
            EngineAsleepError: The engine's weights are asleep.
            BucketSyncError: As ``push``.
        """
        begin_s, timeline = time.monotonic(), Timeline(EXAMINING)
        with (turn := threading.Lock()), self._exclusively(turn):
            asking = self._asking(check_pause(pause), dry_run, resume_torn, progress)
            check_rename(rename)
            to = check_trace(trace)
            patterns = check_patterns(partial)
            text = check_order(version, require_newer=require_newer)
            called, how = check_name(name), check_verify(verify)
            self._check_ready()
            opened, config = open_adapter(
                adapter, adapter_name=adapter_name, rename=rename, recall=self._adapter_recall
            )
            update = self._begin(
                asking,
                version=text,
                require_newer=require_newer,
                partial=patterns,
                is_dry_run=dry_run,
                is_traced=to is not None,
                kind="adapter",
                verify=how,
                adapter=spec_of(called, version=text, config=config),
            )
            sender = self._give(opened, update, asking, timeline=timeline, trace=to)
        return self._logged(adapter_report_of(sender, self._slots, **self._outcome(begin_s)))

    async def apush_lora(self, adapter: object, **options: Any) -> AdapterReport:
        """Push an adapter from an async trainer; see ``apush`` and ``push_lora``.

        Raises:
            BucketSyncError: As ``push_lora``.
        """
        enter = leave_thread()

        def run() -> AdapterReport:
            enter()
            return self.push_lora(adapter, **options)

        return await asyncio.to_thread(run)

    def remove_lora(self, name: str) -> bool:
        """Make every engine forget an adapter, and free all that was kept for it.

        An online engine first lets the requests that run end, for ``connect_timeout_s`` at
        most; a server answers later ones for this name with 404.

        Args:
            name: The adapter.

        Returns:
            Whether a worker had it.

        Raises:
            ConfigError: No adapter can be called so.
            ChannelTimeoutError: The requests that run did not end. The adapter is still there.
            EngineBusyError: The engine is at work and did not answer in time.
            BucketSyncError: A worker could not forget it.
        """
        called = check_name(name)
        timeout_s = self._settings.connect_timeout_s
        with (turn := threading.Lock()), self._exclusively(turn):
            self._check_ready()
            answers = ask_each(
                self._engines,
                lambda engine: engine.remove_adapter(called, timeout_s=timeout_s),
                what=f"to forget adapter {called!r}",
                # The drain has the same deadline, and says it better.
                timeout_s=timeout_s + RETURN_TIMEOUT_S,
            )
        for answer in answers:
            wire = answer.get("error")
            if wire is not None:
                raise from_wire(
                    wire["code"], wire["message"], wire["details"], rank=answer.get("rank")
                )
        return any(answer.get("was_held") for answer in answers)

    async def apush(self, source: object, **options: Any) -> PushReport:
        """Push from an async trainer, without blocking its event loop.

        The source is consumed on a thread of its own, after what the current CUDA
        stream was given to do. A cancelled ``apush`` raises at once, but the update goes
        on to its end; until then the next one raises ``EngineBusyError``.

        Args:
            source: See ``push``.
            options: The other arguments of ``push``.

        Raises:
            BucketSyncError: As ``push``.
        """
        enter = leave_thread()

        def run() -> PushReport:
            enter()
            return self.push(source, **options)

        return await asyncio.to_thread(run)

    def status(self) -> list[dict[str, Any]]:
        """Return what every worker says that it holds, in order of engine and rank.

        Raises:
            EngineBusyError: The engine is at work and did not answer within
                ``connect_timeout_s``.
            EngineUnreachableError: It did not answer at all.
            UnsupportedError: It was started without the extension.
        """
        with in_words_of(self._engines):
            self._check_open()
            self._check_ready()
            return self._ask(STATUS_METHOD)

    def release(self) -> None:
        """Give the shared memory back on both ends; the next push takes it anew.

        Raises:
            EngineBusyError: The engine is at work and did not answer in time.
            BucketSyncError: A worker could not let go. Nothing was given back here.
        """
        with (turn := threading.Lock()), self._exclusively(turn):
            self._check_ready()
            answers = self._ask(RELEASE_METHOD)
            failed = next((one for one in answers if one.get("error")), None)
            if failed is not None:
                # What a worker may still have mapped is not given back.
                wire = failed["error"]
                raise from_wire(wire["code"], wire["message"], wire["details"], rank=failed["rank"])
            self._slots.release()
            # They have hung up.
            self._known = {}

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
        nobody, and nothing was touched.

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
        is_warm = bool(self._known) and not (update.is_dry_run or update.require_newer)
        if is_warm and all(engine.is_idle for engine in self._engines):
            self._call(update, asking)
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

    def _call(self, update: Update, asking: Asking) -> None:
        # A new listener knows nobody, so it comes first.
        endpoint = self._listening().endpoint
        ask_for_update(
            update, engines=self._engines, endpoint=endpoint, asking=asking, calls=self._calls
        )

    def _run_remote(self, sender: Sender, asking: Asking) -> None:
        """Run the update; what is kept for the next one holds, whatever interrupts this."""
        if not self._calls:
            self._call(sender.update, asking)
        # Where those who were called come to.
        listener = self._listener or self._listening()
        known, self._known = self._known, {}
        if not (sender.update.is_dry_run or sender.update.require_newer):
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
