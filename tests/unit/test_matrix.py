"""README's table of versions is what was recorded, and what was recorded says what it is of."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import lists
from matrix import record
from support import junit

FACTS = {
    "suite": "tests/engine",
    "vllm": "0.9.0",
    "device": "CPU",
    "torch": "2.13.0",
    "python": "3.11.7",
}


def results() -> record.Results:
    return {"rows": [], "names": {"ours": [], "checked": ["0.9.0"]}}


def report(path: Path, outcomes: dict[str, str], **changes: str) -> Path:
    junit.write(path / "report.xml", outcomes, FACTS | changes)
    return path / "report.xml"


def kept(
    *, passed: int = 0, skipped: int = 0, failed: list[str] | None = None, date: str
) -> record.File:
    return {"passed": passed, "skipped": skipped, "failed": failed or [], "date": date}


def today(row: record.Row) -> str:
    """Return the day on which the JUnit files were written."""
    return next(iter(row["files"].values()))["date"]


def test_readme_s_table_is_what_was_recorded() -> None:
    text = record.README.read_text()

    assert text.split(record.BEGIN)[1].split(record.END)[0] == record.table(record.load())


def test_the_rows_are_of_suites_that_there_are_and_none_is_there_twice() -> None:
    rows = record.load()["rows"]

    assert {row["suite"] for row in rows} <= set(record.SUITES)
    assert len({record._key(row) for row in rows}) == len(rows)
    for suite in record.SUITES:
        assert suite == record.VLLMS_OWN or (record.ROOT / suite).is_dir()


def test_a_run_of_some_files_says_so_and_failures_are_named(tmp_path: Path) -> None:
    found = results()
    outcomes = {
        "tests.engine.test_plans::a": junit.PASSED,
        "tests.engine.test_plans.TestAll::b[x.test_casts]": junit.FAILED,
        "tests.engine.test_weights::c": junit.SKIPPED,
    }

    record.add(found, report(tmp_path, outcomes))

    (row,) = found["rows"]
    failed = ["tests.engine.test_plans.TestAll::b[x.test_casts]"]
    assert row["files"]["test_plans"] == kept(passed=1, failed=failed, date=today(row))
    assert row["files"]["test_weights"] == kept(skipped=1, date=today(row))
    num_there = len(list((record.ROOT / "tests" / "engine").glob("test_*.py")))
    cell = f"1 passed, **1 failed**, 1 skipped, in 2 of {num_there} files; {today(row)}"
    expected = f"| 0.9.0 | CPU, torch 2.13.0, Python 3.11.7 | {cell} |  |  |  |"
    assert record.table(found).splitlines()[2] == expected


def test_a_file_that_was_run_again_takes_the_place_of_its_earlier_results(tmp_path: Path) -> None:
    found = results()
    first = {
        "tests.engine.test_plans::a": junit.FAILED,
        "tests.engine.test_plans::b": junit.PASSED,
        "tests.engine.test_weights::c": junit.PASSED,
    }
    again = {
        "tests.engine.test_plans::a": junit.PASSED,
        "tests.engine.test_plans::b": junit.SKIPPED,
    }

    record.add(found, report(tmp_path, first))
    _, left_out = record.add(found, report(tmp_path, again))

    (row,) = found["rows"]
    assert row["files"] == {
        "test_plans": kept(passed=1, skipped=1, date=today(row)),
        "test_weights": kept(passed=1, date=today(row)),
    }
    assert not left_out


def test_a_run_of_a_part_of_a_file_is_not_taken_for_the_file(tmp_path: Path) -> None:
    found = results()
    whole = {f"tests.engine.test_plans::{name}": junit.PASSED for name in "ab"}
    part = {"tests.engine.test_plans::a": junit.FAILED, "tests.engine.test_casts::a": junit.PASSED}

    record.add(found, report(tmp_path, whole))
    row, left_out = record.add(found, report(tmp_path, part))

    # It is told all the same.
    assert row["files"]["test_plans"]["failed"]
    assert left_out == ["test_plans: 1 tests are a part of it: 2 are kept"]
    (row,) = found["rows"]
    assert row["files"]["test_plans"] == kept(passed=2, date=today(row))
    assert row["files"]["test_casts"] == kept(passed=1, date=today(row))


def test_a_run_of_the_whole_suite_takes_the_place_of_everything(tmp_path: Path) -> None:
    found = results()
    old = [f"test_engines::{name}" for name in "abc"] + ["test_server::a"]

    record.add(found, report(tmp_path, dict.fromkeys(old, junit.FAILED), suite="tests/harness"))
    new = ["test_engines::b", "test_server::b"]
    record.add(found, report(tmp_path, dict.fromkeys(new, junit.PASSED), suite="tests/harness"))

    (row,) = found["rows"]
    assert [record._num_tests(one) for one in row["files"].values()] == [1, 1]
    assert "failed" not in record.table(found)


@pytest.mark.parametrize("num_new", [1, 2, 3])
def test_runs_with_different_torches_are_not_mixed(tmp_path: Path, num_new: int) -> None:
    found = results()
    names = [f"tests.engine.{name}::a" for name in ("test_plans", "test_casts", "test_weights")]

    record.add(found, report(tmp_path, dict.fromkeys(names[:2], junit.FAILED)))
    new = dict.fromkeys(names[:num_new], junit.PASSED)
    _, left_out = record.add(found, report(tmp_path, new, torch="2.14.0"))

    (row,) = found["rows"]
    is_new = num_new >= 2
    assert row["torch"] == ("2.14.0" if is_new else "2.13.0")
    assert len(row["files"]) == (num_new if is_new else 2)
    assert bool(left_out) is not is_new


def test_vllm_s_own_tests_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    found = results()
    outcomes = {
        "lora/test_worker.py tests.lora.test_worker::a": junit.PASSED,
        "v1/executor/test_executor.py tests.v1.executor.test_executor::a": junit.PASSED,
    }

    record.add(found, report(tmp_path, outcomes, suite=record.VLLMS_OWN))

    (row,) = found["rows"]
    assert list(row["files"]) == ["lora/test_worker.py", "v1/executor/test_executor.py"]
    assert row["num_files"] == len({one.path for one in lists.FILES})


def test_a_test_of_no_file_of_the_suite_is_refused(tmp_path: Path) -> None:
    path = report(tmp_path, {"tests.engine.test_of_nothing::a": junit.PASSED})

    with pytest.raises(ValueError, match="of no file of tests/engine"):
        record.add(results(), path)


def test_devices_and_versions_have_rows_of_their_own(tmp_path: Path) -> None:
    found = results()
    outcomes = {"tests.engine.test_plans::a": junit.PASSED}
    for version in ("0.10.0", "0.9.0"):
        record.add(found, report(tmp_path, outcomes, vllm=version))
    record.add(found, report(tmp_path, outcomes, device="NVIDIA H200"))

    rows = [line.split("|")[1:3] for line in record.table(found).splitlines()[2:5]]
    assert [version.strip() for version, _ in rows] == ["0.9.0", "0.9.0", "0.10.0"]
    assert [where.split(",")[0].strip() for _, where in rows] == ["CPU", "NVIDIA H200", "CPU"]


@pytest.mark.parametrize("change", [{"suite": "tests/unit"}, {"suite": "tests/engine tests/unit"}])
def test_what_is_no_suite_of_the_table_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        record.add(results(), report(tmp_path, {}, **change))


def test_a_file_that_does_not_say_with_which_vllm_is_refused(tmp_path: Path) -> None:
    junit.write(tmp_path / "old.xml", {}, {"suite": "tests/engine"})

    with pytest.raises(ValueError, match=r"does not tell .*'vllm'"):
        record.add(results(), tmp_path / "old.xml")
