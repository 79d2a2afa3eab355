"""Which names our extension brings to vLLM's worker, and which ones vLLM's has itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# vLLM calls it where an extension has it, from 0.33 on.
HOOKS = frozenset({"init_worker_extension"})


def ours() -> frozenset[str]:
    """Return every name of our worker extension; its base classes' included."""
    from vllm_bucketsync import WorkerExtension

    return frozenset(name for name in dir(WorkerExtension) if not name.startswith("__"))


def defined_in(folder: Path) -> frozenset[str]:
    """Return every name that vLLM's worker sources define, of whatever class.

    Methods, classes, attributes of classes and of instances, and what is declared of them.

    Args:
        folder: vLLM's ``v1/worker``, or one that holds it.

    Raises:
        FileNotFoundError: There is no worker in it.
    """
    files = sorted(folder.rglob("*.py"))
    if not any(path.name == "worker_base.py" for path in files):
        raise FileNotFoundError(f"{folder} has no worker_base.py of vLLM's")
    return frozenset(name for path in files for name in _defined(ast.parse(path.read_text())))


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), _]):
                yield name
            case _:
                pass
