"""Warm pushes of tensors that exist all at once: through kept slots, bucket by bucket."""

from __future__ import annotations

import pytest
import torch
from support.bytes_of import bytes_of
from support.thread_engine import ThreadEngine

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.sync import WeightSync


@pytest.mark.parametrize("slot_size", [512, 4096])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_warm_pushes_through_few_slots_bring_the_new_bytes(slot_size: int, num_slots: int) -> None:
    engine = ThreadEngine(num_workers=2)
    with WeightSync(engine, slot_size=slot_size, num_slots=num_slots) as sync:
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            tensors = {
                f"t{size}": torch.randn(size, 3, generator=generator).to(dtype)
                for size, dtype in [(1, torch.float64), (99, torch.float32), (300, torch.bfloat16)]
            }
            tensors["turned"] = torch.randn(30, 7, generator=generator).t()
            tensors["none"] = torch.zeros(0)
            report = sync.push(tensors, version=step)

            for sink in engine.sinks[-2:]:
                assert {n: bytes_of(t) for n, t in sink.tensors.items()} == {
                    n: bytes_of(t) for n, t in tensors.items()
                }
            assert report.num_tensors == len(tensors)
            assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    engine.close()


def test_a_source_that_changes_while_it_is_pushed_is_refused() -> None:
    engine = ThreadEngine()
    tensors = {f"t{number}": torch.ones(100) for number in range(9)}

    def change(num_bytes: int, total: int | None) -> None:
        if num_bytes:
            tensors["t8"] = torch.ones(3)

    with WeightSync(engine, slot_size=512) as sync:
        with pytest.raises(SourceError, match=r"'t8' was declared as float32 \[100\] and is now"):
            sync.push(tensors, version="changing", progress=change)
        tensors["t8"] = torch.zeros(100)
        sync.push(tensors, version="still")
    assert engine.finished == ["still"]
    engine.close()


class One(torch.Tensor):
    pass


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("verify", ["none", "digest"])
def test_strided_tensors_of_two_subclasses_go_through_one_slot(verify: str) -> None:
    engine = ThreadEngine()
    tensors = {
        "one": torch.randn(30, 7).t().as_subclass(One),
        "other": torch.randn(70, 5).t().as_subclass(Other),
        "plain": torch.randn(4),
    }
    with WeightSync(engine, slot_size=4096) as sync:
        sync.push(tensors, version=1, verify=verify)
        sent = {name: tensor.as_subclass(torch.Tensor) for name, tensor in tensors.items()}
        assert {n: bytes_of(t) for n, t in engine.sinks[-1].tensors.items()} == {
            n: bytes_of(t) for n, t in sent.items()
        }
    engine.close()


def test_zeros_that_are_negated_keep_their_sign_on_every_way() -> None:
    engine = ThreadEngine()
    zeros = torch.complex(torch.tensor([1.0, 0.0, -0.0] * 4), torch.tensor([0.0, -0.0, 3.0] * 4))
    turned = torch._neg_view(zeros.reshape(3, 4).t())
    tensors = {"negated": turned, "both": torch._neg_view(turned.conj()), "plain": zeros}
    with WeightSync(engine, slot_size=4096) as sync:
        # Bytes of a digest are made in one way, and those of a slot in another.
        for verify in ("none", "digest"):
            sync.push(tensors, version=1, verify=verify)
            found = {name: bytes_of(data) for name, data in engine.sinks[-1].tensors.items()}
            resolved = {n: t.resolve_conj().resolve_neg() for n, t in tensors.items()}
            assert found == {n: bytes_of(t) for n, t in resolved.items()}
    engine.close()
