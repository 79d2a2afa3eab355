"""README's programs with an ``LLM`` object run as they stand, on a tiny checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.async_engines import running_async
from support.engines import ENVIRONMENT
from support.readme import block

from vllm_bucketsync.cli.demo_model import build_checkpoint


def test_the_program_with_an_llm_object_generates_with_the_new_weights(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    build_checkpoint(old, seed=1)
    build_checkpoint(new, seed=2)
    program = block("from vllm import LLM, ")
    program = program.replace('"MODEL"', f"{str(old)!r}, dtype='float32', enforce_eager=True")
    program = program.replace('"NEW_CHECKPOINT"', repr(str(new)))
    program = program.replace('"Hello"', '"the old fox sleeps under"')

    before, after = re.findall(r"[( ]token_ids=(\[.*?\])", output_of(program))
    assert before != after


def test_the_program_with_an_adapter_generates_with_it(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "base", seed=1)
    program = block("from peft import ")
    base = repr(str(tmp_path / "base"))
    program = program.replace('LLM("MODEL"', f"LLM({base}, dtype='float32', enforce_eager=True")
    program = program.replace('"MODEL"', base)
    program = program.replace('"Hello"', '"the old fox sleeps under"')

    output = output_of(program)

    assert output.count("lora_request=LoRARequest(lora_name='policy'") == 3
    assert output.count("bucketsync://policy@2") == 1


def test_the_async_program_updates_an_async_engine(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build_checkpoint(tmp_path / "old", seed=1)
    build_checkpoint(tmp_path / "new", seed=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    names: dict[str, Any] = {}
    exec(block("from vllm_bucketsync import WeightSync\n\n\nasync def"), names)  # noqa: S102
    extension = "vllm_bucketsync.WorkerExtension"

    with running_async(tmp_path / "old", worker_extension_cls=extension) as running:
        before = running.ask([5, 17, 100]).result(60)
        running.run(names["train"](running.llm, model))
        after = running.ask([5, 17, 100]).result(60)

    assert before != after


def output_of(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **ENVIRONMENT},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
