"""Merged weights are those of PEFT's own merge, byte for byte, and the model stays unmerged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.bytes_of import bytes_of
from torch import nn

from vllm_bucketsync.errors import AdapterConfigError, SourceError
from vllm_bucketsync.inputs import open_source
from vllm_bucketsync.merging import open_merged


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    """What a decoder has: an embedding, linear layers, a norm, experts, buffers, a head."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.q_proj = nn.Linear(4, 6)
        self.conv = nn.Conv1d(4, 4, 2)
        self.norm = nn.LayerNorm(4)
        self.experts = Experts()
        self.register_buffer("scale", torch.randn(2))
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.head = nn.Linear(4, 10, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.config = {"tie_word_embeddings": is_tied}


def trained(*, is_tied: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    torch.manual_seed(0)
    model = Model(is_tied=is_tied).to(dtype)
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["embed", "q_proj", "conv"]} | config
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))


def sent(source: Any) -> dict[str, bytes]:
    return {meta.name: bytes_of(tensor) for meta, tensor in source.tensors}


CASES: dict[str, Callable[[], Any]] = {
    "linear, embedding and convolution": trained,
    "in bfloat16": lambda: trained(dtype=torch.bfloat16),
    "scaled by the root of the rank": lambda: trained(use_rslora=True),
    "ranks by pattern": lambda: trained(rank_pattern={"q_proj": 1}, alpha_pattern={"embed": 3}),
    "with biases of its own": lambda: trained(target_modules=["q_proj"], lora_bias=True),
    "with a module trained whole": lambda: trained(modules_to_save=["head", "norm"]),
    "experts in one parameter": lambda: trained(
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    ),
    "a tied embedding": lambda: trained(is_tied=True),
    "a tied head": lambda: trained(is_tied=True, target_modules=["head"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_what_is_sent_is_what_peft_s_merge_leaves(case: str) -> None:
    model = CASES[case]()
    before = {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}

    found = sent(open_merged(model))

    assert {name: bytes_of(tensor) for name, tensor in model.state_dict().items()} == before
    assert not any(getattr(module, "merged", False) for module in model.modules())
    expected = sent(open_source(copy.deepcopy(model).merge_and_unload()))
    assert found == expected
    assert found != sent(open_source(model.unload()))


def test_several_adapters_are_added_and_those_that_are_merged_or_off_are_not() -> None:
    model = trained()
    model.add_adapter("more", LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "more"])
    both = sent(open_merged(model))
    assert both == sent(open_source(copy.deepcopy(model).merge_and_unload()))

    merged = copy.deepcopy(model)
    merged.merge_adapter()
    assert sent(open_merged(merged)) == both
    with model.disable_adapter():
        assert sent(open_merged(model)) == sent(open_source(copy.deepcopy(model).unload()))


def test_a_sum_is_made_when_it_is_asked_for_and_not_before() -> None:
    model = trained()
    base = model.base_model.model.q_proj.base_layer.weight
    source = open_merged(model)
    assert source.declared is not None
    assert len(source.declared) == 11

    found = None
    for meta, tensor in source.tensors:
        if meta.name == "embed.weight":
            with torch.no_grad():
                model.base_model.model.q_proj.lora_B.default.weight.zero_()
        if meta.name == "q_proj.weight":
            found = tensor.clone()

    assert found is not None
    assert torch.equal(found, base)


CHANGES: dict[str, Callable[[Any], object]] = {
    "merged": lambda model: model.merge_adapter(),
    "switched off": lambda model: model.base_model.disable_adapter_layers(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_merged_otherwise_under_the_push_is_refused(change: str) -> None:
    model = trained()
    tensors = open_merged(model).tensors
    next(tensors)

    CHANGES[change](model)

    with pytest.raises(SourceError, match="wait for the push to return") as caught:
        list(tensors)
    assert caught.value.name == "base_model.model.embed.weight"


def test_what_is_merged_in_a_context_is_merged_for_as_long_as_the_source_runs() -> None:
    model = trained(target_modules=["q_proj"])
    expected = sent(open_source(copy.deepcopy(model).merge_and_unload()))["q_proj.weight"]
    layer = model.base_model.model.q_proj

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        model.merge_adapter()
        try:
            yield "q_proj.weight", layer.base_layer.weight
        finally:
            model.unmerge_adapter()

    # Whatever the source enters, it has entered while its tensors are read, and no longer.
    source = open_source(merged())
    assert not layer.merged
    assert sent(source)["q_proj.weight"] == expected
    assert not layer.merged


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_parameter_that_was_replaced_since_is_merged_all_the_same(is_tied: bool) -> None:
    # Of tied tensors the first name is sent, and the second one has the adapter.
    model = trained(is_tied=is_tied, target_modules=["head"])
    inner = model.base_model.model
    new = nn.Parameter(torch.randn(10, 4))
    source = open_merged(model)
    if is_tied:
        inner.embed.weight = new
    inner.head.base_layer.weight = new

    found = sent(source)

    name = "embed.weight" if is_tied else "head.weight"
    assert found[name] == bytes_of(new + inner.head.get_delta_weight("default"))


def test_dora_is_refused_with_what_to_do() -> None:
    model = trained(target_modules=["q_proj"], use_dora=True)

    with pytest.raises(AdapterConfigError, match="merge_and_unload") as caught:
        open_merged(model)
    assert (caught.value.setting, caught.value.adapter) == ("use_dora", "default")


def test_what_is_no_peft_model_is_refused() -> None:
    with pytest.raises(SourceError, match="leave merge= out"):
        open_merged(nn.Linear(2, 2))
