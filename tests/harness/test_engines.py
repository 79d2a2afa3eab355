"""Updates of engines that ``vllm_runner`` starts: in process, in processes, on two ranks.

What an engine then holds and answers is compared, to the last bit, with one that was started
from the new checkpoint, or that read the same adapter from disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from support.adapter_tensors import CONFIG, request_of
from support.hashes import hashes_of

from vllm_bucketsync import (
    AdapterModuleError,
    LoadError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
    WeightSync,
)
from vllm_bucketsync.cli.demo_model import PROMPTS

EXTENSION = "vllm_bucketsync.WorkerExtension"
# Whether workers have processes of their own, and how many there are.
MODES = {"in process": ("0", 1), "in processes": ("1", 1), "on two ranks": ("1", 2)}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "worker_extension_cls": EXTENSION,
}
Answers = list[Any]


def ask(runner: Any, request: Any = None) -> Answers:
    """Return greedy tokens and log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
    outputs, logprobs = runner.generate(
        list(PROMPTS), params, return_logprobs=True, lora_request=request
    )
    tokens = [token_ids for token_ids, _ in outputs]
    numbers = [
        sorted((token, one.logprob) for token, one in at.items())
        for of_one in logprobs
        for at in of_one
    ]
    return [tokens, numbers]


@dataclass(frozen=True)
class Holding:
    """What every rank of an engine holds, and what it answers."""

    live: list[dict[str, str]]
    answers: Answers

    @classmethod
    def of(cls, runner: Any) -> Holding:
        return cls(runner.apply_model(hashes_of), ask(runner))


@dataclass(frozen=True)
class Stage:
    """An engine that was started from the old weights, and what others hold and answer.

    Attributes:
        with_adapter: Answers with each adapter from disk, over the old weights.
    """

    runner: Any
    old: Holding
    new: Holding
    with_adapter: dict[int, Answers]


def read_from_disk(runner: Any, files: Any) -> dict[int, Answers]:
    from vllm.lora.request import LoRARequest

    return {
        seed: ask(runner, LoRARequest(f"disk-{seed}", seed, str(folder)))
        for seed, folder in files.adapters.items()
    }


@pytest.fixture(scope="module", params=list(MODES))
def stage(request: pytest.FixtureRequest, vllm_runner: Any, files: Any) -> Iterator[Stage]:
    in_processes, num_ranks = MODES[request.param]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": in_processes,
        # For `apply_model`, by which these tests look into workers; the plugin has no need of it.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if num_ranks > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    settings = SETTINGS | {"tensor_parallel_size": num_ranks}
    with mock.patch.dict(os.environ, environment):
        with vllm_runner(str(files.new), **settings) as runner:
            new = Holding.of(runner)
        with vllm_runner(str(files.old), **settings) as runner:
            # Before the plugin's first call, which wraps how this engine finds adapters.
            from_disk = read_from_disk(runner, files)
            yield Stage(runner, Holding.of(runner), new, from_disk)


@pytest.fixture
def sync(stage: Stage, files: Any) -> Iterator[WeightSync]:
    # Many buckets: what ends half-way has written something by then.
    with WeightSync(stage.runner.get_llm(), slot_size="64KiB") as found:
        yield found
        found.push(files.old, version="old")


def test_an_updated_engine_is_one_that_was_started_from_the_new_weights(
    stage: Stage, sync: WeightSync, files: Any
) -> None:
    assert stage.old.live != stage.new.live
    assert stage.old.answers != stage.new.answers
    for folder, expected in ((files.new, stage.new), (files.old, stage.old)):
        report = sync.push(folder, version=folder.name)

        assert Holding.of(stage.runner) == expected
        assert report.num_workers == len(stage.new.live)
        assert {one["version"] for one in sync.status()} == {folder.name}


def test_what_does_not_fit_is_refused_and_nothing_changes(
    stage: Stage, sync: WeightSync, files: Any
) -> None:
    from safetensors.torch import load_file

    good = load_file(files.new / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"
    wrong: dict[type[LoadError], Any] = {
        UnknownTensorError: good | {"model.nothing": torch.ones(1)},
        TensorMismatchError: good | {query: torch.ones(3, 5)},
        MissingTensorError: {name: one for name, one in good.items() if name != query},
    }
    for kind, source in wrong.items():
        with pytest.raises(kind) as caught:
            sync.push(source, version="wrong")
        assert caught.value.engine_state == "unchanged"
        assert Holding.of(stage.runner) == stage.old


def test_an_update_that_ends_half_way_leaves_a_torn_engine_that_the_next_one_mends(
    stage: Stage, sync: WeightSync, files: Any
) -> None:
    from safetensors.torch import load_file

    good = load_file(files.new / "model.safetensors")

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(good.items())[: len(good) // 2]
        raise OSError("the gather failed")

    with pytest.raises(OSError, match="the gather failed"):
        sync.push(failing(), version="half")
    assert {one["is_torn"] for one in sync.status()} == {True}

    sync.push(good, version="whole")
    assert {one["is_torn"] for one in sync.status()} == {False}
    assert Holding.of(stage.runner) == stage.new


def test_a_pushed_adapter_answers_as_the_same_one_from_disk(
    stage: Stage, sync: WeightSync, files: Any
) -> None:
    assert len({str(one) for one in (stage.old.answers, *stage.with_adapter.values())}) == 3
    for seed in (1, 2, 1):
        report = sync.push_lora(files.trained(seed), name="policy", version=seed)
        assert ask(stage.runner, request_of(report)) == stage.with_adapter[seed]

    wrong = {f"base_model.model.nothing.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    with pytest.raises(AdapterModuleError) as caught:
        sync.push_lora((wrong, CONFIG), name="policy", version=9)
    assert caught.value.engine_state == "unchanged"
    assert ask(stage.runner, request_of(report)) == stage.with_adapter[1]
    assert sync.remove_lora("policy")
