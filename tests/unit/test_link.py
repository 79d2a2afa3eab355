"""Proves that a worker finds the sender of its own process by a token, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_bucketsync.errors import PeerLostError
from vllm_bucketsync.link import SCHEME, find, register, unregister
from vllm_bucketsync.messages import Command, Reply


class SilentLink:
    def exchange(self, replies: list[Reply]) -> list[Command]:
        return []


@pytest.fixture
def link() -> Iterator[SilentLink]:
    yield SilentLink()
    unregister("one")
    unregister("two")


def test_an_endpoint_leads_to_the_link_that_it_was_made_for(link: SilentLink) -> None:
    other = SilentLink()
    endpoint = register("one", link)

    assert endpoint.startswith(SCHEME)
    assert find(endpoint) is link
    assert find(register("two", other)) is other
    assert find(endpoint) is link


def test_a_link_that_is_gone_is_not_found_and_the_text_says_what_to_do(link: SilentLink) -> None:
    endpoint = register("one", link)
    unregister("one")
    unregister("one")

    with pytest.raises(PeerLostError, match="push again"):
        find(endpoint)
    with pytest.raises(PeerLostError):
        find(SCHEME)
