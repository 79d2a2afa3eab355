"""The wire stays what it is, and nothing that arrives is believed, executed, or large."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden_messages import GOLDEN

from vllm_bucketsync import codec, messages
from vllm_bucketsync.codec import encode
from vllm_bucketsync.errors import RemoteProtocolError
from vllm_bucketsync.layout import MAX_NAME_BYTES, TensorMeta
from vllm_bucketsync.messages import Command, Message, Reply

IDS = [f"{number}-{type(message).__name__}" for number, (message, _) in enumerate(GOLDEN)]

OPEN: dict[str, Any] = {
    "type": "open", "update_id": "u", "version": "7", "kind": "weights", "transport": "shm",
    "handles": [], "regions": [], "layout": {"slot_size_bytes": 256},
}  # fmt: skip
SHM = {"type": "shm", "id": "r", "path": "/x", "num_bytes": 1, "canary": b"c" * 32}
CUDA = {
    "type": "cuda_ipc", "id": "r", "lease": SHM, "boot_id": "b", "device_uuid": "u",
    "num_bytes": 1, "memory": b"m" * 64, "events": [b"e" * 64],
}  # fmt: skip
# Each is one step away from a message that is accepted.
REFUSED: dict[str, Any] = {
    "no tag": {"reason": "x"},
    "unknown tag": {"type": "shutdown"},
    "tag that is a number": {"type": 1},
    "a reply's tag": {"type": "ack", "seq": 0},
    "unknown field": {"type": "commit", "force": True},
    "missing field": {"type": "abort"},
    "wrong type": {"type": "abort", "reason": 7},
    "number as text": {"type": "deviate", "index": "3"},
    "negative count": {"type": "deviate", "index": -1},
    "count of 2**63": {"type": "deviate", "index": 1 << 63},
    "NaN count": {"type": "deviate", "index": float("nan")},
    "bool as count": {"type": "deviate", "index": True},
    "NaN offset": {"type": "batch", "seq": 0, "region": 0, "entries": [[0, 0, float("nan"), 1]]},
    "negative offset": {"type": "batch", "seq": 0, "region": 0, "entries": [[0, 0, -256, 1]]},
    "negative length": {"type": "batch", "seq": 0, "region": 0, "entries": [[0, 0, 0, -5]]},
    "negative start": {"type": "batch", "seq": 0, "region": 0, "entries": [[0, -1, 0, 5]]},
    "huge offset": {"type": "batch", "seq": 0, "region": 0, "entries": [[0, 0, 1 << 63, 5]]},
    "short entry": {"type": "batch", "seq": 0, "region": 0, "entries": [[0, 0, 0]]},
    "too many entries": {"type": "batch", "seq": 0, "region": 0, "entries": [[0, 0, 0, 0]] * 8193},
    "too many metas": {"type": "metas", "metas": [["a", "b", [], 0]] * 8193},
    "shape of floats": {"type": "metas", "metas": [["a", "b", [1.5], 0]]},
    "slot of no size": {**OPEN, "layout": {"slot_size_bytes": 0}},
    "slot not aligned": {**OPEN, "layout": {"slot_size_bytes": 257}},
    "unknown handle": {**OPEN, "handles": [{"type": "http", "id": "x"}]},
    "short canary": {**OPEN, "handles": [{**SHM, "canary": b"c"}]},
    "endless path": {**OPEN, "handles": [{**SHM, "path": "/" * 4097}]},
    "long device memory": {**OPEN, "handles": [{**CUDA, "memory": b"m" * 65}]},
    "short device memory": {**OPEN, "handles": [{**CUDA, "memory": b"m" * 63}]},
    "device memory as text": {**OPEN, "handles": [{**CUDA, "memory": "m" * 64}]},
    "long event": {**OPEN, "handles": [{**CUDA, "events": [b"e" * 64, b"e" * 65]}]},
    "short event": {**OPEN, "handles": [{**CUDA, "events": [b""]}]},
    "too many events": {**OPEN, "handles": [{**CUDA, "events": [b"e" * 64] * 65}]},
    "lease that is no file": {**OPEN, "handles": [{**CUDA, "lease": CUDA}]},
    "lease with a short canary": {**OPEN, "handles": [{**CUDA, "lease": {**SHM, "canary": b"c"}}]},
    "negative device memory": {**OPEN, "handles": [{**CUDA, "num_bytes": -1}]},
    "endless boot id": {**OPEN, "handles": [{**CUDA, "boot_id": "b" * 257}]},
    "endless transport reason": {**OPEN, "transport_reason": "x" * 65_537},
    "region before its handle": {**OPEN, "regions": [[0, -1, 5]]},
    "endless update id": {**OPEN, "update_id": "u" * 257},
    "endless reason": {"type": "abort", "reason": "x" * 65_537},
    "a list": [{"type": "commit"}],
    "a number": 7,
    "nothing": None,
}
RAW = {
    "empty": b"",
    "junk": b"\xff" * 64,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "json": b'{"type": "commit"}',
    "truncated": encode(messages.Abort(reason="x"))[:-1],
    "trailing": encode(messages.Commit()) + b"\x00",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "text of 4 GiB": b"\x81\xa4type\xdb\xff\xff\xff\xff",
    "list of 4 billion": b"\x82\xa4type\xa5metas\xa5metas\xdd\xff\xff\xff\xff",
    "nested a million deep": b"\x82\xa4type\xa5abort\xa6reason" + b"\x91" * 1_000_000,
    "skipped a million deep": b"\x82\xa4type\xa5abort\xa1x" + b"\x81\xa1a" * 1_000_000,
    "not UTF-8": b"\x82\xa4type\xa5abort\xa6reason\xa3\xed\xa0\x80",
    "an extension type": b"\x81\xa4type\xc7\x04\x05code",
    "above the limit": b"\x00" * (codec.MAX_MESSAGE_BYTES + 1),
}


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def decode(data: bytes, kind: type) -> Message:
    if issubclass(kind, Command):
        return codec.decode_command(data)
    return codec.decode_reply(data)


def concrete(base: type) -> set[type]:
    found: set[type] = set(base.__subclasses__())
    return found.union(*map(concrete, found))


@pytest.mark.parametrize("handle", [SHM, CUDA], ids=["shm", "cuda_ipc"])
def test_a_handle_within_its_limits_is_accepted(handle: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode({**OPEN, "handles": [handle]})

    assert isinstance(codec.decode_command(data), messages.Open)


def test_every_message_has_golden_bytes() -> None:
    assert {type(message) for message, _ in GOLDEN} == concrete(Command) | concrete(Reply)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=IDS)
def test_a_message_is_the_same_bytes_as_ever(message: Message, golden: str) -> None:
    assert encode(message).hex() == golden


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=IDS)
def test_golden_bytes_are_still_the_message(message: Message, golden: str) -> None:
    arrived = decode(bytes.fromhex(golden), type(message))

    assert arrived == message
    assert type(arrived) is type(message)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=IDS)
def test_a_message_of_the_other_direction_is_refused(message: Message, golden: str) -> None:
    other = Reply if isinstance(message, Command) else Command

    with pytest.raises(RemoteProtocolError):
        decode(bytes.fromhex(golden), other)


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_a_message_that_breaks_the_schema_is_refused(content: Any) -> None:
    data = msgspec.msgpack.encode(content)

    with pytest.raises(RemoteProtocolError, match=r"no command of protocol 4: .*same version"):
        codec.decode_command(data)
    with pytest.raises(RemoteProtocolError):
        codec.decode_reply(data if content != REFUSED["a reply's tag"] else b"")


@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_bytes_that_are_no_message_are_refused_without_taking_memory(data: bytes) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(RemoteProtocolError):
        codec.decode_command(data)
    with pytest.raises(RemoteProtocolError):
        codec.decode_reply(data)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_touch_a_file_is_refused_and_does_not(
    tmp_path: Path, protocol: int
) -> None:
    data = pickle.dumps(Touch(tmp_path / "touched"), protocol=protocol)

    for place in (data, msgspec.msgpack.encode({"type": "abort", "reason": data})):
        with pytest.raises(RemoteProtocolError):
            codec.decode_command(place)
        with pytest.raises(RemoteProtocolError):
            codec.decode_reply(place)

    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for decoder in (codec.decode_command, codec.decode_reply):
        try:
            arrived: object = decoder(data)
        except RemoteProtocolError:
            continue
        assert isinstance(arrived, Message)


@given(st.sampled_from(GOLDEN), st.data())
def test_a_message_with_one_byte_changed_is_a_message_or_refused(
    golden: tuple[Message, str], data: st.DataObject
) -> None:
    raw = bytearray.fromhex(golden[1])
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))

    try:
        arrived = decode(bytes(raw), type(golden[0]))
    except RemoteProtocolError:
        return
    assert isinstance(arrived, Message)


@given(
    st.lists(
        st.builds(
            TensorMeta,
            name=st.text("a.0é", max_size=20),
            dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
            shape=st.lists(st.integers(0, 1 << 40), max_size=5).map(tuple),
            num_bytes=st.integers(0, 1 << 50),
            is_buffer=st.booleans(),
        ),
        max_size=5,
    ).map(tuple)
)
def test_metas_survive_whatever_they_say(metas: tuple[TensorMeta, ...]) -> None:
    assert codec.decode_command(encode(messages.Metas(metas=metas))) == messages.Metas(metas=metas)


def test_the_largest_message_of_metas_is_within_the_limit() -> None:
    metas = [
        TensorMeta(f"{i:04}".ljust(MAX_NAME_BYTES, "x"), "float8_e4m3fnuz", (1 << 40,) * 4, 1 << 50)
        for i in range(messages.MAX_METAS)
    ]

    data = encode(messages.Metas(metas=tuple(metas)))

    assert len(data) <= codec.MAX_MESSAGE_BYTES
    assert len(codec.decode_command(data).metas) == messages.MAX_METAS  # type: ignore[attr-defined]


def test_messages_cannot_be_changed_and_take_no_positions() -> None:
    with pytest.raises(AttributeError):
        messages.Ack(seq=1).seq = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        messages.Ack(1)  # type: ignore[call-arg]
