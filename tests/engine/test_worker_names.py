"""No name that we bring to a worker is one of vLLM's, in this version or in any we support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm.v1.worker
from matrix import record
from support import engines, worker_names
from support.worlds import World

from vllm_bucketsync import WeightSync

SOURCES = Path(vllm.v1.worker.__path__[0])
# Those without our prefix are the two that trainers call, and vLLM's own hook.
PUBLIC = {"update_weights_from_bucket", "update_lora_from_bucket", *worker_names.HOOKS}


def test_the_installed_version_defines_no_name_of_ours() -> None:
    theirs = worker_names.defined_in(SOURCES)

    assert {"load_model", "model_runner", "init_device", "wake_up"} <= theirs
    assert worker_names.ours() & theirs == set()


def test_every_name_of_ours_has_our_prefix_or_is_known() -> None:
    rest = {
        name
        for name in worker_names.ours() - PUBLIC
        if not name.startswith(("bucketsync_", "_bucketsync_"))
    }

    assert rest == set()


def test_every_name_of_ours_was_compared_with_all_versions_that_we_support() -> None:
    names = record.load()["names"]

    assert names["ours"] == sorted(worker_names.ours()), "run: python tests/matrix names VERSION…"
    rows = {row["vllm"] for row in record.load()["rows"]}
    assert rows <= set(names["checked"])


@pytest.mark.parametrize("world", ["qwen3"], indirect=True)
def test_what_a_push_leaves_on_a_worker_has_our_prefix_or_wraps_what_vllm_has(
    world: World, checkpoint: Any
) -> None:
    worker = engines.worker_of(world.llm)
    before = set(vars(worker))
    with WeightSync(world.llm) as sync:
        sync.push(world.tensors(1), version=1)

    added = set(vars(worker)) - before
    assert added
    assert {
        name
        for name in added
        if not name.startswith("_bucketsync_") and not hasattr(type(worker), name)
    } == set()
