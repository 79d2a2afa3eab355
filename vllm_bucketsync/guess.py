"""What can be sent before the workers have spoken: they are as the last update left them.

A worker stays connected after an update that was committed. While it does, nobody else
has pushed to it and it has given nothing up, so what it will say is known. It hears the
next update while its engine is being asked for it, which spares a round trip; where
nobody else has a vote, buckets and commit need not wait for one either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from .errors import RemoteProtocolError
from .messages import Hello, Open
from .peers import Peer, place_of
from .retained import MAX_MANIFESTS
from .session import Role, Session, State

Known = Mapping[bytes, Hello]


def peers_of(known: Known) -> dict[bytes, Peer]:
    """Return workers as if they had said hello."""
    peers = {}
    for key, hello in known.items():
        session = Session(Role.SENDER)
        session.receive(hello)
        peers[key] = Peer(hello, session, is_guessed=True)
    return peers


def what_is_known(peers: Mapping[bytes, Peer], opened: Open | None, manifest: str) -> Known:
    """Return what workers will say next time; nothing if one has not committed.

    Args:
        peers: The workers.
        opened: What they were offered last.
        manifest: Digest of what they got.
    """
    have_committed = all(peer.session.state is State.COMMITTED for peer in peers.values())
    if opened is None or not have_committed:
        return {}
    return {key: _next_hello(peer.hello, opened, manifest) for key, peer in peers.items()}


def may_hurry(peers: Sequence[Peer], opened: Open) -> bool:
    """Whether buckets need not wait for a worker's Ready, nor the commit for its vote.

    There is one worker, so nobody else can refuse, and it has all that the offer names.
    """
    return (
        len(peers) == 1
        and peers[0].is_guessed
        and opened.is_declared
        and not opened.num_metas
        and {handle.id for handle in opened.handles} <= set(peers[0].hello.regions)
    )


def check(peer: Peer, said: Hello, opened: Open) -> None:
    """Confirm that a worker is what it was taken for, and has what it was offered by name.

    Raises:
        RemoteProtocolError: It is not.
    """
    guess = peer.hello
    is_same = said.instance_id == guess.instance_id and place_of(said) == peer.place
    needed = {handle.id for handle in opened.handles} & set(guess.regions)
    if not is_same or not needed <= set(said.regions):
        raise RemoteProtocolError(
            f"{peer} is not as its last update left it, though its connection stands; push again"
        )


def _next_hello(hello: Hello, opened: Open, manifest: str) -> Hello:
    others = [digest for digest in hello.manifests if digest != manifest]
    manifests = (*others, manifest)[-MAX_MANIFESTS:]
    regions = tuple(handle.id for handle in opened.handles)
    return replace(hello, manifests=manifests, regions=regions)
