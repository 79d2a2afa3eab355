"""The sink that puts every tensor in its place, as a loader of a model does."""

from __future__ import annotations

from itertools import accumulate

import torch

from vllm_bucketsync.copies import CopyBatch
from vllm_bucketsync.errors import EngineState, LoadError
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.sinks import Bucket, Piece, SinkReport


class ModelSink:
    """Copies every piece to its tensor's place in memory as large as the model."""

    def __init__(self, model: torch.Tensor) -> None:
        """Begin an update.

        Args:
            model: ``[num_bytes]``, uint8; written to.
        """
        self._model = model
        self._starts: list[int] = []

    def open(self, manifest: Manifest | None) -> None:
        """Give every tensor its place.

        Raises:
            LoadError: There is no manifest, or the model is too small for it.
        """
        if manifest is None or manifest.num_bytes > self._model.numel():
            raise LoadError(
                f"the benchmark's model of {self._model.numel()} bytes takes declared updates "
                f"of at most as many; nothing was written"
            )
        self._starts = list(accumulate((meta.num_bytes for meta in manifest.metas), initial=0))

    def deviate(self, index: int) -> None:
        """Refuse: what was declared is all that there is a place for."""
        raise LoadError(f"the update leaves its manifest at tensor {index}")

    def load(self, bucket: Bucket) -> None:
        """Copy each piece once, as a planned update of a model does."""
        prepared = bucket.prepared
        if not isinstance(prepared, CopyBatch):
            prepared = CopyBatch((self._place(piece), piece.data) for piece in bucket.pieces)
            if bucket.is_kept:
                bucket.prepared = prepared
        prepared.run()
        if self._model.is_cuda:
            torch.cuda.current_stream(self._model.device).synchronize()

    def _place(self, piece: Piece) -> torch.Tensor:
        start = self._starts[piece.index] + piece.first_byte
        return self._model[start : start + piece.data.numel()]

    def prepare(self) -> None:
        """Have nothing to miss: the receiver counts what arrived."""

    def commit(self) -> SinkReport:
        """Have nothing to commit: it is in use as it is written."""
        return SinkReport()

    def abort(self) -> EngineState:
        """Say that part of it may be there."""
        return EngineState.TORN if self._starts else EngineState.UNCHANGED

    def release(self) -> None:
        """Keep nothing but the model, which is the worker's."""
        self._starts = []
