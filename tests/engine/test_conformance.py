"""Every model, dtype and way of the weights that a CPU can run, to the last bit.

See ``support/conformance/proof.py`` for what is compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import engines, tiny_configs, tiny_models
from support.conformance import table
from support.conformance.in_flight import prove_in_flight, prove_paused
from support.conformance.proof import Bench, prove_row
from support.conformance.results import recorded
from support.conformance.rows import Row
from support.process_engines import running_processes

pytestmark = [
    pytest.mark.timeout(500),
    # vLLM leaves sockets and contexts of its client to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EXTENSION = "vllm_bucketsync.WorkerExtension"
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0}}
LORA = {"enable_lora": True, "max_lora_rank": 8}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}


def under_trainers_names(row: Row, seed: int) -> dict[str, Any]:
    """Return the weights as a trainer names them that has wrapped its model again and again."""
    tensors = tiny_models.checkpoint_tensors(row.model, seed=seed)
    outer, inner = "_fsdp_wrapped_module._orig_mod.base_model.model.", "_checkpoint_wrapped_module"
    return {
        f"module.{outer}{name}".replace("layers.0.", f"layers.0.{inner}."): tensor
        for name, tensor in tensors.items()
    }


ROWS = [
    *(Row(model=kind, dtype="float32") for kind in ("qwen3", "qwen3_tied", "gemma3", "qwen3_moe")),
    *(Row(model=kind, dtype="float32") for kind in ("deepseek_v3", "mamba2")),
    # Half a minute each; more of what the others show.
    *(Row(model=kind, dtype="float32", is_long=True) for kind in ("llama", "glm4_moe")),
    Row(model="paligemma", dtype="float32", settings=TEXT_ONLY, is_long=True),
    Row(model="qwen3", dtype="float16", is_long=True),
    *(Row(model=kind, is_long=True) for kind in ("qwen3", "qwen3_next")),
    Row(
        model="glm4_moe",
        why_not_run="vLLM 0.32 itself crashes in the CPU's rotary embedding of this tiny model in "
        "bf16, before anything is pushed",
    ),
    Row(
        model="llama",
        mode="dummy start",
        dtype="float32",
        settings={"load_format": "dummy"},
        truth_settings={},
        has_old_outputs=False,
    ),
    Row(
        model="qwen3",
        mode="trainers' names",
        dtype="float32",
        source=under_trainers_names,
        is_long=True,
    ),
    Row(model="qwen3", mode="LoRA enabled", dtype="float32", settings=LORA),
    Row(model="qwen3", mode="ngram drafts", dtype="float32", settings=NGRAM, is_long=True),
    *(
        Row(
            model=kind,
            mode="tensor parallel 2",
            dtype="float32",
            settings={"tensor_parallel_size": 2},
            is_in_process=False,
            is_long=True,
        )
        for kind in ("qwen3_tied", "qwen3_moe", "deepseek_v3")
    ),
]
IN_FLIGHT = [
    (Row(model="qwen3", mode="in flight, prompt", dtype="float32", settings=CHUNKS), 2),
    (Row(model="qwen3", mode="in flight", dtype="float32", settings=CHUNKS), 8),
]
PAUSED = [
    Row(model="qwen3", mode="AsyncLLM, paused", dtype="float32", settings={"max_model_len": 256})
]


@contextmanager
def start(checkpoint: Path, *, is_in_process: bool, **settings: Any) -> Iterator[Any]:
    """Start an engine on the CPU: in this process, or with workers of its own."""
    if is_in_process:
        running = engines.running_engine(checkpoint, worker_extension_cls=EXTENSION, **settings)
    else:
        num_ranks = settings.pop("tensor_parallel_size", 1)
        running = running_processes(
            checkpoint, num_ranks=num_ranks, worker_extension_cls=EXTENSION, **settings
        )
    # For what is asked of the workers here alone.
    with mock.patch.dict(os.environ, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}), running as llm:
        yield llm


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(
        start, tmp_path_factory.mktemp("conformance"), defaults={"worker_extension_cls": EXTENSION}
    )


def marked(row: Row) -> Any:
    return pytest.param(row, marks=[pytest.mark.long] if row.is_long else [])


def name_of(row: Any) -> str:
    return row.name if isinstance(row, Row) else f"{row}_steps"


@pytest.mark.parametrize("row", [marked(row) for row in ROWS], ids=name_of)
def test_an_engine_that_was_given_weights_is_one_that_was_started_from_them(
    row: Row, bench: Bench
) -> None:
    prove_row(row, bench)


@pytest.mark.parametrize(("row", "num_steps"), IN_FLIGHT, ids=name_of)
def test_a_request_that_runs_goes_on_with_the_new_weights(
    row: Row, num_steps: int, bench: Bench
) -> None:
    with recorded(row):
        prove_in_flight(row, bench, num_steps=num_steps)


@pytest.mark.long
@pytest.mark.parametrize("row", PAUSED, ids=name_of)
def test_what_a_pause_does_to_a_request_that_runs(row: Row, bench: Bench) -> None:
    with recorded(row):
        prove_paused(row, bench)


def test_every_kind_of_model_has_a_name_in_the_table() -> None:
    assert table.MODELS.keys() == tiny_configs.CONFIGS.keys()
