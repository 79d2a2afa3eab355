"""What was run with which vLLM, as rows of ``results.json``, and as README's table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypedDict

from support import junit

_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parents[1]
RESULTS = _HERE / "results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- from tests/matrix/results.json -->\n", "<!-- end -->\n"
# Folders of tests, in the table's order; the last one has no files of ours.
VLLMS_OWN = "vLLM's own"
SUITES = ("tests/engine", "tests/harness", VLLMS_OWN, "tests/gpu")


class Row(TypedDict):
    """One run of one suite.

    Attributes:
        suite: One of ``SUITES``.
        files: Test files that were run, and how many the suite has; none of vLLM's own.
        failed: Names of tests that failed, or came to another outcome with the plugin.
        date: The day of the run.
    """

    suite: str
    vllm: str
    device: str
    torch: str
    python: str
    date: str
    files: list[int]
    passed: int
    skipped: int
    failed: list[str]


class Names(TypedDict):
    """Our names in vLLM's worker, and the versions none of whose names they are."""

    ours: list[str]
    checked: list[str]


class Results(TypedDict):
    """Everything that is kept."""

    rows: list[Row]
    names: Names


def load() -> Results:
    """Return what is kept."""
    found: Results = json.loads(RESULTS.read_text())
    return found


def save(results: Results) -> None:
    """Keep ``results``, and write README's table anew."""
    results["rows"].sort(key=lambda row: (row["device"], number(row["vllm"]), row["suite"]))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + table(results) + END + after)


def add(results: Results, path: Path) -> Row:
    """Take a JUnit file into ``results``, instead of an older run of the same; return the row.

    Raises:
        ValueError: The file does not say what was run, or with which vLLM.
    """
    run = junit.read(path)
    lacking = {"suite", "vllm", "device", "torch", "python"} - run.facts.keys()
    if lacking:
        raise ValueError(f"{path} does not tell {sorted(lacking)}; run the tests of this checkout")
    suite = run.facts["suite"]
    if suite not in SUITES:
        raise ValueError(f"{path} is a run of {suite!r}; expected one of {SUITES}")
    row = Row(
        suite=suite,
        vllm=run.facts["vllm"],
        device=run.facts["device"],
        torch=run.facts["torch"],
        python=run.facts["python"],
        date=run.date,
        files=_files(suite, run),
        passed=run.count(junit.PASSED) + run.count(junit.XFAILED),
        skipped=run.count(junit.SKIPPED),
        failed=sorted(n for n, one in run.outcomes.items() if one in {junit.FAILED, junit.ERROR}),
    )
    results["rows"] = [one for one in results["rows"] if _key(one) != _key(row)] + [row]
    return row


def _key(row: Row) -> tuple[str, str, str]:
    return row["suite"], row["vllm"], row["device"]


def _files(suite: str, run: junit.Run) -> list[int]:
    there = {path.stem for path in (ROOT / suite).rglob("test_*.py")}
    parts = {part for name in run.outcomes for part in re.split(r"[.:]+", name)}
    return [len(there & parts), len(there)] if there else []


def number(version: str) -> tuple[int, ...]:
    """Return a version such that versions are in order: 0.9 before 0.10."""
    return tuple(map(int, re.findall(r"\d+", version)))


def table(results: Results) -> str:
    """Return README's table, with a line of text below."""
    lines = ["| vLLM | on | " + " | ".join(f"`{one}`" for one in SUITES) + " |"]
    lines[0] = lines[0].replace(f"`{VLLMS_OWN}`", "vLLM's own tests")
    lines.append("|---" * (len(SUITES) + 2) + "|")
    places = {(row["device"], row["vllm"]): row for row in results["rows"]}
    for (device, vllm), one in sorted(places.items(), key=lambda item: number(item[0][1])):
        of_place = {
            row["suite"]: row
            for row in results["rows"]
            if (row["device"], row["vllm"]) == (device, vllm)
        }
        cells = [_cell(of_place.get(suite)) for suite in SUITES]
        where = f"{device}, torch {one['torch'].partition('+')[0]}, Python {one['python']}"
        lines.append(f"| {vllm} | {where} | {' | '.join(cells)} |")
    checked = ", ".join(results["names"]["checked"])
    text = f"No name that the extension adds to vLLM's workers is one of theirs: {checked}."
    return "\n".join([*lines, "", text]) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    told = f"{row['passed']} passed"
    if row["failed"]:
        told += f", **{len(row['failed'])} failed**"
    if row["skipped"]:
        told += f", {row['skipped']} skipped"
    if row["files"] and row["files"][0] < row["files"][1]:
        told += f", in {row['files'][0]} of {row['files'][1]} files"
    return f"{told}; {row['date']}"
