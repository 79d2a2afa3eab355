"""What an update of the weights stands on, whatever it brings: an engine that can be updated.

None of it depends on what comes. So it is found out at the beginning of the call, while the
trainer makes its offer ready; and it holds until the end of the call, since nothing else runs
in a worker meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..serve import Ahead
from . import compat, guards, layerwise
from .memory import WeightMemory
from .model_looks import ModelLooks
from .wrapped import Wrapped

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Footing:
    """An engine that can be updated.

    Attributes:
        looks: How its model looks.
        notes: What a user should know of it.
    """

    looks: ModelLooks
    notes: tuple[str, ...]


class Footings(Ahead):
    """Finds out what the updates of one worker stand on: once for each call."""

    def __init__(self, worker: Any, memory: WeightMemory) -> None:
        """Take note of the worker.

        Args:
            worker: vLLM's worker.
            memory: What is kept of its dry runs; another look at the model makes it void.
        """
        self._worker = worker
        self._memory = memory
        self._found: Footing | None = None

    @contextmanager
    def during_a_call(self) -> Iterator[None]:
        """See ``Ahead``: the model may change between two calls, and not in one."""
        self._found = None
        try:
            yield
        finally:
            self._found = None

    def look_ahead(self) -> None:
        """See ``Ahead``. What is wrong is raised by ``find``."""
        try:
            self._found = self._look()
        # Nobody has offered anything yet that could be refused.
        except Exception as error:  # noqa: BLE001
            logger.debug("an update has nothing to stand on: %s", error)

    def find(self) -> Footing:
        """Return what an update stands on. A reload that had failed is put back first.

        Raises:
            EngineAsleepError: The weights are asleep.
            EngineBusyError: vLLM's own weight update is open.
            UnsupportedError: This engine, or this vLLM, cannot do it.
        """
        # Once: an update changes what another one would stand on.
        found, self._found = self._found, None
        return self._look() if found is None else found

    def _look(self) -> Footing:
        worker = self._worker
        guards.refuse_unfit(worker)
        notes = list(guards.notes_of(worker))
        with compat.engine_context(worker.vllm_config):
            # vLLM's own knows the model with its wrappers.
            model = worker.model_runner.get_model()
            if layerwise.is_open(model):
                layerwise.put_back(model)
                notes.append("the rest of another reload, which had failed, was put back")
        with Wrapped(worker).taken_off():
            return Footing(self._memory.look_at(worker), tuple(notes))
