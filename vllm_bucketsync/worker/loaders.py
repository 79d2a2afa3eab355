"""vLLM's own layerwise loaders: the way of everything that no plan has.

Each bucket is fed to them, and what they keep of it is cloned before it is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..layout import TensorMeta
from ..sinks import Piece
from . import problems
from .completeness import Waiver
from .intake import Intake
from .layerwise import LayerwiseReload

Weights = list[tuple[TensorMeta, torch.Tensor]]


class Loaders:
    """One update, as far as it goes through vLLM's loaders.

    Attributes:
        num_bytes: Bytes of the tensors that were fed.
    """

    def __init__(self, worker: Any, model: torch.nn.Module, waiver: Waiver) -> None:
        self._reload = LayerwiseReload(model, worker.model_config)
        self._intake = Intake(worker, model, self._reload, waiver)
        self._fragments = _Fragments()
        self.num_bytes = 0

    @property
    def skipped(self) -> dict[str, str]:
        """Names that go nowhere, rightly, and why."""
        return self._intake.skipped

    @property
    def cloned_bytes(self) -> int:
        """Bytes copied aside because they had to outlive their bucket."""
        return self._reload.cloned_bytes + self._fragments.num_bytes

    @property
    def num_modules(self) -> int:
        """Modules that were built anew, once all is done."""
        return self._reload.num_built

    def begin(self, *, spared: Callable[[torch.nn.Module], bool] = lambda module: False) -> None:
        """Take modules out of the live model; see ``LayerwiseReload.begin``."""
        self._reload.begin(spared=spared)

    def note_planned(self, metas: Iterable[TensorMeta], targets: Iterable[str]) -> None:
        """Take note of what came by plan, so that it is not missed.

        Args:
            metas: The tensors that came.
            targets: The engine's parameters and buffers that they reached.
        """
        self._intake.note_planned(metas, targets)

    def feed(self, pieces: Sequence[Piece], *, is_declared: bool) -> None:
        """Feed what a bucket holds.

        Args:
            pieces: A part of it, or all.
            is_declared: A dry run has found these tensors good.

        Raises:
            LoadError: A tensor was refused.
        """
        weights = self._fragments.whole(pieces)
        self.feed_whole(weights, is_declared=is_declared)
        self._reload.keep_out_of({piece.data.untyped_storage().data_ptr() for piece in pieces})

    def feed_whole(self, weights: Weights, *, is_declared: bool) -> None:
        """Feed whole tensors, which stay as they are."""
        self.num_bytes += sum(meta.num_bytes for meta, _ in weights)
        if is_declared:
            self._intake.feed_declared(weights)
        else:
            self._intake.feed_watched(weights)

    def unfinished(self) -> list[problems.Problem]:
        """Return a problem for each tensor of which bytes are missing."""
        return self._fragments.unfinished()

    def missing(self) -> list[problems.Problem]:
        """Return what the model still lacks, where no dry run has seen to it."""
        return self._intake.missing()

    def finalise(self) -> None:
        """Process what waits for the end; see ``LayerwiseReload.finalise``."""
        self._reload.finalise()

    def abort(self) -> bool:
        """Put the live tensors back, and return whether the model is torn."""
        return self._reload.abort()


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
