"""What the command line ends with, and what it says, before anything is started."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_bucketsync
from vllm_bucketsync import cli
from vllm_bucketsync.cli import demo, preflight, screen
from vllm_bucketsync.cli.exits import CommandError, ExitCode


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])

    assert ended.value.code == ExitCode.OK
    assert capsys.readouterr().out == f"vllm-bucketsync {vllm_bucketsync.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["statsu"], "did you mean status?"),
        (["push", "folder", "--url", "u", "--dryrun"], "did you mean --dry-run?"),
        (["push", "folder", "--url", "u", "--parital=*"], "did you mean --partial?"),
        (["push", "folder", "--url", "u", "--pause", "keeps"], "did you mean keep?"),
        (["bench", "transfr"], "did you mean transfer?"),
        (["bench", "engine", "--modle", "8b"], "did you mean --model?"),
        (["--versoin", "demo"], "did you mean --version?"),
    ],
)
def test_a_word_that_is_nearly_right_is_answered_with_the_right_one(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)

    assert ended.value.code == ExitCode.USAGE
    assert capsys.readouterr().err.rstrip().endswith(meant)


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["demo", "--no-such-option"]])
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)

    assert ended.value.code == ExitCode.USAGE


def test_the_help_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])

    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert all(f"  {code.value} " in text for code in ExitCode)


def test_a_command_s_error_becomes_its_text_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    code = cli.main(["demo"])

    assert code == ExitCode.UNAVAILABLE
    assert "pip install 'vllm-bucketsync[cpu]'" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "require_vllm", interrupt)

    assert cli.main(["demo"]) == ExitCode.INTERRUPTED


def test_a_torchvision_that_does_not_load_is_named_with_the_command_that_helps(
    tmp_path: Path,
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vllm_bucketsync import cli; sys.exit(cli.main(['demo']))"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30
    )

    assert result.returncode == ExitCode.UNAVAILABLE
    assert "operator torchvision::nms does not exist" in result.stderr
    assert "pip uninstall -y torchvision" in result.stderr


def test_an_environment_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(CommandError) as refused:
        preflight.require_vllm()

    assert refused.value.code is ExitCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ([], logging.WARNING),
        (["-q"], logging.ERROR),
        (["-v"], logging.INFO),
        (["--verbose"], logging.INFO),
        (["-vv"], logging.DEBUG),
        (["-vvv"], logging.DEBUG),
    ],
)
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("command", [["demo"], ["bench", "engine"], ["bench", "transfer"]])
def test_every_command_is_as_verbose_as_it_is_told(
    command: list[str],
    is_before: bool,
    options: list[str],
    level: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, int] = {}
    monkeypatch.setattr(logging, "basicConfig", lambda level, **_: given.update(level=level))

    args = cli.parser().parse_args([*options, *command] if is_before else [*command, *options])
    screen.start_logging(args)

    assert given == {"level": level}
    assert args.quiet is (options == ["-q"])


def test_quiet_and_verbose_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "-q", "-v"])

    assert ended.value.code == ExitCode.USAGE


@pytest.mark.parametrize("command", [*cli.COMMANDS, "bench transfer", "bench engine"])
def test_a_command_s_help_says_more_than_its_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])

    usage, text = capsys.readouterr().out.split("\n\n", 1)
    description = re.split(r"^(?:positional arguments|options):$", text, flags=re.MULTILINE)[0]
    assert ended.value.code == ExitCode.OK
    assert usage.startswith(f"usage: vllm-bucketsync {command}")
    # A sentence to begin with, and no markup of docstrings.
    assert len(description.split()) >= 12
    assert "``" not in description


EXAMPLES = [
    line.strip()
    for module in cli.COMMANDS.values()
    for line in getattr(module, "EXAMPLES", "").splitlines()[1:]
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_can_be_parsed(example: str) -> None:
    program, *arguments = shlex.split(example)

    assert program == "vllm-bucketsync"
    assert cli.parser().parse_args(arguments).command in cli.COMMANDS


def test_the_commands_for_servers_have_examples() -> None:
    assert {line.split()[1] for line in EXAMPLES} >= {"doctor", "push", "push-lora", "status"}
