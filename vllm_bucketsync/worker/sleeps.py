"""What a worker's sleeps take away that nobody gives back.

Level 1 keeps a copy of all that is on the device. Level 2 keeps the addresses of the
weights and drops their contents, so nothing that is found by looking at the model tells of
it; with them go the slots of adapters, where vLLM allocates both alike. The worker's
methods are wrapped on the instance, at our first RPC or before: no plan is older than that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import guards
from .lora.shelf import find_shelf

_KEY = "_bucketsync_sleeps"


class Sleeps:
    """Watches one worker. Begin before it sleeps, or while it does.

    Attributes:
        num_deep: Sleeps since then that may have dropped the weights.
        has_lost_base: Its weights were dropped, and no complete set came since.
    """

    def __init__(self, worker: Any) -> None:
        """Watch ``worker``: those of the methods that it has are wrapped on the instance."""
        self._worker = worker
        self.num_deep = 0
        # Only a sleep of level 2 saves buffers, until the weights wake up.
        self.has_lost_base = bool(vars(worker).get("_sleep_saved_buffers"))
        self._has_lost_slots = self.has_lost_base
        self._wrap("sleep", before=self._fall_asleep)
        self._wrap("wake_up", after=self._wake_up)
        # By either of these vLLM itself loads the weights anew.
        self._wrap("reload_weights", after=self.regain_base)
        self._wrap("finish_weight_update", after=self._finish_update)

    def regain_base(self) -> None:
        """Take note that the weights are whole again."""
        self.has_lost_base = False

    def _fall_asleep(self, level: int = 1, *_: Any, **__: Any) -> None:
        shelf = find_shelf(self._worker)
        if shelf is not None:
            # A sleep is to give memory back.
            shelf.replays.forget()
        # Also one that fails half-way, and one of a level that is not known here.
        if level != 1:
            self.num_deep += 1
            self.has_lost_base = self._has_lost_slots = True

    def _wake_up(self) -> None:
        if not self._has_lost_slots or guards.weights_are_asleep(self._worker):
            return
        self._has_lost_slots = False
        shelf = find_shelf(self._worker)
        if shelf is not None:
            shelf.restore()

    def _finish_update(self) -> None:
        # A draft model has weights of its own. The flag stays until the next update begins.
        if not getattr(self._worker, "_weight_update_is_draft", False):
            self.regain_base()

    def _wrap(
        self,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        method = getattr(self._worker, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = method(*args, **kwargs)
            if after is not None:
                after()
            return result

        setattr(self._worker, name, watched)


def watch(worker: Any) -> Sleeps:
    """Return what is known of a worker's sleeps; the first time, begin to watch it."""
    found: Sleeps | None = vars(worker).get(_KEY)
    if found is None:
        found = Sleeps(worker)
        vars(worker)[_KEY] = found
    return found


def num_deep_sleeps(worker: Any) -> int:
    """Return how many sleeps since ``watch`` may have dropped the weights."""
    found: Sleeps | None = vars(worker).get(_KEY)
    return 0 if found is None else found.num_deep


def regain_base(worker: Any) -> None:
    """Take note that a complete set of weights was loaded into ``worker``."""
    found: Sleeps | None = vars(worker).get(_KEY)
    if found is not None:
        found.regain_base()
