"""README's table of versions is what was recorded, and what was recorded says what it is of."""

from __future__ import annotations

from pathlib import Path

import pytest
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
        "tests.engine.test_plans.TestAll::b": junit.FAILED,
        "tests.engine.test_weights::c": junit.SKIPPED,
    }

    record.add(found, report(tmp_path, outcomes))

    (row,) = found["rows"]
    assert (row["passed"], row["skipped"]) == (1, 1)
    assert row["failed"] == ["tests.engine.test_plans.TestAll::b"]
    num_there = len(list((record.ROOT / "tests" / "engine").glob("test_*.py")))
    assert row["files"] == [2, num_there]
    cell = f"1 passed, **1 failed**, 1 skipped, in 2 of {num_there} files; {row['date']}"
    expected = f"| 0.9.0 | CPU, torch 2.13.0, Python 3.11.7 | {cell} |  |  |  |"
    assert record.table(found).splitlines()[2] == expected


def test_a_later_run_of_the_same_takes_the_place_of_the_former(tmp_path: Path) -> None:
    found = results()
    for outcome in (junit.FAILED, junit.PASSED):
        record.add(found, report(tmp_path, {"tests.engine.test_plans::a": outcome}))
    record.add(found, report(tmp_path, {}, device="NVIDIA H200", suite="tests/gpu"))

    assert [(row["device"], row["failed"]) for row in found["rows"]] == [
        ("CPU", []),
        ("NVIDIA H200", []),
    ]


def test_versions_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    found = results()
    for version in ("0.10.0", "0.9.0"):
        record.add(found, report(tmp_path, {}, vllm=version))

    rows = [line.split("|")[1].strip() for line in record.table(found).splitlines()[2:4]]
    assert rows == ["0.9.0", "0.10.0"]


@pytest.mark.parametrize("change", [{"suite": "tests/unit"}, {"suite": "tests/engine tests/unit"}])
def test_what_is_no_suite_of_the_table_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        record.add(results(), report(tmp_path, {}, **change))


def test_a_file_that_does_not_say_with_which_vllm_is_refused(tmp_path: Path) -> None:
    junit.write(tmp_path / "old.xml", {}, {"suite": "tests/engine"})

    with pytest.raises(ValueError, match=r"does not tell .*'vllm'"):
        record.add(results(), tmp_path / "old.xml")
