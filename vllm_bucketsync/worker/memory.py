"""What is worth keeping of a dry run until the next update, and for how long it holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ..layout import Manifest
from . import sleeps
from .dryrun import DryRunResult
from .model_looks import ModelLooks

# Two: an engine may be fed whole models and partial ones by turns.
MAX_RESULTS = 2

_Key = tuple[str, tuple[str, ...]]


class WeightMemory:
    """The last good dry runs of one worker, by manifest.

    One instance lives as long as the worker. A result holds only for the model that
    it was made with: the same parameter objects at the same addresses, the same quant
    methods, kernels and expert maps, in the same modules, on the same rank. Whatever of
    that changed makes it void, and so does a sleep that dropped the weights.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[_Key, DryRunResult] = OrderedDict()
        self._num_deep_sleeps = 0
        self._looks: ModelLooks | None = None

    def result_for(
        self,
        manifest: Manifest,
        *,
        partial: Sequence[str],
        dry_run: Callable[[], DryRunResult],
    ) -> DryRunResult:
        """Return the result for a manifest: the one that is kept, or that of ``dry_run``.

        It holds for the model that was last looked at. A result with problems is not kept:
        it is rare, and its cause may be repaired.
        """
        key = (manifest.digest, tuple(partial))
        kept = self._results.get(key)
        if kept is not None and kept.is_current():
            self._results.move_to_end(key)
            return kept
        result = dry_run()
        self._results.pop(key, None)
        if not result.problems:
            self._results[key] = result
            while len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
        return result

    def look_at(self, worker: Any) -> ModelLooks:
        """Return how the model looks now; what was kept for another look is dropped."""
        num_deep_sleeps = sleeps.num_deep_sleeps(worker)
        is_same = self._looks is not None and self._looks.are_those_of(worker)
        if not is_same or num_deep_sleeps != self._num_deep_sleeps:
            self.forget()
        if self._looks is None:
            self._looks = ModelLooks(worker)
        self._num_deep_sleeps = num_deep_sleeps
        return self._looks

    def forget(self) -> None:
        """Drop everything, as after an update that left the model torn."""
        self._results.clear()
        self._looks = None
