"""The demo's verdict: only the outputs of the new checkpoint are good."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_bucketsync import cli
from vllm_bucketsync.cli import demo
from vllm_bucketsync.cli.demo import Outcome, differences
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.cli.progress import Steps
from vllm_bucketsync.cli.servers import Completion

OLD = Completion(prompt="the fox", text="sleeps again", token_ids=(5, 6), logprobs=(-0.5, -1.0))
NEW = Completion(prompt="the fox", text="sings alone", token_ids=(7, 8), logprobs=(-0.25, -2.0))
REPORT = {
    "version": "step-1",
    "num_bytes": 1024,
    "num_tensors": 2,
    "num_buckets": 1,
    "slot_size_bytes": 2048,
    "num_workers": 1,
    "seconds": 0.5,
    "gb_per_s": 0.1,
    "transport": "shm",
    "transport_reason": "another process of this host",
}


def outcome(*, before: Completion, after: Completion, expected: Completion) -> Outcome:
    return Outcome(before=[before], after=[after], expected=[expected], report=REPORT)


def test_outputs_of_the_new_checkpoint_are_good() -> None:
    assert differences(outcome(before=OLD, after=NEW, expected=NEW)) == []


def test_another_word_is_a_difference_and_both_are_shown() -> None:
    (problem,) = differences(
        outcome(before=OLD, after=replace(NEW, text="sings far", token_ids=(7, 9)), expected=NEW)
    )

    assert "'sings far'" in problem
    assert "'sings alone'" in problem


def test_the_last_bit_of_a_log_probability_is_a_difference() -> None:
    after = replace(NEW, logprobs=(-0.25, -2.0000000000000004))

    (problem,) = differences(outcome(before=OLD, after=after, expected=NEW))

    assert "4.44e-16" in problem


def test_an_engine_that_keeps_its_old_outputs_is_wrong_twice() -> None:
    problems = differences(outcome(before=OLD, after=OLD, expected=NEW))

    assert len(problems) == 2
    assert "changed no output" in problems[1]


@pytest.mark.parametrize(
    ("after", "code", "verdict", "num_folders"),
    [(NEW, ExitCode.OK, "ok:", 0), (OLD, ExitCode.FAILED, "wrong:", 1)],
)
def test_the_exit_code_follows_the_outputs_and_logs_stay_if_they_are_wrong(
    after: Completion,
    code: ExitCode,
    verdict: str,
    num_folders: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def seen(*_: object) -> Outcome:
        return outcome(before=OLD, after=after, expected=NEW)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(demo, "require_vllm", lambda: None)
    monkeypatch.setattr(demo, "_push_and_generate", seen)

    assert cli.main(["demo"]) == code
    printed = capsys.readouterr().out
    assert verdict in printed
    assert "shm: another process of this host" in printed
    assert len(list(tmp_path.iterdir())) == num_folders


def test_a_step_is_a_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with Steps(Console()) as steps, steps.step("build") as advance:
        advance(1, 2)

    assert capsys.readouterr().out == "build …\nbuild: done in 0.0 s\n"


def test_on_a_terminal_a_step_shows_how_much_is_done() -> None:
    from io import StringIO

    from rich.console import Console

    said = StringIO()
    with Steps(Console(file=said, force_terminal=True, width=120)) as steps:
        with steps.step("push it") as advance:
            advance(1_500_000_000, 3_000_000_000)
        steps.say("by the way [1]")

    assert "1.5 of 3 GB" in said.getvalue()
    assert "by the way [1]" in said.getvalue()


class Stopped:
    """Stands for a server, and writes down what happens to it."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def ask_to_stop(self) -> None:
        self._done.append("asked")

    def stop(self) -> None:
        self._done.append("stopped")


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_engines_are_stopped_all_at_once_and_an_interruption_says_so_first(
    error: type[BaseException] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    done: list[str] = []
    servers: list[Any] = [Stopped(done), Stopped(done)]
    with (
        contextlib.suppress(KeyboardInterrupt),
        Steps(Console()) as steps,
        demo._stopping(steps, *servers),
    ):
        if error is not None:
            raise error

    assert done == ["asked", "asked", "stopped", "stopped"]
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("interrupted: stopping" if error else "stop the engines …")
