"""What an engine holds in another dtype than it was sent in is told; a router stays in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from support import engines, tiny_models

from vllm_bucketsync import WeightSync


def test_casts_are_told_and_what_the_engine_keeps_in_fp32_is_not_among_them(
    checkpoint: Callable[[str, int], Path],
) -> None:
    extension = "vllm_bucketsync.WorkerExtension"
    tensors = tiny_models.checkpoint_tensors("glm4_moe", seed=1)
    fp32 = {name for name in tensors if name.endswith(".gate.weight") or "e_score" in name}
    assert len(fp32) == 2
    with (
        engines.running_engine(
            checkpoint("glm4_moe", 0), dtype="bfloat16", worker_extension_cls=extension
        ) as llm,
        WeightSync(llm) as sync,
    ):
        (worker,) = sync.push(tensors, version="fp32").workers
        (narrowed,) = worker.casts
        assert (narrowed.sent, narrowed.held) == ("float32", "bfloat16")
        assert narrowed.num_tensors == len(tensors) - len(fp32)
        assert narrowed.names[0] in tensors
        assert not fp32 & set(narrowed.names)

        live = dict(engines.worker_of(llm).model_runner.get_model().named_parameters())
        assert {live[name].dtype for name in fp32} == {torch.float32}
        # The CPU packs the router's weight away; not the bias beside it.
        (bias,) = (name for name in fp32 if "e_score" in name)
        assert torch.equal(live[bias], tensors[bias])

        bf16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        (worker,) = sync.push(bf16, version="bf16").workers
        (widened,) = worker.casts
        assert (widened.sent, widened.held) == ("bfloat16", "float32")
        assert set(widened.names) == fp32
