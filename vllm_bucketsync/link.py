"""How a worker finds the sender that lives in its own process.

An in-process engine runs the worker's method on the trainer's own thread: two blocking
ends would wait for each other for ever. So the worker pulls: it hands its replies to the
sender and gets the next commands back, without sockets.
"""

from __future__ import annotations

from typing import Protocol

from .errors import PeerLostError
from .messages import Command, Reply

SCHEME = "inproc://"


class Link(Protocol):
    """The sender's end of an in-process session."""

    def exchange(self, replies: list[Reply]) -> list[Command]:
        """Hand over what the worker says, and return what it is to do next.

        Returns:
            At least one command while the session has not ended.
        """


_LINKS: dict[str, Link] = {}


def register(token: str, link: Link) -> str:
    """Make a link known in this process and return the endpoint that finds it."""
    _LINKS[token] = link
    return SCHEME + token


def unregister(token: str) -> None:
    """Forget a link. Idempotent."""
    _LINKS.pop(token, None)


def find(endpoint: str) -> Link:
    """Return the link behind an endpoint.

    Raises:
        PeerLostError: No sender of this process offers it.
    """
    link = _LINKS.get(endpoint.removeprefix(SCHEME))
    if link is None:
        raise PeerLostError(
            "the sender of this in-process update is gone, or lives in another process; push again"
        )
    return link
