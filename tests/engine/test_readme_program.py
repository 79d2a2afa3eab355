"""README's programs with an ``LLM`` object run as they stand, on a tiny checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.engines import ENVIRONMENT

from vllm_bucketsync.cli.demo_model import build_checkpoint

README = Path(__file__).parents[2] / "README.md"


def test_the_program_with_an_llm_object_generates_with_the_new_weights(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    build_checkpoint(old, seed=1)
    build_checkpoint(new, seed=2)
    (program,) = re.findall(r"```python\n(from vllm import LLM, .*?)```", README.read_text(), re.S)
    program = program.replace('"MODEL"', f"{str(old)!r}, dtype='float32', enforce_eager=True")
    program = program.replace('"NEW_CHECKPOINT"', repr(str(new)))
    program = program.replace('"Hello"', '"the old fox sleeps under"')

    before, after = re.findall(r"[( ]token_ids=(\[.*?\])", output_of(program))
    assert before != after


def test_the_program_with_an_adapter_generates_with_it(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "base", seed=1)
    (program,) = re.findall(r"```python\n(from peft import .*?)```", README.read_text(), re.S)
    base = repr(str(tmp_path / "base"))
    program = program.replace('LLM("MODEL"', f"LLM({base}, dtype='float32', enforce_eager=True")
    program = program.replace('"MODEL"', base)
    program = program.replace('"Hello"', '"the old fox sleeps under"')

    output = output_of(program)

    assert output.count("lora_request=LoRARequest(lora_name='policy'") == 3
    assert output.count("bucketsync://policy@2") == 1


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
