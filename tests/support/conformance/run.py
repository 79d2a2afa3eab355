"""Tries the rows of a GPU by several processes at a time, which share it.

    PYTHONPATH=tests python -m support.conformance.run DIR [NUM_PROCESSES] [-k EXPRESSION]

Each process takes a few rows of one model at a time. DIR gets a result for each row, and a
log of each process; what pytest says of each is printed at the end.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .results import VARIABLE

TESTS = "tests/gpu/test_conformance.py"
MOST_ROWS = 4
TIMEOUT_S = 1800


def main() -> int:
    """Run everything; return 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_processes", type=int, nargs="?", default=8)
    parser.add_argument("-k", dest="expression", default="")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    batches = _batches(options.expression)
    with ThreadPoolExecutor(options.num_processes) as pool:
        codes = list(
            pool.map(
                lambda number: _try(number, batches[number], options.folder), range(len(batches))
            )
        )
    return int(any(codes))


def _batches(expression: str) -> list[list[str]]:
    """Return the names of tests, a few of one model at a time, the most first."""
    command = [sys.executable, "-m", "pytest", TESTS, "--collect-only", "-q", "-k", expression]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    names = sorted(line for line in listed.stdout.splitlines() if "::" in line)
    if listed.returncode or not names:
        raise SystemExit(f"no row was found for -k {expression!r}:\n{listed.stdout}{listed.stderr}")
    by_model = itertools.groupby(names, key=lambda name: name.partition("[")[2].partition("-")[0])
    groups = [list(of_model) for _, of_model in by_model]
    batches = [
        group[first : first + MOST_ROWS]
        for group in groups
        for first in range(0, len(group), MOST_ROWS)
    ]
    return sorted(batches, key=len, reverse=True)


def _try(number: int, names: list[str], folder: Path) -> int:
    log = folder / f"batch-{number}.log"
    with log.open("w") as out:
        try:
            code = subprocess.call(
                [sys.executable, "-m", "pytest", "-q", "-rA", "-m", "gpu", *names],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, VARIABLE: str(folder)},
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            out.write(f"FAILED to end within {TIMEOUT_S} s\n")
            code = 1
    told = ("PASSED", "FAILED", "ERROR", "SKIPPED")
    lines = [line[:400] for line in log.read_text().splitlines() if line.startswith(told)]
    sys.stdout.write("\n".join([f"{log.name}: {code}", *lines]) + "\n")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
