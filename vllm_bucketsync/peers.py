"""One worker, seen from the sender, and what several of them hold together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import EngineState, RemoteProtocolError
from .messages import AdapterSpec, Done, Hello
from .session import Session


@dataclass(slots=True)
class Peer:
    """One worker, seen from the sender.

    Attributes:
        hello: Who it said it is.
        session: Where the protocol stands with it.
        state: What it holds, once that is known.
        fallback: Why it cannot use the transport that was offered.
        done: Its report.
        is_lost: Its connection has ended.
        is_guessed: It stayed connected since the last update, and has not said hello in
            this one yet: ``hello`` is what it is expected to say.
    """

    hello: Hello
    session: Session
    state: EngineState = EngineState.UNKNOWN
    fallback: str | None = None
    done: Done | None = None
    is_lost: bool = False
    is_guessed: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        """Which worker of which engine it is."""
        return place_of(self.hello)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come from it."""
        return self.is_lost or self.session.has_ended

    def holds(self, adapter: AdapterSpec | None) -> str | None:
        """Return which version it had of what is updated, before; ``None`` for none."""
        return self.hello.version if adapter is None else self.hello.adapters.get(adapter.name)

    def blamed(self, error: RemoteProtocolError) -> RemoteProtocolError:
        """Return what is wrong with something that it said, with who it was."""
        found = RemoteProtocolError(f"{self} broke the protocol: {error}")
        found.rank = self.hello.rank
        return found

    def __str__(self) -> str:
        """Return how messages for people name it."""
        engine = f"engine {self.hello.engine} " if self.hello.engine else ""
        replica = f"replica {self.hello.dp_index} " if self.hello.dp_index else ""
        return f"{engine}{replica}rank {self.hello.rank} pid {self.hello.pid}"


def place_of(hello: Hello) -> tuple[int, int, int]:
    """Return which worker says this: engine, data-parallel replica, and rank."""
    return hello.engine, hello.dp_index, hello.rank


def held_by(peers: Iterable[Peer]) -> EngineState:
    """Return what workers hold together: parts of two sets of weights are torn."""
    states = {peer.state for peer in peers}
    if not states:
        return EngineState.UNCHANGED
    if EngineState.TORN in states or states > {EngineState.COMMITTED, EngineState.UNCHANGED}:
        return EngineState.TORN
    if EngineState.UNKNOWN in states:
        return EngineState.UNKNOWN
    return EngineState.TORN if len(states) > 1 else states.pop()
