"""A source is pulled one tensor at a time, and ends its user's contexts where they began."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.sources import open_source

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
