"""``doctor``: what it shows, what it ends with, and what programs get of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_bucketsync import cli
from vllm_bucketsync.cli import doctor
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.doctor import examine, transports
from vllm_bucketsync.doctor.findings import Finding, State

GOOD = Finding(name="shm, cpu", state=State.OK, found="the same [bytes]")
SLOW = Finding(name="room", state=State.WARN, found="64 MiB", advice="use --shm-size")
BAD = Finding(name="cuda_ipc [0]", state=State.FAILED, found="refused", advice="no MIG")
NONE = Finding(name="vLLM", state=State.SKIPPED, found="not installed")


class Examined:
    """Stands for the checks.

    Attributes:
        findings: What the machine's come to.
        asked: What they were asked with.
    """

    def __init__(self) -> None:
        self.findings = [GOOD, SLOW, NONE]
        self.asked: list[Any] = []

    def machine(self, **asked: Any) -> Iterator[Finding]:
        self.asked.append(asked)
        yield from self.findings

    def servers(self, urls: list[str], *, api_key: str | None) -> Iterator[Finding]:
        self.asked.append((urls, api_key))
        yield from [Finding(name=url, state=State.OK, found="up") for url in urls]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examined:
    found = Examined()
    monkeypatch.setattr(examine, "check_machine", found.machine)
    monkeypatch.setattr(examine, "check_servers", found.servers)
    return found


def test_every_finding_is_a_line_with_its_advice_below(
    examined: Examined, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == ExitCode.OK

    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "ok     shm, cpu: the same [bytes]",
        "warn   room: 64 MiB",
        "       use --shm-size",
        "-      vLLM: not installed",
        "all of it will work, 1 of it could work better",
    ]
    assert err == ""


def test_on_a_terminal_long_texts_are_wrapped_beside_the_mark(
    examined: Examined, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    long = Finding(name="x", state=State.WARN, found="long " * 15, advice="so " * 30)
    examined.findings = [long]

    assert cli.main(["doctor"]) == ExitCode.OK

    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert out[0].startswith("warn   x: long")
    assert len(out) == 2 + 2 + 1
    assert all(line.startswith(" " * 7) for line in out[1:-1])
    assert max(map(len, out[:-1])) <= 60


def test_what_will_not_work_is_named_at_the_end_and_by_the_exit_code(
    examined: Examined, capsys: pytest.CaptureFixture[str]
) -> None:
    examined.findings = [BAD, GOOD]

    assert cli.main(["doctor"]) == ExitCode.FAILED

    out = capsys.readouterr().out.splitlines()
    assert out[0] == "FAILED cuda_ipc [0]: refused"
    assert out[-1] == "will not work: cuda_ipc [0]"


def test_json_is_all_that_stdout_gets(
    examined: Examined, capsys: pytest.CaptureFixture[str]
) -> None:
    examined.findings = [SLOW, BAD]

    assert cli.main(["doctor", "--json"]) == ExitCode.FAILED

    assert json.loads(capsys.readouterr().out) == {
        "will_all_work": False,
        "findings": [
            {"name": "room", "state": "warn", "found": "64 MiB", "advice": "use --shm-size"},
            {"name": "cuda_ipc [0]", "state": "failed", "found": "refused", "advice": "no MIG"},
        ],
    }


def test_options_are_handed_on(examined: Examined) -> None:
    urls = ["--url", "http://one", "--url", "http://two"]

    assert cli.main(["doctor", "--clean", "--timeout-s", "7", *urls, "--api-key", "k"]) == 0

    machine, servers = examined.asked
    assert machine["is_cleaning"] is True
    assert 0 < machine["deadline"].left_s <= 7
    assert servers == (["http://one", "http://two"], "k")

    cli.main(["doctor"])
    assert examined.asked[2]["is_cleaning"] is False
    assert examined.asked[3] == ([], None)


def test_quiet_leaves_the_exit_code(examined: Examined, capsys: pytest.CaptureFixture[str]) -> None:
    examined.findings = [BAD]

    assert cli.main(["doctor", "-q"]) == ExitCode.FAILED
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "x", "1e9"])
def test_a_deadline_has_to_be_one(examined: Examined, seconds: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--timeout-s", seconds])

    assert ended.value.code == ExitCode.USAGE


def test_the_deadline_is_that_of_the_checks() -> None:
    assert doctor.DEFAULT_TIMEOUT_S == transports.DEFAULT_TIMEOUT_S
