"""Checkpoints and adapters for our tests under vLLM's harness."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.adapter_tensors import trained
from support.facts import facts

from vllm_bucketsync.cli.demo_model import build_checkpoint


def pytest_configure() -> None:
    """Say what to do where vLLM's fixtures are not there."""
    if importlib.util.find_spec("tests.utils") is None:
        raise pytest.UsageError("these tests are run by: python tests/harness")


@pytest.fixture(scope="session", autouse=True)
def _facts(record_testsuite_property: Callable[[str, object], None]) -> None:
    for name, value in facts("tests/harness").items():
        record_testsuite_property(name, value)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Keep vLLM's own clean-up from ending engines that several tests share."""
    return False


@dataclass(frozen=True)
class Files:
    """Two checkpoints, and two adapters of the first one, as a trainer and as files have them."""

    old: Path
    new: Path
    adapters: dict[int, Path]

    def trained(self, seed: int) -> Any:
        return trained(self.old, seed)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("files")
    for seed, name in enumerate(("old", "new")):
        build_checkpoint(root / name, seed=seed)
    adapters = {seed: root / f"adapter-{seed}" for seed in (1, 2)}
    for seed, folder in adapters.items():
        trained(root / "old", seed).save_pretrained(str(folder), save_embedding_layers=False)
    return Files(root / "old", root / "new", adapters)
