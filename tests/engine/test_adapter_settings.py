"""A PEFT config that would be computed as something else is refused, by the setting's name."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapter_tensors import CONFIG
from support.pushes import metas_of
from vllm.lora.peft_helper import PEFTHelper

from vllm_bucketsync import AdapterConfigError, AdapterTensorError
from vllm_bucketsync.worker.lora.fit import MAX_FITS, Fit, Fits, check_fit
from vllm_bucketsync.worker.lora.places import nan_head
from vllm_bucketsync.worker.lora.settings import read_config


@pytest.fixture(autouse=True)
def vllm_that_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older vLLM lacks many checks; ours are not to lean on them."""
    monkeypatch.setattr(PEFTHelper, "validate_legal", lambda *_: None)


def read(**settings: Any) -> PEFTHelper:
    lora_config: Any = SimpleNamespace(max_lora_rank=8)
    return read_config(json.dumps(CONFIG | settings), lora_config=lora_config, adapter="policy")


@pytest.mark.parametrize("bad", [True, "16", None, [16], 10**400], ids=str)
@pytest.mark.parametrize("setting", ["lora_alpha", "alpha_pattern", "rank_pattern"])
def test_scales_and_ranks_are_finite_numbers(setting: str, bad: object) -> None:
    name = setting if setting == "lora_alpha" else f"{setting}['q_proj']"
    value = bad if setting == "lora_alpha" else {"q_proj": bad}

    with pytest.raises(AdapterConfigError, match="nothing was changed") as caught:
        read(**{setting: value})

    assert (caught.value.setting, caught.value.found) == (name, str(bad))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("place", ['"lora_alpha": {}', '"alpha_pattern": {{"q_proj": {}}}'])
def test_what_is_no_number_is_refused_wherever_it_is(place: str, text: str) -> None:
    config = json.dumps(CONFIG)[:-1] + ", " + place.format(text) + "}"
    lora_config: Any = SimpleNamespace(max_lora_rank=8)

    with pytest.raises(AdapterConfigError, match="nothing was changed"):
        read_config(config, lora_config=lora_config, adapter="policy")


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("alpha_pattern", [1]),
        ("rank_pattern", "q_proj"),
        ("use_rslora", "no"),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 2]]),
        ("use_bdlora", {"nblocks": 2}),
        ("use_qalora", True),
        *(
            ("init_lora_weights", kind)
            for kind in ("pissa", "PiSSA_niter_4", "olora", "corda", "loftq", "lora_ga", "new")
        ),
    ],
)
def test_what_vllm_would_ignore_is_refused_by_name(setting: str, found: object) -> None:
    with pytest.raises(AdapterConfigError, match="nothing was changed") as caught:
        read(**{setting: found})

    assert (caught.value.setting, caught.value.found) == (setting, str(found))


def test_what_peft_writes_of_a_plain_adapter_is_taken() -> None:
    from peft import LoraConfig

    plain = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"]).to_dict()
    unused = {name: value for name, value in plain.items() if name != "target_modules"}
    for kind in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        helper = read(**json.loads(json.dumps(unused, default=str)) | {"init_lora_weights": kind})
        assert (helper.r, helper.lora_alpha) == (4, 16)
    assert read(lora_alpha=0.5, use_rslora=None).r == 4


@pytest.mark.parametrize("setting", ["alpha_pattern", "rank_pattern"])
def test_patterns_are_taken_where_vllm_has_them_and_refused_where_not(setting: str) -> None:
    pattern = {setting: {"q_proj": 3}}
    if setting in {field.name for field in fields(PEFTHelper)}:
        assert getattr(read(**pattern), setting) == {"q_proj": 3}
        return

    with pytest.raises(AdapterConfigError, match="this vLLM would scale every module") as caught:
        read(**pattern)

    assert (caught.value.setting, caught.value.found) == (setting, "{'q_proj': 3}")


@pytest.mark.parametrize(
    ("sent", "missing"), [("lora_A", "lora_B"), ("lora_B", "lora_A")], ids=["A", "B"]
)
def test_a_missing_partner_is_named_whatever_else_is_in_its_name(sent: str, missing: str) -> None:
    base = SimpleNamespace(input_size=8, output_size=8)
    manager = SimpleNamespace(
        model=torch.nn.Module(),
        modules={"tower_A.part_B": SimpleNamespace(base_layer=base)},
        packed_modules={},
    )
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    metas = metas_of({f"base_model.model.tower_A.part_B.{sent}.weight": torch.ones(4, 8)})

    with pytest.raises(AdapterTensorError) as caught:
        check_fit(
            metas, worker=SimpleNamespace(model_runner=runner), helper=read(), adapter="policy"
        )

    assert caught.value.tensor == f"base_model.model.tower_A.part_B.{missing}.weight"


def test_a_tensor_that_comes_twice_under_two_names_is_refused() -> None:
    base = SimpleNamespace(input_size=8, output_size=8)
    manager = SimpleNamespace(
        model=torch.nn.Module(),
        modules={"proj": SimpleNamespace(base_layer=base)},
        packed_modules={},
    )
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    tensors = {
        "base_model.model.proj.lora_A.weight": torch.ones(4, 8),
        "base_model.model.proj.lora_B.weight": torch.ones(8, 4),
        "proj.lora_B.weight": torch.ones(8, 4),
    }

    with pytest.raises(AdapterTensorError) as caught:
        check_fit(
            metas_of(tensors),
            worker=SimpleNamespace(model_runner=runner),
            helper=read(),
            adapter="policy",
        )

    assert (caught.value.tensor, caught.value.got) == ("proj.lora_B.weight", "twice")


def test_a_kind_of_adapter_is_checked_once_and_one_that_was_refused_again() -> None:
    fits, asked = Fits(), []
    good = Fit(modules=frozenset(), skipped=(), is_stacked=False)

    def check(result: Fit | None) -> Fit:
        asked.append(result)
        if result is None:
            raise AdapterTensorError("no", adapter="policy")
        return result

    for _ in range(2):
        with pytest.raises(AdapterTensorError):
            fits.get("bad", check=lambda: check(None))
        assert fits.get("good", check=lambda: check(good)) is good
    assert asked == [None, good, None]
    for number in range(MAX_FITS):
        fits.get(number, check=lambda: check(good))
    assert fits.get("good", check=lambda: check(good)) is good
    assert len(asked) == 3 + MAX_FITS + 1


def test_what_stands_for_a_missing_adapter_leaves_one_token_that_is_the_largest() -> None:
    module = SimpleNamespace(hidden_size=8, base_layer=SimpleNamespace(vocab_size=20))
    head = nan_head("head", module, dtype=torch.float32)
    hidden, logits = torch.randn(5, 8), torch.randn(5, 20)

    logits = logits + hidden @ head.lora_a.T @ head.lora_b.T

    # Kernels that compare find no largest one among NaNs, but another number, or none.
    assert not logits.isnan().any()
    assert logits.isposinf().sum(dim=1).tolist() == [1] * 5
    assert logits.argmax(dim=1).max() <= 1
    assert logits.log_softmax(dim=1).isnan().all()
