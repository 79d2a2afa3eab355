"""Updates without end: weights and adapters of every kind into one engine, which stays as it is.

What is served at the end is what was served at the beginning, and nothing has grown.
``VLLM_BUCKETSYNC_TEST_SOAK=DIR pytest tests/engine/test_soak.py -m long`` runs the long form
and leaves a picture of the memory in DIR.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import soak
from support.engines import greedy
from support.process_engines import EXTENSION, running_processes
from support.soak import Sample, Soak

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
# What allocators of three processes and their Python still move by.
MAX_GROWTH_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str, int], Path]) -> Iterator[Any]:
    folder = checkpoint(soak.KIND, 0)
    with running_processes(folder, worker_extension_cls=EXTENSION, **LORA) as llm:
        yield llm


@pytest.mark.timeout(240)
def test_weights_and_adapters_of_every_kind_leave_the_engine_as_it_was(llm: Any) -> None:
    check(llm, num_updates=120, sample_every=6)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_thousand_updates_leave_the_engine_as_it_was(llm: Any, tmp_path: Path) -> None:
    check(
        llm,
        num_updates=2000,
        sample_every=20,
        folder=Path(os.environ.get("VLLM_BUCKETSYNC_TEST_SOAK", tmp_path)),
    )


def check(llm: Any, *, num_updates: int, sample_every: int, folder: Path | None = None) -> None:
    before = greedy(llm)
    run = Soak(llm)
    try:
        requests = run.settle()
        adapted = [soak.answers(llm, request) for request in requests]
        run.run(num_updates, sample_every=sample_every)
        requests = run.settle()

        assert greedy(llm) == before
        assert [soak.answers(llm, request) for request in requests] == adapted
        assert adapted[0] != adapted[1]
    finally:
        run.close()
        if folder is not None:
            run.write(folder)
    # Every kind of update was among them.
    assert set(run.counts) == {name for name, _ in run._steps()}
    assert_flat(run.samples)


def assert_flat(samples: list[Sample]) -> None:
    """Compare the last quarter with the second: the first is the warm-up."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    for end in range(2):
        grown = _median(late, "rss_bytes", end) - _median(early, "rss_bytes", end)
        assert grown < MAX_GROWTH_BYTES
        for what in ("num_fds", "num_threads"):
            # Some moments keep a connection and memory, others have just given them back.
            most = max(getattr(one, what)[end] for one in early)
            assert max(getattr(one, what)[end] for one in late) <= most + 2
    assert max(one.num_files for one in late) <= max(one.num_files for one in early) + 1


def _median(samples: list[Sample], what: str, end: int) -> float:
    return statistics.median(float(getattr(one, what)[end]) for one in samples)
