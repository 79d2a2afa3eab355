"""The example's command: what it shows of a training run, and what it refuses before one."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import vllm_bucketsync
from vllm_bucketsync import cli
from vllm_bucketsync.cli import example, example_trainer
from vllm_bucketsync.cli.exits import CommandError, ExitCode


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(example, "require_vllm", lambda: None)
    monkeypatch.setattr(example, "build_checkpoint", lambda folder, *, seed: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def train(monkeypatch: pytest.MonkeyPatch, *rewards: float) -> list[list[str]]:
    """Let trainers come to these rewards; return the arguments that they are started with."""
    started = []

    def lines(arguments: Sequence[str], log: Path) -> Iterator[str]:
        started.append(list(arguments[1:]))
        for reward in rewards:
            update = {"reward": reward, "push_s": 0.25, "mismatch": 1e-5, "sample": "a [cat]"}
            yield json.dumps(update)

    monkeypatch.setattr(example, "lines_of", lines)
    return started


def test_a_reward_that_rises_is_shown_and_is_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started = train(monkeypatch, 0.125, 0.5)

    assert cli.main(["example", "rl", "--updates", "2", "--seed", "7"]) == ExitCode.OK

    shown = capsys.readouterr()
    assert started == [["2", "7"]]
    assert "the reward rose from 0.125 to 0.500" in shown.out
    assert "250.0 ms" in shown.out
    assert "a [cat]" in shown.out
    assert "update   2  reward 0.500  push  250.0 ms  a [cat]" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_reward_that_does_not_rise_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(monkeypatch, 0.5, 0.5)

    assert cli.main(["example", "rl"]) == ExitCode.FAILED
    assert "the reward went from 0.500 to 0.500" in capsys.readouterr().out


def test_the_switch_for_an_adapter_reaches_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    started = train(monkeypatch, 0.0, 1.0)

    assert cli.main(["example", "rl", "--adapter"]) == ExitCode.OK
    assert started == [["20", "0", "--adapter"]]


def test_the_picture_is_written_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train(monkeypatch, 0.0, 1.0)
    picture = tmp_path / "rl.png"

    assert cli.main(["example", "rl", "--plot", str(picture)]) == ExitCode.OK

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {picture}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--updates", "1"], ExitCode.USAGE, "expected at least 2"),
        (["--plot", "rl.gif"], ExitCode.USAGE, "expected a name that ends with .png or .svg"),
        (["--plot", "/no/such/folder/rl.svg"], ExitCode.USAGE, "its folder does not exist"),
        (["--adapter"], ExitCode.UNAVAILABLE, "pip install peft"),
    ],
)
def test_what_cannot_end_well_is_refused_before_anything_is_started(
    options: list[str],
    code: ExitCode,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = train(monkeypatch, 0.0, 1.0)
    monkeypatch.setitem(sys.modules, "peft", None)

    assert cli.main(["example", "rl", *options]) == code
    assert text in capsys.readouterr().err
    assert started == []


def test_the_code_is_a_whole_program_that_uses_public_names_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["example", "rl", "--code"]) == ExitCode.OK

    program = ast.parse(capsys.readouterr().out)
    imports = [node for node in ast.walk(program) if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in imports)
    ours = [node for node in imports if "vllm_bucketsync" in str(node.module)]
    assert {node.module for node in ours} == {"vllm_bucketsync"}
    names = {alias.name for node in ours for alias in node.names}
    assert names <= set(vllm_bucketsync.__all__)


def test_a_trainer_that_fails_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="the trainer ended with code 1") as failed:
        list(example_trainer.lines_of(["only-one-argument"], tmp_path / "log"))

    assert "TypeError: main() missing" in str(failed.value)
