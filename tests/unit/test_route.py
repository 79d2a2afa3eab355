"""Proves that what workers read where it lies is what the source holds when it is placed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from vllm_bucketsync.inputs import open_source
from vllm_bucketsync.recall import Recall
from vllm_bucketsync.route import Route
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.transport.registry import Choice, Wish


class WatchedSlots:
    """Takes note of what was to be placed, and whether it counted as seen."""

    def __init__(self) -> None:
        self.placed: list[tuple[list[torch.Tensor], object]] = []

    def place(self, manifest: Any, tensors: Any, *, seen: object, hellos: Any) -> int:
        self.placed.append((tensors, seen))
        return 0

    def prepare(self, kind: str, **options: Any) -> None:
        pass


@pytest.mark.parametrize("is_just_opened", [False, True])
def test_a_tensor_that_was_replaced_since_the_source_was_opened_is_placed_anew(
    is_just_opened: bool,
) -> None:
    slots, recall = WatchedSlots(), Recall()
    wish = Wish(transport="auto", device=torch.device("cpu"), is_zero_copy=True)
    choice = Choice(kind="cuda_ipc", reason="", is_zero_copy=True)
    route = Route(wish=wish, slots=cast(Slots, slots), choices=[choice])
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    for _ in range(2):
        source = open_source(tensors, recall=recall)
        route.prepare([], source=source, is_just_opened=is_just_opened)

    source = open_source(tensors, recall=recall)
    tensors["b"] = torch.zeros(3)
    route.prepare([], source=source, is_just_opened=False)

    (_, first), (_, second), (found, third) = slots.placed
    assert first is second
    assert third is not second
    assert found[1] is tensors["b"]
