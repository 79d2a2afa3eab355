"""On a GPU, digests are those of the CPU, and staged updates wait in its own memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.fake_engine import FakeEngine
from support.gpu_trainer import hashes_of, many_tensors
from support.tensor_samples import bytes_tensor

from vllm_bucketsync import CorruptionError, WeightSync
from vllm_bucketsync.digests import ROW_BYTES, Digests, digest
from vllm_bucketsync.packing import Packing
from vllm_bucketsync.proofs import Proof
from vllm_bucketsync.transport import arena
from vllm_bucketsync.transport.arena import Arena

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1024**2


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    torch.zeros(1, device="cuda")
    with FakeEngine(device="cuda:0", world_size=2) as engine:
        yield engine


@pytest.mark.parametrize("size", [0, 1, 7, 255, 256, 257, 4099, 70_001, 8 * MIB + 13])
@pytest.mark.parametrize("shift", [0, 3, 8])
def test_a_digest_is_the_same_number_as_on_the_cpu(size: int, shift: int) -> None:
    data = bytes_tensor(size + shift, seed=size)

    assert digest(data.cuda()[shift:]) == digest(data[shift:].clone())


def test_a_slot_digested_at_once_is_the_same_as_on_the_cpu() -> None:
    sizes = [300, 256, 0, 1, 70_001, 512]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ROW_BYTES) * ROW_BYTES)
    slot = bytes_tensor(offsets[-1], seed=9)
    found = []
    for memory in (slot, slot.cuda()):
        digests = Digests()
        digests.add_all([memory[o : o + s] for o, s in zip(offsets, sizes, strict=False)])
        found.append(digests.take())

    assert found[0] == found[1]
    assert found[0] == [
        digest(slot[o : o + s].clone()) for o, s in zip(offsets, sizes, strict=False)
    ]


def test_a_copy_from_the_host_is_proved_on_the_device_casts_included() -> None:
    data = torch.randn(257, 33)
    live = torch.zeros(257, 33, dtype=torch.bfloat16, device="cuda")
    live.copy_(data)
    proof = Proof()
    proof.note("p", live, source="s", data=data)
    proof.seal()

    proof.check(state="x")


@pytest.mark.parametrize("num_bytes", [1, 64 * MIB + 3])
def test_staged_memory_on_the_device_comes_and_goes(num_bytes: int) -> None:
    device = torch.device("cuda:0")
    torch.zeros(1, device=device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    made = Arena.allocate(num_bytes, device=device, num_sharers=1)
    made.data.fill_(7)
    view = made.data[:1]

    assert (made.place, made.data.device) == ("cuda:0", device)
    made.close()
    assert int(view) == 7
    del view
    assert free_bytes - torch.cuda.mem_get_info(device)[0] < 4 * MIB


def test_staged_memory_on_the_host_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "DEVICE_MARGIN_BYTES", 1 << 60)
    made = Arena.allocate(MIB, device=torch.device("cuda:0"), num_sharers=1)

    assert made.place == "pinned host memory"
    assert made.data.is_pinned()
    made.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_staged_and_verified_update_brings_the_same_bytes(
    engine: FakeEngine, transport: str, zero_copy: bool, device: str
) -> None:
    with WeightSync(engine, transport=transport, slot_size=8192) as sync:
        for version in range(3):
            tensors = many_tensors(device, seed=version)

            report = sync.push(
                tensors, version=version, atomic=True, verify="digest", zero_copy=zero_copy
            )

            for found in engine.call("loaded"):
                assert found == hashes_of(tensors)
            assert [one.staged_on for one in report.workers] == ["cuda:0"] * 2
            assert [one.verified_bytes for one in report.workers] == [report.num_bytes] * 2
        assert (report.zero_copy_bytes > 0) == (
            zero_copy and device == "cuda" and transport == "cuda_ipc"
        )


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_a_bit_that_flips_in_a_slot_is_found(
    engine: FakeEngine, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_bucket = Packing._end_bucket

    def flipping(self: Packing, *, region: int | None = None) -> object:
        owned = self._slots._region
        if self.num_batches == 1 and owned is not None and owned.data is not None:
            torch.cuda.synchronize()
            owned.flush(1)
            owned.data[self._slots.layout.slot_size_bytes + 2] ^= 0x20
        return end_bucket(self, region=region)

    tensors = many_tensors()
    with WeightSync(engine, transport=transport, slot_size=8192) as sync:
        sync.push(tensors, version=0)
        with monkeypatch.context() as patch:
            patch.setattr(Packing, "_end_bucket", flipping)
            with pytest.raises(CorruptionError, match="bucket 2 of") as caught:
                sync.push(tensors, version=1, atomic=True, verify="digest")
        assert (caught.value.engine_state, caught.value.transport) == ("unchanged", transport)

        sync.push(tensors, version=2, atomic=True, verify="digest")
        assert all(found == hashes_of(tensors) for found in engine.call("loaded"))
