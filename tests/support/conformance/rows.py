"""A row of the suite: a model, in an engine of some mode, given weights in some way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import tiny_models

SEEDS = (0, 1, 2, 3)


def _nothing(_: Any) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        model: A kind of ``tiny_configs.CONFIGS``.
        mode: What is special about the engine, or about the way of the weights.
        dtype: Of the engine.
        files: How the checkpoint is quantised on disk, and what is pushed.
        settings: Of the engine, beside the ordinary ones.
        truth_settings: Of the engine that is started from the new checkpoint, where they
            differ without a difference to what it computes.
        is_in_process: Its worker runs in this process.
        source: Makes what is pushed: of the row and a seed.
        push: Arguments of ``push``.
        around: Surrounds each push, with the engine: puts it to sleep and wakes it, say.
        has_old_outputs: Outputs before the first push are those of the first checkpoint.
        why_refused: A part of the error with which it has to be refused.
        why_not_run: Why it is not tried at all.
        may_not_start: A part of the error of a vLLM that starts no such engine in some places.
        is_long: Not for every run.
    """

    model: str
    mode: str = "plain"
    dtype: str = "bfloat16"
    files: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    truth_settings: Mapping[str, Any] | None = None
    is_in_process: bool = True
    source: Callable[[Row, int], Any] = lambda row, seed: tiny_models.trainer_model(
        row.model, seed=seed
    )
    push: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[Any], AbstractContextManager[None]] = _nothing
    has_old_outputs: bool = True
    why_refused: str = ""
    why_not_run: str = ""
    may_not_start: str = ""
    is_long: bool = False

    @property
    def name(self) -> str:
        """What a test of this row is called: for ``pytest -k``."""
        mode = "_".join(self.mode.replace(",", "").split())
        return f"{self.model}-{mode}-{self.dtype}"

    def checkpoint(self, root: Path, seed: int) -> Path:
        """Return the folder of a checkpoint, written if it is not there yet."""
        folder = root / f"{self.model}-{self.files or 'plain'}-{seed}"
        if not folder.exists():
            tiny_models.save_checkpoint(self.model, folder, seed=seed, files=self.files)
        return folder


def files_of(row: Row, seed: int) -> dict[str, torch.Tensor]:
    """Return what a checkpoint's files hold, under their names."""
    return tiny_models.checkpoint_tensors(row.model, seed=seed, files=row.files)
