"""Proves that tensors which look otherwise are noticed, at the first question and at later ones.

From the second question on, torch's own check answers for all but the addresses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch

from vllm_bucketsync.looks import Looks

Change = Callable[[torch.Tensor], None]


def moved(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def turned(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def shortened(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data[:2]


def reshaped(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(-1)


def read_as_integers(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32)


def negated(tensor: torch.Tensor) -> None:
    tensor.data = torch._neg_view(tensor.data)


CHANGES: list[Change] = [moved, turned, shortened, reshaped, read_as_integers, negated]


def made() -> list[torch.Tensor]:
    return [torch.arange(12.0).reshape(4, 3).clone() for _ in range(3)]


@pytest.mark.parametrize("num_questions", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed_however_often_it_was_asked_before(
    change: Change, num_questions: int
) -> None:
    tensors = made()
    looks = Looks(tensors)
    for _ in range(num_questions):
        assert looks.are_those_of(tensors)
        assert looks.are_those_of(tensors[1:], first=1)

    change(tensors[1])

    assert not looks.are_those_of(tensors)
    assert not looks.are_those_of(tensors[1:], first=1)
    assert looks.are_those_of(tensors[2:], first=2)


def test_a_tensor_with_two_names_is_known_at_a_glance_and_its_changes_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = made()
    tied = [first, second, first, third]
    looks = Looks(tied)
    assert looks.are_those_of(tied)

    with monkeypatch.context() as patch:
        # Nobody asks them one by one any more.
        patch.setattr("vllm_bucketsync.looks._LOOKS", ())
        assert looks.are_those_of(tied)
    # At the same address, but of another shape.
    other = first.detach().view(3, 4)
    assert not looks.are_those_of([first, second, other, third])
    assert not looks.are_those_of([other, second, other, third])
    assert not looks.are_those_of([first, second, second, third])
    assert looks.are_those_of(tied)


def test_what_gradients_a_tensor_wants_is_no_look() -> None:
    tensors = made()
    looks = Looks(tensors)
    assert looks.are_those_of(tensors)

    tensors[1].requires_grad_()

    assert looks.are_those_of(tensors)


def test_tensors_are_not_kept_alive() -> None:
    tensors = made()
    looks = Looks(tensors)
    assert looks.are_those_of(tensors)
    assert looks.are_those_of(tensors)
    seen = [ref(tensor) for tensor in tensors]

    del tensors
    gc.collect()

    assert [one() for one in seen] == [None] * 3
    assert len(looks) == 3


def test_a_torch_without_such_a_check_is_asked_tensor_by_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    tensors = made()
    looks = Looks(tensors)
    assert looks.are_those_of(tensors)
    assert looks.are_those_of(tensors)

    turned(tensors[0])

    assert not looks.are_those_of(tensors)
