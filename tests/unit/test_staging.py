"""An atomic update leaves the model alone until its commit, and then is all of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.live_sink import LiveSink, Model
from support.pushes import load_all, metas_of, push
from support.stepping import hello, opening, shm_slots

from vllm_bucketsync import staging
from vllm_bucketsync.boxes import Box
from vllm_bucketsync.config import Verify
from vllm_bucketsync.errors import (
    ApplyError,
    EngineState,
    LoadError,
    MissingTensorError,
    RemoteProtocolError,
    StagingError,
    VerifyError,
)
from vllm_bucketsync.layout import Manifest, aligned
from vllm_bucketsync.messages import Abort, Aborted, Error, Metas
from vllm_bucketsync.receiver import Receiver
from vllm_bucketsync.retained import ReceiverMemory
from vllm_bucketsync.sinks import Bucket, Piece
from vllm_bucketsync.staging import StagedSink, staged_if_asked
from vllm_bucketsync.transport import arena

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def tensors_of(seed: int, *, num: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{i}.{'columns' if i % 2 else 'rows'}": torch.randint(
            0, 100, (4 + 4 * (i % 3), 8 + 4 * i), generator=generator
        ).to(DTYPES[i % 3])
        for i in range(num)
    }


def staged(inner: Any, *, verify: Verify = Verify.NONE) -> StagedSink:
    return StagedSink(inner, device=CPU, verify=verify)


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
@pytest.mark.parametrize("slot_size_bytes", [256, 1024, 1 << 16])
def test_a_staged_update_comes_to_the_same_as_one_that_is_not(
    rank: int, num_ranks: int, slot_size_bytes: int, verify: Verify
) -> None:
    model = Model(rank, num_ranks)
    for seed in (1, 2):
        tensors = tensors_of(seed)

        report = push(
            staged(LiveSink(model), verify=verify), tensors, slot_size_bytes=slot_size_bytes
        )

        assert model.hashes() == model.expected(tensors)
        assert report.staged.place == "host memory"


@settings(max_examples=40)
@given(st.data())
def test_any_strided_part_of_any_tensor_is_staged_as_it_is(draw: st.DataObject) -> None:
    shape = tuple(draw.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensor = torch.randn(*shape)
    part, transposed = tensor, draw.draw(st.booleans())
    for dim, size in enumerate(shape):
        first = draw.draw(st.integers(0, size - 1))
        part = part.narrow(dim, first, draw.draw(st.integers(1, size - first)))
    part = part.t() if transposed and part.dim() == 2 else part
    box = Box(int(part.storage_offset()), tuple(part.shape), part.stride())
    inner = PartSink(box)

    push(staged(inner), {"t": tensor}, slot_size_bytes=draw.draw(st.sampled_from([256, 1 << 12])))

    assert torch.equal(inner.got, part)


class PartSink(LiveSink):
    """Asks for one part of the only tensor, and keeps it."""

    def __init__(self, box: Box) -> None:
        super().__init__(Model())
        self._box = box
        self.got = torch.empty(0)

    def wanted(self, index: int) -> tuple[Box, ...] | None:
        return (self._box, self._box)

    def load(self, bucket: Bucket) -> None:
        (piece,) = bucket.pieces
        target = Box(0, self._box.shape, (0,) * len(self._box.shape))
        ((data, _),) = piece.share(self._box, target)
        self.got = data.clone()


def test_only_what_is_wanted_takes_memory_and_is_handed_on() -> None:
    class Choosy(LiveSink):
        def wanted(self, index: int) -> tuple[Box, ...] | None:
            return [(), None, (Box(0, (2, 3), (8, 1)),)][index]

        def load(self, bucket: Bucket) -> None:
            seen.extend((one.index, one.box, one.is_whole) for one in bucket.pieces)

    seen: list[tuple[int, Box | None, bool]] = []
    names = ("dropped.rows", "whole.rows", "part.rows")
    tensors = {name: torch.randn(4, 8) for name in names}

    report = push(staged(Choosy(Model())), tensors)

    assert seen == [(1, None, True), (2, Box(0, (2, 3), (8, 1)), False)]
    assert report.staged.num_bytes == aligned(4 * 8 * 4) + aligned(2 * 3 * 4)


@pytest.mark.parametrize("num_loaded", [0, 3, 6])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_update_that_ends_before_its_commit_leaves_every_byte(
    num_loaded: int, is_prepared: bool
) -> None:
    model = Model()
    push(LiveSink(model), tensors_of(1))
    inner = LiveSink(model)
    sink = staged(inner)
    tensors = tensors_of(2)

    sink.open(Manifest(metas_of(tensors)))
    load_all(sink, dict(list(tensors.items())[:num_loaded]), slot_size_bytes=512)
    if is_prepared and num_loaded == len(tensors):
        sink.prepare()
    state = sink.abort()
    sink.release()

    assert state is EngineState.UNCHANGED
    assert model.hashes() == model.expected(tensors_of(1))
    assert inner.calls == ["open", "abort", "release"]


def test_what_did_not_come_whole_cannot_be_committed() -> None:
    tensors = tensors_of(1)
    sink = staged(LiveSink(Model()))
    sink.open(Manifest(metas_of(tensors)))
    load_all(sink, dict(list(tensors.items())[:-1]), slot_size_bytes=512)

    with pytest.raises(MissingTensorError, match=r"'t5.columns' were not staged") as caught:
        sink.prepare()
    assert caught.value.name == "t5.columns"
    sink.release()


def test_a_tensor_whose_last_fragment_is_missing_cannot_be_committed() -> None:
    meta = metas_of({"a.rows": torch.zeros(8, 16)})[0]
    sink = staged(LiveSink(Model(0, 2)))
    sink.open(Manifest([meta]))
    data = torch.zeros(200, dtype=torch.uint8)
    sink.load(Bucket(seq=0, pieces=(Piece(index=0, meta=meta, first_byte=0, data=data),)))

    with pytest.raises(MissingTensorError, match=r"56 bytes of 'a.rows' were not staged"):
        sink.prepare()
    sink.release()


def test_the_memory_is_given_back_and_not_only_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []

    def close(self: arena.Arena) -> None:
        closed.append(self)

    monkeypatch.setattr(arena.Arena, "close", close)
    sink = staged(LiveSink(Model()))
    sink.open(Manifest(metas_of({"a": torch.zeros(3, 4)})))
    made = sink._arena

    sink.release()
    sink.release()

    assert closed == [made]


@pytest.mark.parametrize("verify", Verify)
def test_a_bit_that_flips_while_it_waits_is_found_before_the_vote(verify: Verify) -> None:
    model = Model()
    tensors = tensors_of(1)
    sink = staged(LiveSink(model), verify=verify)
    sink.open(Manifest(metas_of(tensors)))
    load_all(sink, tensors, slot_size_bytes=512)
    assert sink._arena is not None
    sink._arena.data[sink._places[3][0].first_byte] ^= 1

    if verify is Verify.DIGEST:
        with pytest.raises(VerifyError, match=r"staged t3.columns.*nothing was written"):
            sink.prepare()
        assert sink.abort() is EngineState.UNCHANGED
    else:
        sink.prepare()
    sink.release()


@pytest.mark.parametrize("call", ["load", "prepare", "commit"])
@pytest.mark.parametrize("error", [RuntimeError("out of paper"), LoadError("no", name="a.b")])
def test_a_failure_while_it_is_applied_is_torn_and_named_so(call: str, error: Exception) -> None:
    def fail(now: str) -> None:
        if now == call:
            raise error

    inner = LiveSink(Model(), on_call=fail)
    sink = staged(inner)
    tensors = tensors_of(1)
    sink.open(Manifest(metas_of(tensors)))
    load_all(sink, tensors, slot_size_bytes=512)
    sink.prepare()

    with pytest.raises(ApplyError, match="applying it failed here: ") as caught:
        sink.commit()

    assert str(error) in str(caught.value)
    assert caught.value.cause == ("load" if isinstance(error, LoadError) else "remote")
    assert caught.value.name == getattr(error, "name", None)
    # What it failed with has a traceback, which would keep the memory.
    assert caught.value.__cause__ is None
    assert sink.abort() is EngineState.TORN
    assert inner.calls[-1] == "abort"
    sink.release()


def num_holders(memory: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(memory._cdata))


def test_the_memory_goes_at_the_release_whatever_happened() -> None:
    ends: list[Callable[[StagedSink], object]] = [StagedSink.commit, StagedSink.abort]
    for end in ends:
        sink = staged(LiveSink(Model()))
        tensors = tensors_of(1)
        sink.open(Manifest(metas_of(tensors)))
        load_all(sink, tensors, slot_size_bytes=512)
        assert sink._arena is not None
        memory = sink._arena.data.untyped_storage()
        assert num_holders(memory) > 1

        end(sink)
        sink.release()
        sink.release()

        gc.collect()
        # This test's own.
        assert num_holders(memory) == 1


def test_no_room_is_said_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_bytes", lambda: arena.HOST_MARGIN_BYTES + 4000)
    tensors = {"a": torch.zeros(501, 4)}
    inner = LiveSink(Model())
    sink = StagedSink(inner, device=CPU, num_sharers=2)

    with pytest.raises(StagingError) as caught:
        sink.open(Manifest(metas_of(tensors)))

    error = caught.value
    assert (error.needed_bytes, error.host_bytes, error.device_bytes) == (aligned(8016), 2000, 0)
    for word in (str(aligned(8016)), "2000 on the host", "2 workers", "without atomic=True"):
        assert word in str(error)
    assert sink.abort() is EngineState.UNCHANGED
    assert "load" not in inner.calls


def test_a_stream_that_was_not_declared_is_refused() -> None:
    sink = staged(LiveSink(Model()))

    with pytest.raises(RemoteProtocolError, match="without a declared manifest"):
        sink.open(None)
    with pytest.raises(RemoteProtocolError, match="leaves its manifest at tensor 3"):
        sink.deviate(3)


def test_only_an_offer_that_asks_for_it_is_staged(tmp_path: Any) -> None:
    slots = shm_slots(tmp_path)
    inner = LiveSink(Model())
    wrap: Callable[..., Any] = staged_if_asked

    plain = wrap(inner, opening(slots), device=CPU)
    atomic = wrap(inner, opening(slots, is_atomic=True), device=CPU)
    slots.release()

    assert plain is inner
    assert isinstance(atomic, StagedSink)


def test_all_workers_of_all_engines_share_the_hosts_memory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "available_bytes", lambda: arena.HOST_MARGIN_BYTES + 9000)
    slots = shm_slots(tmp_path)
    opened = opening(slots, is_atomic=True, num_workers=6)
    slots.release()
    sink = staged_if_asked(LiveSink(Model()), opened, device=CPU)

    with pytest.raises(StagingError, match="6 workers") as caught:
        sink.open(Manifest(metas_of({"a": torch.zeros(501, 4)})))

    assert caught.value.host_bytes == 1500


@pytest.mark.parametrize(
    "changes", [{"is_declared": False}, {"kind": "adapter"}], ids=["streamed", "adapter"]
)
def test_a_receiver_refuses_an_atomic_offer_that_cannot_be(
    tmp_path: Any, changes: dict[str, Any]
) -> None:
    slots = shm_slots(tmp_path)
    manifest = Manifest(metas_of({"a": torch.zeros(3)}))
    receiver = Receiver(memory=ReceiverMemory(), make_sink=lambda opened: LiveSink(Model()))
    receiver.greet(hello())
    offer = opening(slots, manifest=manifest, is_atomic=True, **{"is_declared": True, **changes})

    (reply,) = receiver.step(offer)
    slots.release()

    assert isinstance(reply, Error)
    assert reply.code == RemoteProtocolError.code
    assert "atomic" in reply.message


def test_a_worker_that_was_torn_stays_so_when_an_atomic_update_is_aborted(tmp_path: Any) -> None:
    slots = shm_slots(tmp_path)
    manifest = Manifest(metas_of({"a": torch.zeros(3, 4)}))
    for was_torn, expected in ((True, EngineState.TORN), (False, EngineState.UNCHANGED)):
        memory = ReceiverMemory(is_torn=was_torn)
        receiver = Receiver(memory=memory, make_sink=lambda opened: staged(LiveSink(Model())))
        receiver.greet(hello())
        offer = opening(slots, manifest=manifest, is_atomic=True, is_declared=True)
        receiver.step(offer)
        receiver.step(Metas(metas=manifest.metas))

        (reply,) = receiver.step(Abort(reason="x"))
        receiver.release()
        memory.release()

        assert reply == Aborted(state=expected)
    slots.release()


def test_staging_waits_for_the_devices_that_it_copies_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(staging, "synchronise", waited.append)

    push(staged(LiveSink(Model())), {"a": torch.zeros(3, 4)})

    # After the bucket, and before the memory goes: a load that fails waits for nothing.
    assert waited == [CPU, CPU]
