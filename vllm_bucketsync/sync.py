"""``WeightSync``: what a trainer holds to give an engine new weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .adapters import check_name, spec_of
from .arguments import (
    check_order,
    check_patterns,
    check_pause,
    check_rename,
    check_trace,
    check_verify,
    is_count,
)
from .asking import Progress, ask_each
from .clients.base import RELEASE_METHOD, STATUS_METHOD, PauseMode
from .clients.connect import connect
from .clients.words import in_words_of
from .config import Settings, Verify
from .errors import ConfigError
from .keeping import RETURN_TIMEOUT_S
from .merging import open_weights
from .peft_models import open_adapter
from .recall import Recall
from .report import AdapterReport, PushReport, adapter_report_of, report_of
from .streams import leave_thread
from .timeline import EXAMINING, Timeline
from .updating import Updater
from .wire_errors import from_dict

R = TypeVar("R", bound=PushReport)


class WeightSync(Updater):
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
        super().__init__(
            connect(engine, api_key=api_key),
            settings=Settings.from_env(**settings),
            expected_workers=expected_workers,
        )
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
        return await _on_a_thread(lambda: self.push_lora(adapter, **options))

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
                raise from_dict(wire, rank=answer.get("rank"))
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
        return await _on_a_thread(lambda: self.push(source, **options))

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
                raise from_dict(failed["error"], rank=failed["rank"])
            self._slots.release()
            # They have hung up.
            self._known = {}


async def _on_a_thread(push: Callable[[], R]) -> R:
    """Run ``push`` after what this thread has given to its CUDA streams."""
    enter = leave_thread()

    def run() -> R:
        enter()
        return push()

    return await asyncio.to_thread(run)
