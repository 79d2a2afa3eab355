"""This package's own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_bucketsync.report import PushReport
from vllm_bucketsync.sync import WeightSync

from .method import Details, Stage


class Push:
    """``WeightSync.push`` with settings of its own.

    Attributes:
        name: What it is called on the command line.
        what: What is in its time.
        is_floor: ``False``.
    """

    is_floor = False

    def __init__(
        self, stage: Stage, name: str, *, what: str, zero_copy: bool = False, **settings: Any
    ) -> None:
        self.name = name
        self.what = f"WeightSync.push of the trainer's tensors, entry to return: {what}"
        self._stage = stage
        self._is_zero_copy = zero_copy
        self._settings = {**stage.settings, **settings}
        self._sync: WeightSync | None = None

    def why_not(self) -> str | None:
        """Refuse device memory without a GPU."""
        if self._settings["transport"] == "cuda_ipc" and not self._stage.has_gpu:
            return "the tensors and the model are on the CPU"
        return None

    def prepare(self) -> None:
        """Make the ``WeightSync``; its memory comes with the first push."""
        self._sync = WeightSync(self._stage.llm, **self._settings)

    def run(self) -> Details:
        """Push."""
        return self.push().as_dict()

    def push(self, trace: Path | None = None) -> PushReport:
        """Push, and write a trace where there is a file for it."""
        if self._sync is None:
            raise RuntimeError("Push.prepare was not called")
        trainer = self._stage.trainer
        return self._sync.push(
            trainer.tensors,
            version=f"step {trainer.num_steps}",
            zero_copy=self._is_zero_copy,
            trace=trace,
        )

    def close(self) -> None:
        """Give slots and sockets back."""
        if self._sync is not None:
            self._sync.close()
        self._sync = None
