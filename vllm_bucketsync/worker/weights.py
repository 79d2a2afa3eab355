"""Weights into the running model: one update.

A declared manifest is dry-run first, so nearly every fault is found while the model
is untouched, and so that its tensors can be copied by plan; a streamed one is checked as
it comes. What no plan has goes through vLLM's own layerwise loaders.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import structs

from ..boxes import Box
from ..config import PlanMode, Verify
from ..errors import EngineState
from ..layout import Manifest
from ..messages import Checked, LoadSplit
from ..sinks import Bucket, Piece, SinkReport
from ..streams import synchronise
from . import caches, compat, layerwise, problems, sleeps
from .completeness import Waiver, idle_patterns
from .dryrun import DryRunResult, dry_run
from .footing import Footings
from .loaders import Loaders
from .memory import WeightMemory
from .model_looks import ModelLooks
from .proofs import Proofs
from .record import LoadRecord
from .replay import Replay
from .verify import Check
from .wrapped import Wrapped, plain

__all__ = ["WeightMemory", "WeightSink"]

logger = logging.getLogger(__name__)

_NOTHING = "nothing was written"


class WeightSink:
    """One update of a worker's model. See ``sinks.Sink`` for the order of calls.

    The model leaves its live state with the first bucket, not before, so an update
    that ends earlier has not touched it.
    """

    def __init__(
        self,
        worker: Any,
        *,
        partial: Sequence[str] = (),
        memory: WeightMemory | None = None,
        footings: Footings | None = None,
        is_promise: bool = True,
        mode: PlanMode = PlanMode.AUTO,
        verify: Verify = Verify.NONE,
    ) -> None:
        """Prepare for one update; nothing is touched.

        Args:
            worker: vLLM's worker, its model loaded.
            partial: fnmatch patterns of the engine's parameters (by the names of
                ``model.named_parameters()``, whether LoRA is enabled or not) that may
                stay without a value. A module that is sent in part is an error all the same.
            memory: What is kept of one update for the next.
            footings: What tells whether this worker can be updated; made with ``memory``.
            is_promise: The manifest is what will come; else it is what the last stream
                was, and that it does not fit says nothing of this one.
            mode: Whether to load by plan.
            verify: Whether to compare what is loaded by plan with what came.
        """
        self._worker = worker
        self._partial = tuple(plain(pattern) for pattern in partial)
        self._memory = WeightMemory() if memory is None else memory
        self._footings = footings or Footings(worker, self._memory)
        self._mode = mode
        self._proofs = Proofs() if verify is Verify.DIGEST else None
        self._result: DryRunResult | None = None
        self._is_promise = is_promise
        self._is_declared = False
        self._replay: Replay | None = None
        self._looks: ModelLooks | None = None
        self._left_at: int | None = None
        self._waived: Waiver | None = None
        self._is_handed_over = False
        self._was_begun = False
        self._idle = ""
        self._loaders: Loaders | None = None
        self._check: Check | None = None
        self._wrapped = Wrapped(worker)
        self._notes: list[str] = []
        self._manifest = Manifest([])

    @property
    def record(self) -> LoadRecord | None:
        """What loading the manifest comes down to; ``None`` if none was declared."""
        return None if self._result is None else self._result.record

    def wanted(self, index: int) -> tuple[Box, ...] | None:
        """Return the parts of a tensor that a plan copies; ``None`` for all of its bytes.

        Nothing of a tensor that goes nowhere, and all of what vLLM's own loaders take.
        Called once ``open`` has taken a declared manifest.
        """
        if self._manifest.metas[index].name in self._skipped():
            return ()
        replay = self._replay
        if replay is None or self._check is not None or index in replay.plan.by_loaders:
            return None
        _, copies = replay.plan.of_source[index]
        return tuple(copy.source_box for copy in copies)

    @property
    def has_begun(self) -> bool:
        """Whether a byte, or a module, of the model may have left its live state."""
        return self._was_begun

    def open(self, manifest: Manifest | None) -> None:
        """Refuse what cannot work; dry-run the manifest.

        Raises:
            EngineAsleepError: The weights are asleep.
            EngineBusyError: vLLM's own weight update is open.
            UnsupportedError: This engine, or this vLLM, cannot do it.
            LoadError: The manifest does not fit. The model is as it was.
        """
        footing = self._footings.find()
        self._looks = footing.looks
        self._notes.extend(footing.notes)
        with self._wrapped.taken_off():
            self._look_for_idle_patterns(self._model)
            if manifest is not None:
                self._preflight(manifest)

    def deviate(self, index: int) -> None:
        """Watch each tensor from ``index`` on: the dry run says nothing of them."""
        self._is_declared = False
        self._left_at = index

    def load(self, bucket: Bucket) -> None:
        """Take over one bucket: by plan, and through vLLM's loaders what no plan has.

        Raises:
            LoadError: A tensor was refused. Only ``abort`` may follow.
        """
        with self._wrapped.taken_off():
            self._was_begun = True
            if self._check is not None:
                self._check.keep(bucket.pieces)
            if self._proofs is not None:
                self._proofs.begin(bucket)
            pieces = self._load_by_plan(bucket)
            if pieces:
                self._load_by_loaders(pieces)
            if self._proofs is not None:
                self._proofs.seal()
            for device in {self._worker.device, *{one.data.device for one in bucket.pieces}}:
                synchronise(device)

    def prepare(self) -> None:
        """Confirm that every parameter has its new value.

        Raises:
            LoadError: One has none, or only a part of it.
        """
        with self._wrapped.taken_off():
            found = [] if self._loaders is None else self._loaders.unfinished()
            # A dry run has shown that a declared manifest misses nothing.
            if not self._is_declared:
                self._hand_over()
                found += self._begun_loaders().missing()
            elif self._replay is not None:
                found += [problems.module_cut_short(one.path) for one in self._replay.unfinished()]
            problems.raise_problems(found, state=f"the update cannot be committed{self._idle}")
            if self._proofs is not None:
                self._proofs.check_live()

    def commit(self) -> SinkReport:
        """Process what vLLM leaves for the end, and drop what knows the old weights.

        Raises:
            PlanError: Plans are checked, and this one was wrong.
        """
        loaders, split = self._loaders, LoadSplit()
        skipped: dict[str, str] = {}
        with self._wrapped.taken_off():
            self._was_begun = True
            if loaders is not None:
                skipped.update(loaders.skipped)
                loaders.finalise()
                split = LoadSplit(num_loaded=loaders.num_modules, loaded_bytes=loaders.num_bytes)
            else:
                looks = self._looks or self._memory.look_at(self._worker)
                layerwise.finish(self._model, self._worker.model_config, finalised=looks.finalised)
            if self._check is not None:
                self._check.compare()
            if self._replay is not None:
                split = _joined(self._replay.settle(), split)
        with compat.engine_context(self._worker.vllm_config):
            self._notes.extend(caches.drop_caches(self._worker))
            left_as_is = self._left_as_is()
            if not left_as_is:
                sleeps.regain_base(self._worker)
            synchronise(self._worker.device)
        self._was_begun = False
        skipped.update(self._skipped())
        for name, why in skipped.items():
            logger.debug("skipped %s: %s", name, why)
        return SinkReport(
            split=split,
            checked=Checked() if self._proofs is None else self._proofs.report(),
            cloned_bytes=0 if loaders is None else loaders.cloned_bytes,
            skipped=tuple(skipped),
            notes=tuple(self._notes),
            spans=() if self._replay is None else tuple(self._replay.timeline.spans),
            left_as_is=left_as_is,
            casts=self._result.casts if self._is_declared and self._result else (),
        )

    def abort(self) -> EngineState:
        """Put every live tensor back that was not replaced yet.

        Returns:
            ``UNCHANGED`` if nothing was written to the live model, else ``TORN``.
        """
        if not self._was_begun:
            return EngineState.UNCHANGED
        with self._wrapped.taken_off():
            is_torn = self._loaders is not None and self._loaders.abort()
            if self._replay is not None:
                is_torn |= self._replay.has_written
                # What a module was when its processing failed.
                layerwise.put_back(self._model)
            synchronise(self._worker.device)
        self._was_begun = False
        self._memory.forget()
        return EngineState.TORN if is_torn else EngineState.UNCHANGED

    def release(self) -> None:
        """Drop what was kept for this update. Idempotent."""
        if self._replay is not None:
            self._replay.release()
        if self._check is not None:
            self._check.release()
        if self._proofs is not None:
            self._proofs.release()
        self._loaders = self._replay = self._check = None

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    def _look_for_idle_patterns(self, model: torch.nn.Module) -> None:
        """Warn of what was to be left out and is not there."""
        if idle := idle_patterns(model, self._partial):
            listed = ", ".join(map(repr, idle))
            note = f"partial names {listed}, which matches no parameter that this worker has"
            logger.warning("%s", note)
            self._notes.append(note)
            self._idle = f"; {note}"

    def _preflight(self, manifest: Manifest) -> None:
        result = self._memory.result_for(
            manifest,
            partial=self._partial,
            dry_run=lambda: dry_run(self._worker, manifest, partial=self._partial),
        )
        if result.problems and not self._is_promise:
            # Watched as it comes, like a stream that nothing is known of.
            return
        self._result = result
        if result.problems:
            model: torch.nn.Module = self._worker.model_runner.get_model()
            names = [meta.name for meta in manifest.metas]
            hint = problems.prefix_hint(model, result.problems, names)
            problems.raise_problems(result.problems, state=_NOTHING + self._idle, hint=hint)
        self._is_declared = True
        self._manifest = manifest
        if result.plan is not None and self._mode is not PlanMode.OFF:
            self._replay = Replay(result.plan, proofs=self._proofs)
            if self._mode is PlanMode.CHECK:
                self._check = Check(self._worker, self._waiver(), result.record.skipped)

    def _load_by_plan(self, bucket: Bucket) -> Sequence[Piece]:
        """Load what the plan has of a bucket; return the rest."""
        if self._replay is None or self._is_handed_over:
            skipped = self._skipped() if self._is_declared else {}
            return [piece for piece in bucket.pieces if piece.meta.name not in skipped]
        if self._left_at is None:
            return self._replay.load(bucket)
        known = tuple(piece for piece in bucket.pieces if piece.index < self._left_at)
        others = self._replay.load(Bucket(seq=bucket.seq, pieces=known))
        if len(known) == len(bucket.pieces):
            return others
        if others:
            self._load_by_loaders(others)
        self._hand_over()
        return bucket.pieces[len(known) :]

    def _load_by_loaders(self, pieces: Sequence[Piece]) -> None:
        if self._proofs is not None:
            self._proofs.note_unchecked(piece.meta.name for piece in pieces)
        is_known = self._left_at is not None and all(one.index < self._left_at for one in pieces)
        self._begun_loaders().feed(pieces, is_declared=self._is_declared or is_known)

    def _hand_over(self) -> None:
        """Let vLLM's loaders go on where the stream has left the plan."""
        replay, end = self._replay, self._left_at
        if replay is None or end is None or self._is_handed_over:
            return
        loaders = self._begun_loaders()
        self._is_handed_over = True
        unfinished, weights = replay.hand_over(end)
        finished = {one.module for one in replay.plan.modules if one not in set(unfinished)}
        loaders.begin(spared=finished.__contains__)
        came = {s: copies for s, (_, copies) in replay.plan.of_source.items() if s < end}
        metas = [replay.plan.metas[source] for source in came]
        loaders.note_planned(metas, {one.target for copies in came.values() for one in copies})
        if self._proofs is not None:
            self._proofs.give_up(unfinished, names=(meta.name for meta, _ in weights))
        loaders.feed_whole(weights, is_declared=True)

    def _begun_loaders(self) -> Loaders:
        """Begin the reload at the first call; return what feeds it."""
        if self._loaders is None:
            self._was_begun = True
            self._loaders = Loaders(self._worker, self._model, self._waiver())
            if self._replay is None:
                self._loaders.begin()
            else:
                loaded = self._replay.plan.loaded_modules
                self._loaders.begin(spared=lambda module: module not in loaded)
        return self._loaders

    def _waiver(self) -> Waiver:
        if self._waived is None:
            self._waived = Waiver(self._partial, compat.tied_names(self._model))
        return self._waived

    def _left_as_is(self) -> tuple[str, ...]:
        """Return the patterns without which something would be missing."""
        if self._is_declared and self._result is not None:
            return self._result.left_as_is
        return () if self._waived is None else tuple(sorted(self._waived.used))

    def _skipped(self) -> dict[str, str]:
        """Return what the dry run said of the tensors that came, of those that go nowhere."""
        if self._result is None:
            return {}
        skipped = self._result.record.skipped
        if self._left_at is None or self._result.plan is None:
            return skipped
        came = {meta.name for meta in self._result.plan.metas[: self._left_at]}
        return {name: why for name, why in skipped.items() if name in came}


def _joined(planned: LoadSplit, loaded: LoadSplit) -> LoadSplit:
    return structs.replace(planned, num_loaded=loaded.num_loaded, loaded_bytes=loaded.loaded_bytes)
