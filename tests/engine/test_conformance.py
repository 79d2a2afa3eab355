"""Every model, dtype and way of the weights that a CPU can run, to the last bit.

See ``support/conformance/proof.py`` for what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import engines
from support.conformance.in_flight import prove_in_flight, prove_paused
from support.conformance.proof import Bench, prove, prove_refused
from support.conformance.results import NotRunError, recorded
from support.conformance.rows import Row

pytestmark = pytest.mark.timeout(400)

EXTENSION = "vllm_bucketsync.WorkerExtension"
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}

ROWS = [
    Row(model="qwen3", dtype="float32"),
    Row(model="qwen3_tied", dtype="float32"),
    Row(model="llama", dtype="float32"),
    Row(model="gemma3", dtype="float32"),
    Row(model="qwen3_moe", dtype="float32"),
    Row(model="glm4_moe", dtype="float32"),
    Row(model="deepseek_v3", dtype="float32"),
    Row(model="mamba2", dtype="float32"),
    Row(model="paligemma", dtype="float32", settings={"limit_mm_per_prompt": {"image": 0}}),
    Row(model="qwen3", dtype="bfloat16"),
    Row(model="qwen3", dtype="float16"),
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
    with engines.running_engine(checkpoint, worker_extension_cls=EXTENSION, **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(
        start, tmp_path_factory.mktemp("conformance"), defaults={"worker_extension_cls": EXTENSION}
    )


def name_of(row: Any) -> str:
    return row.name if isinstance(row, Row) else f"{row}_steps"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_an_engine_that_was_given_weights_is_one_that_was_started_from_them(
    row: Row, bench: Bench
) -> None:
    with recorded(row) as reasons:
        if row.why_not_run:
            raise NotRunError(row.why_not_run)
        if row.why_refused:
            reasons.append(prove_refused(row, bench))
        else:
            prove(row, bench)


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
