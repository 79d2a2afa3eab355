"""Proves that a receiver takes every valid update, and nothing else for one of them.

Whole updates of random tensors, packed by the real sender's half; then the same with one
field of one message changed, as a broken or hostile sender would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stepping import (
    Pairs,
    WatchedRegion,
    byte_pairs,
    bytes_by_name,
    commands_of,
    feed,
    greeted,
    kept_by,
    manifest_of,
    shm_slots,
)
from support.thread_engine import KeepingSink

from vllm_bucketsync.codec import decode_command, encode
from vllm_bucketsync.errors import EngineState, RemoteProtocolError
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.messages import Done, Error
from vllm_bucketsync.retained import ReceiverMemory
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.transport.registry import open_region

HUGE = 1 << 62
# What says where bytes lie. A sender that points elsewhere gets the bytes that are there:
# no digest of the data travels, so only their place and number can be checked.
PLACES = {"regions", "region", "entries", "layout", "handles"}


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slots]:
    made = shm_slots(tmp_path_factory.mktemp("slots"))
    yield made
    made.release()


@st.composite
def updates(draw: st.DrawFn) -> tuple[Pairs, Manifest | None, bool]:
    """Random tensors; declared, streamed, or like a known stream up to some tensor."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 8, 255, 256, 300, 512, 513, 1100]), max_size=5))
    pairs = byte_pairs(*sizes, 8)
    match draw(st.sampled_from(["declared", "streamed", "resembling"])):
        case "declared":
            return pairs, manifest_of(pairs), True
        case "streamed":
            return pairs, None, False
    num_same = draw(st.integers(0, len(pairs)))
    known = [*pairs[:num_same], *byte_pairs(*draw(st.lists(st.just(40), max_size=2)), prefix="k")]
    return pairs, manifest_of(known or pairs), False


def mutate(draw: Callable[..., Any], value: Any) -> tuple[Any, list[Any]]:
    """Change one value somewhere within a message, and return also the way to it."""
    if isinstance(value, dict | list | tuple) and value and draw(st.integers(0, 9)):
        keys: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from([k for k in keys if k != "type"] or list(keys)))
        changed, way = mutate(draw, value[key])
        copied = dict(value) if isinstance(value, dict) else list(value)
        copied[key] = changed
        return copied, [key, *way]
    options: list[Any] = [None, 0, 1, -1, 256, HUGE, (1 << 64) - 1, "", "x", [], {}, True, 0.5]
    if isinstance(value, int):
        options += [value + 1, value - 1, 2 * value, value + 256] * 3
    if isinstance(value, list | tuple) and value:
        options += [[*value, value[-1]], value[:-1], value[1:], value[::-1]] * 3
    return draw(st.sampled_from(options)), []


@settings(max_examples=500)
@given(data=st.data(), update=updates())
def test_one_wrong_field_never_raises_and_never_commits_anything_else(
    slots: Slots, data: st.DataObject, update: tuple[Pairs, Manifest | None, bool]
) -> None:
    pairs, manifest, is_declared = update
    commands = commands_of(slots, pairs, manifest=manifest, is_declared=is_declared)
    victim = data.draw(st.integers(0, len(commands) - 1))
    plain = msgspec.msgpack.decode(encode(commands[victim]))
    changed, way = mutate(data.draw, plain)
    wire = [encode(command) for command in commands]
    try:
        wire[victim] = msgspec.msgpack.encode(changed)
    except OverflowError:
        return
    sink, memory = KeepingSink(), ReceiverMemory()
    receiver = greeted(memory, sink)
    watched: Any = WatchedRegion(open_region("shm", slots.handles[0], device=torch.device("cpu")))
    memory.regions[slots.handles[0].id] = watched

    for message in wire:
        try:
            replies = receiver.step(decode_command(message))
        except RemoteProtocolError as error:
            replies = [receiver.fail(error)]
        assert all(encode(reply) for reply in replies)
        if receiver.session.has_ended:
            break

    end_bytes = slots.handles[0].num_bytes
    for offset, size in watched.views:
        assert offset >= 0
        assert offset + size <= end_bytes or isinstance(receiver.error, Error)
    assert sink.calls.count("abort") <= 1
    if receiver.state is EngineState.COMMITTED:
        assert {n: len(d) for n, d in kept_by(sink).items()} == {
            name: len(data) for name, data in bytes_by_name(pairs).items()
        }
        assert list(sink.metas.values()) == [meta for meta, _ in pairs]
        if not PLACES & set(way[:1]):
            assert kept_by(sink) == bytes_by_name(pairs)
    else:
        assert "commit" not in sink.calls
        if receiver.state is EngineState.UNCHANGED:
            assert sink.tensors == {}
    receiver.release()
    memory.release()


@settings(max_examples=100)
@given(update=updates())
def test_a_valid_update_arrives_however_it_is_described(
    slots: Slots, update: tuple[Pairs, Manifest | None, bool]
) -> None:
    pairs, manifest, is_declared = update
    sink, memory = KeepingSink(), ReceiverMemory()

    replies = feed(
        greeted(memory, sink),
        commands_of(slots, pairs, manifest=manifest, is_declared=is_declared),
    )

    assert isinstance(replies[-1], Done)
    assert kept_by(sink) == bytes_by_name(pairs)
    memory.release()
