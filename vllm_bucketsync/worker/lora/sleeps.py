"""What a worker's sleeps take away that nobody gives back.

Level 1 keeps a copy of all that is on the device. Level 2 drops the weights, which are
garbage from then on, and with them the slots of adapters where vLLM allocates both alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import guards
from .shelf import find_shelf

# By any of these vLLM itself loads the weights anew.
_RELOADS = ("reload_weights", "finish_weight_update")


_KEY = "_bucketsync_sleeps"


class Sleeps:
    """Watches one worker. Begin before it sleeps, or while it does.

    Attributes:
        has_lost_base: Its weights were dropped, and no complete set came since.
    """

    def __init__(self, worker: Any) -> None:
        """Watch ``worker``: its methods are wrapped on the instance."""
        self._worker = worker
        # Only a sleep of level 2 saves buffers, until the weights wake up.
        self.has_lost_base = bool(vars(worker).get("_sleep_saved_buffers"))
        self._has_lost_slots = self.has_lost_base
        self._wrap("sleep", before=self._fall_asleep)
        self._wrap("wake_up", after=self._wake_up)
        for name in _RELOADS:
            self._wrap(name, after=self.regain_base)

    def regain_base(self) -> None:
        """Take note that the weights are whole again."""
        self.has_lost_base = False

    def _fall_asleep(self, level: int = 1, *_: Any, **__: Any) -> None:
        if level >= 2:
            self.has_lost_base = self._has_lost_slots = True

    def _wake_up(self) -> None:
        if not self._has_lost_slots or guards.weights_are_asleep(self._worker):
            return
        self._has_lost_slots = False
        shelf = find_shelf(self._worker)
        if shelf is not None:
            shelf.restore()

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


def regain_base(worker: Any) -> None:
    """Take note that a complete set of weights was loaded into ``worker``."""
    found: Sleeps | None = vars(worker).get(_KEY)
    if found is not None:
        found.regain_base()
