"""Weights into the running model: one update, through vLLM's own layerwise loaders.

A declared manifest is dry-run first, so nearly every fault is found while the model
is untouched; a streamed one is checked as it comes. Then each bucket is fed to the
loaders, and what they keep of it is cloned before the bucket is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import EngineState
from ..layout import Manifest, TensorMeta
from ..sinks import Piece, SinkReport
from . import caches, compat, guards, layerwise, problems
from .completeness import Waiver
from .dryrun import DryRunResult, dry_run
from .intake import Intake
from .layerwise import LayerwiseReload
from .lora import sleeps
from .memory import WeightMemory
from .record import LoadRecord

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
        is_promise: bool = True,
    ) -> None:
        """Prepare for one update; nothing is touched.

        Args:
            worker: vLLM's worker, its model loaded.
            partial: fnmatch patterns of the engine's parameters (by the names of
                ``model.named_parameters()``) that may stay without a value. A module
                that is sent in part is an error all the same.
            memory: What is kept of one update for the next.
            is_promise: The manifest is what will come; else it is what the last stream
                was, and that it does not fit says nothing of this one.
        """
        self._worker = worker
        self._partial = tuple(partial)
        self._memory = WeightMemory() if memory is None else memory
        self._result: DryRunResult | None = None
        self._is_promise = is_promise
        self._is_declared = False
        self._reload: LayerwiseReload | None = None
        self._intake: Intake | None = None
        self._fragments = _Fragments()
        self._notes: list[str] = []

    @property
    def record(self) -> LoadRecord | None:
        """What loading the manifest comes down to; ``None`` if none was declared."""
        return None if self._result is None else self._result.record

    @property
    def has_begun(self) -> bool:
        """Whether the model has left its live state, and was not put back."""
        return self._reload is not None

    def open(self, manifest: Manifest | None) -> None:
        """Refuse what cannot work; dry-run the manifest.

        Raises:
            EngineAsleepError: The weights are asleep.
            EngineBusyError: vLLM's own weight update is open.
            UnsupportedError: This engine, or this vLLM, cannot do it.
            LoadError: The manifest does not fit. The model is as it was.
        """
        guards.refuse_unfit(self._worker)
        with compat.engine_context(self._worker.vllm_config):
            model = self._model
            if layerwise.is_open(model):
                layerwise.put_back(model)
                self._notes.append("the rest of another reload, which had failed, was put back")
            if manifest is not None:
                self._preflight(manifest)

    def deviate(self, index: int) -> None:
        """Watch each tensor from ``index`` on: the dry run says nothing of them."""
        self._is_declared = False

    def load(self, pieces: Sequence[Piece]) -> None:
        """Feed one bucket to the model's loaders.

        Raises:
            LoadError: A tensor was refused. Only ``abort`` may follow.
        """
        with compat.engine_context(self._worker.vllm_config):
            intake, reload = self._begun()
            weights = self._fragments.whole(pieces)
            if self._is_declared and self._result is not None:
                skipped = self._result.record.skipped
                intake.feed_declared([one for one in weights if one[0].name not in skipped])
            else:
                intake.feed_watched(weights)
            reload.keep_out_of({piece.data.untyped_storage().data_ptr() for piece in pieces})
            for device in {self._worker.device, *(piece.data.device for piece in pieces)}:
                compat.synchronise(device)

    def prepare(self) -> None:
        """Confirm that every parameter has its new value.

        Raises:
            LoadError: One has none, or only a part of it.
        """
        with compat.engine_context(self._worker.vllm_config):
            intake, _ = self._begun()
            found = self._fragments.unfinished()
            # A dry run has shown that a declared manifest misses nothing.
            if not self._is_declared:
                found += intake.missing()
            problems.raise_problems(found, state="the update cannot be committed")

    def commit(self) -> SinkReport:
        """Process what vLLM leaves for the end, and drop what knows the old weights."""
        with compat.engine_context(self._worker.vllm_config):
            intake, reload = self._begun()
            reload.finalise()
            self._notes.extend(caches.drop_caches(self._worker))
            if not self._partial:
                sleeps.regain_base(self._worker)
            compat.synchronise(self._worker.device)
        self._reload = None
        skipped = dict(intake.skipped)
        if self._result is not None:
            skipped.update(self._result.record.skipped)
        for name, why in skipped.items():
            logger.debug("skipped %s: %s", name, why)
        return SinkReport(
            cloned_bytes=reload.cloned_bytes + self._fragments.num_bytes,
            skipped=tuple(skipped),
            notes=tuple(self._notes),
        )

    def abort(self) -> EngineState:
        """Put every live tensor back that was not replaced yet.

        Returns:
            ``UNCHANGED`` if no module had been replaced, else ``TORN``.
        """
        if self._reload is None:
            return EngineState.UNCHANGED
        with compat.engine_context(self._worker.vllm_config):
            is_torn = self._reload.abort()
            compat.synchronise(self._worker.device)
        self._reload = None
        if not is_torn:
            return EngineState.UNCHANGED
        self._memory.forget()
        return EngineState.TORN

    def release(self) -> None:
        """Drop fragments. Idempotent."""
        self._fragments = _Fragments()
        self._intake = None

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    def _preflight(self, manifest: Manifest) -> None:
        result = self._memory.result_for(
            self._worker,
            manifest,
            partial=self._partial,
            dry_run=lambda: dry_run(self._worker, manifest, partial=self._partial),
        )
        if result.problems and not self._is_promise:
            # Watched as it comes, like a stream that nothing is known of.
            return
        self._result = result
        problems.raise_problems(result.problems, state=_NOTHING)
        self._is_declared = True

    def _begun(self) -> tuple[Intake, LayerwiseReload]:
        """Begin the reload at the first call; return what feeds it."""
        if self._intake is None or self._reload is None:
            model = self._model
            self._reload = LayerwiseReload(model, self._worker.model_config)
            waiver = Waiver(self._partial, compat.tied_names(model))
            self._intake = Intake(self._worker, model, self._reload, waiver)
            self._reload.begin()
        return self._intake, self._reload


class _Fragments:
    """Tensors larger than a slot, put together in private memory.

    Attributes:
        num_bytes: Bytes that went this way.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[TensorMeta, torch.Tensor, int]] = {}
        self.num_bytes = 0

    def whole(self, pieces: Sequence[Piece]) -> list[tuple[TensorMeta, torch.Tensor]]:
        """Return the tensors that are whole now: views of the bucket, or private."""
        found = []
        for piece in pieces:
            if piece.is_whole:
                found.append((piece.meta, piece.tensor()))
                continue
            if piece.index not in self._open:
                size, device = piece.meta.num_bytes, piece.data.device
                empty = torch.empty(size, dtype=torch.uint8, device=device)
                self._open[piece.index] = (piece.meta, empty, 0)
            meta, buffer, num_filled = self._open.pop(piece.index)
            end = piece.first_byte + piece.data.numel()
            buffer[piece.first_byte : end].copy_(piece.data)
            num_filled += piece.data.numel()
            self.num_bytes += piece.data.numel()
            if num_filled < meta.num_bytes:
                self._open[piece.index] = (meta, buffer, num_filled)
                continue
            whole = Piece(index=piece.index, meta=meta, first_byte=0, data=buffer)
            found.append((meta, whole.tensor()))
        return found

    def unfinished(self) -> list[problems.Problem]:
        """Return a problem for each tensor of which bytes are missing."""
        return [
            problems.cut_short(meta.name, num_bytes=num_filled, expected=meta.num_bytes)
            for meta, _, num_filled in self._open.values()
        ]
