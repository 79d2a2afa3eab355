"""An engine that can take adapters takes base weights as any other does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import engines, tiny_models
from support.pushes import push
from support.worlds import Truth

from vllm_bucketsync.worker.weights import WeightSink


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied"])
def test_base_weights_reach_the_layers_that_adapters_wrap(
    kind: str, checkpoint: Callable[[str, int], Path], truth: Callable[[str, int], Truth]
) -> None:
    expected = {seed: truth(kind, seed).outputs for seed in (0, 1)}
    with engines.running_engine(checkpoint(kind, 0), enable_lora=True, max_lora_rank=8) as llm:
        worker = engines.worker_of(llm)
        addresses = engines.live_addresses(worker)
        assert any(".base_layer." in name for name in addresses)
        for seed, declared in ((1, True), (0, False)):
            tensors = tiny_models.checkpoint_tensors(kind, seed=seed)
            if kind == "qwen3_tied":
                tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

            report = push(WeightSink(worker), tensors, slot_size_bytes=20_000, declared=declared)

            assert report.skipped == (("lm_head.weight",) if kind == "qwen3_tied" else ())
            assert engines.greedy(llm) == expected[seed]
            assert engines.live_addresses(worker) == addresses
        del llm, worker
