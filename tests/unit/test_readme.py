"""README's commands are those that CI runs, and its programs use what there is."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import vllm_bucketsync
from vllm_bucketsync import cli, config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
CI_LINES = (ROOT / ".ci" / "run").read_text().splitlines()
VENV_LINES = ["python3 -m venv .venv", ". .venv/bin/activate"]


def blocks(language: str, section: str) -> list[str]:
    body = TEXT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"```{language}\n(.*?)```", body, flags=re.DOTALL)


def commands(block: str) -> list[str]:
    return [command.strip() for command in block.strip().split("&&")]


def test_the_two_commands_are_one_line_each() -> None:
    assert [block.count("\n") for block in blocks("sh", "Try it")] == [1, 1]


def test_the_test_command_is_what_ci_runs_after_the_same_installation() -> None:
    _, tests = blocks("sh", "Try it")

    assert commands(tests)[:2] == VENV_LINES
    assert commands(tests)[-1] == "bash .ci/test"
    steps = [line for line in CI_LINES if line in commands(tests)]
    assert steps == commands(tests)[2:]


def test_the_demo_command_installs_what_ci_does_and_starts_the_demo() -> None:
    demo, _ = blocks("sh", "Try it")

    *install, start = commands(demo)
    assert start == "vllm-bucketsync demo"
    assert [shlex.split(line.replace(",test", "")) for line in CI_LINES if ".[cpu" in line] == [
        shlex.split(install[2])
    ]
    assert install[3] in CI_LINES


@pytest.mark.parametrize("program", blocks("python", "Smallest working program"))
def test_a_program_is_short_and_imports_public_names(program: str) -> None:
    assert program.count("\n") < 30
    imported = [
        alias.name
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and node.module == "vllm_bucketsync"
        for alias in node.names
    ]
    assert imported
    assert set(imported) <= set(vllm_bucketsync.__all__)


def test_every_setting_is_listed_with_its_variable() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `(VLLM_BUCKETSYNC_\w+)` \|", TEXT, flags=re.MULTILINE)

    names = list(config.Settings.__dataclass_fields__)
    assert listed == [(name, config.ENV_PREFIX + name.upper()) for name in names]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_listed(command: str) -> None:
    assert re.search(rf"^\| `vllm-bucketsync {command}\b", TEXT, flags=re.MULTILINE)
