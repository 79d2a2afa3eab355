"""This package's own ways."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm_bucketsync.config import Settings
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

    def __init__(self, stage: Stage, name: str, *, what: str, **settings: Any) -> None:
        self.name = name
        self.what = f"WeightSync.push of the trainer's tensors, entry to return: {what}"
        self._stage = stage
        self._settings = {**stage.settings, **settings}
        self._sync: WeightSync | None = None

    def why_not(self) -> str | None:
        """Refuse what this version has no setting for, and device memory without a GPU."""
        unknown = self._settings.keys() - {field.name for field in fields(Settings)}
        if unknown:
            return f"this version has no setting {', '.join(sorted(unknown))}"
        if self._settings["transport"] == "cuda_ipc" and not self._stage.has_gpu:
            return "the tensors and the model are on the CPU"
        return None

    def prepare(self) -> None:
        """Make the ``WeightSync``; its memory comes with the first push."""
        self._sync = WeightSync(self._stage.llm, **self._settings)

    def run(self) -> Details:
        """Push."""
        if self._sync is None:
            raise RuntimeError("Push.prepare was not called")
        trainer = self._stage.trainer
        return self._sync.push(trainer.tensors, version=f"step {trainer.num_steps}").as_dict()

    def close(self) -> None:
        """Give slots and sockets back."""
        if self._sync is not None:
            self._sync.close()
        self._sync = None
