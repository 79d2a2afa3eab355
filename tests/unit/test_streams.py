"""A source is pulled one tensor at a time, and ends its user's contexts where they began."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.inputs import open_source
from vllm_bucketsync.sources import Source
from vllm_bucketsync.streams import wait_for_trainer

Pairs = Iterator[tuple[str, torch.Tensor]]


def test_a_stream_is_pulled_one_item_at_a_time_on_demand() -> None:
    pulled: list[int] = []

    def produce() -> Pairs:
        for number in range(3):
            pulled.append(number)
            yield f"t{number}", torch.full((1,), float(number))

    source = open_source(produce())
    assert source.declared is None
    assert pulled == []
    for number, (meta, tensor) in enumerate(source.tensors):
        assert pulled == list(range(number + 1))
        assert (meta.name, tensor.item()) == (f"t{number}", number)


def test_a_tensor_of_a_stream_is_let_go_before_the_next_is_pulled() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def produce() -> Pairs:
        for number in range(4):
            assert [ref() for ref in alive] == [None] * number
            # Not kept in this frame either.
            yield f"t{number}", remember(torch.ones(3))

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(tensor))
        return tensor

    count = 0
    for meta, tensor in open_source(produce()).tensors:
        count += meta.num_bytes // tensor.nbytes
        del tensor
    assert count == 4


class Lazy(Mapping[str, torch.Tensor]):
    """Makes each tensor when it is asked for."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __getitem__(self, key: str) -> torch.Tensor:
        assert len(self.alive) == 0
        tensor = torch.full((2,), float(key))
        self.alive.add(tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(["1", "2", "3"])

    def __len__(self) -> int:
        return 3


def test_a_lazy_mapping_has_one_tensor_alive_at_a_time() -> None:
    values = []
    for _, tensor in open_source(Lazy()).tensors:
        values.append(tensor[0].item())
        del tensor
    assert values == [1.0, 2.0, 3.0]


def test_what_the_user_s_generator_raises_passes_unchanged() -> None:
    problem = RuntimeError("out of memory")

    def produce() -> Pairs:
        yield "a", torch.ones(1)
        raise problem

    source = open_source(produce())
    next(source.tensors)
    with pytest.raises(RuntimeError) as caught:
        next(source.tensors)
    assert caught.value is problem


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
def test_closing_a_source_closes_the_user_s_generator_where_it_began(*, begun: bool) -> None:
    events: list[str] = []

    def produce() -> Pairs:
        events.append("enter")
        try:
            yield "a", torch.ones(1)
            yield "b", torch.ones(1)
        finally:
            events.append("exit")

    given = produce()  # held here, so that nothing but the source can close it
    source = open_source(given)
    if begun:
        next(source.tensors)
    source.close()
    source.close()

    assert events == (["enter", "exit"] if begun else [])


def test_a_refused_item_closes_the_user_s_generator_too() -> None:
    closed: list[bool] = []

    def produce() -> Iterator[Any]:
        try:
            yield "a", torch.ones(1, device="meta")
        finally:
            closed.append(True)

    given = produce()  # held here, so that nothing but the source can close it
    with pytest.raises(SourceError, match="'a' is on the meta device"):
        next(open_source(given).tensors)
    assert closed == [True]


def test_a_stream_of_nothing_is_refused_where_it_ends() -> None:
    source = open_source(iter([]))

    with pytest.raises(SourceError, match="ended without a tensor"):
        next(source.tensors)


def waited_for(
    monkeypatch: pytest.MonkeyPatch, devices: set[str], *, is_initialized: bool = True
) -> list[str]:
    """Return the devices that were synchronised before tensors on ``devices`` are read."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append(str(device)))
    wait_for_trainer(frozenset(map(torch.device, devices)))
    return sorted(found)


def test_every_gpu_that_has_tensors_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited_for(monkeypatch, {"cuda:0", "cpu", "cuda:1"}) == ["cuda:0", "cuda:1"]


def test_of_a_stream_the_current_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited_for(monkeypatch, set()) == ["cuda"]


def test_tensors_on_the_host_wait_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited_for(monkeypatch, {"cpu"}) == []


@pytest.mark.parametrize("devices", [set(), {"cpu"}, {"cuda:0"}], ids=str)
def test_a_trainer_that_does_not_use_cuda_does_not_begin_to(
    monkeypatch: pytest.MonkeyPatch, devices: set[str]
) -> None:
    assert waited_for(monkeypatch, devices, is_initialized=False) == []


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([], None),
        (["cpu"], "cpu"),
        (["cpu", "cuda:1"], "cuda:1"),
        (["cuda:2", "cuda:1", "cpu"], "cuda:1"),
        (["cuda", "cuda:1"], "cuda"),
    ],
    ids=str,
)
def test_one_device_stands_for_all_a_gpu_before_the_host(
    devices: list[str], expected: str | None, order: int
) -> None:
    found = frozenset(map(torch.device, devices[::order]))

    device = Source(declared=None, tensors=iter(()), devices=found).device

    assert (None if device is None else str(device)) == expected


def test_a_source_knows_the_devices_of_what_it_has_seen(tmp_path: Path) -> None:
    pair = ("a", torch.ones(1))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")

    for given in ([pair], dict([pair]), Lazy(), nn.Linear(2, 2), tmp_path):
        assert open_source(given).devices == {torch.device("cpu")}
    # Nobody has seen a stream's tensors yet.
    assert open_source(iter([pair])).devices == frozenset()
