"""A peer's death is never mistaken for another's, however descriptors are given out again."""

from __future__ import annotations

import itertools
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.connections import Connection, Connections


def never() -> bool:
    raise AssertionError("the peer was probed without need")


def identify(
    connections: Connections, peer: bytes, fd: int, *, reachable: bool | None = None
) -> Connection:
    probe = never if reachable is None else lambda: reachable
    return connections.identify(peer, fd, is_reachable=probe)


def test_a_peer_is_bound_to_the_socket_that_its_first_message_came_over() -> None:
    connections = Connections()
    accepted = connections.accepted(7)

    assert connections.find(b"a") is None
    assert identify(connections, b"a", 7) is accepted
    assert connections.find(b"a") is accepted
    assert accepted.is_open
    assert connections.settle() == []


def test_a_peer_that_is_closed_is_lost_once() -> None:
    connections = Connections()
    accepted = connections.accepted(7)
    identify(connections, b"a", 7)

    connections.closed(7)

    assert connections.settle() == [accepted]
    assert connections.settle() == []
    assert connections.find(b"a") is None


def test_a_peer_that_never_spoke_is_not_reported() -> None:
    connections = Connections()
    connections.accepted(7)
    connections.closed(7)

    assert connections.settle() == []


def test_a_peer_that_was_closed_before_its_message_was_read_is_lost_after_it() -> None:
    connections = Connections()
    accepted = connections.accepted(7)
    connections.closed(7)

    assert identify(connections, b"a", 7) is accepted
    assert connections.settle() == [accepted]


def test_a_descriptor_that_was_given_out_again_belongs_to_whoever_can_be_reached() -> None:
    for order in itertools.permutations([(b"old", False), (b"new", True)]):
        connections = Connections()
        old = connections.accepted(7)
        connections.closed(7)
        new = connections.accepted(7)

        for peer, is_reachable in order:
            identify(connections, peer, 7, reachable=is_reachable)

        assert (old.peer, new.peer) == (b"old", b"new")
        assert connections.settle() == [old]
        assert connections.find(b"new") is new


def test_a_probe_that_left_no_message_is_forgotten_after_the_queue_was_empty() -> None:
    connections = Connections()
    connections.accepted(7)
    connections.closed(7)
    assert connections.settle() == []
    new = connections.accepted(7)

    assert identify(connections, b"new", 7) is new


def test_a_peer_that_was_taken_for_the_next_one_is_lost_as_soon_as_that_one_speaks() -> None:
    connections = Connections()
    connections.accepted(7)
    connections.closed(7)
    connections.accepted(7)
    identify(connections, b"old", 7, reachable=True)  # for a last microsecond

    new = identify(connections, b"new", 7, reachable=True)

    assert [connection.peer for connection in connections.settle()] == [b"old"]
    assert connections.find(b"new") is new
    assert new.is_open
    connections.closed(7)
    assert [connection.peer for connection in connections.settle()] == [b"new"]


def test_a_socket_that_is_accepted_where_one_is_open_means_that_one_was_closed() -> None:
    connections = Connections()
    connections.accepted(7)
    identify(connections, b"a", 7)

    connections.accepted(7)

    assert [connection.peer for connection in connections.settle()] == [b"a"]


class Kernel:
    """Gives out the lowest free descriptor, and lets messages be read in any order."""

    def __init__(self) -> None:
        self.fds: dict[bytes, int] = {}
        self.events: deque[tuple[str, int]] = deque()
        self.unread: list[tuple[bytes, int]] = []
        self.spoke: set[bytes] = set()
        self.closed: set[bytes] = set()

    def accept(self) -> None:
        fd = next(fd for fd in itertools.count(3) if fd not in self.fds.values())
        peer = b"%d" % (len(self.fds) + len(self.closed))
        self.fds[peer] = fd
        self.events.append(("accepted", fd))

    def say(self, peer: bytes) -> None:
        self.spoke.add(peer)
        self.unread.append((peer, self.fds[peer]))

    def close(self, peer: bytes) -> None:
        self.events.append(("closed", self.fds.pop(peer)))
        self.closed.add(peer)


@given(st.data())
def test_exactly_the_peers_that_spoke_and_died_are_lost(data: st.DataObject) -> None:
    kernel, connections, lost = Kernel(), Connections(), []

    for _ in range(data.draw(st.integers(0, 30))):
        step = data.draw(st.sampled_from(["accept", "say", "close", "read"]))
        if step == "accept":
            kernel.accept()
        elif step == "read":
            lost += read_all(kernel, connections, data)
        elif kernel.fds:
            getattr(kernel, step)(data.draw(st.sampled_from(sorted(kernel.fds))))
    lost += read_all(kernel, connections, data)

    assert sorted(lost) == sorted(kernel.spoke & kernel.closed)
    for peer in kernel.spoke - kernel.closed:
        connection = connections.find(peer)
        assert connection is not None
        assert connection.is_open
        assert connection.fd == kernel.fds[peer]


def read_all(kernel: Kernel, connections: Connections, data: st.DataObject) -> list[bytes]:
    while kernel.events:
        event, fd = kernel.events.popleft()
        getattr(connections, event)(fd)
    unread = data.draw(st.permutations(kernel.unread))
    kernel.unread = []
    for peer, fd in unread:
        if connections.find(peer) is None:
            identify(connections, peer, fd, reachable=peer in kernel.fds)
    return [connection.peer or b"" for connection in connections.settle()]
