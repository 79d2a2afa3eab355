"""An engine that has no adapter yet, or can have none, says so and stays well.

In a file of its own: one engine at a time in a process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from support import engines
from support.adapter_tensors import request_of
from support.adapters import LORA, outputs_of, peft_model
from vllm.lora.request import LoRARequest

from vllm_bucketsync import AdapterConfigError, WeightSync
from vllm_bucketsync.adapters import spec_of

EXTENSION = "vllm_bucketsync.WorkerExtension"


def test_an_engine_that_was_restarted_outlives_a_request_of_before(
    checkpoint: Callable[[str, int], Path],
) -> None:
    settings = LORA | {"worker_extension_cls": EXTENSION}
    spec = spec_of("policy", version="9")
    stale = LoRARequest(spec.name, spec.lora_int_id, spec.lora_path)
    with engines.running_engine(checkpoint("qwen3", 0), **settings) as llm, WeightSync(llm) as sync:
        assert sync.status()[0]["adapters"] == []

        outputs = outputs_of(llm, stale)

        assert all(math.isnan(logprob) for answer in outputs for _, logprob in answer)
        report = sync.push_lora(peft_model(1), name="policy", version=10)
        assert outputs_of(llm, stale) == outputs_of(llm, request_of(report)) != outputs


def test_an_engine_without_lora_says_how_to_start_it(
    checkpoint: Callable[[str, int], Path],
) -> None:
    with (
        engines.running_engine(checkpoint("qwen3", 0), worker_extension_cls=EXTENSION) as llm,
        WeightSync(llm) as sync,
    ):
        with pytest.raises(AdapterConfigError, match="with enable_lora=True") as caught:
            sync.push_lora(peft_model(1), name="policy", version=1)
        assert caught.value.setting == "enable_lora"
        assert sync.status()[0]["adapters"] == []
        assert not sync.remove_lora("policy")
