"""What runs vLLM's own tests tells a change from no change, and a pass from what did not run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import compare, environments, vllm_tests
from harness.lists import FILES, TestFile
from harness.running import Ended
from support import junit

FILE = TestFile("v1/test_it.py", is_short=True)
LOADED = [{"event": "plugins", "pid": 1, "has_plugin": True}]
HONEST = Path(environments.__file__).parent / "honest.py"


def ended(
    outcomes: dict[str, str] | None = None,
    *,
    code: int | None = 0,
    witnessed: list[dict[str, object]] | None = None,
) -> Ended:
    outcomes = {"a": "passed", "b": "failed"} if outcomes is None else outcomes
    return Ended(junit.Run(outcomes, {}, {}, "", 0.0), code, Path("log"), witnessed or [])


def test_the_same_outcomes_are_no_problem_even_where_some_fail() -> None:
    assert compare.judge(FILE, ended(code=1), ended(code=1, witnessed=LOADED)) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"a": "failed", "b": "failed"}, "a: passed without the plugin, failed with it"),
        ({"a": "skipped", "b": "failed"}, "a: passed without the plugin, skipped with it"),
        ({"a": "passed", "b": "passed"}, "b: failed without the plugin, passed with it"),
        ({"a": "passed"}, "b: failed without the plugin, absent with it"),
        ({"a": "passed", "b": "failed", "c": "passed"}, "c: absent without the plugin, passed"),
    ],
)
def test_a_test_that_changes_its_outcome_is_named(changed: dict[str, str], text: str) -> None:
    (problem,) = compare.judge(FILE, ended(), ended(changed, witnessed=LOADED))

    assert text in problem


@pytest.mark.parametrize(
    ("without", "with_plugin", "text"),
    [
        (ended(), ended(code=2, witnessed=LOADED), "ended with 0 without the plugin and with 2"),
        (ended(), ended(code=None, witnessed=LOADED), "ended with the plugin with None"),
        (Ended(None, 4, Path("log"), []), ended(witnessed=LOADED), "ended without the plugin"),
        (ended({"a": "skipped"}), ended({"a": "skipped"}, witnessed=LOADED), "nothing passes"),
        (ended(), ended(), "loaded by 0 of 0 processes"),
        (ended(witnessed=LOADED), ended(witnessed=LOADED), "and by 1 without it"),
        (ended(), ended(witnessed=[*LOADED, {**LOADED[0], "has_plugin": False}]), "by 1 of 2"),
    ],
)
def test_two_runs_that_prove_nothing_are_a_problem(
    without: Ended, with_plugin: Ended, text: str
) -> None:
    (problem,) = compare.judge(FILE, without, with_plugin)

    assert text in problem


def test_what_no_test_of_a_short_file_has_passed_is_allowed_in_a_long_one() -> None:
    skipped = {"a": "skipped"}

    assert compare.judge(TestFile("x.py"), ended(skipped), ended(skipped, witnessed=LOADED)) == []


def test_what_came_to_the_same_is_told_from_what_did_not_run_and_what_changed(
    tmp_path: Path,
) -> None:
    before = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed", "e": "passed"}
    after = {"a": "passed", "b": "failed", "c": "skipped", "d": "skipped"}

    found = compare.outcomes(FILE, ended(before), ended(after))
    junit.write(tmp_path / "compared.xml", found, {"vllm": "0.32.0"})

    read = junit.read(tmp_path / "compared.xml")
    assert read.facts == {"vllm": "0.32.0"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", read.date)
    assert list(read.outcomes.values()) == ["passed", "passed", "skipped", "failed", "failed"]


def test_a_file_is_listed_once_for_each_choice_of_its_tests() -> None:
    chosen = [(one.path, one.select) for one in FILES]

    assert len(set(chosen)) == len(chosen)
    assert 3 <= sum(one.is_short for one in FILES) < len(FILES)


# A test of vLLM's that forks, as its decorator does, and is told as passed if the child exits
# with zero.
FORKS = """
import os
import pytest

def in_child(act):
    pid = os.fork()
    if not pid:
        try:
            act()
        except pytest.skip.Exception:
            os._exit(0)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def test_skips_in_a_child():
    in_child(lambda: pytest.skip("no GPU here"))

def test_runs_in_a_child():
    in_child(lambda: None)

def test_asks_for_devices():
    import torch
    assert torch.accelerator.device_count() == 3

@pytest.mark.xfail
def test_is_known():
    assert False
"""
# As much of vLLM and torch as the plugin touches, so that this starts at once.
STUBS = {
    "vllm/__init__.py": "",
    "vllm/plugins.py": "def load_general_plugins(): print('plugins were loaded')",
    "vllm/platforms.py": "class P: pass\ncurrent_platform = P()",
    "torch.py": "class accelerator: pass",
}


@pytest.fixture
def run(tmp_path: Path) -> tuple[junit.Run, str]:
    for name, text in {**STUBS, "bucketsync_honest.py": HONEST.read_text()}.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "test_forks.py").write_text(FORKS)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    command += ["-p", "bucketsync_honest", f"--junitxml={report}", "--rootdir", str(tmp_path)]
    environment = {"PYTHONPATH": str(tmp_path / "site"), "VLLM_BUCKETSYNC_TEST_DEVICES": "3"}
    done = subprocess.run(
        [*command, str(tmp_path / "test_forks.py")],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return junit.read(report), done.stdout


def test_a_skip_in_a_forked_child_is_no_pass(run: tuple[junit.Run, str]) -> None:
    found, said = run

    assert found.outcomes == {
        "test_forks::test_skips_in_a_child": "skipped",
        "test_forks::test_runs_in_a_child": "passed",
        "test_forks::test_asks_for_devices": "passed",
        "test_forks::test_is_known": "xfailed",
    }
    assert "no GPU here" in found.reasons["test_forks::test_skips_in_a_child"]
    assert found.summary() == "2 passed, 1 xfailed, 1 skipped"
    assert "plugins were loaded" in said


def test_an_error_after_a_pass_counts_as_an_error(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        textwrap.dedent("""
        <testsuites><testsuite timestamp="2026-12-01T10:00:00" time="1.5">
        <properties><property name="vllm" value="0.32.0"/></properties>
        <testcase classname="m" name="t"/>
        <testcase classname="m" name="t"><error message="no  ray">text</error></testcase>
        </testsuite></testsuites>
        """).strip()
    )

    found = junit.read(report)
    assert found.outcomes == {"m::t": "error"}
    assert found.reasons == {"m::t": "no ray"}
    assert (found.facts, found.date, found.seconds) == ({"vllm": "0.32.0"}, "2026-12-01", 1.5)


def test_an_index_without_the_source_distribution_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_NO_INDEX", "PIP_ISOLATED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    with pytest.raises(vllm_tests.FetchError, match=r"source distribution of vllm 0\.0\.1"):
        vllm_tests.fetch("0.0.1", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "vllm-0.0.1").mkdir()

    assert vllm_tests.fetch("0.0.1", cache=tmp_path) == tmp_path / "vllm-0.0.1"
