"""Which transport carries one update, and what is left when one does not work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import RegionError, TransportError, UnsupportedError
from .messages import Hello
from .slots import Slots
from .sources import Source
from .transport.registry import Choice, Wish, candidates

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Route:
    """The transports of one update, the best first.

    Attributes:
        wish: What is known before any worker was asked.
        slots: The memory, kept between updates; it remembers what failed.
        choices: Transports to try, in order; empty until every worker said hello.
    """

    wish: Wish
    slots: Slots
    choices: list[Choice] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        """The transport in use, and why."""
        return self.choices[0]

    def choose(self, hellos: Sequence[Hello]) -> None:
        """Choose, now that every worker said hello.

        Raises:
            UnsupportedError: The only transport that may be used cannot work.
        """
        self.choices = self.slots.without_failures(candidates(self.wish, hellos), hellos)

    def prepare(self, hellos: Sequence[Hello], *, source: Source, is_just_opened: bool) -> None:
        """Have memory for the first transport that there is memory for.

        Args:
            hellos: The workers.
            source: What is to be sent.
            is_just_opened: Nobody was waited for since the source was opened.

        Raises:
            RegionError: There is none for any.
            UnsupportedError: The last of them cannot work here.
        """
        while True:
            try:
                needed_bytes = self._place(source, hellos, is_just_opened=is_just_opened)
                self.slots.prepare(
                    self.choice.kind,
                    needed_bytes=needed_bytes,
                    hellos=hellos,
                    wish=self.wish,
                    is_at_once=source.ready is not None,
                )
            except (RegionError, UnsupportedError) as error:
                if len(self.choices) == 1:
                    raise
                self.fall_back(str(error), hellos)
            else:
                return

    def fall_back(self, reason: str, hellos: Sequence[Hello]) -> None:
        """Go on to the next transport, and keep to it for as long as the workers live.

        Raises:
            TransportError: There is no other.
        """
        if len(self.choices) == 1:
            raise TransportError(
                f"transport {self.choice.kind} does not work: {reason}; nothing was written; "
                f"there is no other transport to fall back to"
            )
        self.slots.note_failure(self.choice.name, hellos, reason)
        self._go_on(reason)
        logger.warning("falling back to %s: %s", self.choice.name, self.choice.reason)

    def _go_on(self, reason: str) -> None:
        failed = self.choices.pop(0)
        self.choices[0] = self.choice.after(failed, reason)

    def _place(
        self, source: Source, hellos: Sequence[Hello], *, is_just_opened: bool
    ) -> int | None:
        """Leave tensors where they lie, if that was chosen; return what slots have to carry."""
        declared, ready = source.declared, source.ready
        if self.choice.is_zero_copy and declared is not None and ready is not None:
            # A tensor may have been replaced while workers were waited for.
            tensors = source.found if is_just_opened else ready(0, len(declared))
            seen = None if source.seen is None else source.seen()
            needed_bytes = self.slots.place(declared, tensors, seen=seen, hellos=hellos)
            if needed_bytes is not None:
                return needed_bytes
            # Of this source; the next one may be another.
            self._go_on("no tensor is in memory that can be exported")
        self.slots.unplace()
        return None if declared is None else declared.aligned_bytes
