"""A trainer on a GPU pushes into real engines on the same GPU, through every transport.

Outputs and every live tensor are those of an engine that was started from the new
checkpoint, whether its weights were random before or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import tiny_models
from support.gpu_engines import addresses, holding, running

from vllm_bucketsync import MissingTensorError, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    # vLLM leaves sockets and contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KINDS = ("qwen3_moe", "qwen2", "qwen3_tied", "llama", "glm4_moe", "qwen3")


def model_of(kind: str, seed: int) -> Any:
    # In its own dtype: a router that is kept in fp32 would be rounded here.
    return tiny_models.trainer_model(kind, seed=seed).cuda()


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine with old weights, what one with the new holds, and one with neither.

    The new weights are those of an engine in this process that was started with them. It
    is then given the old ones by reference, and has to hold what the other was started
    with; one engine is started with random weights instead.
    """
    kind = request.param
    old, new = (
        tiny_models.save_checkpoint(kind, tmp_path_factory.mktemp(f"{kind}{seed}"), seed=seed)
        for seed in (0, 1)
    )
    with running(new, is_in_process=True) as llm:
        held_new = holding(llm)
        with WeightSync(llm) as sync:
            report = sync.push(model_of(kind, 0), version="old")
            assert report.transport == "inproc"
            held_old = holding(llm)
    is_dummy = kind == "llama"
    with running(old, load_format="dummy" if is_dummy else "auto") as llm:
        assert is_dummy or holding(llm) == held_old
        yield kind, llm, held_old, held_new


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_pushes_from_the_gpu_and_from_the_host_are_exact_and_move_nothing(
    stage: Any, transport: str
) -> None:
    kind, llm, old, new = stage
    before = llm.collective_rpc(addresses)
    with WeightSync(llm, transport=transport) as sync:
        for seed, expected in ((0, old), (1, new), (0, old)):
            report = sync.push(model_of(kind, seed), version=f"gpu {seed}")
            assert report.transport == ("cuda_ipc" if transport == "auto" else "shm")
            assert holding(llm) == expected
    if transport == "auto":
        with WeightSync(llm) as sync:
            model = model_of(kind, 1)
            for version in ("first", "warm"):
                report = sync.push(model, version=version, zero_copy=True)
                assert report.zero_copy_bytes == report.num_bytes
                assert holding(llm) == new
    for slot_size in (1024, "64KiB"):
        with WeightSync(llm, transport=transport, slot_size=slot_size) as small:
            small.push(tiny_models.checkpoint_tensors(kind, seed=0), version="host")
            pairs = tiny_models.checkpoint_tensors(kind, seed=1).items()
            small.push(((name, tensor.cuda()) for name, tensor in pairs), version="stream")
            assert holding(llm) == new
    assert llm.collective_rpc(addresses) == before


def test_what_does_not_fit_changes_nothing_and_a_torn_engine_is_mended(stage: Any) -> None:
    kind, llm, _, new = stage
    good = {n: t.cuda() for n, t in tiny_models.checkpoint_tensors(kind, seed=1).items()}
    with WeightSync(llm, slot_size=4096) as sync:
        sync.push(good, version="good")
        without = {n: t for n, t in good.items() if "layers.0.self_attn.q_proj.weight" not in n}
        with pytest.raises(MissingTensorError):
            sync.push(without, version="bad")
        assert holding(llm) == new

        def failing() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(tiny_models.checkpoint_tensors(kind, seed=0).items())[:15]
            raise OSError("half")

        with pytest.raises(OSError, match="half"):
            sync.push(failing(), version="half")
        sync.push(good, version="mended")
        assert holding(llm) == new
