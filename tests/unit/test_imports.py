"""Importing does nothing: what must not be loaded is not, in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_bucketsync

FORBIDDEN = [
    ("vllm_bucketsync", {"torch", "vllm", "zmq", "msgspec", "httpx", "rich"}),
    ("vllm_bucketsync.plugin", {"torch", "vllm", "zmq", "msgspec", "httpx", "rich"}),
    ("vllm_bucketsync.probe", {"torch", "vllm", "zmq", "pynvml", "cuda"}),
    ("vllm_bucketsync.errors", {"torch", "vllm", "zmq", "msgspec"}),
    ("vllm_bucketsync.layout", {"torch", "vllm", "zmq"}),
    ("vllm_bucketsync.config", {"torch", "vllm", "zmq"}),
    ("vllm_bucketsync.messages", {"torch", "vllm", "zmq"}),
    ("vllm_bucketsync.codec", {"torch", "vllm", "zmq"}),
    ("vllm_bucketsync.session", {"torch", "vllm", "zmq"}),
    ("vllm_bucketsync.sender", {"vllm"}),
    ("vllm_bucketsync.receiver", {"vllm", "vllm_bucketsync.sender", "vllm_bucketsync.sync"}),
    ("vllm_bucketsync.sources", {"vllm"}),
    ("vllm_bucketsync.sync", {"vllm", "vllm_bucketsync.worker"}),
    ("vllm_bucketsync.bench.plot", {"vllm", "matplotlib"}),
    ("vllm_bucketsync.cli", {"torch", "vllm", "zmq", "transformers", "matplotlib"}),
    ("vllm_bucketsync.doctor.examine", {"torch", "vllm", "zmq", "httpx", "rich"}),
]


def run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    return result.stdout


@pytest.mark.parametrize(("module", "banned"), FORBIDDEN, ids=[m for m, _ in FORBIDDEN])
def test_importing_a_module_loads_nothing_it_must_not(module: str, banned: set[str]) -> None:
    loaded = run(f"import sys, {module}; print(*{banned!r} & sys.modules.keys())")

    assert loaded.split() == []


@pytest.mark.parametrize("module", ["vllm_bucketsync", "vllm_bucketsync.plugin"])
def test_importing_a_module_neither_logs_nor_changes_the_environment(module: str) -> None:
    seen = run(
        "import logging, os; logging.basicConfig(level=0, format='%(message)s'); "
        f"before = dict(os.environ); import {module}; print(os.environ == before)"
    )

    assert seen.split() == ["True"]


def test_the_trainer_s_side_works_where_vllm_is_missing() -> None:
    script = "import sys; sys.modules['vllm'] = None; from vllm_bucketsync import WeightSync"

    assert run(script) == ""


PACKAGE = Path(vllm_bucketsync.__file__).parent
# What runs in an engine's processes, or starts an engine itself.
KNOW_VLLM = ("worker/", "bench/engine/", "examples/", "endpoint.py")


def imported_anywhere(path: Path) -> set[str]:
    """Return what a file imports, inside functions as well, by statement or by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.update(str(one.value) for one in node.args if isinstance(one, ast.Constant))
    return found


def test_the_trainer_s_side_imports_vllm_in_no_function_either() -> None:
    knowing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.partition(".")[0] == "vllm" for name in imported_anywhere(path))
    }

    assert {name for name in knowing if not name.startswith(KNOW_VLLM)} == set()
    # It sees those that do.
    assert {"worker/compat.py", "endpoint.py"} <= knowing


def test_nothing_calls_what_a_device_without_cuda_ipc_cannot_do() -> None:
    # The benchmark runs vLLM's own transfer beside ours, and cleans up after that.
    paths = [path for path in PACKAGE.rglob("*.py") if "bench" not in path.parts]
    assert len(paths) > 100
    for path in paths:
        names = {getattr(node, "attr", None) for node in ast.walk(ast.parse(path.read_text()))}
        texts = {getattr(node, "value", None) for node in ast.walk(ast.parse(path.read_text()))}
        assert "ipc_collect" not in names | {text for text in texts if isinstance(text, str)}, path
