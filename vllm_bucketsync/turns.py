"""Whose turn it is, told in a way that Ctrl-C cannot get wrong.

A signal may raise between any two statements, also between taking a lock and the ``try``
that is to give it back. Only a ``with`` over a lock itself leaves no gap: both ends of it
are C. But it waits, and a second push is to be refused at once. So each caller holds a
lock of its own, which nobody else wants, and the first one that is held has the turn.
"""

from __future__ import annotations

import contextlib
import threading


class Turns:
    """One turn at a time, for any thread. Nobody waits."""

    def __init__(self) -> None:
        """Begin with nobody's."""
        self._taken: list[threading.Lock] = []

    def take(self, turn: threading.Lock) -> bool:
        """Take the turn, unless somebody has it; return whether it was taken.

        Args:
            turn: Made by the caller and held by its ``with``: as soon as that ends, however
                it does, the turn is over.
        """
        self._taken.append(turn)
        for other in tuple(self._taken):
            if other is turn:
                return True
            if other.locked():
                break
            self.end(other)
        self.end(turn)
        return False

    def end(self, turn: threading.Lock) -> None:
        """End a turn before its lock is given back. Idempotent."""
        with contextlib.suppress(ValueError):
            self._taken.remove(turn)
