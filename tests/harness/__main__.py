"""Runs this package under vLLM's own harness: ``python tests/harness``.

Two things are run, in an environment that has vLLM and this package's ``test`` extra:

- our tests beside this file, which use nothing but vLLM's fixtures;
- vLLM's own tests that touch what we touch, unmodified, twice: where this package is
  installed, and where everything else is. A test whose outcome differs fails the run.

What it fetches and makes is kept in ``~/.cache/vllm-bucketsync-tests``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# This folder is a package of the tests' own, as pytest has it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness import compare, environments, hub, ours, vllm_tests  # noqa: E402
from harness.lists import FILES, TestFile  # noqa: E402
from harness.running import Place  # noqa: E402


def main() -> int:
    """Run what the command line asks for, and return the exit code."""
    options = _parse()
    try:
        folder = vllm_tests.fetch(vllm_tests.installed_version(), cache=options.cache)
    except (vllm_tests.FetchError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    print(f"vLLM {folder.name.partition('-')[2]}: its tests are in {folder}, results in {results}")
    with tempfile.TemporaryDirectory(prefix="bucketsync-harness-") as name:
        try:
            place = _prepare(Path(name), folder, options, results)
        except (environments.SetupError, subprocess.SubprocessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        problems = [] if options.only == "vllm" else ours.run(place)
        if options.only != "ours":
            problems += compare.run(place, _chosen(options))
    for problem in problems:
        print(f"FAILED {problem}")
    print("failed" if problems else "everything is as it should be")
    return 1 if problems else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/harness", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--all", action="store_true", help="the whole list of vLLM's tests")
    parser.add_argument("--only", choices=("ours", "vllm"), help="leave the others out")
    parser.add_argument(
        "--cache", type=Path, default=vllm_tests.default_cache(), help="what is kept"
    )
    parser.add_argument("--results", type=Path, help="where logs and JUnit files go")
    parser.add_argument("files", nargs="*", help="of vLLM's list, those whose path has this in it")
    options = parser.parse_args()
    options.cache = options.cache.expanduser().resolve()
    options.results = options.results or options.cache / "results"
    return options


def _chosen(options: argparse.Namespace) -> list[TestFile]:
    if options.files:
        return [one for one in FILES if any(part in one.path for part in options.files)]
    return [one for one in FILES if options.all or one.is_short]


def _prepare(scratch: Path, folder: Path, options: argparse.Namespace, results: Path) -> Place:
    both = []
    for has_plugin in (False, True):
        made = environments.make(scratch / f"plugin-{has_plugin}", has_plugin=has_plugin)
        environments.check(made)
        both.append(made)
    without, with_plugin = both
    home = hub.make(cache=options.cache)
    return Place(vllm=folder, hub=home, results=results, without=without, with_plugin=with_plugin)


if __name__ == "__main__":
    sys.exit(main())
