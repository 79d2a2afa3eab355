"""Every model and engine mode that one GPU can run, to the last bit.

See ``support/conformance/proof.py`` for what is compared. Each row stands alone, so that
several processes can share them, and the GPU: ``pytest -m gpu -k "sleep or fp8"``, each with
``VLLM_BUCKETSYNC_TEST_CONFORMANCE=DIR``, where every row leaves its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.conformance.in_flight import prove_in_flight, prove_paused
from support.conformance.proof import Bench, prove_row
from support.conformance.results import recorded
from support.conformance.rows import Row, files_of
from support.gpu_engines import SETTINGS, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    # What vLLM, its compilers and kernels warn of is theirs; so are sockets that it leaves.
    pytest.mark.filterwarnings("default"),
]

# Several engines share the GPU.
SMALL: dict[str, Any] = {"gpu_memory_utilization": 0.05}
GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}
MLA = {"attention_config": {"backend": "TRITON_MLA"}}
# A model whose layers each have their own kind of attention: vLLM has to choose.
ANY_ATTENTION: dict[str, Any] = {"attention_config": {}, "enable_prefix_caching": False}
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
IMAGES_ONLY = {"limit_mm_per_prompt": {"image": 0}}
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}
# A prompt that comes out of the cache is computed in another shape: in other last bits.
UNCACHED = {"enable_prefix_caching": False}
LONG = UNCACHED | {"max_model_len": 256}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


@contextmanager
def slept(level: int, llm: Any) -> Iterator[None]:
    """Put an engine to sleep, and have the weights change between its two awakenings."""
    llm.sleep(level=level)
    llm.wake_up(tags=["weights"])
    yield
    llm.wake_up(tags=["kv_cache"])


@contextmanager
def asleep(level: int, llm: Any) -> Iterator[None]:
    """Have the weights change while there is no memory for them."""
    llm.sleep(level=level)
    try:
        yield
    finally:
        llm.wake_up()


def sleeping(model: str, level: int, **changes: Any) -> Row:
    settings = changes.pop("settings", {})
    return Row(
        model=model,
        mode=f"sleep level {level}",
        settings={"enable_sleep_mode": True, **settings},
        truth_settings=settings,
        is_in_process=False,
        around=partial(slept, level),
        **changes,
    )


ROWS = [
    *(Row(model=kind) for kind in ("qwen3", "qwen3_tied", "qwen2", "llama", "gemma3")),
    *(Row(model=kind) for kind in ("qwen3_moe", "glm4_moe")),
    Row(model="deepseek_v3", settings=MLA, source=files_of),
    Row(model="qwen3_next", settings=ANY_ATTENTION, may_not_start="flashinfer"),
    Row(model="mamba2", settings=ANY_ATTENTION),
    Row(model="paligemma", settings=IMAGES_ONLY),
    Row(model="qwen2_vl", settings=TEXT_ONLY),
    Row(model="qwen3", dtype="float16"),
    Row(model="qwen3", dtype="float32"),
    Row(
        model="llama",
        mode="dummy start",
        settings={"load_format": "dummy"},
        truth_settings={},
        has_old_outputs=False,
    ),
    *(Row(model=kind, mode="CUDA graphs", settings=GRAPHS) for kind in ("qwen3", "qwen3_moe")),
    Row(model="glm4_moe", mode="CUDA graphs", settings=GRAPHS),
    Row(model="deepseek_v3", mode="CUDA graphs", settings=GRAPHS | MLA, source=files_of),
    Row(
        model="qwen3_next",
        mode="CUDA graphs",
        settings=GRAPHS | ANY_ATTENTION,
        may_not_start="flashinfer",
    ),
    *(sleeping("qwen3", level) for level in (1, 2)),
    sleeping("qwen3_moe", 2),
    sleeping("glm4_moe", 2),
    sleeping("deepseek_v3", 2, settings=MLA, source=files_of),
    sleeping("gemma3", 2),
    *(
        Row(model=kind, mode="online fp8", settings={"quantization": "fp8"})
        for kind in ("qwen3_wide", "qwen3_moe_wide")
    ),
    *(
        Row(model=kind, mode=f"{what} checkpoint", files=files, source=files_of)
        for files, what in (("fp8", "fp8"), ("fp8_block", "block fp8"))
        for kind in ("qwen3_wide", "qwen3_moe_wide")
    ),
    Row(
        model="qwen3_wide",
        mode="online fp8 and graphs",
        settings={"quantization": "fp8", **GRAPHS},
    ),
    *(
        Row(model=kind, mode="LoRA enabled", settings=LORA, truth_settings=LORA)
        for kind in ("qwen3", "qwen3_moe")
    ),
    Row(model="qwen3", mode="ngram drafts", settings=NGRAM),
    Row(model="qwen3", mode="chunked prefill", settings=CHUNKS),
    Row(model="qwen3", mode="no prefix cache", settings=UNCACHED),
    Row(model="qwen3", mode="fp8 KV cache", settings={"kv_cache_dtype": "fp8"}),
    Row(model="qwen3", mode="zero-copy", is_in_process=False, push={"zero_copy": True}),
    Row(
        model="qwen3_moe",
        mode="atomic and verified",
        is_in_process=False,
        push={"atomic": True, "verify": "digest"},
    ),
    *(
        Row(
            model="qwen3",
            mode=f"asleep, level {level}",
            settings={"enable_sleep_mode": True},
            is_in_process=False,
            around=partial(asleep, level),
            why_refused="asleep",
        )
        for level in (1,)
    ),
]
# How many steps a request has done when the weights change: within its prompt, and after it.
IN_FLIGHT = [
    (Row(model="qwen3", mode="in flight, prompt", settings=CHUNKS | UNCACHED), 2),
    (Row(model="qwen3", mode="in flight", settings=CHUNKS | UNCACHED), 8),
    (Row(model="qwen3", mode="in flight and graphs", settings=GRAPHS | UNCACHED), 6),
]
PAUSED = [
    Row(model="qwen3", mode="AsyncLLM, paused", settings=LONG),
    Row(model="qwen3", mode="AsyncLLM and graphs", settings=GRAPHS | LONG),
]


def start(checkpoint: Path, *, is_in_process: bool, **settings: Any) -> AbstractContextManager[Any]:
    """Start an engine on the GPU: in this process, or in one of its own."""
    return running(checkpoint, is_in_process=is_in_process, **{**SMALL, **settings})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("conformance")
    return Bench(start, root, defaults={**SETTINGS, **SMALL})


def on_gpu(row: Row) -> Row:
    """Return the row with a trainer that has its weights on the GPU."""
    made = row.source

    def source(row: Row, seed: int) -> Any:
        found = made(row, seed)
        if isinstance(found, dict):
            return {name: tensor.cuda() for name, tensor in found.items()}
        return found.cuda()

    return replace(row, source=source)


def name_of(row: Any) -> str:
    return row.name if isinstance(row, Row) else f"{row}_steps"


@pytest.mark.parametrize("row", [on_gpu(row) for row in ROWS], ids=name_of)
def test_an_engine_that_was_given_weights_is_one_that_was_started_from_them(
    row: Row, bench: Bench
) -> None:
    prove_row(row, bench)


@pytest.mark.parametrize(
    ("row", "num_steps"), [(on_gpu(row), steps) for row, steps in IN_FLIGHT], ids=name_of
)
def test_a_request_that_runs_goes_on_with_the_new_weights(
    row: Row, num_steps: int, bench: Bench
) -> None:
    with recorded(row):
        prove_in_flight(row, bench, num_steps=num_steps)


@pytest.mark.parametrize("row", [on_gpu(row) for row in PAUSED], ids=name_of)
def test_what_a_pause_does_to_a_request_that_runs(row: Row, bench: Bench) -> None:
    with recorded(row):
        prove_paused(row, bench)
