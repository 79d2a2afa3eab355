"""A bit that flips in shared memory is found by the worker that reads it, and by nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bytes_of import bytes_of
from support.fake_engine import FakeEngine
from support.gpu_trainer import hashes_of, many_tensors
from support.thread_engine import KeepingSink, ThreadEngine

from vllm_bucketsync import ConfigError, CorruptionError, WeightSync
from vllm_bucketsync.packing import Packing

TENSORS = many_tensors("cpu")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def as_stream(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


SOURCES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "declared": dict,
    "streamed": as_stream,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(world_size=2) as engine:
        yield engine


def flip_in_the_slot(monkeypatch: pytest.MonkeyPatch, *, bucket: int) -> None:
    """Let one bit of a bucket flip after it was filled, before it is announced."""
    end_bucket = Packing._end_bucket

    def flipping(self: Packing, **options: Any) -> object:
        region = self._slots._region
        if self.num_batches == bucket and region is not None and region.data is not None:
            first = bucket % self._slots.num_slots * self._slots.layout.slot_size_bytes
            region.data[first + 2] ^= 0x20
        return end_bucket(self, **options)

    monkeypatch.setattr(Packing, "_end_bucket", flipping)


@pytest.mark.parametrize("slot_size", [1024, "1MiB"])
@pytest.mark.parametrize(
    ("source", "atomic"), [("declared", False), ("streamed", False), ("declared", True)]
)
def test_a_verified_push_brings_the_same_bytes(
    engine: FakeEngine, source: str, slot_size: int | str, atomic: bool
) -> None:
    with WeightSync(engine, slot_size=slot_size) as sync:
        for version in range(3):
            tensors = many_tensors("cpu", seed=version)

            report = sync.push(
                SOURCES[source](tensors), version=version, verify="digest", atomic=atomic
            )

            for found in engine.call("loaded"):
                assert found == hashes_of(tensors)
            assert [one.verified_bytes for one in report.workers] == [report.num_bytes] * 2
            staged = [(one.staged_bytes > 0, one.staged_on) for one in report.workers]
            assert staged == [(atomic, "host memory" if atomic else "")] * 2


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bucket", [0, 3])
def test_a_flipped_bit_is_found_and_named_and_the_next_push_works(
    engine: FakeEngine, source: str, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightSync(engine, slot_size=1024) as sync:
        sync.push(TENSORS, version="old")
        with monkeypatch.context() as patch:
            flip_in_the_slot(patch, bucket=bucket)
            with pytest.raises(CorruptionError, match=f"bucket {bucket + 1}.* over shm") as caught:
                sync.push(SOURCES[source](TENSORS), version="bad", verify="digest")
        error = caught.value
        assert error.name in TENSORS
        assert (error.bucket, error.transport) == (bucket, "shm")
        assert error.first_byte <= TENSORS[error.name].nbytes - error.num_bytes
        assert error.rank in {0, 1}
        assert error.engine_state == ("unchanged" if bucket == 0 else "torn")

        sync.push(SOURCES[source](TENSORS), version="good", verify="digest")
        assert [one["version"] for one in sync.status()] == ["good"] * 2
        assert all(found == hashes_of(TENSORS) for found in engine.call("loaded"))


def test_without_verify_the_same_bit_goes_through(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_in_the_slot(monkeypatch, bucket=3)
    with WeightSync(engine, slot_size=1024) as sync:
        sync.push(TENSORS, version=1)

    assert all(found != hashes_of(TENSORS) for found in engine.call("loaded"))


def test_a_flipped_bit_of_an_atomic_update_changes_nothing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_in_the_slot(monkeypatch, bucket=3)
    with WeightSync(engine, slot_size=1024) as sync:
        with pytest.raises(CorruptionError) as caught:
            sync.push(TENSORS, version="bad", verify="digest", atomic=True)

        assert caught.value.engine_state == "unchanged"
        assert [one["is_torn"] for one in sync.status()] == [False, False]


def test_an_adapters_bytes_are_verified_on_their_way(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.randn(4, 64), name.format("B"): torch.randn(64, 4)}
    with WeightSync(engine) as sync:
        report = sync.push_lora((tensors, CONFIG), name="policy", version=1, verify="digest")
        assert [one.verified_bytes for one in report.workers] == [report.num_bytes] * 2

        flip_in_the_slot(monkeypatch, bucket=0)
        with pytest.raises(CorruptionError):
            sync.push_lora((tensors, CONFIG), name="policy", version=2, verify="digest")


@pytest.mark.parametrize("verify", ["sha256", "", None, True])
def test_a_word_that_is_no_way_to_verify_is_refused(engine: FakeEngine, verify: Any) -> None:
    with WeightSync(engine) as sync:
        with pytest.raises(ConfigError, match="expected one of none, digest"):
            sync.push(TENSORS, version=1, verify=verify)
        with pytest.raises(ConfigError, match="expected one of none, digest"):
            sync.push_lora(({}, CONFIG), name="policy", version=1, verify=verify)


@pytest.mark.parametrize("verify", ["none", "digest"])
def test_a_slot_is_not_refilled_before_the_slowest_of_four_workers_has_read_it(verify: str) -> None:
    made: list[KeepingSink] = []

    def lag(call: str, _pieces: object) -> None:
        if call == "load":
            time.sleep(0.05)

    def make() -> KeepingSink:
        # One of the four lags behind with every bucket.
        made.append(KeepingSink(lag if not made else None))
        return made[-1]

    tensors = {f"t{i}": torch.full((1024,), i, dtype=torch.uint8) for i in range(8)}
    engine = ThreadEngine(num_workers=4, make=make)
    with WeightSync(engine, slot_size=1024, num_slots=2) as sync:
        sync.push(tensors, version=1, verify=verify)
    engine.close()

    assert len(made) == 4
    for sink in made:
        assert sink.calls.count("load") == 8
        assert {name: bytes_of(one) for name, one in sink.tensors.items()} == {
            name: bytes_of(one) for name, one in tensors.items()
        }
