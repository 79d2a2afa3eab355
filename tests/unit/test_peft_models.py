"""Whatever holds an adapter gives its tensors under the names of PEFT's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from support.bytes_of import bytes_of
from torch import nn

from vllm_bucketsync.errors import AdapterConfigError, ConfigError, SourceError
from vllm_bucketsync.messages import MAX_CONFIG_CHARS
from vllm_bucketsync.peft_models import active_adapter, config_text, open_adapter, peft_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.q_proj = nn.Linear(4, 6)
        self.o_proj = nn.Linear(6, 4)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])


def model(**config: Any) -> Any:
    torch.manual_seed(0)
    settings = {"r": 2, "target_modules": ["embed", "q_proj", "o_proj"]} | config
    return get_peft_model(Tiny(), LoraConfig(init_lora_weights=False, **settings))


def sent(given: object, **settings: Any) -> dict[str, bytes]:
    source, _ = open_adapter(given, **settings)
    return {meta.name: bytes_of(tensor) for meta, tensor in source.tensors}


def saved_by_peft(given: Any, name: str = "default") -> dict[str, bytes]:
    tensors = get_peft_model_state_dict(given, adapter_name=name, save_embedding_layers=False)
    return {key.removeprefix("base_model.model."): bytes_of(one) for key, one in tensors.items()}


def test_a_model_gives_what_peft_saves_of_it() -> None:
    given = model()

    assert sent(given) == saved_by_peft(given)
    assert len(sent(given)) == 12


def test_one_adapter_of_several_is_sent_the_active_one_where_none_is_named() -> None:
    given = model()
    given.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))

    assert sent(given) == saved_by_peft(given)
    assert sent(given, adapter_name="other") == saved_by_peft(given, "other")
    given.set_adapter("other")
    assert sent(given) == saved_by_peft(given, "other")
    assert json.loads(open_adapter(given)[1])["r"] == 3
    with pytest.raises(SourceError, match="the model has 'default', 'other'"):
        sent(given, adapter_name="third")


def test_a_wrapped_model_is_found_and_its_wrappers_leave_no_trace() -> None:
    given = model()
    expected = sent(given)
    wrapped = nn.Module()
    wrapped.module = given

    assert peft_model(wrapped) is given
    assert sent(wrapped) == expected
    endless = SimpleNamespace()
    endless.module = endless
    assert peft_model(endless) is None


def test_a_model_is_known_by_what_it_has() -> None:
    tensors = {"a.lora_A.x.weight": torch.ones(2, 3), "a.base_layer.weight": torch.ones(3, 3)}
    double = SimpleNamespace(
        peft_config={"x": {"r": 2, "lora_alpha": 2}},
        active_adapters=lambda: ["x"],
        state_dict=lambda: tensors,
    )

    assert list(sent(double)) == ["a.lora_A.weight"]
    double.active_adapters = lambda: ["x", "y"]
    with pytest.raises(SourceError, match="adapter_name="):
        active_adapter(double)


def test_what_a_hook_makes_of_the_state_is_what_is_sent() -> None:
    given = model()
    layer = given.base_model.model.layers[1].q_proj
    plain = sent(given)

    def double(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [one for one in state if one.startswith(f"{prefix}lora_B")]:
            state[name] = torch.zeros(6, 2)

    layer.register_state_dict_post_hook(double)

    changed = sent(given)
    assert list(changed) == list(plain)
    names = [name for name in plain if plain[name] != changed[name]]
    assert len(names) == 1
    assert changed[names[0]] == bytes(6 * 2 * 4)


def test_a_pair_and_a_folder_are_adapters_too(tmp_path: Path) -> None:
    given = model()
    expected = sent(given)
    tensors = get_peft_model_state_dict(given, save_embedding_layers=False)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = config_text(given.peft_config["default"])
    (tmp_path / "adapter_config.json").write_text(config)

    def one_at_a_time() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    for source in (
        (tensors, given.peft_config["default"]),
        (one_at_a_time(), {"r": 2, "lora_alpha": 8}),
        tmp_path,
        str(tmp_path),
    ):
        assert sent(source) == expected
    assert json.loads(open_adapter(tmp_path)[1]) == json.loads(config)


@pytest.mark.parametrize("given", [({"a": torch.ones(1)}, {"r": 1}), "/nowhere", Path("/nowhere")])
def test_what_is_one_adapter_has_none_to_pick(given: object) -> None:
    with pytest.raises(ConfigError, match="is one adapter; it picks one of a PEFT model's"):
        open_adapter(given, adapter_name="policy")


def test_a_config_is_written_as_peft_writes_it() -> None:
    given = model().peft_config["default"]
    found = json.loads(config_text(given))

    assert found["peft_type"] == "LORA"
    assert found["target_modules"] == ["embed", "o_proj", "q_proj"]
    assert found["r"] == 2


NO_ADAPTERS: dict[str, tuple[type[Exception], Any, str]] = {
    "a plain model": (SourceError, nn.Linear(2, 2), "expected a PEFT model"),
    "a state dict": (SourceError, {"a": torch.ones(1)}, "expected a PEFT model"),
    "a config that is none": (SourceError, ({"a": torch.ones(1)}, 7), "expected PEFT's LoraConfig"),
    "a config too large": (
        SourceError,
        ({"a": torch.ones(1)}, {"target_modules": ["x" * MAX_CONFIG_CHARS]}),
        "by pattern",
    ),
    "a config that no JSON holds": (
        SourceError,
        ({"a": torch.ones(1)}, {(1, 2): 3}),
        "cannot be written as JSON",
    ),
    "no tensors": (SourceError, ({}, {"r": 1}), "holds no tensors"),
    "a folder without one": (SourceError, "/nowhere", "adapter_model.safetensors"),
    "another kind": (
        AdapterConfigError,
        ({"a": torch.ones(1)}, {"peft_type": "IA3"}),
        "merge=True",
    ),
}


@pytest.mark.parametrize("case", NO_ADAPTERS)
def test_what_is_no_adapter_is_refused(case: str) -> None:
    kind, given, text = NO_ADAPTERS[case]

    with pytest.raises(kind, match=text):
        open_adapter(given)


def test_a_model_with_another_kind_of_adapter_says_so() -> None:
    given = get_peft_model(
        Tiny(), IA3Config(target_modules=["q_proj"], feedforward_modules=["q_proj"])
    )

    with pytest.raises(AdapterConfigError, match="peft_type is 'IA3'") as caught:
        open_adapter(given)
    assert (caught.value.setting, caught.value.found) == ("peft_type", "IA3")


def test_a_folder_with_a_broken_config_says_which(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{")

    with pytest.raises(SourceError, match=r"adapter_config\.json cannot be read"):
        open_adapter(tmp_path)
