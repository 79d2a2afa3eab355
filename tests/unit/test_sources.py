"""Whatever a user gives becomes tensors in order, one at a time, complete and unchanged."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.tensor_samples import expected_bytes
from torch import nn

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.inputs import open_source
from vllm_bucketsync.sources import Source


class Block(nn.Module):
    """Has parameters, persistent and other buffers, and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.router = nn.Linear(2, 2, bias=False)
        self.router.register_buffer("correction", torch.arange(2.0))
        self.router.register_buffer("scratch", torch.zeros(9), persistent=False)
        self.router.register_buffer("absent", None)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_parameter("absent", None)


class Tied(nn.Module):
    """A head that is the embedding, and a view that is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.again = nn.Parameter(self.embed.weight.detach().view(4, 2))
        self.other = nn.Parameter(torch.zeros(4, 2))
        self.shared = self.head


def names_of(source: Source) -> list[str]:
    return [meta.name for meta, _ in source.tensors]


def declared_names(source: Source) -> list[str]:
    assert source.declared is not None
    return [meta.name for meta in source.declared.metas]


def test_a_module_is_its_parameters_and_persistent_buffers_module_by_module() -> None:
    block = Block()

    source = open_source(block)
    sent = list(source.tensors)

    assert declared_names(source) == [
        "scale", "first.weight", "first.bias", "router.weight", "router.correction",
    ]  # fmt: skip
    assert source.declared is not None
    assert [meta for meta, _ in sent] == list(source.declared.metas)
    assert [meta.name for meta, _ in sent if meta.is_buffer] == ["router.correction"]
    state = block.state_dict()
    assert {meta.name for meta, _ in sent} == set(state)
    for meta, tensor in sent:
        assert expected_bytes(tensor) == expected_bytes(state[meta.name])


def test_tied_tensors_of_a_module_are_sent_once_under_the_first_name() -> None:
    assert declared_names(open_source(Tied())) == ["again", "other"]


def test_tied_tensors_of_a_state_dict_are_sent_as_given() -> None:
    model = Tied()

    source = open_source(model.state_dict())

    assert names_of(source) == list(model.state_dict())
    assert declared_names(source) == list(model.state_dict())


def test_wrapped_modules_give_the_names_of_what_they_wrap() -> None:
    block = Block()
    compiled = torch.compile(block)
    nested = nn.Module()
    nested.module = torch.compile(block.first)  # type: ignore[assignment]

    assert declared_names(open_source(compiled)) == declared_names(open_source(block))
    assert declared_names(open_source(nested)) == ["weight", "bias"]


def test_rename_is_applied_to_every_form(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    module = nn.Module()
    module.a = nn.Parameter(torch.ones(1))
    for given in (module, tensors, list(tensors.items()), iter(tensors.items()), tmp_path):
        source = open_source(given, rename=lambda name: f"model.{name}")
        assert names_of(source) == ["model.a"]


@pytest.mark.parametrize("form", [dict, lambda d: d.items(), lambda d: list(d.items()), tuple])
def test_pairs_that_are_known_beforehand_are_declared(form: Any) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(0, 3)}
    given = form(tensors.items()) if form is tuple else form(tensors)

    source = open_source(given)

    assert source.declared is not None
    assert [(m.name, m.shape, m.num_bytes) for m in source.declared.metas] == [
        ("b", (2,), 8),
        ("a", (0, 3), 0),
    ]
    assert [(meta.name, tensor.shape) for meta, tensor in source.tensors] == [
        ("b", (2,)),
        ("a", (0, 3)),
    ]


def test_a_checkpoint_is_declared_and_read(tmp_path: Path) -> None:
    tensors = {"l.10.w": torch.ones(2), "l.2.w": torch.full((2, 2), 3.0, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")

    for given in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        source = open_source(given)
        assert declared_names(source) == ["l.2.w", "l.10.w"]
        for meta, tensor in source.tensors:
            assert str(tensor.dtype) == f"torch.{meta.dtype}"
            assert expected_bytes(tensor) == expected_bytes(tensors[meta.name])


def test_a_module_whose_parameter_was_replaced_sends_the_new_one() -> None:
    block = Block()
    source = open_source(block)
    block.scale = nn.Parameter(torch.tensor(5.0))

    assert next(source.tensors)[1].item() == 5.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: setattr(b, "scale", nn.Parameter(torch.ones(2))), r"now float32 \[2\]"),
        (lambda b: b.half(), r"float32 \[\] and is now float16 \[\]"),
        (lambda b: delattr(b, "scale"), "and is gone"),
        (lambda b: b.to("meta"), "on the meta device"),
    ],
    ids=["shape", "dtype", "gone", "meta"],
)
def test_a_module_that_changes_under_the_push_is_refused(change: Any, text: str) -> None:
    block = Block()
    source = open_source(block)
    change(block)

    with pytest.raises(SourceError, match=rf"'scale' .*{text}"):
        next(source.tensors)


def test_a_mapping_that_loses_a_name_under_the_push_is_refused() -> None:
    tensors = {"a": torch.ones(1), "b": torch.ones(1)}
    source = open_source(tensors)
    next(source.tensors)
    del tensors["b"]

    with pytest.raises(SourceError, match=r"'b' was declared as .* and is gone"):
        next(source.tensors)


@pytest.mark.parametrize("given", [{}, [], (), nn.Module(), nn.ReLU()], ids=str)
def test_a_declared_source_of_nothing_is_refused_at_once(given: object) -> None:
    with pytest.raises(SourceError, match="holds no tensors; nothing was sent"):
        open_source(given)


@pytest.mark.parametrize(
    "given",
    [None, 3, torch.ones(2), np.ones(2), b"bytes", object(), nn.Linear],
    ids=["none", "int", "tensor", "numpy", "bytes", "object", "class"],
)
def test_what_is_no_source_is_refused_with_what_would_be(given: object) -> None:
    with pytest.raises(SourceError, match="was given; expected a module, a state_dict, "):
        open_source(given)


@pytest.mark.parametrize("item", [torch.ones(2), "ab", ("a",), ("a", 1, 2), {"a": 1, "b": 2}, None])
def test_items_that_are_no_pairs_are_refused_by_their_position(item: object) -> None:
    good = ("first", torch.ones(1))
    with pytest.raises(SourceError, match=r"item 1 is a .*; expected \(name, tensor\)"):
        open_source([good, item])
    with pytest.raises(SourceError, match="item 1 is a "):
        list(open_source(iter([good, item])).tensors)


@pytest.mark.parametrize("form", [list, iter], ids=["declared", "streamed"])
def test_names_are_checked_in_every_source(form: Any) -> None:
    one = torch.ones(1)
    for pairs, text in (
        ([("a", one), ("a", one)], "'a' was given twice"),
        ([("module.a", one), ("a", one)], "both become 'a'"),
        ([("", one)], "empty"),
        ([(1, one)], "expected a str"),
        ([("a", np.ones(1))], "from_numpy"),
    ):
        with pytest.raises(SourceError, match=text):
            list(open_source(form(pairs)).tensors)


def test_opening_and_sending_keep_nothing_alive() -> None:
    block = Block()
    ref = weakref.ref(block)
    source = open_source(block)
    list(source.tensors)

    del block, source
    gc.collect()

    assert ref() is None
