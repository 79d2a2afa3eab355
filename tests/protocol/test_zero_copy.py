"""Zero-copy: which tensors are read where they lie, and that they are the right ones.

There is no GPU in it (``support/blocks.py``); that CUDA does what is asked of it is
tested in ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

import pytest
import torch
from support.blocks import Device, device
from support.bytes_of import bytes_of
from support.tensor_samples import bytes_tensor
from support.thread_engine import ThreadEngine

from vllm_bucketsync.errors import EngineUnreachableError
from vllm_bucketsync.sync import WeightSync

__all__ = ["device"]


@pytest.fixture
def engine() -> Iterator[ThreadEngine]:
    made = ThreadEngine(num_workers=2)
    yield made
    made.close()


def model(*, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of two allocations, with parts of one that is shared."""
    flat = bytes_tensor(4000, seed=seed)
    return {
        "a": flat[256:512].view(torch.float32),
        "b": bytes_tensor(900, seed=seed + 1),
        "c": flat[512:3000].view(torch.bfloat16),
        "d": flat[3000:3008].view(torch.float64)[0],
    }


def assert_arrived(engine: ThreadEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    for sink in engine.sinks[-len(engine.workers) :]:
        assert list(sink.metas) == list(tensors)
        arrived = {name: bytes(tensor.numpy()) for name, tensor in sink.tensors.items()}
        assert arrived == {name: bytes_of(tensor) for name, tensor in tensors.items()}


def test_tensors_are_read_where_they_lie_and_nothing_else_is_made(
    device: Device, engine: ThreadEngine
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        report = sync.push(tensors, version=1, zero_copy=True)
        assert sync._slots._region is None

    assert_arrived(engine, tensors)
    assert (report.transport, report.num_buckets) == ("cuda_ipc", 1)
    assert report.zero_copy_bytes == report.num_bytes == sum(t.nbytes for t in tensors.values())
    assert "where they lie" in report.transport_reason
    where = {address for sink in engine.sinks for address in sink.addresses}
    assert where == {t.data_ptr() for t in tensors.values()}


def test_handles_are_opened_once_taken_again_each_time_and_values_are_new(
    device: Device, engine: ThreadEngine
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        sync.push(tensors, version=1, zero_copy=True)
        num_opens, num_exports = device.num_opens, device.num_exports
        for version in range(2, 6):
            for tensor in tensors.values():
                tensor.view(-1).view(torch.uint8).add_(version)
            sync.push(tensors, version=version, zero_copy=True)
            assert_arrived(engine, tensors)
        assert device.num_opens == num_opens == 2 * 2
        assert device.num_exports == num_exports + 4 * 2
        sync.release()
        sync.push(tensors, version=6, zero_copy=True)
        assert device.num_opens == 2 * num_opens
        assert_arrived(engine, tensors)


def test_what_cannot_be_read_in_place_goes_through_slots_of_the_same_update(
    device: Device, engine: ThreadEngine
) -> None:
    hidden = bytes_tensor(3000, seed=9)
    tensors = model() | {
        "e": torch.arange(60.0).view(6, 10)[:, 2:5],
        "f": torch.empty(0, 3),
        "g": hidden,
        "h": bytes_tensor(77, seed=3),
    }
    device.know(list(tensors.values()))
    device.hidden.add(hidden.data_ptr())
    with WeightSync(engine, slot_size=1024) as sync:
        for version in range(3):
            report = sync.push(tensors, version=version, zero_copy=True)
            assert_arrived(engine, tensors)

    through_slots = sum(tensors[name].nbytes for name in "efg")
    assert report.zero_copy_bytes == report.num_bytes - through_slots


def test_other_memory_under_the_same_address_is_opened_anew(
    device: Device, engine: ThreadEngine
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        sync.push(tensors, version=1, zero_copy=True)
        num_opens = device.num_opens
        device.generation[tensors["b"].data_ptr()] = 1
        sync.push(tensors, version=2, zero_copy=True)
    assert device.num_opens == 2 * num_opens
    assert_arrived(engine, tensors)


def test_a_tensor_that_was_replaced_is_read_where_it_is_now(
    device: Device, engine: ThreadEngine
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        sync.push(tensors, version=1, zero_copy=True)
        tensors["b"] = bytes_tensor(900, seed=77)
        tensors["c"].data = tensors["c"].clone()
        device.know(list(tensors.values()))
        sync.push(tensors, version=2, zero_copy=True)
        assert_arrived(engine, tensors)
        other = model(seed=5)
        device.know(list(other.values()))
        sync.push(other, version=3, zero_copy=True)
        assert_arrived(engine, other)
        sync.push(other, version=4)
        assert_arrived(engine, other)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_workers_that_cannot_open_them_get_slots_in_the_same_update(
    device: Device, engine: ThreadEngine, number: int
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    device.fails_at = number
    with WeightSync(engine) as sync:
        for version in range(2):
            report = sync.push(tensors, version=version, zero_copy=True)
            assert_arrived(engine, tensors)
            assert report.transport == "cuda_ipc"
            assert report.zero_copy_bytes == 0
            assert "zero-copy cuda_ipc failed (rank" in report.transport_reason
    assert device.num_given_up == (number - 1) % 2


def test_a_stream_is_copied_and_says_nothing_of_zero_copy(
    device: Device, engine: ThreadEngine
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        report = sync.push(iter(tensors.items()), version=1, zero_copy=True)
    assert_arrived(engine, tensors)
    assert report.zero_copy_bytes == 0


def test_more_tensors_than_one_message_names_are_read_in_place(
    device: Device, engine: ThreadEngine
) -> None:
    flat = bytes_tensor(9000 * 16)
    tensors = {f"t{i}": flat[i * 16 : i * 16 + 16] for i in range(9000)}
    device.know([flat])
    with WeightSync(engine) as sync:
        for version in range(2):
            report = sync.push(tensors, version=version, zero_copy=True)
            assert_arrived(engine, tensors)
    assert report.num_buckets == 2
    assert report.zero_copy_bytes == flat.nbytes


def test_closing_lets_workers_let_go_at_once(device: Device, engine: ThreadEngine) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        sync.push(tensors, version=1, zero_copy=True)
        assert all(worker.memory.regions for worker in engine.workers)
    assert not any(worker.memory.regions for worker in engine.workers)
    assert not any(worker.memory.buckets for worker in engine.workers)


def unreachable(request: object) -> NoReturn:
    raise RuntimeError("nobody is there")


def test_what_was_opened_but_not_placed_between_two_pushes_is_not_taken_for_placed(
    device: Device, engine: ThreadEngine
) -> None:
    first, second = model(), model(seed=40)
    device.know([*first.values(), *second.values()])
    with WeightSync(engine) as sync:
        sync.push(first, version=1, zero_copy=True)
        sync.push(second, version=2, dry_run=True, zero_copy=True)
        sync.push(second, version=3, zero_copy=True)
        assert_arrived(engine, second)


def test_a_tensor_that_was_replaced_before_a_push_that_failed_is_read_where_it_is(
    device: Device, engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        sync.push(tensors, version=1, zero_copy=True)
        tensors["b"].data = bytes_tensor(900, seed=50)
        device.know(list(tensors.values()))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "update", unreachable)
            with pytest.raises(EngineUnreachableError):
                sync.push(tensors, version=2, zero_copy=True)
        sync.push(tensors, version=3, zero_copy=True)
        assert_arrived(engine, tensors)


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_with_and_without_zero_copy_by_turns_every_tensor_has_its_own_place(
    device: Device, engine: ThreadEngine, order: tuple[bool, ...]
) -> None:
    hidden = bytes_tensor(300, seed=9)
    # First, so that the first bucket is in a slot both times, of other tensors.
    tensors = {"g": hidden} | model() | {"h": bytes_tensor(77, seed=3)}
    device.know(list(tensors.values()))
    device.hidden.add(hidden.data_ptr())
    with WeightSync(engine, slot_size="64KiB") as sync:
        for version, zero_copy in enumerate(order * 2):
            sync.push(tensors, version=version, zero_copy=zero_copy)
            assert_arrived(engine, tensors)


def test_a_state_dict_that_is_made_anew_for_each_push_is_opened_once(
    device: Device, engine: ThreadEngine
) -> None:
    module = torch.nn.Linear(40, 30)
    device.know([*module.parameters()])
    with WeightSync(engine) as sync:
        for version in range(4):
            with torch.no_grad():
                module.weight.add_(1)
            sync.push(module.state_dict(), version=version, zero_copy=True)
            assert_arrived(engine, module.state_dict())
    assert device.num_opens == 2 * 2


def test_workers_that_are_new_or_have_let_go_are_shown_the_tensors_again(
    device: Device, engine: ThreadEngine
) -> None:
    tensors = model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        sync.push(tensors, version=1, zero_copy=True)
        for worker in engine.workers:
            worker.memory.release()
            worker.instance_id += "again"
        report = sync.push(tensors, version=2, zero_copy=True)
        assert report.zero_copy_bytes == report.num_bytes
        assert_arrived(engine, tensors)


def test_a_source_without_exportable_tensors_is_no_reason_against_the_next_one(
    device: Device, engine: ThreadEngine
) -> None:
    other, tensors = {"x": bytes_tensor(40, seed=1)}, model()
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        first = sync.push(other, version=1, zero_copy=True)
        assert (first.transport, first.zero_copy_bytes) == ("cuda_ipc", 0)
        assert "no tensor is in memory that can be exported" in first.transport_reason
        report = sync.push(tensors, version=2, zero_copy=True)
        assert report.zero_copy_bytes == report.num_bytes
        assert sync.push(tensors, version=3, dry_run=True).zero_copy_bytes == 0


def test_the_slots_of_what_is_left_are_kept_between_pushes(
    device: Device, engine: ThreadEngine
) -> None:
    hidden = bytes_tensor(5000, seed=9)
    tensors = model() | {"g": hidden}
    device.know(list(tensors.values()))
    device.hidden.add(hidden.data_ptr())
    with WeightSync(engine) as sync:
        handles = set()
        for version in range(4):
            sync.push(tensors, version=version, zero_copy=True)
            assert_arrived(engine, tensors)
            handles.add(sync._slots.handles)
    assert len(handles) == 1


def test_tensors_without_elements_need_no_slot(device: Device, engine: ThreadEngine) -> None:
    tensors = model() | {"e": torch.empty(0, 3)}
    device.know(list(tensors.values()))
    with WeightSync(engine) as sync:
        report = sync.push(tensors, version=1, zero_copy=True)
        assert sync._slots._region is None
    assert report.zero_copy_bytes == report.num_bytes
    assert_arrived(engine, tensors)
