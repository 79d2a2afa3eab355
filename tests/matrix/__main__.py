"""Keeps what was run with which vLLM, and on what: ``python tests/matrix``.

``add FILE…`` takes JUnit files, wherever they were written: each says itself with which vLLM
and on which device; a file whose tests were run again takes the place of its earlier results.
It ends with 1 where a test failed. ``names VERSION…`` compares our names with the sources of
vLLM's workers. Both write ``results.json``, and the table in README that follows from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness import vllm_tests  # noqa: E402
from matrix import record  # noqa: E402
from support import worker_names  # noqa: E402


def main() -> int:
    """Do what the command line asks for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/matrix", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="keep what JUnit files say")
    add.add_argument("files", nargs="+", type=Path)
    names = commands.add_parser("names", help="compare our names with vLLM's workers")
    names.add_argument("versions", nargs="+")
    options = parser.parse_args()
    results = record.load()
    if options.command == "add":
        failed = [path for path in options.files if _add(results, path)]
        code = int(bool(failed))
    else:
        code = _compare_names(results, options.versions)
    record.save(results)
    return code


def _add(results: record.Results, path: Path) -> bool:
    row, left_out = record.add(results, path)
    for line in left_out:
        print(f"{path}: {line}")
    return any(one["failed"] for one in row["files"].values())


def _compare_names(results: record.Results, versions: list[str]) -> int:
    ours = worker_names.ours()
    if results["names"]["ours"] != sorted(ours):
        results["names"] = {"ours": sorted(ours), "checked": []}
    met = False
    checked = set(results["names"]["checked"])
    for version in versions:
        folder = vllm_tests.fetch(version, cache=vllm_tests.default_cache())
        common = ours & worker_names.defined_in(folder / vllm_tests.SOURCES)
        print(f"vLLM {version}: {', '.join(sorted(common)) or 'no name of ours'}")
        met = met or bool(common)
        (checked.discard if common else checked.add)(version)
    results["names"]["checked"] = sorted(checked, key=record.number)
    return int(met)


if __name__ == "__main__":
    sys.exit(main())
