"""A source that is what it was last time is recognised, and any other one is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.inputs import open_source
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.recall import Recall


def upper(name: str) -> str:
    return name.upper()


def manifest_of(source: object, recall: Recall, **options: Any) -> Manifest:
    declared = open_source(source, recall=recall, **options).declared
    assert declared is not None
    return declared


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))


SOURCES: dict[str, Callable[[], Any]] = {
    "module": Tied,
    "dict": lambda: {"a": torch.ones(2), "b": torch.ones(3)},
    "list": lambda: [("a", torch.ones(2)), ("b", torch.ones(3))],
}


@pytest.mark.parametrize("form", SOURCES)
def test_the_same_source_has_the_very_same_manifest(form: str) -> None:
    recall = Recall()

    manifests = [manifest_of(SOURCES[form](), recall, rename=upper) for _ in range(3)]

    assert manifests[0] is manifests[1] is manifests[2]
    assert manifests[0].digest == manifest_of(SOURCES[form](), Recall(), rename=upper).digest


def _other_name(tensors: dict[str, Any]) -> None:
    tensors["c"] = tensors.pop("b")


def _other_shape(tensors: dict[str, Any]) -> None:
    tensors["a"] = torch.ones(2, 1)


def _other_dtype(tensors: dict[str, Any]) -> None:
    tensors["a"] = torch.ones(2, dtype=torch.int32)


def _other_order(tensors: dict[str, Any]) -> None:
    tensors["a"] = tensors.pop("a")


def _one_more(tensors: dict[str, Any]) -> None:
    tensors["c"] = torch.ones(1)


@pytest.mark.parametrize(
    "change", [_other_name, _other_shape, _other_dtype, _other_order, _one_more]
)
def test_a_source_that_differs_is_described_anew(change: Callable[[Any], None]) -> None:
    recall, tensors = Recall(), SOURCES["dict"]()
    before = manifest_of(tensors, recall)

    change(tensors)
    after = manifest_of(tensors, recall)

    assert after is not before
    assert after.digest == manifest_of(tensors, Recall()).digest != before.digest


def test_another_rename_is_another_source() -> None:
    recall, tensors = Recall(), SOURCES["dict"]()

    plain = manifest_of(tensors, recall)
    renamed = manifest_of(tensors, recall, rename=upper)

    assert [meta.name for meta in plain.metas] == ["a", "b"]
    assert [meta.name for meta in renamed.metas] == ["A", "B"]


def test_a_tensor_that_is_tied_no_more_is_sent() -> None:
    recall, module = Recall(), Tied()
    assert len(manifest_of(module, recall)) == 3

    module.second.weight = nn.Parameter(torch.zeros(3, 3))

    assert len(manifest_of(module, recall)) == 4


@pytest.mark.parametrize("is_data", [False, True])
def test_a_tensor_that_is_tied_again_is_sent_once(is_data: bool) -> None:
    recall, module = Recall(), Tied()
    module.second.weight = nn.Parameter(torch.zeros(3, 3))
    assert len(manifest_of(module, recall)) == 4

    if is_data:
        module.second.weight.data = module.first.weight.data
    else:
        module.second.weight = module.first.weight

    names = [meta.name for meta in manifest_of(module, recall).metas]
    assert names == [meta.name for meta in manifest_of(module, Recall()).metas]
    assert len(names) == 3


def test_a_tied_tensor_that_became_sparse_is_refused_by_name() -> None:
    recall, module = Recall(), nn.Module()
    module.register_buffer("one", torch.ones(2, 2))
    module.register_buffer("other", module.get_buffer("one"))
    manifest_of(module, recall)

    module.one = torch.ones(2, 2).to_sparse()

    with pytest.raises(SourceError, match="'one' has the layout sparse_coo"):
        manifest_of(module, recall)


def test_a_parameter_that_became_a_buffer_is_described_anew() -> None:
    recall, module = Recall(), Tied()
    manifest_of(module, recall)

    bias = module.first.bias.detach()
    del module.first.bias
    module.first.register_buffer("bias", bias)

    assert [meta.is_buffer for meta in manifest_of(module, recall).metas].count(True) == 2


UNFIT: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.ones(2).to_sparse(),
    "no tensor": lambda: [1.0, 1.0],
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_became_unfit_is_refused_as_at_first(what: str) -> None:
    recall, tensors = Recall(), SOURCES["dict"]()
    manifest_of(tensors, recall)

    tensors["a"] = UNFIT[what]()

    with pytest.raises(SourceError, match="'a' "):
        open_source(tensors, recall=recall)


def test_memory_that_was_freed_is_refused() -> None:
    recall, tensors = Recall(), SOURCES["dict"]()
    source = open_source(tensors, recall=recall)
    assert source.ready is not None
    tensors["a"].untyped_storage().resize_(0)

    with pytest.raises(SourceError, match="its storage was freed"):
        source.ready(0, 2)
    with pytest.raises(SourceError, match="its storage was freed"):
        open_source(tensors, recall=recall)


def test_ready_tensors_are_looked_up_when_they_are_asked_for() -> None:
    module = Tied()
    source = open_source(module)
    assert source.ready is not None
    assert source.declared is not None
    module.first.bias = nn.Parameter(torch.full((3,), 7.0))

    names = [meta.name for meta in source.declared.metas]
    found = dict(zip(names, source.ready(0, 3), strict=True))

    assert found["first.bias"].tolist() == [7, 7, 7]


def test_tensors_count_as_seen_until_one_is_replaced_under_the_push() -> None:
    recall, tensors = Recall(), SOURCES["dict"]()
    open_source(tensors, recall=recall)
    source = open_source(tensors, recall=recall)
    assert source.ready is not None
    assert source.seen is not None
    before = source.seen()
    source.ready(0, 2)
    assert source.seen() is before

    tensors["b"] = tensors["b"].clone()
    source.ready(0, 2)

    assert source.seen() is not before


def test_only_sources_whose_tensors_exist_at_once_are_ready() -> None:
    pairs = SOURCES["list"]()

    assert open_source(pairs).ready is not None
    assert open_source(iter(pairs)).ready is None


def test_no_tensor_is_kept() -> None:
    recall, tensors = Recall(), SOURCES["dict"]()
    open_source(tensors, recall=recall).close()
    kept = weakref.ref(tensors["a"])

    del tensors
    gc.collect()

    assert kept() is None
    assert recall.described is not None
