"""What is to be sent, and how far the sender as a whole has come with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .config import Verify
from .messages import AdapterSpec


class Phase(Enum):
    """What the sender as a whole is about."""

    GREETING = "greeting"
    OPENING = "opening"
    STREAMING = "streaming"
    FINISHING = "finishing"
    COMMITTING = "committing"
    ABORTING = "aborting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What is to be sent, and how.

    Attributes:
        update_id: Random name of the update.
        version: The user's name for the weights.
        token: The secret that only the RPC carried.
        num_workers: How many have to take part, for each engine.
        kind: Which sink takes it.
        partial: Patterns of what may be left out, see ``messages.Open``.
        adapter: What the adapter is; ``None`` for weights.
        is_dry_run: Stop when every worker is ready.
        is_traced: Workers are to say when each thing happened.
        is_atomic: No model may change before every worker has everything.
        verify: What is checked.
        require_newer: Refuse a version that is not newer than what an engine holds.
    """

    update_id: str
    version: str
    token: str
    num_workers: tuple[int, ...]
    kind: str = "weights"
    partial: tuple[str, ...] = ()
    adapter: AdapterSpec | None = None
    is_dry_run: bool = False
    is_traced: bool = False
    is_atomic: bool = False
    verify: Verify = Verify.NONE
    require_newer: bool = False

    @property
    def may_be_guessed(self) -> bool:
        """Whether what workers will say may be taken as said."""
        return not (self.is_dry_run or self.require_newer)
