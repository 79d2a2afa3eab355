"""What was run with which vLLM, as rows of ``results.json``, and as README's table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypedDict

from harness import lists
from support import junit

_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parents[1]
RESULTS = _HERE / "results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- from tests/matrix/results.json -->\n", "<!-- end -->\n"
# Folders of tests, in the table's order; the last one has no files of ours.
VLLMS_OWN = "vLLM's own"
SUITES = ("tests/engine", "tests/harness", VLLMS_OWN, "tests/gpu")


class File(TypedDict):
    """What came of the tests of one file.

    Attributes:
        failed: Names of tests that failed, or came to another outcome with the plugin.
        date: The day of the run.
    """

    passed: int
    skipped: int
    failed: list[str]
    date: str


class Row(TypedDict):
    """What was run of one suite with one vLLM on one device.

    Attributes:
        suite: One of ``SUITES``.
        num_files: How many test files the suite has.
        files: Those that were run, by name without folder and ending; of vLLM's own, by path.
    """

    suite: str
    vllm: str
    device: str
    torch: str
    python: str
    num_files: int
    files: dict[str, File]


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


def add(results: Results, path: Path) -> tuple[Row, list[str]]:
    """Take a JUnit file into ``results``; return what it says, and what of it is not kept.

    A run of the whole suite takes the place of whatever is kept of it. A run of some files
    takes the place of these files' earlier results, as long as it ran as many of their tests:
    what was mended is run again by itself. From elsewhere, from another torch or Python, it
    only replaces a run that has fewer files.

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
    there = _test_files(suite)
    row = Row(
        suite=suite,
        vllm=run.facts["vllm"],
        device=run.facts["device"],
        torch=run.facts["torch"],
        python=run.facts["python"],
        num_files=len(there),
        files=_by_file(run, there, path),
    )
    kept = next((one for one in results["rows"] if _key(one) == _key(row)), None)
    new, left_out = row, list[str]()
    if kept is not None and len(row["files"]) < len(there):
        new, left_out = _merged(kept, row)
    results["rows"] = [one for one in results["rows"] if one is not kept] + [new]
    return row, left_out


def _key(row: Row) -> tuple[str, str, str]:
    return row["suite"], row["vllm"], row["device"]


def _merged(kept: Row, row: Row) -> tuple[Row, list[str]]:
    """Return what to keep of two runs, and why something of the second one is not kept."""
    places = [f"torch {one['torch']}, Python {one['python']}" for one in (kept, row)]
    if places[0] != places[1]:
        if len(row["files"]) >= len(kept["files"]):
            return row, []
        told = f"{len(row['files'])} files with {places[1]}: {len(kept['files'])} with {places[0]}"
        return kept, [f"{told} are kept"]
    left_out = [
        f"{name}: {_num_tests(one)} tests are a part of it: {_num_tests(known)} are kept"
        for name, one in row["files"].items()
        if (known := kept["files"].get(name)) is not None and _num_tests(one) < _num_tests(known)
    ]
    parts = {one.partition(":")[0] for one in left_out}
    files = {name: one for name, one in row["files"].items() if name not in parts}
    return {**row, "files": dict(sorted((kept["files"] | files).items()))}, left_out


def _num_tests(one: File) -> int:
    return one["passed"] + one["skipped"] + len(one["failed"])


def _test_files(suite: str) -> set[str]:
    if suite == VLLMS_OWN:
        return {one.path for one in lists.FILES}
    return {path.stem for path in (ROOT / suite).rglob("test_*.py")}


def _by_file(run: junit.Run, there: set[str], path: Path) -> dict[str, File]:
    found: dict[str, File] = {}
    for name, outcome in sorted(run.outcomes.items()):
        # Ours: ``tests.engine.test_plans.TestAll::name``; vLLM's own begin with their path.
        parts = [name.partition(" ")[0], *re.split(r"[.:]+", name)]
        file = next((part for part in parts if part in there), None)
        if file is None:
            raise ValueError(f"{path} has {name!r}, of no file of {run.facts['suite']}")
        one = found.setdefault(file, File(passed=0, skipped=0, failed=[], date=run.date))
        if outcome in {junit.FAILED, junit.ERROR}:
            one["failed"].append(name)
        elif outcome == junit.SKIPPED:
            one["skipped"] += 1
        else:
            one["passed"] += 1
    return dict(sorted(found.items()))


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
    files = row["files"].values()
    num_failed = sum(len(one["failed"]) for one in files)
    num_skipped = sum(one["skipped"] for one in files)
    told = f"{sum(one['passed'] for one in files)} passed"
    if num_failed:
        told += f", **{num_failed} failed**"
    if num_skipped:
        told += f", {num_skipped} skipped"
    if len(files) < row["num_files"]:
        told += f", in {len(files)} of {row['num_files']} files"
    dates = sorted({one["date"] for one in files})
    return f"{told}; {' to '.join(dates[:1] + dates[1:][-1:])}"
